"""An autocast around training changes nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from isthmus.train import TrainConfig, gradient_noise, load_data, train_pair, train_pairs

pytest.importorskip("sklearn")


def bits(result: Any) -> list[Any]:
    return [
        (
            one.history,
            [(name, key, value.tolist()) for name, state in one.states.items() for key, value in state.items()],
        )
        for one in result
    ]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "train",
    [lambda config: [train_pair(config)], lambda config: train_pairs([config, config])],
    ids=["one", "stacked"],
)
def test_training_inside_an_autocast_is_training_outside(
    precision: str, train: Callable[[TrainConfig], Any], device: str
) -> None:
    config = TrainConfig(
        steps=30,
        branch_step=10,
        lr=0.05,
        precision=precision,
        device=device,
        model_options={"widths": [16]},  # type: ignore[arg-type]
    )
    outside = bits(train(config))
    with torch.autocast(device, torch.bfloat16):
        assert bits(train(config)) == outside
        assert torch.is_autocast_enabled(device)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_gradient_noise_inside_an_autocast(precision: str) -> None:
    config = TrainConfig(steps=1, precision=precision)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    measure = lambda: gradient_noise(model, load_data("digits"), config, model.state_dict(), batches=3)  # noqa: E731
    outside = measure()
    with torch.autocast("cpu", torch.bfloat16):
        assert measure() == outside
