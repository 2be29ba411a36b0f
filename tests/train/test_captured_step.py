"""Recorded steps take the steps that operations launched one by one take."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from isthmus import _capture
from isthmus.train import Data, Execution, Pair, TrainConfig, gradient_noise, load_data, loop, train_pair
from isthmus.train.batches import Chunk
from isthmus.train.models import ResNet18
from isthmus.train.networks import Network
from isthmus.train.steps import RecordedSteps

pytest.importorskip("sklearn")

CONFIG = TrainConfig(
    steps=30,
    branch_step=10,
    warmup_steps=5,
    anneal_steps=6,
    ema_decay=0.9,
    record_every=4,
    augmentation={"noise": 0.3},  # type: ignore[arg-type]
    model_options={"widths": [16]},
)


@pytest.fixture(scope="module")
def digits() -> Data:
    return load_data("digits")


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(144, 10),
        )


class Waiting(nn.Module):
    """A model that looks at a value, which no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm(images.flatten(1))
        return self.head(hidden if float(hidden.detach().sum()) < 1e9 else hidden.relu())


def same(a: Pair, b: Pair) -> bool:
    """Whether two pairs are equal to the bit."""
    assert a.states.keys() == b.states.keys()
    assert {"a", "b", "annealed_a", "annealed_b"} <= a.states.keys()
    equal = all(torch.equal(a.states[name][key], b.states[name][key]) for name in a.states for key in a.states[name])
    return equal and a.history == b.history and a.steps == b.steps


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"momentum": 0.0, "model_options": {"widths": [16], "norm": "batch"}},
        {"nesterov": True, "kind": "independent", "branch_step": 0},
        {"optimizer": "adamw", "lr": 1e-3},
        {"precision": "bfloat16"},
    ],
    ids=str,
)
def test_captured_and_eager_training_take_the_same_steps(graphs: str, digits: Data, changes: dict[str, object]) -> None:
    config = replace(CONFIG, device=graphs, **changes)  # type: ignore[arg-type]
    eager = train_pair(config, data=digits, capture=False)
    captured = train_pair(config, data=digits)
    assert captured.execution == Execution(captured=True)
    assert eager.execution == Execution(eager_reason="not asked for")
    assert same(captured, eager)


@pytest.mark.parametrize("last", [False, True])
def test_dropout_convolutions_and_channels_last(
    graphs: str, digits: Data, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "channels_last", lambda model, data: last)
    config = replace(CONFIG, device=graphs)
    captured = train_pair(config, model=lambda data: Convolutions(), data=digits)
    assert captured.execution == Execution(captured=True, channels_last=last)
    eager = train_pair(config, model=lambda data: Convolutions(), data=digits, capture=False)
    assert same(captured, eager)
    assert all(tensor.is_contiguous() for state in captured.states.values() for tensor in state.values())


def test_a_phase_of_several_chunks_after_one_of_less_than_one(graphs: str, digits: Data) -> None:
    """The first phase, with which the step is recorded, has fewer steps than a chunk of a later one."""
    config = replace(CONFIG, device=graphs, steps=300, branch_step=3, anneal_steps=0, warmup_steps=0, ema_decay=None)
    captured, eager = (train_pair(config, data=digits, capture=capture) for capture in (True, False))
    assert captured.history == eager.history
    assert all(torch.equal(captured.a[key], eager.a[key]) for key in eager.a)  # type: ignore[index,union-attr]


def test_what_cannot_be_captured_is_trained_step_by_step_and_says_why(
    device: str, digits: Data, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if device == "cpu":
        monkeypatch.setitem(_capture.RECORDERS, "cpu", request.getfixturevalue("tape"))
    config = replace(CONFIG, device=device)
    pair = train_pair(config, model=lambda data: Waiting(), data=digits)
    assert pair.execution is not None
    assert not pair.execution.captured
    assert any(word in pair.execution.eager_reason for word in ("captur", "synchroniz"))
    assert same(pair, train_pair(config, model=lambda data: Waiting(), data=digits, capture=False))


def test_an_error_of_the_model_is_the_models_error(digits: Data, graphs: str) -> None:
    class Broken(nn.Linear):
        def forward(self, images: Tensor) -> Tensor:
            raise ZeroDivisionError("by the model")

    with pytest.raises(ZeroDivisionError, match="by the model"):
        train_pair(replace(CONFIG, device=graphs), model=lambda data: Broken(64, 10), data=digits)


def test_a_device_without_graphs_says_so(digits: Data) -> None:
    pair = train_pair(replace(CONFIG, device="cpu"), data=digits)
    assert pair.execution == Execution(eager_reason="there are no graphs on the device cpu")


def test_divergence_stops_a_captured_run_where_it_stops_an_eager_one(graphs: str, digits: Data) -> None:
    config = replace(CONFIG, device=graphs, steps=500, branch_step=0, lr=1e30, model_options={"norm": "none"})
    captured, eager = (train_pair(config, data=digits, capture=capture) for capture in (True, False))
    assert captured.status == eager.status == "diverged"
    assert captured.steps == eager.steps == {"trunk": 0, "a": 128}
    assert len(captured.history["a"]["loss"]) == 32


def test_how_a_pair_was_computed_is_saved_and_may_be_missing(digits: Data, tmp_path: Path) -> None:
    pair = train_pair(CONFIG, data=digits)
    pair.save(tmp_path)
    assert Pair.load(tmp_path).execution == pair.execution
    record = json.loads((tmp_path / "pair.json").read_text())
    del record["execution"]  # as pairs were saved before
    (tmp_path / "pair.json").write_text(json.dumps(record))
    assert Pair.load(tmp_path).execution is None


def test_bfloat16_changes_the_forward_passes_alone(digits: Data, device: str) -> None:
    config = replace(CONFIG, device=device)
    narrow = replace(config, precision="bfloat16")
    assert "precision" not in config.to_dict()  # older files stay valid
    assert config.digest != narrow.digest
    assert TrainConfig.from_dict(narrow.to_dict()) == narrow
    wide_pair, narrow_pair = train_pair(config, data=digits), train_pair(narrow, data=digits)
    assert wide_pair.a is not None
    assert narrow_pair.a is not None
    for key, value in narrow_pair.a.items():
        assert value.dtype == torch.float32
        assert not torch.equal(value, wide_pair.a[key])
    losses = narrow_pair.history["a"]["loss"][-1], wide_pair.history["a"]["loss"][-1]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)
    traces = [
        gradient_noise(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), digits, c, STATE, batches=4).trace
        for c in (config, narrow)
    ]
    assert traces[0] != traces[1]
    assert traces[0] == pytest.approx(traces[1], rel=0.05)


STATE = {"1.weight": torch.linspace(-1, 1, 640).view(10, 64), "1.bias": torch.zeros(10)}


def test_optimiser_state_is_float32_under_bfloat16(digits: Data, device: str) -> None:
    config = replace(CONFIG, device=device, precision="bfloat16", optimizer="adamw", lr=1e-3)
    data = digits.to(device)
    trainer = loop.Trainer([Convolutions().to(device)], data, [config])
    trainer.run("trunk", [lambda step: 1e-3], range(3))
    states = [tensor for state in trainer.checkpoint().optimizer for tensor in state.values()]
    assert len(states) == 3
    assert {tensor.dtype for tensor in states} == {torch.float32}


def test_kernels_are_laid_out_with_channels_last_and_compute_the_same() -> None:
    torch.manual_seed(0)
    plain = ResNet18(10, width=2, in_channels=3).double()
    inputs, labels = torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.arange(4)
    results = []
    for last in (False, True):
        model = ResNet18(10, width=2, in_channels=3).double()
        model.load_state_dict(plain.state_dict())
        network = Network([model], "float32", channels_last=last)
        images = inputs.contiguous(memory_format=torch.channels_last) if last else inputs
        loss = network.backward(images, labels)
        assert model.stem.weight.is_contiguous(memory_format=torch.channels_last) == last
        results.append((loss, {name: parameter.grad for name, parameter in model.named_parameters()}))
        for value in network.parameters.values[0]:  # a step of the optimiser reaches the model
            value.data.zero_()
        assert not any(bool(parameter.any()) for parameter in model.parameters())
    torch.testing.assert_close(results[1], results[0])


def test_replays_read_what_tensors_hold_and_warm_up_leaves_the_random_state(graphs: str) -> None:
    where = torch.device(graphs)
    total, amount = torch.zeros(1, device=where), torch.ones(1, device=where)
    before = torch.get_rng_state()

    def work() -> None:
        total.add_(amount)

    def warm_up() -> None:
        torch.rand(1)
        work()

    replay = _capture.capture(work, where, warm_up=warm_up)
    assert torch.equal(torch.get_rng_state(), before)
    total.zero_()
    for value in (1.0, 10.0):
        amount.fill_(value)
        replay()
    assert total.item() == 11


def test_reads_are_allowed_again_where_warnings_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch warns of the mode that refuses reads; it may have set the mode when it does."""
    mode: list[object] = [0]

    def set_mode(value: object) -> None:
        mode[0] = value
        if value == "error":
            raise UserWarning("Another message about a mode")

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with pytest.raises(UserWarning, match="Another"), _capture._reads_refused():
        pass
    assert mode == [0]


def test_recordings_of_a_thread_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: [device])
    streams = _capture._Streams()
    first = streams.stream(torch.device("cuda", 1))
    assert first == [1]
    assert streams.stream(torch.device("cuda", 1)) is first
    assert streams.stream(torch.device("cuda", 0)) == [0]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(streams.stream, torch.device("cuda", 1)).result() is not first


def test_values_arrive_as_they_were(device: str) -> None:
    value = _capture.to_device(torch.arange(3), torch.device(device))
    arrival = _capture.Arrival(value)
    value.zero_()
    assert arrival.get().tolist() == [0, 1, 2]
    assert arrival.get().device.type == "cpu"


def test_recorded_steps_see_the_batches_in_the_order_of_memory_that_they_have(graphs: str) -> None:
    images = torch.randn(3 * 4, 3, 5, 5, device=graphs).contiguous(memory_format=torch.channels_last)
    chunk = Chunk(images.unflatten(0, (3, 4)), torch.arange(12, device=graphs).view(3, 4))
    seen: list[bool] = []
    total = torch.zeros((), device=graphs)

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        seen.append(inputs.is_contiguous(memory_format=torch.channels_last))
        return total.add_(inputs.sum() + labels.sum() * group["lr"])

    group: dict[str, object] = {}
    rates = torch.tensor([[1.0], [10.0], [100.0]])
    steps = RecordedSteps(step, [group], chunk, rates, 5, total.zero_)
    steps.begin(chunk, rates)
    for _ in range(3):
        steps.take()
    sums = images.unflatten(0, (3, 4)).sum((1, 2, 3, 4)) + torch.tensor([6.0, 220.0, 3800.0], device=graphs)
    torch.testing.assert_close(steps.losses(), sums.cumsum(0))
    assert all(seen)
