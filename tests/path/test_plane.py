"""Scans of planes between models, around one model and along a trajectory; and of random lines."""

from __future__ import annotations

import copy
import csv
import json
import math
import random

import matplotlib as mpl
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from isthmus import norms, ops
from isthmus.errors import EvaluationError, FileError, InputError, IsthmusWarning
from isthmus.flat import FlatState
from isthmus.io import save_state
from isthmus.path import (
    Evaluator,
    PathResult,
    PlaneResult,
    ProfileResult,
    random_directions,
    random_line,
    random_plane,
    scan_plane,
    trajectory_plane,
)

mpl.use("agg")


class Vector(nn.Module):
    """A model that is a point of three-dimensional space."""

    def __init__(self, *w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w or (0.0, 0.0, 0.0), dtype=torch.float64))


def position(model: Vector) -> list[float]:
    return model.w.tolist()


def squared_distance(*centre: float):
    """The loss |w - c|^2."""
    return lambda model: float((model.w.detach() - torch.tensor(centre, dtype=torch.float64)).square().sum())


def mlp(seed: int, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(144, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.ReLU(), nn.Linear(16, 5)
    )


def data(samples: int = 50, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 12, 12, generator=generator), torch.randint(5, (samples,), generator=generator)


def grids(result: PlaneResult) -> tuple[np.ndarray, np.ndarray]:
    return np.meshgrid(result.x, result.y)


class TestTaskCoordinates:
    base, a, b = Vector(1.0, 0.0, 0.0), Vector(3.0, 0.0, 0.0), Vector(1.0, 4.0, 0.0)

    def scan(self, evaluate, grid=(5, 3), **options) -> PlaneResult:
        return scan_plane(Vector(), self.base, [self.a, self.b], evaluate, grid, **options)

    def test_values_by_hand(self):
        """w = (1 + 2x, 4y, 0), so that |w - (2, 2, 1)|^2 is (2x - 1)^2 + (4y - 2)^2 + 1."""
        result = self.scan(squared_distance(2, 2, 1))
        assert result.x.tolist() == [-0.5, 0, 0.5, 1, 1.5]
        assert result.y.tolist() == [-0.5, 0.5, 1.5]
        assert result.values["data"]["loss"].tolist() == [
            [4 + 17, 18, 17, 18, 21],
            [5, 2, 1, 2, 5],
            [21, 18, 17, 18, 21],
        ]
        assert result.models == {"base": (0, 0), "A": (1, 0), "B": (0, 1)}
        assert result.model_values["data"]["loss"].tolist() == [6, 6, 6]
        assert result.distances["task_norm_a"] == 2
        assert result.distances["task_norm_b"] == 4
        assert result.distances["task_cosine"] == 0
        assert result.distances["l2"] == math.sqrt(20)
        assert (result.coordinates, result.choices["coordinates"], result.complete) == ("task", "task", True)
        assert result.seconds.shape == (3, 5)
        assert (result.seconds > 0).all()
        assert (result.model_seconds > 0).all()
        assert result.trajectory.shape == (0, 2)

    def test_the_default_grid_meets_the_models(self):
        result = scan_plane(Vector(), self.base, [self.a, self.b], squared_distance(2, 2, 1))
        assert result.values["data"]["loss"].shape == (41, 41)
        assert result.x.tolist() == [(5 * k - 50) / 100 for k in range(41)]  # 0 and 1 among them
        x, y = grids(result)
        assert np.allclose(result.values["data"]["loss"], (2 * x - 1) ** 2 + (4 * y - 2) ** 2 + 1, rtol=1e-13)
        assert result.best("loss") == (0.5, 0.5, {"data": {"loss": 1.0}})

    def test_coordinates_that_differ_by_rounding_are_the_models(self):
        result = self.scan(squared_distance(0, 0, 0), (31, 11), x_range=(-0.25, 1.25), y_range=(-0.3, 0.7))
        assert {0.0, 1.0} < set(result.x.tolist())
        assert 0.0 in result.y
        assert len(np.unique(result.x)) == 31

    def test_models_are_evaluated_where_the_grid_does_not_meet_them(self):
        seen = []
        result = self.scan(lambda m: seen.append(position(m)) or 1.0, (2, 2), x_range=(2, 3), y_range=(2, 3))
        assert [w for w in seen if w[1] <= 4 and w[0] <= 3] == [[1, 0, 0], [3, 0, 0], [1, 4, 0]]
        assert len(seen) == 7
        assert result.model_values["data"]["loss"].tolist() == [1, 1, 1]

    def test_each_point_is_evaluated_once(self):
        seen = []
        self.scan(lambda m: seen.append(tuple(position(m))) or 0.0, (5, 5))
        assert len(seen) == len(set(seen)) == 25

    def test_names(self):
        result = self.scan(squared_distance(0, 0, 0), names=("pretrained", "cars", "birds"))
        assert list(result.models) == ["pretrained", "cars", "birds"]

    def test_splits_and_choosing_on_one(self):
        evaluate = {
            "val": lambda m: {"loss": (position(m)[0] - 2) ** 2, "score": position(m)[1]},
            "test": lambda m: {"loss": position(m)[0], "score": -position(m)[1]},
        }
        result = self.scan(evaluate, higher_is_better=["score"])
        assert result.best("loss", "val")[:2] == (0.5, -0.5)  # of equal ones the first
        assert result.best("loss", "val").values["test"] == {"loss": 2, "score": 2}
        assert result.best("score")[:2] == (-0.5, 1.5)
        assert result.best("score", "test").values["val"]["score"] == -2
        with pytest.raises(InputError, match="no metric 'f1'"):
            result.best("f1")
        with pytest.raises(InputError, match=r"on a split 'train'; it has \{'val': \['loss', 'score'\]"):
            result.best("loss", "train")


class TestMetricCoordinates:
    """O = (1, 1, 1), A = O + (3, 0, 0), B = O + (1, 2, 0): at (0, 0), (3, 0) and (1, 2)."""

    models = Vector(1.0, 1.0, 1.0), Vector(4.0, 1.0, 1.0), Vector(2.0, 3.0, 1.0)

    def scan(self, evaluate, grid=(4, 3), **options) -> PlaneResult:
        base, *models = self.models
        return scan_plane(Vector(), base, models, evaluate, grid, coordinates="metric", **options)

    def test_distances_are_to_scale(self):
        result = self.scan(squared_distance(1, 1, 1), x_range=(-3, 3), y_range=(-1, 2))
        assert np.allclose(list(result.models.values()), [(0, 0), (3, 0), (1, 2)], rtol=1e-15)
        x, y = grids(result)
        assert np.allclose(result.values["data"]["loss"], x**2 + y**2, rtol=1e-14, atol=1e-14)
        assert np.allclose(result.model_values["data"]["loss"], [0, 9, 5], rtol=1e-15)

    def test_the_default_extent_has_a_margin(self):
        result = self.scan(squared_distance(0, 0, 0))
        assert np.allclose(result.x[[0, -1]], [-0.75, 3.75])
        assert np.allclose(result.y[[0, -1]], [-0.5, 2.5])

    def test_models_are_themselves_to_the_bit(self):
        seen = []
        base, a, b = (FlatState.from_module(mlp(seed)) for seed in (1, 2, 3))
        base["1.bias"][0] = -0.0

        def keep(model):
            seen.append(FlatState.from_module(model))
            return 0.0

        for coordinates in ("task", "metric"):
            seen.clear()
            scan_plane(mlp(0), base, [a, b], keep, (2, 2), coordinates=coordinates, x_range=(-2, -1), y_range=(-2, -1))
            for model in (base, a, b):
                bits = [buffer.view(torch.int32) for buffer in model.buffers.values()]
                assert any(
                    all(torch.equal(x, y.view(torch.int32)) for x, y in zip(bits, s.buffers.values(), strict=True))
                    for s in seen
                )

    @given(st.lists(st.floats(-10, 10), min_size=9, max_size=9))
    @settings(max_examples=50, deadline=None)
    def test_property_distances_from_the_models(self, numbers):
        points = np.reshape(numbers, (3, 3))
        u, w = points[1] - points[0], points[2] - points[0]
        if np.linalg.norm(np.cross(u, w)) < 1e-3 * np.linalg.norm(u) * np.linalg.norm(w) + 1e-3:
            return
        base, *models = (Vector(*point) for point in points.tolist())
        for k, centre in enumerate(points):
            result = scan_plane(Vector(), base, models, squared_distance(*centre), (3, 2), coordinates="metric")
            x, y = grids(result)
            place = list(result.models.values())[k]
            expected = (x - place[0]) ** 2 + (y - place[1]) ** 2
            assert np.allclose(result.values["data"]["loss"], expected, rtol=1e-6, atol=1e-6)

    def test_the_order_of_models_turns_the_plane_alone(self):
        o, a, b = self.models
        loss = squared_distance(2, 2, 2)
        one = scan_plane(Vector(), o, [a, b], loss, (3, 3), x_range=(0, 2), y_range=(0, 2))
        two = scan_plane(Vector(), o, [b, a], loss, (3, 3), x_range=(0, 2), y_range=(0, 2))
        assert np.allclose(one.values["data"]["loss"], two.values["data"]["loss"].T, rtol=1e-14)

    @pytest.mark.parametrize("third", [(7.0, 1.0, 1.0), (4.0, 1.0, 1.0), (1.0, 1.0, 1.0), (7.0, 1.0 + 1e-7, 1.0)])
    def test_models_on_a_line_have_no_plane(self, third):
        base, a, _ = self.models
        with pytest.raises(InputError, match="lie on a line, or two of them are equal"):
            scan_plane(Vector(), base, [a, Vector(*third)], lambda m: 0.0, (2, 2), coordinates="metric")

    def test_equal_models_have_task_coordinates(self):
        base, a, _ = self.models
        result = scan_plane(Vector(), base, [a, a], lambda m: position(m)[0], (5, 5))
        x, y = grids(result)
        assert np.allclose(result.values["data"]["loss"], 1 + 3 * (x + y))


class TestWeights:
    def test_one_weighted_sum_to_the_bit(self):
        base, a, b = (mlp(seed) for seed in (1, 2, 3))
        seen = {}

        def keep(model):
            seen[len(seen)] = [p.detach().clone() for p in model.parameters()]
            return 0.0

        result = scan_plane(mlp(0), base, [a, b], keep, (2, 2), x_range=(0.25, 0.5), y_range=(0.125, 2))
        weights = {(x, y): [1 - x - y, x, y] for x in (0.25, 0.5) for y in (0.125, 2.0)}
        expected = {
            point: [
                ops.weighted_sum([p.detach() for p in row], w)
                for row in zip(*(m.parameters() for m in (base, a, b)), strict=True)
            ]
            for point, w in weights.items()
        }
        assert len(seen) == 7
        for tensors in expected.values():
            matches = [all(torch.equal(x, y) for x, y in zip(tensors, s, strict=True)) for s in seen.values()]
            assert sum(matches) == 1
        assert result.complete

    @pytest.mark.parametrize("kind", ["state dict", "flat", "file"])
    def test_models_come_in_many_forms(self, kind, tmp_path):
        base, a, b = (mlp(seed) for seed in (1, 2, 3))
        save_state(tmp_path / "b.safetensors", b.state_dict())
        source = {"state dict": b.state_dict(), "flat": FlatState.from_module(b), "file": tmp_path / "b.safetensors"}
        evaluator = Evaluator(data())
        result = scan_plane(mlp(0), base, [a, source[kind]], evaluator, (2, 2))
        assert result.model_values["data"]["loss"].tolist() == [evaluator(model)["loss"] for model in (base, a, b)]

    def test_evaluators_share_the_first_layer(self):
        models = [mlp(seed) for seed in (1, 2, 3)]
        base, *others = models
        results = [
            scan_plane(mlp(0), base, others, Evaluator(data(), share_first_layer=share), (4, 5))
            for share in (True, False)
        ]
        assert [r.choices["splits"]["data"]["first_layer"] for r in results] == ["shared", "computed"]
        shared, computed = (r.values["data"]["loss"] for r in results)
        assert np.allclose(shared, computed, rtol=1e-5)
        models_values = [r.model_values["data"]["loss"].tolist() for r in results]
        assert models_values[0] == models_values[1]
        around = [random_plane(base, Evaluator(data(), share_first_layer=share), (4, 5)) for share in (True, False)]
        assert np.allclose(*(r.values["data"]["loss"] for r in around), rtol=1e-5)

    def test_autocast_is_reported_at_the_models(self):
        evaluator = Evaluator(data(), dtype=torch.bfloat16)
        exact = Evaluator(data())
        models = [mlp(seed) for seed in (1, 2, 3)]
        result = scan_plane(mlp(0), models[0], models[1:], evaluator, (2, 2), names=("o", "p", "q"))
        differences = result.choices["splits"]["data"]["autocast_difference"]
        for name, model, value in zip("opq", models, result.model_values["data"]["loss"], strict=True):
            assert differences[name]["loss"] == pytest.approx(value - exact(model)["loss"], abs=1e-7)
            assert differences[name]["loss"] != 0

    def test_batch_norm(self):
        models = [mlp(seed, norm=True) for seed in (1, 2, 3)]
        models[1](data()[0])  # counters may differ
        evaluator, train = Evaluator(data()), data(64, seed=1)[0]
        kept = scan_plane(mlp(0, norm=True), models[0], models[1:], evaluator, (2, 2), bn="keep")
        models_eval = [copy.deepcopy(model) for model in models]
        assert kept.model_values["data"]["loss"].tolist() == [evaluator(model)["loss"] for model in models_eval]
        result = scan_plane(
            mlp(0, norm=True), models[0], models[1:], evaluator, (3, 3), bn_data=train, bn_batch_size=32
        )
        assert result.choices["bn"] == "reset"
        assert ((result.bn_seconds > 0) & (result.bn_seconds < result.seconds)).all()
        assert kept.bn_seconds is None
        assert PlaneResult.from_json(result.to_json()).bn_seconds.tolist() == result.bn_seconds.tolist()
        line = random_line(mlp(1, norm=True), evaluator, 3, bn_data=train)
        assert ((line.bn_seconds > 0) & (line.bn_seconds < line.seconds)).all()
        assert ProfileResult.from_json(line.to_json()).bn_seconds.tolist() == line.bn_seconds.tolist()
        for model in models_eval:
            norms.reset_statistics(model, train, 32)
        expected = [evaluator(model)["loss"] for model in models_eval]
        assert result.model_values["data"]["loss"].tolist() == pytest.approx(expected, rel=1e-6)
        with pytest.warns(IsthmusWarning, match="bn_data=") as caught:
            scan_plane(mlp(0, norm=True), models[0], models[1:], evaluator, (2, 2))
        assert caught[0].filename == __file__

    def test_what_does_not_fit_is_named(self):
        base, a = mlp(1), mlp(2)
        wrong = nn.Sequential(nn.Flatten(), nn.Linear(144, 17), nn.Identity(), nn.ReLU(), nn.Linear(17, 5))
        with pytest.raises(InputError, match=r"^models\[1\] does not have the tensors of the model: '1.bias'"):
            scan_plane(mlp(0), base, [a, wrong], lambda m: 0.0)
        with pytest.raises(InputError, match="list of two models"):
            scan_plane(mlp(0), base, [a], lambda m: 0.0)
        with pytest.raises(InputError, match="list of two models"):
            scan_plane(mlp(0), base, a, lambda m: 0.0)
        with pytest.raises(InputError, match="different names"):
            scan_plane(mlp(0), base, [a, a], lambda m: 0.0, names=("A", "A", "B"))
        with pytest.raises(InputError, match="different names"):
            scan_plane(mlp(0), base, [a, a], lambda m: 0.0, names=("A", "B", "C", "C"))
        with pytest.raises(InputError, match="'tasks' is unknown"):
            scan_plane(mlp(0), base, [a, a], lambda m: 0.0, coordinates="tasks")
        for grid in ((1, 5), (5,), 5, (2.5, 3), (3, 3, 3)):
            with pytest.raises(InputError, match="is no grid"):
                scan_plane(mlp(0), base, [a, a], lambda m: 0.0, grid)
        for extent in ((1, 0), (0, 0), (0, math.inf), (0, 1, 2)):
            with pytest.raises(InputError, match=r"x_range=.* is no range"):
                scan_plane(mlp(0), base, [a, a], lambda m: 0.0, x_range=extent)
        with pytest.raises(FileError):
            scan_plane(mlp(0), base, [a, "missing.safetensors"], lambda m: 0.0)


class TestWhatHappensOnTheWay:
    def test_nan_at_one_point_is_recorded(self):
        def evaluate(model):
            x, y, _ = position(model)
            return math.nan if (x, y) == (0.5, 1) else x + y

        base, a, b = Vector(0.0, 0.0, 0.0), Vector(1.0, 0.0, 0.0), Vector(0.0, 1.0, 0.0)
        result = scan_plane(Vector(), base, [a, b], evaluate, (5, 5))
        assert np.argwhere(np.isnan(result.values["data"]["loss"])).tolist() == [[3, 2]]
        assert not np.isnan(result.seconds).any()
        assert result.best("loss")[:2] == (-0.5, -0.5)
        assert sum(math.isnan(value) for *_, value in result.rows()) == 1

    def test_everything_comes_back_and_partial_results_are_kept(self):
        model, base, a, b = (mlp(seed, norm=True).train() for seed in range(4))
        before = copy.deepcopy([m.state_dict() for m in (model, base, a, b)])
        states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
        calls = []

        def evaluate(model):
            torch.rand(1), np.random.rand(), random.random()
            model.train()
            calls.append(len(calls))
            if len(calls) == 6:
                raise ZeroDivisionError("by hand")
            return float(len(calls))

        with pytest.raises(EvaluationError, match=r"failed at x = .*, y = .* \(ZeroDivisionError: by hand\)") as caught:
            scan_plane(model, base, [a, b], evaluate, (3, 3), bn="keep")
        partial = caught.value.partial
        assert not partial.complete
        assert len(list(partial.rows())) == 5
        assert np.isnan(partial.values["data"]["loss"]).sum() == np.isnan(partial.seconds).sum()
        assert PlaneResult.from_json(partial.to_json()).to_json() == partial.to_json()
        for m, state in zip((model, base, a, b), before, strict=True):
            assert m.training
            assert all(torch.equal(value, state[key]) for key, value in m.state_dict().items())
        assert random.getstate() == states[0]
        assert np.array_equal(np.random.get_state()[1], states[1])
        assert torch.equal(torch.get_rng_state(), states[2])

    def test_interrupted_at_once(self):
        def evaluate(model):
            raise KeyboardInterrupt

        for scan in (
            lambda: scan_plane(Vector(), Vector(), [Vector(1.0, 0, 0), Vector(0, 1.0, 0)], evaluate),
            lambda: random_plane(Vector(1.0, 2.0, 3.0), evaluate),
            lambda: random_line(Vector(1.0, 2.0, 3.0), evaluate),
        ):
            with pytest.raises(KeyboardInterrupt) as caught:
                scan()
            partial = caught.value.partial
            assert list(partial.rows()) == []
            with pytest.raises(InputError, match="the result has no points"):
                partial.plot()
            assert type(partial).from_json(partial.to_json()).to_json() == partial.to_json()

    def test_progress_counts_all_points(self):
        seen = []
        arguments = Vector(), Vector(), [Vector(1.0, 0, 0), Vector(0, 1.0, 0)], lambda m: 0.0, (2, 2)
        scan_plane(*arguments, progress=lambda *args: seen.append(args[:2]))
        assert seen == [(k, 7) for k in range(1, 8)]

    def test_an_interrupted_scan_goes_on(self, tmp_path):
        base, a, b = mlp(1), mlp(2), mlp(3)
        expected = scan_plane(mlp(0), base, [a, b], Evaluator(data(), share_first_layer=False), (3, 3))

        def stop(done, total, values):
            if done == 5:
                raise KeyboardInterrupt

        options = {"checkpoint": tmp_path / "plane.jsonl"}
        evaluator = Evaluator(data(), share_first_layer=False, batch_size=64)
        with pytest.raises(KeyboardInterrupt):
            scan_plane(mlp(0), base, [a, b], evaluator, (3, 3), progress=stop, **options)
        result = scan_plane(mlp(0), base, [a, b], evaluator, (3, 3), **options)
        assert np.allclose(result.values["data"]["loss"], expected.values["data"]["loss"], rtol=1e-6)
        with pytest.raises(InputError):
            scan_plane(mlp(0), base, [a, b], evaluator, (3, 3), coordinates="metric", **options)


class TestRandomPlane:
    def test_values_by_hand(self):
        """|w + x d + y e - w|^2 is (x^2 + y^2) |w|^2 if d and e are at right angles and as long as w."""
        w = (1.0, 2.0, 2.0)
        model = Vector(*w)
        result = random_plane(model, squared_distance(*w), (5, 3), distance=2)
        x, y = grids(result)
        assert (result.x.tolist(), result.y.tolist()) == ([-2, -1, 0, 1, 2], [-2, 0, 2])
        assert np.allclose(result.values["data"]["loss"], 9 * (x**2 + y**2), rtol=1e-12, atol=1e-12)
        assert result.values["data"]["loss"][1, 2] == 0
        assert position(model) == list(w)
        assert result.distances["norm_x"] == pytest.approx(3)
        assert result.distances["norm_y"] == pytest.approx(3)
        assert result.distances["norm_model"] == 3
        assert abs(result.distances["cosine"]) < 1e-14
        assert result.models == {"model": (0, 0)}

    def test_the_model_is_evaluated_beside_an_even_grid(self):
        result = random_plane(Vector(1.0, 2.0, 2.0), squared_distance(0, 0, 0), (2, 2))
        assert result.model_values["data"]["loss"].tolist() == [9]
        assert len(list(result.rows())) == 5

    def test_directions_are_those_of_the_seed(self):
        model, seen = mlp(1), []
        result = random_plane(
            model, lambda m: seen.append(FlatState.from_module(m)) or 0.0, (2, 2), seed=5, exclude="1d", distance=0.5
        )
        first, second = random_directions(model, 2, seed=5, exclude="1d")
        own = FlatState.from_module(model)
        expected = ops.weighted_sum([own["1.weight"], first["1.weight"], second["1.weight"]], [1.0, 0.5, -0.5])
        assert sum(torch.equal(state["1.weight"], expected) for state in seen) == 1
        assert all(torch.equal(state["1.bias"], own["1.bias"]) for state in seen)
        numpy_seed = random_plane(model, lambda m: 0.0, (2, 2), seed=np.int64(5), exclude="1d", distance=0.5)
        assert json.loads(numpy_seed.to_json())["choices"]["seed"] == 5
        assert result.choices | {"seed": 5, "exclude": "1d", "normalization": "filter"} == result.choices

    def test_buffers_do_not_move(self):
        model, seen = mlp(1, norm=True), []
        model[2].running_mean.normal_()

        def evaluate(m):
            seen.append((m[2].running_mean.clone(), m[2].num_batches_tracked.clone()))
            return 0.0

        random_plane(model, evaluate, (2, 2), bn="keep")
        assert all(torch.equal(mean, model[2].running_mean) and count == 0 for mean, count in seen)

    def test_what_makes_no_plane_is_named(self):
        with pytest.raises(InputError, match="distance=0"):
            random_plane(Vector(1.0, 1.0, 1.0), lambda m: 0.0, distance=0)
        with pytest.raises(InputError, match="zero everywhere"):
            random_plane(Vector(0.0, 0.0, 0.0), lambda m: 0.0)


class TestRandomLine:
    def test_values_by_hand(self):
        w = (1.0, 2.0, 2.0)
        result = random_line(Vector(*w), squared_distance(*w), 5)
        assert result.alphas.tolist() == [-1, -0.5, 0, 0.5, 1]
        assert result.values["data"]["loss"].tolist() == pytest.approx([9, 2.25, 0, 2.25, 9], rel=1e-12)
        assert result.distances == {"norm_model": 3, "norm": pytest.approx(3)}

    def test_it_is_the_first_axis_of_the_plane(self):
        model, evaluator = mlp(1), Evaluator(data(), share_first_layer=False)
        line = random_line(model, evaluator, 11, seed=2, normalization="layer", distance=0.7)
        plane = random_plane(model, evaluator, (11, 3), seed=2, normalization="layer", distance=0.7)
        assert line.values["data"]["loss"].tolist() == plane.values["data"]["loss"][1].tolist()

    @pytest.mark.parametrize(
        ("alphas", "expected"), [(2, [-3, 0, 3]), (3, [-3, 0, 3]), ([0.5, -1], [-1, 0, 0.5]), ([], [0]), ([0], [0])]
    )
    def test_the_model_is_always_a_point(self, alphas, expected):
        assert random_line(Vector(1.0, 1.0, 1.0), lambda m: 0.0, alphas, distance=3).alphas.tolist() == expected

    @pytest.mark.parametrize("alphas", [1, [math.nan], [[1.0]], "adaptive", None])
    def test_bad_alphas_are_named(self, alphas):
        with pytest.raises(InputError, match="alphas"):
            random_line(Vector(1.0, 1.0, 1.0), lambda m: 0.0, alphas)

    @pytest.mark.parametrize("distance", [0, -1.0, math.nan, math.inf])
    def test_bad_distances_are_named(self, distance):
        with pytest.raises(InputError, match=f"distance={distance}"):
            random_line(Vector(1.0, 1.0, 1.0), lambda m: 0.0, distance=distance)

    def test_files_and_figure(self, tmp_path):
        result = random_line(Vector(1.0, 2.0, 2.0), {"a": lambda m: 1.0, "b": lambda m: math.nan}, 5)
        text = result.to_json(tmp_path / "line.json")
        assert ProfileResult.from_json(tmp_path / "line.json").to_json() == text
        assert json.loads(text)["kind"] == "profile result"
        with pytest.raises(FileError, match="expected a path result of schema 1, got a profile result"):
            PathResult.from_json(text)
        result.to_csv(tmp_path / "line.csv")
        assert (tmp_path / "line.csv").read_text().splitlines()[1] == "a,-1.0,loss,1.0"
        (axes,) = result.plot()
        assert [line.get_label() for line in axes.lines[:2]] == ["a", "b"]
        assert axes.get_xlabel() == "α (0: the model)"
        (axes,) = result.plot(split="b")
        assert [line.get_label() for line in axes.lines[:-1]] == ["b"]


class TestTrajectoryPlane:
    """A run in the plane z = 1: (4, 0), (0, -3), and the end (0, 0)."""

    checkpoints = Vector(4.0, 0.0, 1.0), Vector(0.0, -3.0, 1.0), Vector(0.0, 0.0, 1.0)

    def test_values_by_hand(self):
        result = trajectory_plane(Vector(), self.checkpoints, squared_distance(0, 0, 0), (3, 4), center=False)
        assert np.allclose(result.trajectory, [[4, 0], [0, 3], [0, 0]], atol=1e-15)
        assert np.allclose(result.x, [-1, 2, 5])
        assert np.allclose(result.y, [-0.75, 0.75, 2.25, 3.75])
        x, y = grids(result)
        assert np.allclose(result.values["data"]["loss"], x**2 + y**2 + 1)
        assert result.explained.tolist() == pytest.approx([16 / 25, 9 / 25])
        assert result.off_plane.tolist() == pytest.approx([0, 0, 0], abs=1e-6)
        assert result.models == {"last": (0, 0)}
        assert result.model_values["data"]["loss"].tolist() == [1]
        assert result.choices["center"] is False

    def test_four_checkpoints_span_a_plane(self):
        """Differences to the last of (2, 0), (-2, 0) and (0, 3): off their mean (0, 1), variances of 8 and 6."""
        checkpoints = [Vector(*w, 0.0) for w in ((2.0, 0.0), (-2.0, 0.0), (0.0, 3.0), (0.0, 0.0))]
        result = trajectory_plane(Vector(), checkpoints, squared_distance(0, 0, 0), (2, 2))
        assert result.explained.tolist() == pytest.approx([8 / 14, 6 / 14])
        assert np.allclose(np.abs(result.trajectory), [[2, 0], [2, 0], [0, 3], [0, 0]], atol=1e-12)

    def test_what_spans_no_plane_is_named(self):
        with pytest.raises(InputError, match="at least four checkpoints, or of three with center=False"):
            trajectory_plane(Vector(), self.checkpoints, lambda m: 0.0)
        with pytest.raises(InputError, match="at least four checkpoints, or of three with center=False"):
            trajectory_plane(Vector(), self.checkpoints[:2], lambda m: 0.0, center=False)
        with pytest.raises(InputError, match="do not span 2 dimensions"):
            trajectory_plane(Vector(), [self.checkpoints[0]] * 4, lambda m: 0.0)
        with pytest.raises(InputError, match=r"checkpoints\[1\] does not have"):
            trajectory_plane(Vector(), [Vector(), mlp(0), Vector(), Vector()], lambda m: 0.0)


def result(**fields) -> PlaneResult:
    losses = np.array([[1.0, 2.0, math.nan], [4.0, 5.0, math.inf]])
    content = {
        "x": np.array([0.0, 1.0, 2.0]),
        "y": np.array([0.0, 1.0]),
        "values": {"val": {"loss": losses, "accuracy": 1 / losses}, "test": {"loss": losses * 2}},
        "seconds": np.array([[0.1, 0.1, math.nan], [0.1, 0.1, 0.1]]),
        "models": {"base": (0.0, 0.0), "A": (1.0, 0.0), "B": (0.5, 0.5)},
        "model_values": {
            "val": {"loss": np.array([1.0, 2.0, 0.5]), "accuracy": np.array([1.0, 0.5, 2.0])},
            "test": {"loss": np.array([2.0, 4.0, 1.0])},
        },
        "model_seconds": np.array([0.1, 0.1, 0.2]),
        "coordinates": "task",
        "distances": {"l2": 2.0, "task_cosine": math.nan},
        "choices": {"bn": "keep"},
        "versions": {"isthmus": "0"},
    }
    return PlaneResult(**{**content, **fields})


class TestResult:
    def test_json_and_back(self, tmp_path):
        original = result(trajectory=np.array([[1.0, 2.0]]), off_plane=np.array([0.5]), explained=np.array([0.6, 0.4]))
        text = original.to_json(tmp_path / "plane.json")
        back = PlaneResult.from_json(tmp_path / "plane.json")
        assert back.to_json() == text
        for name in ("x", "y", "seconds", "model_seconds", "trajectory", "off_plane", "explained"):
            assert np.array_equal(getattr(back, name), getattr(original, name), equal_nan=True)
        assert np.array_equal(back.values["val"]["loss"], original.values["val"]["loss"], equal_nan=True)
        assert back.models == original.models
        assert PlaneResult.from_json(result().to_json()).trajectory.shape == (0, 2)

    def test_json_is_strict_and_versioned(self):
        content = json.loads(result().to_json(), parse_constant=pytest.fail)
        assert (content["kind"], content["schema"]) == ("plane result", 1)
        assert content["values"]["val"]["loss"] == [[1, 2, "nan"], [4, 5, "inf"]]
        for damage, message in (
            ({"schema": 2}, "schema 1, got 2"),
            ({"x": None}, "damaged"),
            ({"models": 1}, "damaged"),
        ):
            with pytest.raises(FileError, match=message):
                PlaneResult.from_dict({**content, **damage})

    def test_the_tidy_table_has_what_was_evaluated_once(self, tmp_path):
        result().to_csv(tmp_path / "plane.csv")
        with (tmp_path / "plane.csv").open(newline="") as file:
            rows = list(csv.reader(file))
        assert rows[0] == ["split", "x", "y", "metric", "value"]
        assert len(rows) == 1 + 3 * 6  # five points of the grid, and B beside it
        assert rows[1] == ["val", "0.0", "0.0", "loss", "1.0"]
        assert rows[-3:] == [
            ["val", "0.5", "0.5", "loss", "0.5"],
            ["val", "0.5", "0.5", "accuracy", "2.0"],
            ["test", "0.5", "0.5", "loss", "1.0"],
        ]

    def test_frame(self):
        pandas = pytest.importorskip("pandas")
        frame = result().to_frame()
        assert isinstance(frame, pandas.DataFrame)
        assert frame.shape == (18, 5)

    def test_the_best_point_may_be_a_model(self):
        assert result().best("loss") == (0.5, 0.5, {"val": {"loss": 0.5, "accuracy": 2.0}, "test": {"loss": 1.0}})
        assert result().best("accuracy").x == 0.5
        none = result(values={"val": {"loss": np.full((2, 3), math.nan)}}, model_seconds=np.full(3, math.nan))
        with pytest.raises(InputError, match="'val' is NaN"):
            none.best("loss")


class TestPlot:
    def test_a_panel_per_metric(self):
        loss, accuracy = result().plot()
        assert loss.get_xlabel() == "coefficient of A − base"
        assert loss.get_ylabel() == "coefficient of B − base"
        assert loss.get_title() == "★ lowest 0.5 at (0.5, 0.5)"
        assert accuracy.get_title() == "★ highest 2 at (0.5, 0.5)"
        assert {text.get_text() for text in loss.texts} == {"base", "A", "B"}
        assert len([line for line in loss.lines if line.get_linestyle() == "--"]) == 3
        assert (loss.get_xlim(), loss.get_ylim()) == ((0, 2), (0, 1))
        assert [axis.get_ylabel() for axis in loss.child_axes] == ["loss (nats), val"]
        assert loss.get_aspect() == "auto"

    def test_distances_have_one_scale(self):
        (axes,) = result(coordinates="metric").plot(metrics=["loss"], split="test")
        assert axes.get_aspect() == 1
        assert axes.child_axes[0].get_ylabel() == "loss (nats), test"
        assert axes.get_xlabel() == "distance along A − base"

    def test_a_trajectory_is_drawn_with_its_variance(self):
        path = np.array([[2.0, 1.0], [1.0, 0.5], [0.0, 0.0]])
        drawn = result(
            coordinates="principal", models={"last": (0.0, 0.0)}, trajectory=path, explained=np.array([0.9, 0.08])
        )
        (axes,) = drawn.plot(metrics=["loss"])
        assert axes.get_ylabel() == "principal direction 2\n(distance; 8.0% of variance)"
        assert any(np.array_equal(line.get_xydata(), path) for line in axes.lines)
        assert {text.get_text() for text in axes.texts} == {"last", "first"}

    @pytest.mark.parametrize(
        ("losses", "is_logarithmic"), [([1.0, 2.0, 4.0], False), ([1.0, 10.0, 90.0], True), ([0.0, 10.0, 90.0], False)]
    )
    def test_wide_ranges_are_drawn_by_ratio(self, losses, is_logarithmic):
        (axes,) = result(values={"val": {"loss": np.array([losses, losses])}}).plot()
        norm = axes.collections[0].norm
        assert isinstance(norm, mpl.colors.LogNorm) == is_logarithmic
        assert (norm.vmin, norm.vmax) == (min(losses), max(losses))

    def test_own_axes_and_constants(self):
        ax = mpl.figure.Figure().subplots()
        assert result(values={"val": {"loss": np.ones((2, 3))}}).plot(ax) == [ax]
        ax.figure.canvas.draw()

    def test_what_cannot_be_drawn_is_named(self):
        with pytest.raises(InputError, match="no metric 'f1'"):
            result().plot(metrics=["f1"])
        with pytest.raises(InputError, match="no metric 'accuracy'"):
            result().plot(metrics=["accuracy"], split="test")
        with pytest.raises(InputError, match="no split 'train'; it has val, test"):
            result().plot(split="train")
        with pytest.raises(InputError, match="is finite; there is nothing to draw"):
            result(values={"val": {"loss": np.full((2, 3), math.nan)}}).plot()
