"""The loops that people write: what scans and training are compared with."""

from __future__ import annotations

import copy
import gzip
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from torchvision import transforms


class Images(Dataset[tuple[Tensor, int]]):
    """IDX files as torchvision serves them: one PIL image at a time through a transform."""

    def __init__(self, root: Path, part: str, mean: float, std: float) -> None:
        pixels, labels = (_read(root / f"{part}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
        self.pixels, self.labels = pixels[16:].reshape(-1, 28, 28), labels[8:].astype(np.int64)
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((mean,), (std,))])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.pixels[index])), int(self.labels[index])


def _read(path: Path) -> np.ndarray:
    with gzip.open(path) as file:
        return np.frombuffer(file.read(), dtype=np.uint8)


def scan(
    model: nn.Module,
    a: dict[str, Tensor],
    b: dict[str, Tensor],
    alphas: Sequence[float],
    batches: Iterable[tuple[Tensor, Tensor]],
) -> list[float]:
    """Loss at every alpha: interpolate the state dicts, load them into a copy, and go through the batches."""
    losses = []
    for alpha in alphas:
        net = copy.deepcopy(model)
        net.load_state_dict({key: (1 - alpha) * a[key] + alpha * b[key] for key in a})
        net.eval()
        total, correct, count = 0.0, 0, 0
        with torch.no_grad():
            for inputs, labels in batches:
                outputs = net(inputs)
                total += cross_entropy(outputs, labels, reduction="sum").item()
                correct += int((outputs.argmax(1) == labels).sum())
                count += len(labels)
        losses.append(total / count)
    return losses


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]], steps: int
) -> list[float]:
    """Losses of so many steps of the usual training loop."""
    losses = []
    model.train()
    while True:
        for inputs, labels in batches:
            if len(losses) == steps:
                return losses
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
