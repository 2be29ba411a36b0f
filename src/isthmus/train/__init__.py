"""Model pairs whose optimisation noise is varied on purpose."""

from .augment import Augmentation
from .config import TrainConfig
from .data import Data, load_data
from .gradient_noise import GradientNoise, gradient_noise
from .models import MLP, ResNet18, build_model
from .noise import NoiseScale
from .pair import Execution, Pair, train_pair, train_pairs

__all__ = [
    "MLP",
    "Augmentation",
    "Data",
    "Execution",
    "GradientNoise",
    "NoiseScale",
    "Pair",
    "ResNet18",
    "TrainConfig",
    "build_model",
    "gradient_noise",
    "load_data",
    "train_pair",
    "train_pairs",
]
