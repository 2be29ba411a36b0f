"""Models to train: a multilayer perceptron and a ResNet-18 for small images."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional

from isthmus.errors import InputError

from .data import Data
from .factory import call_factory

Norm = Literal["none", "batch", "layer"]
_NORMS: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}


class MLP(nn.Sequential):
    """Flatten, then linear layers with ReLU between them; before each ReLU a normalisation, if asked for.

    Args:
        in_features: values per example.
        widths: units of each hidden layer.
        classes: number of outputs.
        norm: ``none``, ``batch`` (BatchNorm) or ``layer`` (LayerNorm).

    Raises:
        InputError: the normalisation is unknown.
    """

    def __init__(self, in_features: int, widths: Sequence[int], classes: int, *, norm: Norm = "none") -> None:
        if norm != "none" and norm not in _NORMS:
            raise InputError(f"norm is {norm!r}, expected 'none', 'batch' or 'layer'.")
        layers: list[nn.Module] = [nn.Flatten()]
        for width in widths:
            layers.append(nn.Linear(in_features, width))
            if norm != "none":
                layers.append(_NORMS[norm](width))
            layers.append(nn.ReLU())
            in_features = width
        layers.append(nn.Linear(in_features, classes))
        super().__init__(*layers)


class ResNet18(nn.Module):
    """The 18-layer residual network with the stem for small images: a 3x3 convolution, no pooling (He et al., 2016).

    Args:
        classes: number of outputs.
        width: channels of the first stage, doubled at each of the three next.
        in_channels: channels of the images.
    """

    def __init__(self, classes: int, *, width: int = 64, in_channels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        channels = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(_Block(before, after, stride=1 if stage == 0 else 2), _Block(after, after, stride=1))
                for stage, (before, after) in enumerate(itertools.pairwise(channels))
            )
        )
        self.head = nn.Linear(8 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (n, classes) of images (n, in_channels, height, width)."""
        features = self.stages(functional.relu(self.norm(self.stem(images))))
        return self.head(features.mean((2, 3)))  # type: ignore[no-any-return]


class _Block(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a shortcut."""

    def __init__(self, before: int, after: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, images: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(images)))))
        return functional.relu(inner + self.shortcut(images))


def build_model(name: str, data: Data, **options: Any) -> nn.Module:
    """Build a model for a data set; its initial weights come from torch's global random state.

    Args:
        name: ``mlp`` (options ``widths``, default (64, 64), and ``norm``, default "layer"), ``resnet18`` (option
            ``width``, default 64), or the user's own ``package.module:factory``, called as
            ``factory(data, **options)``.
        data: what the model is for: its shapes and number of classes.
        options: options of the factory.

    Raises:
        InputError: the name or an option is unknown, or the model does not fit the data.
    """
    model = call_factory(name, _FACTORIES, "model", data, **options)
    if not isinstance(model, nn.Module):
        raise InputError(f"the model {name!r} is a {type(model).__name__}, expected a torch.nn.Module.")
    return model


def _mlp(data: Data, *, widths: Sequence[int] = (64, 64), norm: Norm = "layer") -> MLP:
    return MLP(data.train_x[0].numel(), widths, data.num_classes, norm=norm)


def _resnet18(data: Data, *, width: int = 64) -> ResNet18:
    if data.train_x.ndim != 4:
        raise InputError(
            f"resnet18 needs images of shape (n, channels, height, width); {data.name} has inputs of shape "
            f"{tuple(data.train_x.shape)}. Choose the model 'mlp'."
        )
    return ResNet18(data.num_classes, width=width, in_channels=data.train_x.shape[1])


_FACTORIES: dict[str, Callable[..., nn.Module]] = {"mlp": _mlp, "resnet18": _resnet18}
