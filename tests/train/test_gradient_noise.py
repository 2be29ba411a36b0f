from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from isthmus.errors import InputError
from isthmus.train import Data, GradientNoise, NoiseScale, TrainConfig, gradient_noise

CONFIG = TrainConfig(steps=1, batch_size=4)


@pytest.fixture
def data() -> Data:
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 5, generator=random), torch.randint(3, (40,), generator=random)
    return Data(x, y, x, y, x, y, 3, "made up")


@pytest.fixture
def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(5, 3)


def exact(model: nn.Module, data: Data) -> tuple[float, float]:
    """Trace of the covariance of single examples' gradients, and the squared norm of their mean, in float64."""
    assert isinstance(model, nn.Linear)
    x, y = data.train_x.double(), data.train_y
    with torch.no_grad():
        residual = (x @ model.weight.double().T + model.bias.double()).softmax(1) - nn.functional.one_hot(y, 3)
        gradients = torch.cat([(residual[:, :, None] * x[:, None]).flatten(1), residual], 1)
    mean = gradients.mean(0)
    return float((gradients - mean).square().sum(1).mean()), float(mean.square().sum())


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_agrees_with_the_gradients_of_single_examples(model: nn.Module, data: Data, batch_size: int) -> None:
    trace, norm = exact(model, data)
    measured = gradient_noise(model, data, replace(CONFIG, batch_size=batch_size), model.state_dict(), batches=2000)
    assert measured.trace == pytest.approx(trace, rel=3 * math.sqrt(2 / 2000))  # three of the stated errors
    assert measured.gradient_norm_squared == pytest.approx(norm, abs=5 * math.sqrt(trace * norm / 2000 / batch_size))
    assert measured.gradient_noise_scale == measured.trace / measured.gradient_norm_squared


def test_by_hand_with_two_batches() -> None:
    # one example, one input of 1, two classes, zero weights: every gradient is the same, so there is no noise
    x, y = torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)
    model = nn.Linear(1, 2, bias=False)
    measured = gradient_noise(
        model, Data(x, y, x, y, x, y, 2, "one"), replace(CONFIG, batch_size=1), {"weight": torch.zeros(2, 1)}, batches=2
    )
    assert measured == GradientNoise(trace=0.0, gradient_norm_squared=0.5, batches=2, batch_size=1)
    assert measured.gradient_noise_scale == 0


def test_augmentation_adds_noise(model: nn.Module, data: Data) -> None:
    noisy = replace(CONFIG, augmentation={"noise": 2.0})  # type: ignore[arg-type]
    plain = gradient_noise(model, data, CONFIG, model.state_dict(), batches=200)
    assert gradient_noise(model, data, noisy, model.state_dict(), batches=200).trace > 2 * plain.trace


def test_model_and_global_random_state_are_left_alone(data: Data) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    state = {key: value + 1 for key, value in before.items()}
    first = gradient_noise(model, data, CONFIG, state, batches=5, seed=3)
    assert torch.equal(torch.get_rng_state(), random)
    torch.manual_seed(99)
    assert gradient_noise(model, data, CONFIG, state, batches=5, seed=3) == first
    assert gradient_noise(model, data, CONFIG, state, batches=5, seed=4) != first
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_scaled_by_the_noise_scale() -> None:
    noise = GradientNoise(trace=8.0, gradient_norm_squared=-0.1, batches=2, batch_size=4)
    assert noise.scaled_trace(NoiseScale(0.1, 16, 0.9)) == pytest.approx(0.5)
    assert noise.gradient_noise_scale == math.inf


def test_bad_input(model: nn.Module, data: Data) -> None:
    with pytest.raises(InputError, match="batches is 1"):
        gradient_noise(model, data, CONFIG, model.state_dict(), batches=1)
    with pytest.raises(InputError, match="does not fit the model Linear"):
        gradient_noise(model, data, CONFIG, {"weight": torch.ones(3, 5)}, batches=2)
