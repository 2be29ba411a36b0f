"""Passes that are captured in graphs: on a CPU in recordings of their operations, which keep what a graph keeps."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seeded import three
from torch import nn
from torch.nn.utils import parametrizations

from isthmus.path import Evaluator, graphs, random_plane, scan_line, scan_plane, scan_task_arithmetic
from isthmus.path.device import InOrder

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = {"batch_size": 16, "memory_format": torch.contiguous_format, "alphas_at_once": 1, "share_first_layer": False}


class Around(nn.Module):
    """A small net with something done before it."""

    def __init__(self, before) -> None:
        super().__init__()
        self.before = before
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("hidden", torch.ones(()), persistent=False)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.net(self.before(self, x))


def write(tensor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        tensor.mul_(0.5)
    return x * tensor.sum()


def reassign(model: Around, x: torch.Tensor) -> torch.Tensor:
    model.hidden = model.hidden * 0.5
    return x * model.hidden


def decide(model: Around, x: torch.Tensor) -> torch.Tensor:
    return x if float(model.net[0].bias.sum()) > 0 else -x


MODELS = {
    "perceptron": lambda: Around(lambda model, x: x),
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    ),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 3))),
}
REFUSED = {
    "reads a value": (lambda: Around(decide), "cannot be captured"),
    "writes into a weight": (lambda: Around(lambda model, x: write(model.net[0].weight, x)), "writes into parameters"),
    "writes into a buffer": (lambda: Around(lambda model, x: write(model.seen, x)), "writes into parameters, buffers"),
    "writes into a hidden buffer": (lambda: Around(lambda model, x: write(model.hidden, x)), "parameters, buffers"),
    "replaces a buffer": (lambda: Around(reassign), "writes into parameters, buffers"),
    "compiled": (lambda: torch.compile(MODELS["perceptron"](), backend="eager"), "the model is compiled"),
}


def evaluator(device: torch.device, **options) -> Evaluator:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(50, 6, generator=generator), torch.randint(3, (50,), generator=generator)
    return Evaluator((inputs.to(device), targets.to(device)), **(OPTIONS | options))


def graph(result, split: str = "data") -> dict:
    return result.choices["splits"][split]["graph"]


def losses(result, split: str = "data") -> np.ndarray:
    return result.values[split]["loss"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_replays_give_what_the_model_does(name, dtype, device, in_order):
    models = three(MODELS[name], device)
    in_order(background=True, graphs=True)
    captured = scan_line(*models, evaluator(device, dtype=dtype), 21, bn="keep")
    in_order(background=False)
    expected = scan_line(*models, evaluator(device, dtype=dtype, graphs=False), 21, bn="keep")
    assert graph(captured) == {"captured": True, "why_not": None}
    assert not graph(expected)["captured"]
    tolerance = 1e-2 if dtype else 1e-6 if device.type == "cpu" else 1e-5
    np.testing.assert_allclose(losses(captured), losses(expected), rtol=tolerance)
    assert np.ptp(losses(expected)) > 1e-2


def test_python_runs_no_more_once_a_point_was_replayed(device, in_order, monkeypatch):
    calls, forward = [], Around.forward

    def counting(model, x):
        calls.append(len(x))
        return forward(model, x)

    monkeypatch.setattr(Around, "forward", counting)
    in_order(background=True, graphs=True)
    counts = []
    for points in (21, 41):
        calls.clear()
        result = scan_line(*three(MODELS["perceptron"], device), evaluator(device), points)
        assert graph(result) == {"captured": True, "why_not": None}
        counts.append(len(calls))
    assert counts[0] == counts[1] < 21 * 4


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_captured_are_run_as_they_are(name, device, in_order):
    make, why_not = REFUSED[name]
    in_order(background=True, graphs=True)
    models = three(make, device)
    hidden = [copy.deepcopy(dict(model.named_buffers())) for model in models]
    found = scan_line(*models, evaluator(device), 21)
    assert not graph(found)["captured"]
    assert why_not in graph(found)["why_not"]
    for model, before in zip(models, hidden, strict=True):
        assert all(torch.equal(buffer, before[key]) for key, buffer in model.named_buffers())
    in_order(background=False)
    expected = scan_line(*three(make, device), evaluator(device, graphs=False), 21)
    np.testing.assert_allclose(losses(found), losses(expected), rtol=0 if device.type == "cpu" else 1e-5)


def test_hooks_and_graphs_false_are_reasons(device, in_order):
    in_order(background=True, graphs=True)
    models = three(MODELS["perceptron"], device)
    assert graph(scan_line(*models, evaluator(device, graphs=False), 9))["why_not"] == "graphs=False was asked for"
    models[0].net[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    assert graph(scan_line(*models, evaluator(device), 9)) == {"captured": False, "why_not": "the model has hooks"}


def test_random_numbers_are_found_out(device, in_order):
    in_order(background=True, graphs=True)
    models = three(lambda: Around(lambda model, x: nn.functional.dropout(x, 0.5)), device)
    state = torch.get_rng_state()
    result = scan_line(*models, evaluator(device), 21)
    assert "other values than the model, by more than rounding" in graph(result)["why_not"]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_cpu_says_that_it_captures_nothing(in_order):
    cpu = torch.device("cpu")
    result = scan_line(*three(MODELS["perceptron"], cpu), evaluator(cpu), 9)
    assert graph(result) == {"captured": False, "why_not": "the device 'cpu' does nothing in the background"}
    in_order(background=True)
    result = scan_line(*three(MODELS["perceptron"], cpu), evaluator(cpu), 9)
    assert graph(result)["why_not"] == "it cannot be captured: there are no graphs on the device cpu"


@pytest.mark.parametrize("wrong", ["stale", "elsewhere", "nan"])
def test_a_graph_that_gives_other_values_is_dropped(wrong, in_order, monkeypatch):
    cpu = torch.device("cpu")
    models = three(MODELS["perceptron"], cpu)
    expected = losses(scan_line(*models, evaluator(cpu), 21))
    in_order(background=True)

    def capture(_device, function):
        means = function()
        other = {"stale": means, "elsewhere": means * (1 + 1e-3), "nan": means * math.nan}[wrong]
        return lambda: other.clone()

    monkeypatch.setattr(InOrder, "capture", capture)
    result = scan_line(*models, evaluator(cpu), 21)
    assert "other values" in graph(result)["why_not"]
    assert losses(result).tolist() == expected.tolist()


def test_first_layers_are_combined_in_graphs(device, in_order):
    models = three(MODELS["perceptron"], device)
    in_order(background=True, graphs=True)
    found = scan_line(*models, evaluator(device, share_first_layer=True), 21)
    plane = scan_plane(models[0], models[0], models[1:], evaluator(device, share_first_layer=True), (6, 5))
    around = random_plane(models[0], evaluator(device, share_first_layer=True), (6, 5))
    in_order(background=False)
    for result, expected in (
        (found, scan_line(*models, evaluator(device), 21)),
        (plane, scan_plane(models[0], models[0], models[1:], evaluator(device), (6, 5))),
        (around, random_plane(models[0], evaluator(device), (6, 5))),
    ):
        assert result.choices["splits"]["data"]["first_layer"] == "shared"
        assert graph(result) == {"captured": True, "why_not": None}
        np.testing.assert_allclose(losses(result), losses(expected), rtol=1e-5)


def test_every_setting_of_task_arithmetic_is_captured_anew(device, in_order):
    models = three(MODELS["perceptron"], device)

    def scan(share):
        tasks = {name: {"test": evaluator(device, share_first_layer=share)} for name in ("one", "two")}
        options = {"base": models[2], "method": "ties", "density": [0.3, 0.8], "select_on": "test"}
        return scan_task_arithmetic(models[2], models[:2], tasks, **options)

    in_order(background=True, graphs=True)
    found = scan(True)
    in_order(background=False)
    expected = scan(False)
    assert graph(found, "one/test") == {"captured": True, "why_not": None}
    for task in ("one", "two"):
        for metric in ("loss", "accuracy"):
            rows = [result.values[task]["test"][metric] for result in (found, expected)]
            np.testing.assert_allclose(*rows, rtol=1e-5, atol=0.021 if metric == "accuracy" else 0)


class Renewing(nn.Module):
    """A layer that keeps what it made of its weights until they are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.version = self.scaled = None

    def forward(self, x):
        if self.version != self.linear.weight._version:
            self.scaled = self.linear.weight / self.linear.weight.norm()
            self.version = self.linear.weight._version
        return nn.functional.linear(x, self.scaled, self.linear.bias)


@pytest.mark.parametrize("metrics", [["accuracy"], None, {"constant": lambda z, y: 0 * z[:, 0]}])
def test_replays_are_compared_far_from_where_they_were_captured(metrics, device, in_order):
    """Where neighbours are so close that weights of the one before make no difference."""
    models, points = three(Renewing, device), [*np.linspace(0, 1e-5, 9).tolist(), *np.linspace(0.9, 1, 9).tolist()]
    in_order(background=True, graphs=True)
    found = scan_line(*models, evaluator(device, metrics=metrics), points)
    assert "other values than the model" in graph(found)["why_not"]
    in_order(background=False)
    expected = scan_line(*models, evaluator(device, metrics=metrics), points)
    tolerance = 0 if device.type == "cpu" else 0.041
    for name, values in expected.values["data"].items():
        np.testing.assert_allclose(found.values["data"][name], values, atol=tolerance)


def test_few_points_are_not_worth_a_capture(device, in_order, monkeypatch):
    in_order(background=True, graphs=True)
    models = three(MODELS["perceptron"], device)
    monkeypatch.setattr(graphs, "FEWEST", 20)

    def arithmetic(factors):
        tasks = {"one": {"test": evaluator(device, share_first_layer=True)}, "two": {"test": evaluator(device)}}
        options = {"base": models[2], "method": "ties", "density": [0.3, 0.8], "select_on": "test"}
        return scan_task_arithmetic(models[2], models[:2], tasks, scaling_factors=np.linspace(0, 1, factors), **options)

    few = {"captured": False, "why_not": "a graph would be replayed 19 times at most, and pays from 20 times on"}
    assert graph(scan_line(*models, evaluator(device), 39)) == few
    assert graph(scan_line(*models, evaluator(device), 41))["captured"]
    found = arithmetic(21)
    why_not = "a graph would be replayed 10 times at most, and pays from 20 times on"
    assert graph(found, "one/test")["why_not"] == why_not
    assert graph(found, "two/test")["captured"]  # both settings have use of it


class TestAgreement:
    def test_bounds_by_hand(self):
        evaluate = Evaluator((torch.zeros(100, 2), torch.zeros(100, dtype=torch.int64)))
        net = nn.Linear(2, 2)
        assert graphs.bounds(evaluate, net) == [2.0**-16, 0.02, 2.0**-16]  # 128 spacings of 2^-23, two samples
        assert graphs.bounds(evaluate, net.double())[0] == 2.0**-45
        assert graphs.bounds(evaluate, net.bfloat16())[0] == 2.0**-8
        half = Evaluator((torch.zeros(100, 2), torch.zeros(100, dtype=torch.int64)), dtype=torch.bfloat16)
        assert graphs.bounds(half, net.float())[0] == 2.0**-8

    @pytest.mark.parametrize(
        ("found", "expected", "equal"),
        [
            (1.0, 1.01, True),
            (1.0, 1.011, False),
            (100.0, 101.0, True),
            (100.0, 101.1, False),
            (0.0, 0.0101, False),
            (math.nan, math.nan, True),
            (math.nan, 1.0, False),
            (1.0, math.nan, False),
            (math.inf, math.inf, True),
            (math.inf, -math.inf, False),
            (math.inf, 1.0, False),
        ],
    )
    def test_limits_by_hand(self, found, expected, equal):
        assert graphs.agree([found], [expected], [0.01]) == equal

    @given(st.lists(st.floats(), max_size=5))
    def test_everything_agrees_with_itself(self, numbers):
        assert graphs.agree(numbers, numbers, [0.0] * len(numbers))
