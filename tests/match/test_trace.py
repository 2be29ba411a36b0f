"""Specs by tracing, for whole models: what moves together, how many groups there are, and that all leave the function.

``PermutationSpec.from_model`` permutes every group at random and warns of those that change the outputs; warnings are
errors in these tests.
"""

from __future__ import annotations

import torch
from torch import nn
from torchvision import models

from isthmus.match import PermutationSpec

IMAGES = torch.zeros(1, 3, 32, 32)


def test_mlp():
    spec = PermutationSpec.from_model(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)), torch.zeros(2, 8)
    )
    assert {name: group.size for name, group in spec.groups.items()} == {"0": 16, "2": 12}
    assert spec.frozen == {
        ("0.weight", 1): "it meets an input",
        ("4.weight", 0): "it is an output",
        ("4.bias", 0): "it is an output",
    }


def test_resnet18():
    spec = PermutationSpec.from_model(models.resnet18(num_classes=5), IMAGES)
    streams = {"conv1": 64, "layer2.0.conv2": 128, "layer3.0.conv2": 256, "layer4.0.conv2": 512}
    inner = {f"layer{stage}.{block}.conv1": 32 * 2**stage for stage in range(1, 5) for block in range(2)}
    assert {name: group.size for name, group in spec.groups.items()} == streams | inner
    stream = spec.axes["conv1.weight"][0]
    assert spec.axes["layer1.1.conv2.weight"][0] == spec.axes["layer2.0.downsample.0.weight"][1] == stream
    assert "bn1.running_mean" in spec.statistics
