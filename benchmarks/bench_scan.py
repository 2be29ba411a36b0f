"""Scans on Fashion-MNIST's test set, against the loops that people write, bare forward passes and loss-landscapes.

Peers take part with a few points each; what is told is how many times faster one point is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from isthmus.path import Evaluator, random_plane, scan_line, scan_plane

from . import peers, usual
from .conftest import Call, seconds

BATCH = 128  # of the usual loops


def mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def convolutions(seed: int) -> nn.Module:
    """Three of them with BatchNorm, whose statistics are those of some noise."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if before == 32 else []
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    with torch.no_grad():
        model(torch.randn(64, 1, 28, 28))
    return model.eval()


@pytest.fixture
def per_point(measure: Callable[..., None], benchmark: Any) -> Callable[..., None]:
    """Measure a scan of ``points`` points; peers are pairs of a call and of how many points it has."""

    def run(call: Call, points: int, others: Mapping[str, tuple[Call, int]], **options: Any) -> None:
        measure(call, peers={name: peer for name, (peer, _) in others.items()}, **options)
        for name, (_, count) in others.items():
            benchmark.extra_info["speedups"][name] *= points / count

    return run


def loops(inputs: Tensor, labels: Tensor, root: Any) -> dict[str, Any]:
    """The batches of the usual loop: images through a DataLoader and transforms, and tensors in memory."""
    images = usual.Images(root, "t10k", mean=0.2860, std=0.3530)
    return {
        "DataLoader and transforms": DataLoader(images, batch_size=BATCH),
        "tensors in memory": list(zip(inputs.split(BATCH), labels.split(BATCH), strict=True)),
    }


def forward_passes(model: nn.Module, inputs: Tensor, batch_size: int, points: int) -> Call:
    """Nothing but forward passes."""

    def run() -> None:
        with torch.inference_mode():
            for _ in range(points):
                for batch in inputs.split(batch_size):
                    model(batch)

    return run


def best_batch_size(model: nn.Module, inputs: Tensor) -> int:
    sizes = [2**k for k in range(7, 13)]
    times = {size: min(seconds(forward_passes(model, inputs, size, 1)) for _ in range(5)) for size in sizes}
    return min(times, key=times.__getitem__)


def bench_mlp_of_201_points(per_point, fashion_mnist, fashion_mnist_root):
    model, a, b = mlp(0), mlp(1).state_dict(), mlp(2).state_dict()
    inputs, labels = fashion_mnist.test_x, fashion_mnist.test_y
    few = np.linspace(0, 1, 5)
    batches = loops(inputs, labels, fashion_mnist_root)
    evaluate = Evaluator((inputs, labels))
    found = scan_line(model, a, b, evaluate, alphas=201).values["data"]["loss"][::50]
    assert found == pytest.approx(usual.scan(model, a, b, few, batches["tensors in memory"]), rel=1e-5)
    size = best_batch_size(model, inputs)
    others = {name: (lambda each=each: usual.scan(model, a, b, few, each), 5) for name, each in batches.items()}
    others["forward passes at the best batch size"] = (forward_passes(model, inputs, size, 20), 20)
    per_point(lambda: scan_line(model, a, b, evaluate, alphas=201), 201, others, rounds=3, peer_rounds=3)


def bench_convolutions_of_11_points(per_point, fashion_mnist, fashion_mnist_root):
    model, a, b = convolutions(0), convolutions(1).state_dict(), convolutions(2).state_dict()
    inputs, labels = fashion_mnist.test_x, fashion_mnist.test_y
    batches = loops(inputs, labels, fashion_mnist_root)
    evaluate = Evaluator((inputs, labels))
    found = scan_line(model, a, b, evaluate, alphas=3, bn="keep").values["data"]["loss"]
    assert found == pytest.approx(usual.scan(model, a, b, [0, 0.5, 1], batches["tensors in memory"]), rel=1e-5)
    others = {name: (lambda each=each: usual.scan(model, a, b, [0.5], each), 1) for name, each in batches.items()}
    bare = forward_passes(model, evaluate.inputs, evaluate.batch_size, 5)
    others["forward passes of the same batches"] = (bare, 5)
    per_point(lambda: scan_line(model, a, b, evaluate, alphas=11, bn="keep"), 11, others, rounds=3, peer_rounds=2)


def bench_line_against_loss_landscapes(per_point, fashion_mnist):
    loss_landscapes = peers.loss_landscapes()
    a, b = (mlp(seed).requires_grad_(False) for seed in range(2))
    inputs, labels = fashion_mnist.test_x, fashion_mnist.test_y
    metric = loss_landscapes.metrics.Loss(functional.cross_entropy, inputs, labels)
    evaluate = Evaluator((inputs, labels), metrics=["loss"])

    def theirs() -> np.ndarray:
        return loss_landscapes.linear_interpolation(a, b, metric, steps=10, deepcopy_model=True)

    # It begins one step behind A, and ends at B.
    found = scan_line(a, a, b, evaluate, alphas=11).values["data"]["loss"][1:]
    assert found == pytest.approx(theirs(), rel=1e-5)
    per_point(lambda: scan_line(a, a, b, evaluate, alphas=101), 101, {"loss-landscapes": (theirs, 10)}, rounds=3)


def bench_random_plane_against_loss_landscapes(per_point, fashion_mnist):
    loss_landscapes = peers.loss_landscapes()
    model = mlp(0).requires_grad_(False)
    inputs, labels = fashion_mnist.test_x, fashion_mnist.test_y
    metric = loss_landscapes.metrics.Loss(functional.cross_entropy, inputs, labels)
    evaluate = Evaluator((inputs, labels), metrics=["loss"])
    steps = 4

    def theirs() -> np.ndarray:
        torch.manual_seed(0)
        return loss_landscapes.random_plane(model, metric, steps=steps, deepcopy_model=True)

    # The plane that it draws, by models that are `steps` of its steps away. Its first, third ... rows have the columns
    # 1 to `steps`, the others 0 to `steps` - 1, of a grid whose middle is the model.
    torch.manual_seed(0)
    ends = [copy.deepcopy(model) for _ in range(2)]
    for end, direction in zip(ends, loss_landscapes.directions(model, distance=1), strict=True):
        for parameter, change in zip(end.parameters(), direction, strict=True):
            parameter.add_(change)
    ours = scan_plane(model, model, ends, evaluate, (steps + 1,) * 2, x_range=(-0.5, 0.5), y_range=(-0.5, 0.5))
    table = ours.values["data"]["loss"].T
    rows = [row[1:] if index % 2 == 0 else row[:-1] for index, row in enumerate(table[:steps])]
    assert np.array(rows) == pytest.approx(theirs(), rel=1e-5)
    per_point(lambda: random_plane(model, evaluate, (11, 11)), 121, {"loss-landscapes": (theirs, steps**2)}, rounds=3)
