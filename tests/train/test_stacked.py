"""Pairs that are trained at once are the pairs that training each alone gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isthmus.errors import InputError
from isthmus.train import Data, Pair, TrainConfig, build_model, load_data, pair, sweep, train_pair, train_pairs
from isthmus.train.sweep import SweepConfig, run_sweep

pytest.importorskip("sklearn")

BASE = TrainConfig(
    steps=12,
    branch_step=4,
    anneal_steps=3,
    ema_decay=0.9,
    record_every=5,
    lr=0.05,
    augmentation={"noise": 0.1, "crop": 1},  # type: ignore[arg-type]
    model_options={"widths": [16]},
)
MEMBERS: list[dict[str, Any]] = [
    {},
    {"seed": 1, "lr": 0.02, "weight_decay": 0.0, "schedule": "constant", "warmup_steps": 3},
    {"momentum": 0.0, "augmentation": {"noise": 0.5}, "ema_decay": None},
]


@pytest.fixture(scope="module")
def digits() -> Data:
    """A part of the digits, in float64, so that what differs by more than rounding shows."""
    data = load_data("digits").subset(train=300, val=50, test=50)
    return data._map({part: (x.double(), y) for part, (x, y) in data.parts.items()})


def configs(**changes: Any) -> list[TrainConfig]:
    return [replace(BASE, **(member | changes)) for member in MEMBERS]


def named(name: str, **options: Any) -> Callable[[Data], nn.Module]:
    return lambda data: build_model(name, data, **options).double()


class Cumulative(nn.Sequential):
    """BatchNorm that averages all batches alike; a tied and a frozen weight."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64, momentum=None), nn.Linear(64, 64), nn.Linear(64, 10)
        )
        self[3].weight = self[1].weight
        self[3].bias.requires_grad_(False)
        self.double()


class Random(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.2), nn.Linear(16, 10))
        self.double()


class Hidden(nn.Linear):
    """A model with a number that is no tensor of its state, another one in each."""

    def __init__(self) -> None:
        super().__init__(64, 10, dtype=torch.float64)
        self.scale = float(torch.rand(()))

    def forward(self, images: Tensor) -> Tensor:
        return self.scale * super().forward(images.flatten(1))


def assert_alike(together: Pair, alone: Pair, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    assert (together.config, together.status, together.steps) == (alone.config, alone.status, alone.steps)
    assert together.states.keys() == alone.states.keys()
    for name, state in alone.states.items():
        torch.testing.assert_close(together.states[name], state, rtol=rtol, atol=atol)
    for phase, columns in alone.history.items():
        for column, values in columns.items():
            assert together.history[phase][column] == pytest.approx(values, rel=max(rtol, 1e-6))


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (named("mlp", widths=[16], norm="batch"), {"nesterov": False}),
        (named("mlp", widths=[16, 8], norm="layer"), {"optimizer": "adamw", "lr": 1e-3}),
        (named("resnet18", width=2), {"anneal_steps": 0}),
        (lambda data: Cumulative(), {"kind": "independent", "branch_step": 0}),
    ],
    ids=["batch norm", "layer norm", "residual network", "cumulative"],
)
def test_pairs_trained_at_once_are_those_trained_alone(
    digits: Data, device: str, model: Callable[[Data], nn.Module], changes: dict[str, Any]
) -> None:
    members = configs(device=device, **changes)
    pairs = train_pairs(members, model=model, data=digits)
    for config, together in zip(members, pairs, strict=True):
        assert together.execution is not None
        assert (together.execution.together, together.execution.apart_reason) == (3, "")
        assert_alike(together, train_pair(config, model=model, data=digits))
    assert "ema" not in pairs[2].states
    assert {"trunk", "a", "b", "annealed_a", "annealed_b"} - pairs[0].states.keys() <= (
        {"trunk"} if members[0].kind == "independent" else {"annealed_a", "annealed_b"}
    )


def test_a_few_steps_in_float32(device: str) -> None:
    members = configs(device=device, steps=6, branch_step=2, model_options={"widths": [16], "norm": "batch"})
    for config, together in zip(members, train_pairs(members), strict=True):
        assert_alike(together, train_pair(config), rtol=1e-4, atol=1e-5)


def test_models_under_bfloat16_are_stacked(device: str) -> None:
    members = configs(device=device, steps=6, branch_step=2, precision="bfloat16")
    pairs = train_pairs(members)
    assert pairs[0].execution is not None
    assert pairs[0].execution.together == 3
    for config, together in zip(members, pairs, strict=True):
        assert_alike(together, train_pair(config), rtol=0.1, atol=0.01)


def test_stacked_steps_are_captured(graphs: str, digits: Data) -> None:
    members = configs(device=graphs)
    model = named("mlp", widths=[16], norm="batch")
    captured, eager = (train_pairs(members, model=model, data=digits, capture=capture) for capture in (True, False))
    for one, other in zip(captured, eager, strict=True):
        assert one.execution is not None
        assert one.execution.captured
        assert one.history == other.history
        for name, state in other.states.items():
            assert all(torch.equal(one.states[name][key], state[key]) for key in state)


def test_a_factor_of_the_host_is_not_captured(graphs: str, digits: Data) -> None:
    pairs = train_pairs(configs(device=graphs), model=lambda data: Cumulative(), data=digits)
    assert pairs[0].execution is not None
    assert pairs[0].execution.together == 3
    assert "momentum=None" in pairs[0].execution.eager_reason


def test_a_pair_that_diverges_leaves_the_others_as_they_are(digits: Data, device: str) -> None:
    model = named("mlp", widths=[16], norm="none")
    fine = replace(BASE, device=device, lr=0.02, steps=200, branch_step=100)
    members = [replace(fine, lr=1e200), fine, replace(fine, weight_decay=1e155)]
    pairs = train_pairs(members, model=model, data=digits)
    assert [one.status for one in pairs] == ["diverged", "ok", "diverged"]
    for config, together in zip(members, pairs, strict=True):
        alone = train_pair(config, model=model, data=digits)
        if alone.status == "ok":
            assert_alike(together, alone, rtol=1e-7)
        assert (together.states.keys(), together.steps) == (alone.states.keys(), alone.steps)


def test_when_all_pairs_diverge_training_stops(digits: Data, device: str) -> None:
    members = [replace(BASE, device=device, lr=1e200, steps=5000, branch_step=4000, seed=seed) for seed in (0, 1)]
    seen: list[int] = []
    model = named("mlp", widths=[16], norm="none")
    pairs = train_pairs(members, model=model, data=digits, progress=lambda done, total: seen.append(done))
    assert [(one.status, one.steps) for one in pairs] == [("diverged", {"trunk": 128})] * 2
    assert seen == [128, 256]  # losses are looked at while the next chunk is on its way


@pytest.mark.parametrize(
    ("model", "reason"),
    [(lambda data: Random(), "random"), (lambda data: Hidden(), "stacked models gave other losses than each alone")],
    ids=["random numbers", "hidden numbers"],
)
def test_what_cannot_be_stacked_is_trained_apart_and_says_why(
    digits: Data, device: str, model: Callable[[Data], nn.Module], reason: str
) -> None:
    members = configs(device=device)
    seen: list[tuple[int, int]] = []
    pairs = train_pairs(members, model=model, data=digits, progress=lambda *call: seen.append(call))
    assert seen[-1] == (3 * 26, 3 * 26)
    for config, one in zip(members, pairs, strict=True):
        assert one.execution is not None
        assert one.execution.together == 1
        assert reason in one.execution.apart_reason
        alone = train_pair(config, model=model, data=digits)
        for name, state in alone.states.items():
            assert all(torch.equal(one.states[name][key], state[key]) for key in state)


def test_models_of_other_shapes_are_trained_apart(digits: Data, device: str) -> None:
    widths = iter([8, 8, 9, 8, 9, 8, 9])
    model = lambda data: build_model("mlp", data, widths=[next(widths)]).double()  # noqa: E731
    pairs = train_pairs([BASE, replace(BASE, seed=1), replace(BASE, seed=2)], model=model, data=digits)
    assert pairs[0].execution is not None
    assert "has shape" in pairs[0].execution.apart_reason
    assert [one.status for one in pairs] == ["ok"] * 3


@pytest.mark.parametrize(
    ("name", "value"), [("batch_size", 8), ("steps", 13), ("optimizer", "adamw"), ("precision", "bfloat16")]
)
def test_pairs_of_other_shapes_cannot_be_trained_at_once(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"share {name}, which is"):
        train_pairs([BASE, replace(BASE, **{name: value})])  # type: ignore[arg-type]


def test_no_pairs_are_an_error() -> None:
    with pytest.raises(InputError, match="configs is empty"):
        train_pairs([])


def test_what_pairs_share_and_what_they_need_not() -> None:
    """Every option is either shared, or is known to be each pair's own."""
    own = {
        *("lr", "momentum", "nesterov", "weight_decay", "betas", "noise_rule", "noise_exponent", "schedule"),
        *("warmup_steps", "decay_fraction", "ema_decay", "augmentation", "min_accuracy", "seed"),
    }
    assert own | set(pair.SHARED) == set(BASE.__dataclass_fields__)
    assert not own & set(pair.SHARED)


def test_global_random_state_comes_back(digits: Data) -> None:
    before = torch.get_rng_state()
    train_pairs(configs(), model=named("mlp"), data=digits)
    assert torch.equal(torch.get_rng_state(), before)


def test_sweeps_train_pairs_of_one_batch_size_at_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    base = replace(BASE, model_options={"widths": [8]}, min_accuracy=0, ema_decay=None)
    config = SweepConfig(base, lr=[0.05, 0.02], batch_size=[16, 32], pairs=2, points=3)
    calls: list[list[tuple[int, float]]] = []

    def counted(members: list[TrainConfig], **options: Any) -> list[Pair]:
        calls.append([(member.batch_size, member.lr) for member in members])
        return train_pairs(members, **options)

    monkeypatch.setattr(sweep, "train_pairs", counted)
    together = run_sweep(config, tmp_path / "together", together=3)
    assert [sorted({size for size, _ in call}) for call in calls] == [[16], [32]]
    assert [len(call) for call in calls] == [3, 3]
    alone = run_sweep(config, tmp_path / "alone")
    assert len(calls) == 2  # on the CPU nothing is stacked unless asked for
    assert [(r.scale, r.pair, r.digest) for r in together.records] == [
        (r.scale, r.pair, r.digest) for r in alone.records
    ]
    for one, other in zip(together.records, alone.records, strict=True):
        for method, metrics in other.methods("test").items():
            assert one.methods("test")[method]["loss"] == pytest.approx(metrics["loss"], rel=1e-4)
    executions = [
        Pair.load(tmp_path / "together" / "pairs" / f"scale{scale:02d}" / f"pair{index:02d}").execution
        for scale in range(4)
        for index in range(2)
    ]
    assert sorted(execution.together for execution in executions if execution) == [1, 1, 3, 3, 3, 3, 3, 3]


def test_together_must_be_positive(tmp_path: Any) -> None:
    with pytest.raises(InputError, match="together is 0"):
        run_sweep(SweepConfig(BASE), tmp_path, together=0)
