"""Curves between two models: their shape, their training and their scans."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import isthmus
from isthmus import norms
from isthmus.errors import EvaluationError, FileError, InputError, IsthmusWarning
from isthmus.flat import FlatState
from isthmus.io import save_state
from isthmus.path import Curve, Evaluator, PathResult, fit_curve, scan_curve, scan_line
from isthmus.path.curve import point_weights

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = ["bezier", "polygon"]


class Point(nn.Module):
    """A model that is a point: f(x) = w for every x."""

    def __init__(self, *w: float, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=dtype))

    def forward(self, x):
        return self.w.expand(len(x), -1)


def weight(model: Point) -> float:
    return model.w.detach()[0].item()


def curve(kind: str, a, theta, b) -> Curve:
    return Curve(kind, *(FlatState.from_state_dict({"w": torch.tensor(w, dtype=torch.float64)}) for w in (a, theta, b)))


def points(count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(count, 1), torch.zeros(count)


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(144, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def data(samples: int = 60, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 144, generator=generator), torch.randint(3, (samples,), generator=generator)


# The shape


@pytest.mark.parametrize(
    ("kind", "t", "expected"),
    [
        ("bezier", 0.25, (0.5625, 0.375, 0.0625)),
        ("bezier", 0.5, (0.25, 0.5, 0.25)),
        ("polygon", 0.25, (0.5, 0.5, 0)),
        ("polygon", 0.5, (0, 1, 0)),
        ("polygon", 0.75, (0, 0.5, 0.5)),
    ],
)
def test_weights_of_the_points(kind, t, expected):
    assert point_weights(kind, t) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("bezier", [1, 1.8125, 2.25, 2.3125, 2]), ("polygon", [1, 2, 3, 2.5, 2])],
)
def test_models_on_the_curve_by_hand(kind, expected):
    c = curve(kind, [1.0], [3.0], [2.0])
    assert [c.at(t)["w"].item() for t in (0, 0.25, 0.5, 0.75, 1)] == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ends_are_those_given_to_the_bit(kind, dtype):
    a = {"w": torch.tensor([-0.0, math.inf, 0.1], dtype=dtype), "n": torch.tensor(3)}
    b = {"w": torch.tensor([math.nan, -0.0, 0.3], dtype=dtype), "n": torch.tensor(4)}
    theta = {"w": torch.tensor([1.0, 2.0, 3.0], dtype=dtype), "n": torch.tensor(3)}
    c = Curve(kind, *(FlatState.from_state_dict(state) for state in (a, theta, b)))
    out = FlatState.zeros(c.a.layout)
    for t, end in ((0.0, a), (1.0, b)):
        assert c.at(t, out=out) is out
        assert torch.equal(out["w"].view(torch.uint8), end["w"].view(torch.uint8))
        assert torch.equal(out["n"], end["n"])


def test_a_chain_passes_through_its_bend_to_the_bit():
    c = curve("polygon", [0.1, math.inf], [0.3, -0.0], [0.7, math.nan])
    assert torch.equal(c.at(0.5)["w"].view(torch.int64), c.theta["w"].view(torch.int64))


def test_what_is_no_place_on_a_curve():
    c = curve("bezier", [0.0], [1.0], [2.0])
    for t in (-0.1, 1.1, math.nan):
        with pytest.raises(InputError, match="not on the curve"):
            c.at(t)
    with pytest.raises(InputError, match=r"out does not have .* shape \(2,\)"):
        c.at(0.5, out=FlatState.from_state_dict({"w": torch.zeros(2, dtype=torch.float64)}))


def test_what_is_no_curve():
    states = [FlatState.from_state_dict({"w": torch.zeros(n)}) for n in (1, 2)]
    with pytest.raises(InputError, match="theta does not have the tensors of a"):
        Curve("bezier", states[0], states[1], states[0])
    with pytest.raises(InputError, match="kind='spline'"):
        Curve("spline", states[0], states[0], states[0])


@given(
    st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=1, max_size=5),
    st.floats(0, 1),
)
@settings(max_examples=50, deadline=None)
def test_a_straight_bezier_curve_is_as_long_as_the_line(pairs, t):
    a, b = (torch.tensor(side, dtype=torch.float64) for side in zip(*pairs, strict=True))
    c = curve("bezier", a.tolist(), ((a + b) / 2).tolist(), b.tolist())
    distance = float((b - a).norm())
    assert c.length == pytest.approx(distance, rel=1e-12, abs=1e-12)
    assert float(c.positions(t)) == pytest.approx(t * distance, rel=1e-12, abs=1e-12)


def test_length_of_a_parabola():
    """With these points φ(t) = (t, t²), whose length up to x is x √(1 + 4x²) / 2 + asinh(2x) / 4."""
    c = curve("bezier", [0.0, 0.0], [0.5, 0.0], [1.0, 1.0])
    expected = [x * math.sqrt(1 + 4 * x * x) / 2 + math.asinh(2 * x) / 4 for x in (0, 0.3, 0.5, 1)]
    assert c.positions([0, 0.3, 0.5, 1]) == pytest.approx(expected, rel=1e-12)
    assert c.length == pytest.approx(math.sqrt(5) / 2 + math.asinh(2) / 4, rel=1e-12)


def test_length_of_a_curve_that_turns_back():
    """φ(t) = 2 t (1 - t) + t² / 2 climbs to 2/3 at t = 2/3 and comes down to 1/2."""
    assert curve("bezier", [0.0], [1.0], [0.5]).length == pytest.approx(2 / 3 + 1 / 6, abs=1e-4)


def test_length_of_a_chain():
    c = curve("polygon", [0.0, 0.0], [3.0, 4.0], [3.0, 16.0])
    assert c.length == 5 + 12
    assert c.positions([0, 0.25, 0.5, 0.75, 1]).tolist() == [0, 2.5, 5, 11, 17]


def test_length_is_over_the_parameters():
    a = {"w": torch.zeros(1), "running_mean": torch.zeros(1), "n": torch.tensor(0)}
    b = {"w": torch.full((1,), 2.0), "running_mean": torch.full((1,), 100.0), "n": torch.tensor(0)}
    states = [FlatState.from_state_dict(state) for state in (a, a, b)]
    assert Curve("polygon", *states, parameters=("w",)).length == 2
    assert Curve("polygon", *states).length == math.hypot(2, 100)


def test_files(tmp_path):
    path = tmp_path / "curve.safetensors"
    for kind in KINDS:
        states = []
        for seed in range(3):
            tensor = torch.randn(4, generator=torch.Generator().manual_seed(seed))
            states.append(FlatState.from_state_dict({"b.w": tensor, "a.w": tensor, "n": torch.tensor(seed)}))
        c = Curve(kind, *states, parameters=("b.w",), training={"lr": 0.1, "steps": 3})
        c.save(path)
        back = Curve.load(path)
        assert (back.kind, back.parameters, back.training) == (kind, ("b.w",), {"lr": 0.1, "steps": 3})
        assert back.a.layout == c.a.layout  # ties too
        for mine, theirs in ((c.a, back.a), (c.theta, back.theta), (c.b, back.b)):
            assert all(torch.equal(mine[key], theirs[key]) for key in mine)
        assert torch.equal(back.at(0.3)["a.w"], c.at(0.3)["a.w"])


def test_files_of_something_else(tmp_path):
    path = tmp_path / "file.safetensors"
    save_state(path, {"w": torch.zeros(1)})
    with pytest.raises(FileError, match="holds no curve"):
        Curve.load(path)
    save_state(path, {"a.w": torch.zeros(1)}, {"isthmus_curve": '{"schema": 1, "kind": "bezier", "ties": {}}'})
    with pytest.raises(FileError, match="damaged"):
        Curve.load(path)
    save_state(path, {"a.w": torch.zeros(1)}, {"isthmus_curve": '{"schema": 2}'})
    with pytest.raises(FileError, match="schema 2, expected 1"):
        Curve.load(path)
    with pytest.raises(FileError, match="there is no file"):
        Curve.load(tmp_path / "none.safetensors")


# Training


def ring(outputs, targets):
    """A valley along the unit circle."""
    return (outputs.norm(dim=1) - 1).square()


@pytest.mark.parametrize("kind", KINDS)
def test_a_curve_follows_a_valley(kind):
    """The mean loss over t is that of the best θ on the diagonal, by a search of its own, and far below the chord's."""
    a, b = Point(1.0, 0.0), Point(0.0, 1.0)
    c = fit_curve(Point(9.0, 9.0), a, b, points(), kind, loss=ring, steps=400, lr=0.2)
    ts = np.linspace(0, 1, 401)
    if kind == "bezier":
        along = {s: (1 - ts) ** 2 + 2 * ts * (1 - ts) * s for s in np.linspace(0.5, 1.5, 501)}
    else:
        along = {s: np.where(ts < 0.5, 1 - 2 * ts + 2 * ts * s, (2 - 2 * ts) * s) for s in np.linspace(0.5, 1.5, 501)}
    losses = {s: np.mean((np.hypot(x, x[::-1]) - 1) ** 2) for s, x in along.items()}
    best = min(losses, key=losses.get)
    assert c.theta["w"].tolist() == pytest.approx([best, best], abs=0.02)
    found = scan_curve(Point(9.0, 9.0), c, lambda m: ring(m.w.detach()[None], None).item(), 401)
    chord = scan_line(Point(9.0, 9.0), a, b, lambda m: ring(m.w.detach()[None], None).item(), 401)
    mean = found.values["data"]["loss"].mean()
    assert mean == pytest.approx(losses[best], rel=0.05)
    assert mean < chord.values["data"]["loss"].mean() / 10
    assert found.summary["data"]["loss"].barrier < chord.summary["data"]["loss"].barrier / 10
    assert torch.equal(c.a["w"], a.w.detach())
    assert torch.equal(c.b["w"], b.w.detach())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_one_step_by_hand(kind, weight_decay):
    """From A = 0, B = 1 and θ = 1/2 the curve is φ(t) = t, so that the model shows which t was drawn."""
    seen = []

    def loss(outputs, targets):
        seen.append(outputs[0].item())
        return (outputs[:, 0] - 5).square()

    c = fit_curve(
        *(Point(0.0), Point(0.0), Point(1.0), points(), kind),
        loss=loss,
        steps=1,
        lr=0.1,
        momentum=0,
        weight_decay=weight_decay,
        seed=1,
    )
    (t,) = seen
    share = 2 * t * (1 - t) if kind == "bezier" else 2 * min(t, 1 - t)
    assert 0.1 < share < 0.9
    expected = 0.5 - 0.1 * share * (2 * (t - 5) + weight_decay * t)
    assert c.theta["w"].item() == pytest.approx(expected, rel=1e-12)
    assert c.training["loss"] == pytest.approx((t - 5) ** 2)


def test_drawn_t_are_stratified():
    seen = []

    def loss(outputs, targets):
        seen.append(outputs[0].item())
        return outputs[:, 0]

    fit_curve(Point(0.0), Point(0.0), Point(1.0), points(), loss=loss, steps=40, lr=0.0)
    assert [int(40 * t) for t in sorted(seen)] == list(range(40))
    assert seen != sorted(seen)


def test_every_example_of_an_epoch_comes_once():
    inputs, seen = torch.arange(6.0)[:, None], []

    class Model(Point):
        def forward(self, x):
            seen.append(x.flatten().tolist())
            return super().forward(x)

    fit_curve(
        *(Model(0.0), Model(0.0), Model(1.0), (inputs, torch.zeros(6))),
        loss=lambda outputs, targets: outputs[:, 0],
        steps=4,
        batch_size=3,
    )
    assert [len(batch) for batch in seen] == [3] * 4
    assert sorted(seen[0] + seen[1]) == sorted(seen[2] + seen[3]) == inputs.flatten().tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides_and_nothing_else_is_touched(kind):
    model, a, b = net(0), net(1), net(2)
    model[0].weight.requires_grad_(False)
    model.eval()
    before = [copy.deepcopy(m.state_dict()) for m in (model, a, b)]
    torch.manual_seed(5)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    first, again, other = (
        fit_curve(model, a, b, data(), kind, steps=20, batch_size=16, seed=seed) for seed in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]
    for m, state in zip((model, a, b), before, strict=True):
        assert all(torch.equal(value, state[key]) for key, value in m.state_dict().items())
    assert not model.training
    assert [parameter.requires_grad for parameter in model.parameters()] == [False] + [True] * 5
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(first.theta[key], again.theta[key]) for key in first.theta)
    assert not torch.equal(first.theta["4.weight"], other.theta["4.weight"])
    middle = isthmus.lerp_states(first.a, first.b, 0.5)
    assert torch.equal(first.theta["0.weight"], middle["0.weight"])  # which requires no gradient
    assert not torch.allclose(first.theta["4.weight"], middle["4.weight"])
    assert first.parameters == tuple(name for name, _ in model.named_parameters())


def test_running_statistics_are_interpolated():
    a, b = net(1), net(2)
    a[1].running_mean.fill_(1.0)
    b[1].running_mean.fill_(2.0)
    c = fit_curve(net(0), a, b, data(), steps=5, batch_size=16)
    assert c.at(0.25)["1.running_mean"].tolist() == pytest.approx([1.25] * 8)


def test_loaders_are_run_through_again():
    inputs, seen = torch.arange(4.0)[:, None], []

    class Model(Point):
        def forward(self, x):
            seen.append(x.flatten().tolist())
            return super().forward(x)

    def loader():
        return DataLoader(TensorDataset(inputs, torch.zeros(4)), batch_size=2, shuffle=True)

    def fit(train):
        return fit_curve(
            *(Model(0.0), Model(0.0), Model(1.0), train),
            loss=lambda outputs, targets: outputs[:, 0].square(),
            steps=6,
        )

    first = fit(loader())
    assert [sorted(seen[k] + seen[k + 1]) for k in (0, 2, 4)] == [[0, 1, 2, 3]] * 3
    assert len({tuple(batch) for batch in seen}) > 2  # shuffled each time
    assert torch.equal(fit(loader()).theta["w"], first.theta["w"])
    assert seen[:6] == seen[6:]
    assert first.training["batch_size"] is None
    with pytest.raises(InputError, match="without batches"):
        fit(DataLoader(TensorDataset(inputs[:1], torch.zeros(1)), batch_size=2, drop_last=True))


def test_16_bit_parameters_are_trained_in_32():
    """No step reaches half a unit in the last place u of bfloat16, and together they make three of them.

    The rates of 800 steps sum to (0.5 + 0.4 · 0.505 + 0.1 · 0.01) · 800 lr, and 2 t (1 - t) is 1/3 on average.
    """
    unit = 2.0**-7
    a, b = (Point(w, dtype=torch.bfloat16) for w in (1.0, 1.5))
    c = fit_curve(
        *(Point(0.0, dtype=torch.bfloat16), a, b, points(), "bezier"),
        loss=lambda outputs, targets: -outputs[:, 0],
        steps=800,
        lr=unit / 64,
        momentum=0,
    )
    assert c.theta["w"].dtype == torch.bfloat16
    assert round(0.703 * 800 / 64 / 3) == 3
    assert c.theta["w"].item() == 1.25 + 3 * unit


def test_progress_and_weighted_losses():
    calls = []
    fit_curve(
        *(Point(0.0), Point(1.0), Point(1.0), points()),
        loss=lambda outputs, targets: (outputs[:, 0], torch.arange(8) % 2),
        steps=120,
        lr=0.0,
        progress=lambda *call: calls.append(call),
    )
    assert [(done, total) for done, total, _ in calls] == [(50, 120), (100, 120), (120, 120)]
    assert [values["train"]["loss"] for _, _, values in calls] == pytest.approx([1, 1, 1])


def test_what_cannot_be_trained():
    ends = Point(0.0), Point(1.0)
    with pytest.raises(InputError, match="choose a lower lr"):
        fit_curve(Point(0.0), *ends, points(), loss=lambda o, t: (o[:, 0] + 1).pow(8), lr=1e8, steps=60)
    with pytest.raises(InputError, match="kind='arc'"):
        fit_curve(Point(0.0), *ends, points(), "arc")
    for name, value in {"steps": 0, "batch_size": 0.5, "lr": -1, "momentum": math.nan, "weight_decay": -1}.items():
        with pytest.raises(InputError, match=f"{name}="):
            fit_curve(Point(0.0), *ends, points(), **{name: value})
    with pytest.raises(InputError, match="no parameters that require gradients"):
        fit_curve(Point(0.0).requires_grad_(False), *ends, points())
    with pytest.raises(InputError, match="b does not have the tensors of the model"):
        fit_curve(Point(0.0), Point(0.0), Point(0.0, 1.0), points())


def test_training_under_inference_mode():
    model, b = Point(0.0), Point(1.0)
    with torch.inference_mode():
        a, train = {"w": torch.zeros(1).double()}, points()
        c = fit_curve(model, a, b, train, loss=lambda outputs, targets: outputs[:, 0], steps=10)
    assert c.theta["w"].item() < 0.5


# Scans


def test_the_integral_is_weighted_by_length():
    """With its bend at 3 a chain from 0 to 4 is passed at two speeds; by length the mean of w is 2, by t it is 2.5."""
    c = curve("polygon", [0.0], [3.0], [4.0])
    result = scan_curve(Point(0.0), c, weight, 5)
    assert result.values["data"]["loss"].tolist() == [0, 1.5, 3, 3.5, 4]
    assert result.positions.tolist() == [0, 1.5, 3, 3.5, 4]
    assert result.summary["data"]["loss"].integral == pytest.approx(2)
    assert (result.distances["arc_length"], result.distances["l2"]) == (4, 4)
    assert result.summary["data"]["loss"].barrier == 2
    assert result.choices["curve"] == "polygon"
    back = PathResult.from_json(result.to_json())
    assert np.array_equal(back.positions, result.positions)
    assert back.summary == result.summary
    line = scan_line(Point(0.0), Point(0.0), Point(4.0), weight, 5)
    assert line.positions is None
    assert PathResult.from_json(line.to_json()).positions is None


@pytest.mark.parametrize("kind", KINDS)
def test_scans_see_the_models_of_the_curve(kind):
    """With a first layer that is combined of three, and statistics re-estimated at every point."""
    c = fit_curve(net(0), net(1), net(2), data(), kind, steps=30, lr=0.5, batch_size=16)
    evaluator = Evaluator(data(80, seed=1), batch_size=80, share_first_layer=True)
    inputs = data(50, seed=2)[0]
    model = net(5)
    before = copy.deepcopy(model.state_dict())
    result = scan_curve(model, c, evaluator, [0.2, 0.9], bn_data=inputs)
    assert result.alphas.tolist() == [0, 0.2, 0.5, 0.9, 1]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for index, t in enumerate(result.alphas.tolist()):
        other = net(6)
        with c.at(t).bind(other):
            norms.reset_statistics(other, inputs)
            expected = evaluator(other)
        assert result.values["data"]["loss"][index] == pytest.approx(expected["loss"], rel=1e-6)
        assert result.values["data"]["accuracy"][index] == expected["accuracy"]
    assert result.choices["bn"] == "reset"
    assert result.choices["splits"]["data"]["first_layer"] == "shared"
    assert result.disagreement["data"] > 0
    assert result.distances["l2"] < result.distances["arc_length"]


def test_curves_from_files_fit_models_with_ties(tmp_path):
    class Tied(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.first = nn.Linear(2, 2, bias=False)
            self.second = nn.Linear(2, 2, bias=False)
            self.second.weight = self.first.weight
            nn.init.constant_(self.first.weight, value)

        def forward(self, x):
            return self.second(self.first(x))

    c = fit_curve(Tied(0.0), Tied(0.0), Tied(1.0), (torch.ones(4, 2), torch.zeros(4).long()), steps=3)
    c.save(tmp_path / "curve.safetensors")
    back = Curve.load(tmp_path / "curve.safetensors")
    assert back.length == c.length
    values = [scan_curve(Tied(0.0), x, lambda m: m.second.weight.detach()[0, 0].item(), 5).values for x in (c, back)]
    assert np.array_equal(values[0]["data"]["loss"], values[1]["data"]["loss"])


def test_an_error_leaves_what_was_done(tmp_path):
    c = curve("bezier", [0.0], [3.0], [4.0])
    calls = []

    def fail(model):
        calls.append(weight(model))
        if len(calls) == 5:
            raise RuntimeError("broken")
        return weight(model)

    path = tmp_path / "checkpoint"
    with pytest.raises(EvaluationError, match=r"failed at alpha = 0\.5625 .*broken") as caught:
        scan_curve(Point(0.0), c, fail, [0.25, 0.5625], checkpoint=path)
    partial = caught.value.partial
    assert not partial.complete
    assert partial.alphas.tolist() == [0, 0.25, 0.5, 1]
    assert partial.positions.tolist() == c.positions(partial.alphas).tolist()
    calls += [0.0]  # past the fault
    resumed = scan_curve(Point(0.0), c, fail, [0.25, 0.5625], checkpoint=path)
    assert resumed.complete
    assert (
        resumed.values["data"]["loss"].tolist()
        == scan_curve(Point(0.0), c, weight, [0.25, 0.5625]).values["data"]["loss"].tolist()
    )
    with pytest.raises(InputError, match="kind was"):
        scan_curve(Point(0.0), curve("polygon", [0.0], [3.0], [4.0]), fail, checkpoint=path)


def test_an_adaptive_scan_finds_the_highest_place():
    """On a Bezier curve from 0 over 3 to 1, w(t) = 6 t (1 - t) + t^2 is highest at t = 3/5: 9/5, 6/5 above the chord.

    Above the chord it is 5 t (1 - t), highest in the middle: 5/4.
    """
    c = curve("bezier", [0.0], [3.0], [1.0])
    result = scan_curve(Point(0.0), c, weight, "adaptive", tol=1e-3)
    assert result.summary["data"]["loss"].barrier == pytest.approx(1.8 - 0.5, abs=1e-3)
    assert result.summary["data"]["loss"].linear_barrier == pytest.approx(1.25, abs=1e-3)
    told = result.choices["adaptive"]
    assert told["points"] == len(result.alphas) == len(result.positions) < 24
    assert 0 <= told["bound"] <= 1e-3
    assert result.positions.tolist() == c.positions(result.alphas).tolist()
    with pytest.warns(IsthmusWarning, match="stopped at 18 points"):
        scan_curve(Point(0.0), c, weight, "adaptive", tol=1e-9, refine="curve", max_points=18)
    with pytest.raises(InputError, match="max_points=3"):
        scan_curve(Point(0.0), c, weight, "adaptive", max_points=3)
    with pytest.raises(InputError, match="alphas='dense', expected one of: 'adaptive'"):
        scan_curve(Point(0.0), c, weight, "dense")


def test_places_beyond_the_ends():
    with pytest.raises(InputError, match=r"from -0\.1 to 1\.0 leave the curve"):
        scan_curve(Point(0.0), curve("bezier", [0.0], [1.0], [2.0]), weight, [-0.1])
