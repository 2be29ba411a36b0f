"""Models that change something on the host at every step are not recorded or stacked, and are trained as ever."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from isthmus import _capture
from isthmus.train import Data, Execution, Pair, TrainConfig, load_data, train_pair, train_pairs
from isthmus.train.host_state import HostState
from isthmus.train.parameters import MovingAverage

pytest.importorskip("sklearn")

CONFIG = TrainConfig(steps=20, branch_step=6, lr=0.05, warmup_steps=10, record_every=5)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.change(images.flatten(1)))

    def change(self, images: Tensor) -> Tensor:
        raise NotImplementedError


class Reassigns(Model):
    """A running mean in a buffer that is another tensor after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))

    def change(self, images: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * images.detach().mean(0)
        return images - self.mean


class Moves(Reassigns):
    """The same, where the tensor stays and its memory is another."""

    def change(self, images: Tensor) -> Tensor:
        if self.training:
            self.mean.data = 0.9 * self.mean + 0.1 * images.detach().mean(0)
        return images - self.mean


class Fills(Model):
    """A buffer that is not there before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def change(self, images: Tensor) -> Tensor:
        if self.training:
            self.mean = images.detach().mean(0)
        return images


class Counts(Model):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def change(self, images: Tensor) -> Tensor:
        if self.training:
            self.n += 1
        return images * min(1.0, self.n / 20)


class Remembers(Model):
    """The mean of the last batch, in an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(64)

    def change(self, images: Tensor) -> Tensor:
        before, self.last = self.last.to(images.device), images.detach().mean(0)
        return images - before


class Drops(Model):
    """A layer that is left out at random, by Python's random numbers."""

    def change(self, images: Tensor) -> Tensor:
        return images + self.body(images).relu() if not self.training or random.random() < 0.5 else images


class DropsByNumpy(Model):
    def change(self, images: Tensor) -> Tensor:
        return images + self.body(images).relu() if not self.training or np.random.rand() < 0.5 else images


class CountsInPlace(Model):
    """A count that no note of references finds."""

    def __init__(self) -> None:
        super().__init__()
        self.n = [0]

    def change(self, images: Tensor) -> Tensor:
        self.n[0] += self.training
        return images * min(1.0, self.n[0] / 20)


class Makes(Model):
    """Something made when it is first needed, and kept: it may be recorded."""

    positions: Tensor | None = None

    def change(self, images: Tensor) -> Tensor:
        if self.positions is None:
            self.positions = torch.linspace(-1, 1, 64, device=images.device)
        return images + self.positions


REFUSED = {
    Reassigns: "mean of Reassigns became another tensor",
    Moves: "mean of Moves became another tensor",
    Fills: "mean of Fills became another tensor",
    Counts: "n of Counts changed from 0 to ",
    Remembers: "last of Remembers became another tensor",
    Drops: "random numbers were drawn from Python's random",
    DropsByNumpy: "random numbers were drawn from NumPy",
}


@pytest.fixture(scope="module")
def digits() -> Data:
    return load_data("digits").subset(train=300, val=50, test=50)


def trained(config: TrainConfig, model: Callable[[], nn.Module], data: Data, **options: Any) -> Pair:
    random.seed(0)
    np.random.seed(0)
    return train_pair(config, model=lambda _: model(), data=data, **options)


def assert_same(found: Pair, expected: Pair) -> None:
    assert found.states.keys() == expected.states.keys()
    for name, state in expected.states.items():
        assert found.states[name].keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(found.states[name][key], value), (name, key)
    assert found.history == expected.history


@pytest.mark.parametrize("model", REFUSED)
def test_changes_on_the_host_are_not_recorded(graphs: str, digits: Data, model: type[Model]) -> None:
    config = replace(CONFIG, device=graphs)
    found = trained(config, model, digits)
    assert found.execution is not None
    assert not found.execution.captured
    assert REFUSED[model] in found.execution.eager_reason
    assert_same(found, trained(config, model, digits, capture=False))


def test_replays_that_differ_are_dropped(
    device: str, digits: Data, tape: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        monkeypatch.setitem(_capture.RECORDERS, "cpu", tape)
    found = trained(replace(CONFIG, device=device), CountsInPlace, digits)
    assert found.execution is not None
    assert found.execution.eager_reason == "replayed steps gave other results than steps launched one by one"


def test_what_is_made_once_is_recorded(graphs: str, digits: Data) -> None:
    config = replace(CONFIG, device=graphs)
    found = trained(config, Makes, digits)
    assert found.execution == Execution(captured=True)
    assert_same(found, trained(config, Makes, digits, capture=False))


@pytest.mark.parametrize("model", REFUSED)
def test_changes_on_the_host_are_not_stacked(device: str, digits: Data, model: type[Model]) -> None:
    config = replace(CONFIG, device=device)
    random.seed(0)
    np.random.seed(0)
    found = train_pairs([config, replace(config, seed=1)], model=lambda _: model(), data=digits)[0]
    assert found.execution is not None
    assert found.execution.together == 1
    reason = "mutating directly with `.data`" if model is Moves else REFUSED[model]  # by torch.vmap itself
    assert reason in found.execution.apart_reason
    assert_same(found, trained(config, model, digits))


@pytest.mark.parametrize("equal", [True, False])
def test_tensors_that_are_attributes_must_be_equal_to_be_stacked(device: str, digits: Data, equal: bool) -> None:
    class Scaled(Model):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(64, device=device) if equal else torch.rand(64).to(device)

        def change(self, images: Tensor) -> Tensor:
            return images * self.scale

    members = [replace(CONFIG, device=device, seed=seed) for seed in (0, 1)]
    execution = train_pairs(members, model=lambda _: Scaled(), data=digits)[0].execution
    assert execution is not None
    assert execution.together == 1 + equal
    assert execution.apart_reason == (
        "" if equal else "the models' attributes scale are different tensors, of which a stack has the first"
    )


def test_moving_averages_are_of_what_modules_hold() -> None:
    module = Fills()
    module.register_buffer("other", torch.zeros(2))
    average = MovingAverage(module, 0.75)
    module.other = torch.full((2,), 4.0)
    module.mean = torch.ones(3)
    with torch.no_grad():
        module.head.bias.fill_(1).sub_(before := average.state_dict()["head.bias"].clone())
    average.update()
    state = average.state_dict()
    assert state.keys() == module.state_dict().keys()
    assert state["other"].tolist() == [1, 1]
    assert torch.equal(state["mean"], module.mean)  # it was not there at the start
    torch.testing.assert_close(state["head.bias"], 0.75 * before + 0.25 * (1 - before))
    assert not any(value.requires_grad for value in state.values())


class TestHostState:
    def test_nothing_changed(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        host = HostState([model])
        model(torch.randn(3, 2))
        assert host.change() == ""

    @pytest.mark.parametrize("model", REFUSED)
    def test_everything_comes_back(self, model: type[Model]) -> None:
        models = [model(), model()]
        states = [dict(vars(one)) for one in models]
        tensors = [dict(one.named_buffers()) for one in models]
        places = [{name: buffer.data_ptr() for name, buffer in named.items()} for named in tensors]
        numbers = random.getstate(), np.random.get_state()[2]
        host = HostState(models)
        models[1](torch.randn(3, 64))
        assert REFUSED[model] in host.change()
        host.restore()
        assert host.change() == ""
        assert (random.getstate(), np.random.get_state()[2]) == numbers
        for one, state, named, addresses in zip(models, states, tensors, places, strict=True):
            assert vars(one).keys() == state.keys()
            assert all(vars(one)[name] is value for name, value in state.items())
            assert {name: id(buffer) for name, buffer in one.named_buffers()} == {n: id(b) for n, b in named.items()}
            assert {name: buffer.data_ptr() for name, buffer in one.named_buffers()} == addresses

    def test_new_attributes_go(self) -> None:
        model = Makes()
        host = HostState([model])
        model(torch.randn(3, 64))
        assert host.change() == ""
        host.restore()
        assert "positions" not in vars(model)
