"""Model pairs whose optimisation noise is varied on purpose."""

from .augment import Augmentation
from .config import TrainConfig
from .data import Data, load_data
from .models import MLP, ResNet18, build_model
from .noise import NoiseScale
from .pair import Pair, train_pair

__all__ = [
    "MLP",
    "Augmentation",
    "Data",
    "NoiseScale",
    "Pair",
    "ResNet18",
    "TrainConfig",
    "build_model",
    "load_data",
    "train_pair",
]
