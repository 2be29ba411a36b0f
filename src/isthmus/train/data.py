"""Data sets as resident tensors: training, validation and test part, standardised, on one device."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus._optional import optional
from isthmus.errors import FileError, InputError

from .factory import call_factory


@dataclass(frozen=True, eq=False)
class Data:
    """A classification data set in memory.

    Args:
        train_x, train_y: training inputs (n, ...), floats, and their classes (n,), int64.
        val_x, val_y: the validation part, held out of the training data.
        test_x, test_y: the test part.
        num_classes: number of classes; labels are 0 .. num_classes − 1.
        name: what reports call the data set.

    Raises:
        InputError: shapes or dtypes do not fit, a training or test part is empty, or a label is out of range.
    """

    train_x: Tensor = field(repr=False)
    train_y: Tensor = field(repr=False)
    val_x: Tensor = field(repr=False)
    val_y: Tensor = field(repr=False)
    test_x: Tensor = field(repr=False)
    test_y: Tensor = field(repr=False)
    num_classes: int
    name: str

    def __post_init__(self) -> None:
        for part, (x, y) in self.parts.items():
            if len(x) == 0 and part != "val":
                raise InputError(f"the {part} part of {self.name} is empty, expected at least one example.")
            if not x.is_floating_point() or x.shape[1:] != self.train_x.shape[1:]:
                raise InputError(
                    f"{part}_x of {self.name} is {x.dtype} of shape {tuple(x.shape)}, expected floats of shape "
                    f"(n, {', '.join(map(str, self.train_x.shape[1:]))})."
                )
            if y.dtype != torch.int64 or y.shape != (len(x),):
                raise InputError(
                    f"{part}_y of {self.name} is {y.dtype} of shape {tuple(y.shape)}, expected int64 of shape "
                    f"({len(x)},)."
                )
            if len(y) and not 0 <= int(y.min()) <= int(y.max()) < self.num_classes:
                raise InputError(
                    f"{part}_y of {self.name} has labels from {int(y.min())} to {int(y.max())}, expected 0 to "
                    f"{self.num_classes - 1}."
                )

    @property
    def parts(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Inputs and labels by part: ``train``, ``val``, ``test``."""
        return {
            "train": (self.train_x, self.train_y),
            "val": (self.val_x, self.val_y),
            "test": (self.test_x, self.test_y),
        }

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.train_x.device

    def to(self, device: torch.device | str) -> Data:
        """The same data on ``device``.

        Raises:
            InputError: torch knows no such device, or it is not there, or has no room.
        """
        try:
            return self._map({part: (x.to(device), y.to(device)) for part, (x, y) in self.parts.items()})
        except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            raise InputError(
                f"{self.name} cannot go to the device {str(device)!r}: {error}. Choose 'cpu', or a GPU that torch sees."
            ) from error

    def subset(self, *, train: int | None = None, val: int | None = None, test: int | None = None) -> Data:
        """The first ``train``, ``val`` and ``test`` examples of each part; None takes all.

        Raises:
            InputError: more are asked for than there are.
        """
        parts = self.parts
        for part, count in {"train": train, "val": val, "test": test}.items():
            if count is None:
                continue
            x, y = parts[part]
            if not 0 <= count <= len(x):
                raise InputError(f"{count} {part} examples of {self.name} were asked for, and there are {len(x)}.")
            parts[part] = (x[:count], y[:count])
        return self._map(parts)

    def _map(self, parts: dict[str, tuple[Tensor, Tensor]]) -> Data:
        (train_x, train_y), (val_x, val_y), (test_x, test_y) = (parts[part] for part in ("train", "val", "test"))
        return replace(self, train_x=train_x, train_y=train_y, val_x=val_x, val_y=val_y, test_x=test_x, test_y=test_y)


def load_data(name: str, *, device: torch.device | str = "cpu", **options: Any) -> Data:
    """Load a data set onto a device.

    Every set of ours is split by a fixed permutation and standardised: the mean of each channel over the training part
    is subtracted, then each channel is divided by its standard deviation. All take the option ``validation``, the
    number of training examples held out.

    ==================  =========================================================================================
    name                source and options
    ==================  =========================================================================================
    ``digits``          scikit-learn's 1797 digits of 8x8 pixels: 1000 for training and validation (200), 797 test
    ``fashion-mnist``   IDX files, plain or ``.gz``, in the folder ``root``; validation 5000
    ``cifar10``         torchvision's files in the folder ``root``, not downloaded; validation 5000
    ``cifar100``        the same
    ``svhn``            the same
    ``package.module:factory``  the user's own: ``factory(**options)`` returns a ``Data``
    ==================  =========================================================================================

    Raises:
        InputError: the name or an option is unknown, or the factory returns something else.
        FileError: the files are missing, truncated or of another format.
        DependencyError: scikit-learn or torchvision is needed and not installed.
    """
    data = call_factory(name, _FACTORIES, "data set", **options)
    if not isinstance(data, Data):
        raise InputError(f"the data set {name!r} is a {type(data).__name__}, expected an isthmus.train.Data.")
    return data.to(device)


def _digits(*, validation: int = 200) -> Data:
    datasets = optional("sklearn.datasets", extra="lab", purpose="the data set 'digits'")
    pixels, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))  # the file is sorted by writer
    images, labels = pixels[order].reshape(-1, 1, 8, 8), labels[order]
    return _split("digits", images[:1000], labels[:1000], images[1000:], labels[1000:], 10, validation)


def _fashion_mnist(*, root: str | os.PathLike[str] | None = None, validation: int = 5000) -> Data:
    folder = _folder(root, "fashion-mnist", "files such as train-images-idx3-ubyte.gz")
    images, labels, test_images, test_labels = (
        _read_idx(folder, f"{part}-{kind}-ubyte")
        for part in ("train", "t10k")
        for kind in ("images-idx3", "labels-idx1")
    )
    return _split("fashion-mnist", images[:, None], labels, test_images[:, None], test_labels, 10, validation)


def _cifar(name: str, num_classes: int) -> Callable[..., Data]:
    def load(*, root: str | os.PathLike[str] | None = None, validation: int = 5000) -> Data:
        train, test = (_torchvision(name, root, train=train) for train in (True, False))
        images, test_images = (part.data.transpose(0, 3, 1, 2) for part in (train, test))
        return _split(
            name.lower(), images, np.array(train.targets), test_images, np.array(test.targets), num_classes, validation
        )

    return load


def _svhn(*, root: str | os.PathLike[str] | None = None, validation: int = 5000) -> Data:
    train, test = (_torchvision("SVHN", root, split=split) for split in ("train", "test"))
    return _split("svhn", train.data, train.labels, test.data, test.labels, 10, validation)


def _torchvision(name: str, root: str | os.PathLike[str] | None, **options: Any) -> Any:
    """A data set of torchvision from local files."""
    datasets = optional("torchvision.datasets", extra="lab", purpose=f"the data set {name.lower()!r}")
    folder = _folder(root, name.lower(), f"the files that torchvision.datasets.{name}(root, download=True) writes")
    try:
        return getattr(datasets, name)(folder, download=False, **options)
    except (RuntimeError, OSError) as error:
        raise FileError(
            f"{folder} does not hold the whole data set {name} ({error}). "
            f"Get it with torchvision.datasets.{name}({str(folder)!r}, download=True)."
        ) from error


def _folder(root: str | os.PathLike[str] | None, name: str, files: str) -> Path:
    if root is None:
        raise InputError(f"the data set {name!r} needs the option root: the folder with {files}.")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise FileError(f"there is no folder {folder}, expected one with {files}. Check the option root.")
    return folder


def _read_idx(folder: Path, name: str) -> np.ndarray:
    """Read an IDX file of bytes: a magic number, big-endian sizes, then the bytes in C-order (LeCun's MNIST page)."""
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
    if path is None:
        raise FileError(f"there is no {name} or {name}.gz in {folder}. Check the option root.")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except (OSError, EOFError) as error:
        raise FileError(f"could not read {path}: {error}. It may be truncated; get it again.") from error
    dimensions = int(name.partition("-idx")[2][0])
    header = 4 * (1 + dimensions)
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) < header:
        raise FileError(f"{path} is not an IDX file of bytes with {dimensions} dimensions. Get it again.")
    shape = tuple(np.frombuffer(content, ">u4", dimensions, offset=4).tolist())
    if len(content) - header != np.prod(shape, dtype=np.int64):
        raise FileError(
            f"{path} holds {len(content) - header} bytes after its header, expected {shape}. It may be truncated; get "
            "it again."
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _split(
    name: str,
    images: np.ndarray,
    labels: np.ndarray,
    test_images: np.ndarray,
    test_labels: np.ndarray,
    num_classes: int,
    validation: int,
) -> Data:
    """Hold ``validation`` examples out of the training data and standardise all parts by what is left.

    Args:
        name: name of the data set.
        images: training images (n, channels, height, width).
        labels: their classes (n,).
        test_images: test images.
        test_labels: their classes.
        num_classes: number of classes.
        validation: number of training examples to hold out.
    """
    if not 0 <= validation < len(images):
        raise InputError(f"validation is {validation}, expected 0 to {len(images) - 1} of {name}'s training examples.")
    order = np.random.default_rng(0).permutation(len(images))
    train, held_out = np.sort(order[validation:]), np.sort(order[:validation])
    train_x = _floats(images[train])
    deviation, mean = torch.std_mean(train_x, (0, 2, 3), correction=0, keepdim=True)

    def standardised(part: np.ndarray) -> Tensor:
        return _floats(part).sub_(mean).div_(deviation)

    def classes(part: np.ndarray) -> Tensor:
        return torch.from_numpy(part.astype(np.int64))

    return Data(
        train_x=train_x.sub_(mean).div_(deviation),
        train_y=classes(labels[train]),
        val_x=standardised(images[held_out]),
        val_y=classes(labels[held_out]),
        test_x=standardised(test_images),
        test_y=classes(test_labels),
        num_classes=num_classes,
        name=name,
    )


def _floats(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images.astype(np.float32))


_FACTORIES: dict[str, Callable[..., Data]] = {
    "digits": _digits,
    "fashion-mnist": _fashion_mnist,
    "cifar10": _cifar("CIFAR10", 10),
    "cifar100": _cifar("CIFAR100", 100),
    "svhn": _svhn,
}
