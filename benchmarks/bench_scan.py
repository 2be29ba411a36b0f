"""101 points between two multilayer perceptrons on Fashion-MNIST's test set, against the loops that people write."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from isthmus.path import Evaluator, scan_line

from . import usual

POINTS = 101
PEER_POINTS = 5  # of the usual loops, whose points all take the same time


def mlp(seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def bench_scan_of_101_points(measure, fashion_mnist, fashion_mnist_root, benchmark):
    model = mlp(0)
    a, b = model.state_dict(), mlp(1).state_dict()
    inputs, labels = fashion_mnist.test_x, fashion_mnist.test_y
    images = usual.Images(fashion_mnist_root, "t10k", mean=0.2860, std=0.3530)
    files = DataLoader(images, batch_size=128)
    memory = list(zip(inputs.split(128), labels.split(128), strict=True))
    alphas = np.linspace(0, 1, POINTS)
    few = alphas[:: (POINTS - 1) // (PEER_POINTS - 1)]
    evaluate = Evaluator((inputs, labels))
    result = scan_line(model, a, b, evaluate, alphas=POINTS)
    losses = usual.scan(model, a, b, few, memory)
    found = result.values["data"]["loss"][:: (POINTS - 1) // (PEER_POINTS - 1)]
    assert found == pytest.approx(losses, rel=1e-5)

    measure(
        lambda: scan_line(model, a, b, evaluate, alphas=POINTS),
        peers={
            "DataLoader and transforms, x5 points": lambda: usual.scan(model, a, b, few, files),
            "tensors in memory, x5 points": lambda: usual.scan(model, a, b, few, memory),
        },
        rounds=3,
    )
    for name, factor in list(benchmark.extra_info["speedups"].items()):
        benchmark.extra_info["speedups"][name.removesuffix(", x5 points")] = factor * POINTS / PEER_POINTS
        del benchmark.extra_info["speedups"][name]
