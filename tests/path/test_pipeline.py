"""Points evaluated in the background, in two weight buffers: on a CPU in order, which must change nothing."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from seeded import three
from torch import nn

from isthmus.errors import EvaluationError
from isthmus.flat import FlatState
from isthmus.path import (
    Curve,
    Evaluator,
    pipeline,
    random_line,
    scan_curve,
    scan_line,
    scan_plane,
    scan_task_arithmetic,
    slots,
)
from isthmus.path.device import InOrder, device_of
from isthmus.path.line_walk import LineWalk

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


class Placed(nn.Module):
    """A small net that knows its place on the line, and can be made to stop there."""

    def __init__(self, place: float = 9.0) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.tensor(place))
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.stop: type[BaseException] | None = None

    def forward(self, x):
        if self.stop is not None and abs(float(self.place) - 0.75) < 1e-6:
            raise self.stop("stop")
        return self.net(x)


class Halving(nn.Module):
    """A layer that halves its weight at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        return self.linear(x)


class Own(nn.Module):
    """A net that computes with a function made when it was, which a copy shares."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.function = lambda x: self.linear(x)

    def forward(self, x):
        return self.function(x)


class Locked(nn.Linear):
    """A layer that cannot be copied."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.lock = threading.Lock()


MODELS = {
    "perceptron": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
    "halving": Halving,
    "own": Own,
    "locked": Locked,
}


def placed(device: torch.device = CPU, stop: type[BaseException] | None = None) -> list[nn.Module]:
    torch.manual_seed(0)
    models = [Placed(place).to(device) for place in (9.0, 0.0, 1.0)]
    models[0].stop = stop
    return models


def examples(device: torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(50, 6, generator=generator), torch.randint(3, (50,), generator=generator)
    return inputs.to(device), targets.to(device)


def evaluators(device: torch.device, **options) -> dict[str, Evaluator]:
    options = {"batch_size": 16, "memory_format": torch.contiguous_format, "alphas_at_once": 1} | options
    train = Evaluator(examples(device), metrics=["accuracy", "loss"], **options)
    return {"train": train, "val": Evaluator(examples(device, 1), metrics=["loss"], **options)}


def buffers(result) -> dict:
    return result.choices["weight_buffers"]


def assert_same(found, expected, device: torch.device) -> None:
    """To the bit on a CPU."""
    assert found.values.keys() == expected.values.keys()
    for split, table in expected.values.items():
        assert found.values[split].keys() == table.keys()
        for name, values in table.items():
            if device.type == "cpu":
                assert np.array_equal(found.values[split][name], values)
            else:
                np.testing.assert_allclose(found.values[split][name], values, 1e-5, 0.041 * (name == "accuracy"))


SCANS = {
    "line": lambda models, device, **o: scan_line(*models, evaluators(device), 21, **o),
    "autocast": lambda models, device, **o: scan_line(*models, evaluators(device, dtype=torch.bfloat16), 9, **o),
    "shared": lambda models, device, **o: scan_line(*models, evaluators(device, share_first_layer=True), 21, **o),
    "plane": lambda models, device, **o: scan_plane(
        models[0], models[0], models[1:], evaluators(device, share_first_layer=True), (5, 4), **o
    ),
    "random line": lambda models, device, **o: random_line(models[0], evaluators(device), 9, **o),
}


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("model", ["perceptron", "batch norm", "halving"])
def test_values_are_those_of_points_evaluated_one_after_the_other(name, model, device, in_order):
    options = {"bn_data": examples(device, 2)[0], "bn_batch_size": 32} if model == "batch norm" else {}
    models = three(MODELS[model], device)
    before = [copy.deepcopy(each.state_dict()) for each in models]
    in_order(background=True)
    found = SCANS[name](models, device, **options)
    in_order(background=False)
    expected = SCANS[name](models, device, **options)
    assert_same(found, expected, device)
    assert buffers(found) == {"number": 2, "why_not_2": None}
    assert buffers(expected)["number"] == 1
    assert found.choices["bn"] == ("reset" if options else "keep")
    if options:
        assert (found.bn_seconds > 0).all()
        assert (found.bn_seconds <= found.seconds).all()
    for each, state in zip(models, before, strict=True):
        assert all(torch.equal(tensor, state[key]) for key, tensor in each.state_dict().items())


def test_curves_and_task_arithmetic_too(device, in_order):
    models = three(MODELS["perceptron"], device)
    curve = Curve("bezier", *map(FlatState.from_module, models))
    tasks = {name: {"test": Evaluator(examples(device, seed), batch_size=16)} for seed, name in enumerate("ab")}

    def scans():
        arithmetic = {"base": models[2], "method": "ties", "density": [0.3, 0.8], "select_on": "test"}
        return [
            scan_curve(models[0], curve, evaluators(device, share_first_layer=True), 13),
            scan_task_arithmetic(models[2], models[:2], tasks, **arithmetic),
        ]

    in_order(background=True)
    found = scans()
    in_order(background=False)
    expected = scans()
    assert_same(found[0], expected[0], device)
    assert [buffers(result)["number"] for result in found] == [2, 2]
    for task, tables in expected[1].values.items():
        for name, values in tables["test"].items():
            tolerances = (0, 0) if device.type == "cpu" else (1e-5, 0.041 * (name == "accuracy"))
            np.testing.assert_allclose(found[1].values[task]["test"][name], values, *tolerances)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_comes_after_the_points_before(error, in_order, tmp_path):
    partial, files = [], []
    for background in (True, False):
        in_order(background=background)
        models = placed(stop=error)
        before = copy.deepcopy(models[0].state_dict())
        path = tmp_path / f"{background}"
        with pytest.raises((error, EvaluationError)) as caught:
            scan_line(*models, evaluators(CPU), 21, checkpoint=path)
        partial.append(caught.value.partial)
        files.append([line.partition(',"seconds"')[0] for line in path.read_text().splitlines()[1:]])
        assert all(torch.equal(tensor, before[key]) for key, tensor in models[0].state_dict().items())
        if error is ValueError:
            assert "the evaluator of split 'train' failed at alpha = 0.75 (ValueError: stop)" in str(caught.value)
    assert partial[0].alphas.tolist() == partial[1].alphas.tolist()
    assert 0.7 in partial[0].alphas
    assert not partial[0].complete
    assert_same(*partial, CPU)
    assert files[0] == files[1]


def test_a_scan_goes_on_from_its_file(device, in_order, tmp_path):
    in_order(background=True)
    models = placed(device)
    whole = scan_line(*models, evaluators(device), 21)
    with pytest.raises(EvaluationError):
        scan_line(*placed(device, stop=ValueError), evaluators(device), 21, checkpoint=tmp_path / "scan")
    resumed = scan_line(*models, evaluators(device), 21, checkpoint=tmp_path / "scan")
    again = scan_line(*models, evaluators(device), 41, checkpoint=tmp_path / "scan")  # known points among new ones
    assert_same(resumed, whole, device)
    for name, values in whole.values["train"].items():
        np.testing.assert_allclose(again.values["train"][name][::2], values, rtol=1e-5)


@pytest.mark.parametrize("stop_at", [3, 4, 10, 20])
def test_progress_tells_of_every_point_in_order_and_may_interrupt(stop_at, in_order):
    told = {}
    for background in (True, False):
        in_order(background=background)
        seen = told[background] = []

        def progress(done, total, values, seen=seen):
            seen.append((done, total, values))
            if done == stop_at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) as caught:
            scan_line(*placed(), evaluators(CPU), 21, progress=progress)
        assert len(caught.value.partial.alphas) == stop_at
    assert told[True] == told[False]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_while_the_host_waits(error, in_order, monkeypatch):
    fetched, fetch = [], InOrder.fetch

    def interrupted(device, tensor):
        read, stops = fetch(device, tensor), [error("stop\nmore")] if len(fetched) == 5 else []
        fetched.append(tensor)

        def reading():
            if stops:
                raise stops.pop()
            return read()

        return reading

    in_order(background=True)
    monkeypatch.setattr(InOrder, "fetch", interrupted)
    with pytest.raises((KeyboardInterrupt, EvaluationError)) as caught:
        scan_line(*placed(), evaluators(CPU), 21)
    assert len(fetched) == 6 + pipeline.AHEAD
    if error is KeyboardInterrupt:
        assert len(caught.value.partial.alphas) == 3 + len(fetched)
    else:
        assert "the device failed at alpha = 0.3 or shortly after (RuntimeError: stop)" in str(caught.value)
        assert len(caught.value.partial.alphas) == 3 + 5
    assert not caught.value.partial.complete


def test_random_states_come_back(device, in_order):
    in_order(background=True)
    make = lambda: nn.Sequential(nn.Linear(6, 8), nn.RReLU(), nn.Linear(8, 3))  # noqa: E731
    models = three(make, device)
    models[0].train()
    state = torch.get_rng_state()
    scan_line(*models, evaluators(device), 9)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in models[0].modules())


def hooked() -> nn.Module:
    model = MODELS["perceptron"]()
    model[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


ONE_BUFFER = {
    "a function of its own": (Own, "a copy of the model gives other values, by more than rounding"),
    "no copy": (Locked, "the model cannot be copied: TypeError: cannot pickle '_thread.lock' object"),
    "hooks": (hooked, "the model has hooks"),
    "compiled": (lambda: torch.compile(MODELS["perceptron"](), backend="eager"), "the model is compiled"),
}


@pytest.mark.parametrize("name", ONE_BUFFER)
def test_models_that_have_no_copy_have_one_buffer(name, device, in_order):
    make, why_not = ONE_BUFFER[name]
    models = three(make, device)
    in_order(background=True)
    found = scan_line(*models, evaluators(device), 9)
    assert buffers(found) == {"number": 1, "why_not_2": why_not}
    in_order(background=False)
    assert_same(found, scan_line(*models, evaluators(device), 9), device)


@pytest.mark.parametrize("metrics", [["accuracy"], ["loss"], {"constant": lambda z, y: 0 * z[:, 0]}])
def test_a_copy_is_compared_far_from_where_the_model_is(metrics, device, in_order):
    """Where neighbours are so close that it makes no difference if a copy computes with the model's weights."""
    models, points = three(Own, device), [*np.linspace(0, 1e-5, 9).tolist(), 0.9, 0.95]
    options = {"metrics": metrics, "batch_size": 16, "alphas_at_once": 1}
    in_order(background=True)
    found = scan_line(*models, Evaluator(examples(device), **options), points)
    assert buffers(found) == {"number": 1, "why_not_2": ONE_BUFFER["a function of its own"][1]}
    in_order(background=False)
    assert_same(found, scan_line(*models, Evaluator(examples(device), **options), points), device)


def test_memory_decides_about_a_second_buffer(in_order, monkeypatch):
    in_order(background=True)
    models = three(lambda: nn.Sequential(nn.Linear(6, 2**16), nn.Linear(2**16, 3)), CPU)
    nbytes = sum(parameter.nbytes for parameter in models[0].parameters())  # 2.5 MiB
    monkeypatch.setattr(InOrder, "free_bytes", lambda _: 2 * nbytes - 2**20)
    result = scan_line(*models, evaluators(CPU), 9)
    assert buffers(result) == {"number": 1, "why_not_2": "the device has room for 4 MiB, expected 5"}
    monkeypatch.setattr(InOrder, "free_bytes", lambda _: 2 * nbytes + 2**20)
    assert buffers(scan_line(*models, evaluators(CPU), 9))["number"] == 2


def test_points_that_depend_on_others_have_one_buffer(in_order):
    models = three(MODELS["perceptron"], CPU)
    in_order(background=True, graphs=True)
    found = scan_line(*models, evaluators(CPU), "adaptive", tol=1e-2)
    why_not = "each point depends on the values of those before"
    assert buffers(found) == {"number": 1, "why_not_2": why_not}
    graph, at_once = (found.choices["splits"]["val"][name] for name in ("graph", "alphas_at_once"))
    assert graph == {"captured": True, "why_not": None}
    assert at_once == {"number": 1, "why_not": why_not}
    in_order(background=False)
    expected = scan_line(*models, evaluators(CPU), "adaptive", tol=1e-2)
    assert found.alphas.tolist() == expected.alphas.tolist()
    np.testing.assert_allclose(found.values["val"]["loss"], expected.values["val"]["loss"], rtol=1e-6)


def test_a_cpu_evaluates_in_full():
    result = scan_line(*placed(), evaluators(CPU), 9)
    assert buffers(result) == {"number": 1, "why_not_2": "the device 'cpu' does nothing in the background"}
    told = scan_line(*placed(), lambda model: 0.0, 9).choices
    assert told["weight_buffers"]["number"] == 1
    assert told["splits"] == {}


def test_functions_are_evaluated_in_full(in_order):
    in_order(background=True)
    result = scan_line(*placed(), {"own": lambda model: model.place.item(), **evaluators(CPU)}, 9)
    assert result.values["own"]["loss"].tolist() == result.alphas.tolist()
    why_not = "there was no point at which no more is done than to run evaluators"
    assert buffers(result) == {"number": 1, "why_not_2": why_not}


def test_a_copy_has_its_tensors_in_its_state_and_nothing_twice():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("hidden", torch.ones(2), persistent=False)
            self.second.bias.requires_grad_(False)

    model = Tied()
    state = FlatState.from_module(model)
    with state.bind(model) as binding:
        copied = slots.copied(slots.Slot(model, state, binding, None))
        try:
            other = copied.model
            assert other.second.weight is other.first.weight
            assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in model.parameters()]
            assert other.hidden is not model.hidden
            ranges = [(b.data_ptr(), b.data_ptr() + b.nbytes) for b in copied.state.buffers.values()]
            for key, tensor in other.state_dict(keep_vars=True).items():
                assert any(start <= tensor.data_ptr() < end for start, end in ranges), key
            copied.state["norm.running_mean"].fill_(7)
            copied.state["first.weight"].fill_(5)
            assert (other.norm.running_mean == 7).all()
            assert (other.second.weight == 5).all()
            assert not (model.norm.running_mean == 7).any()
        finally:
            copied.binding.undo()


@pytest.mark.parametrize("at_once", [1, 4])
def test_models_are_freed_when_a_scan_ends(at_once, device, in_order, monkeypatch):
    """Without waiting for the garbage collector: a second model on a GPU is no small thing."""
    states, make = [], FlatState.zeros.__func__

    def zeros(cls, *args, **kwargs):
        state = make(cls, *args, **kwargs)
        states.append(weakref.ref(state))
        return state

    def scan():
        return scan_line(*models, evaluators(device, alphas_at_once=at_once, share_first_layer=True), 21)

    in_order(background=True, graphs=True)
    models = three(MODELS["perceptron"], device)
    scan()  # what torch does for the first time may keep frames alive
    monkeypatch.setattr(FlatState, "zeros", classmethod(zeros))
    gc.disable()
    try:
        result = scan()
        assert len(states) >= 3
        assert not [state for state in states if state() is not None]
    finally:
        gc.enable()
    assert result.choices["splits"]["val"]["alphas_at_once"]["number"] == at_once


class Watched(InOrder):
    """A device with two queues that keeps a log of what was asked for, as a real one would meet it."""

    background = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.queue = "first"
        self.log: list[tuple[str, str, object]] = []
        self.reads: list[int] = []
        devices.append(self)

    def aside(self, _used):
        watched = self

        class Aside:
            def __enter__(self):
                watched.queue = "second"

            def __exit__(self, *_):
                watched.queue = "first"

        return Aside()

    def note(self, what: str, which: object) -> None:
        self.log.append((self.queue, what, which))

    def mark(self):
        mark = len(self.log)
        self.note("mark", mark)
        return mark

    def wait(self, mark) -> None:
        self.note("wait", mark)

    def seconds(self, start, end) -> float:
        return 0.0

    def fetch(self, tensor):
        numbers, asked = tensor.tolist(), len(self.log)

        def read():
            self.reads.append(asked)
            self.note("read", asked)
            return numbers

        self.note("fetch", asked)
        return read


devices: list[Watched] = []


def test_queues_wait_for_each_other_and_the_host_runs_ahead(monkeypatch):
    devices.clear()
    monkeypatch.setattr(pipeline, "device_of", Watched)
    write, means = LineWalk.write, Evaluator.means

    def writing(walk, point, out):
        devices[0].note("use", out.averaged[0].data_ptr())
        return write(walk, point, out)

    def evaluating(evaluator, model, **options):
        devices[0].note("use", min(parameter.data_ptr() for parameter in model.parameters()))
        return means(evaluator, model, **options)

    monkeypatch.setattr(LineWalk, "write", writing)
    monkeypatch.setattr(Evaluator, "means", evaluating)
    scan_line(*three(MODELS["perceptron"], CPU), evaluators(CPU), 21)
    log = devices[0].log
    assert len({state for _, what, state in log if what == "use"}) == 2
    assert {queue for queue, what, _ in log if what == "use"} == {"first", "second"}
    crossings = 0
    for place, (queue, what, state) in enumerate(log):
        if what != "use":
            continue
        uses = [p for p, entry in enumerate(log[:place]) if entry[0] != queue and entry[1:] == ("use", state)]
        waited = [
            mark for where, done, mark in log[:place] if (where, done) == (queue, "wait") and log[mark][0] != queue
        ]
        crossings += bool(uses)
        assert not uses or max(waited) > uses[-1]  # a mark that comes after the other queue's last use
    assert crossings > 30
    fetched = [asked for _, what, asked in log if what == "fetch"]
    assert len(fetched) == 21 - 3  # the ends and the midpoint are evaluated in full
    assert devices[0].reads == fetched  # once each, in order
    changes = [{"fetch": 1, "read": -1}.get(what, 0) for _, what, _ in log]
    assert np.cumsum(changes).max() == pipeline.AHEAD + 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_used_as_one():
    assert type(device_of(torch.device("cuda"))).__name__ == "Cuda"
    assert device_of(torch.device("cuda")).free_bytes() > 0
