"""Scans that choose their points: the maximum is never missed, and few points are spent."""

from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from isthmus.errors import InputError, IsthmusWarning
from isthmus.path import PathResult, metrics, scan_line
from isthmus.path.adaptive import COARSE_POINTS, Refinement, gaps_between

STEP = 1 / (COARSE_POINTS - 1)
FINE = np.arange(20001) / 20000


def bump(centre, width, height=1.0):
    """A squared cosine, ``width`` wide in all."""
    return lambda x: height * np.where(np.abs(x - centre) < width / 2, np.cos(np.pi * (x - centre) / width) ** 2, 0.0)


def plateau(left, right, slope):
    return lambda x: np.clip((x - left) * slope, 0, 1) - np.clip((x - right) * slope, 0, 1)


def cusp(centre, left, right):
    return lambda x: np.minimum((x - centre) * left, (centre - x) * right)


def normal(centre, deviation, height=1.0):
    return lambda x: height * np.exp(-(((x - centre) / deviation) ** 2) / 2)


SMOOTH = {
    "normal": normal(0.53, 0.2, 2),
    "narrow normal": normal(0.47, 0.1, 2),
    "quadratic": lambda x: 1 - 3 * (x - 0.43) ** 2,
    "quartic": lambda x: 1 - 16 * (x - 0.5137) ** 4,
    "waves": lambda x: np.sin(np.pi * x) + 0.3 * np.sin(2 * np.pi * x) - 0.2 * np.sin(3 * np.pi * x),
}


def scan(curve, tol=1e-3, aim="barrier", max_points=1000):
    """The points, their values and the refinement of one curve, without any model."""
    found = {}
    refinement = Refinement(
        found, tol=tol, aim=aim, metrics=["loss"], higher_is_better=["accuracy"], max_points=max_points
    )
    for alpha in refinement:
        assert alpha not in found
        found[alpha] = {"test": {"loss": float(curve(np.float64(alpha)))}}
    alphas = np.array(sorted(found))
    return alphas, np.array([found[alpha]["test"]["loss"] for alpha in alphas]), refinement


def missed(curve, alphas, values, fine=FINE):
    """By how much the larger of the barrier and the linear barrier falls short of a very fine grid's."""
    ends = values[0], values[-1]
    return max(
        figure(fine, curve(fine), ends).height - figure(alphas, values, ends).height
        for figure in (metrics.barrier, metrics.linear_barrier)
    )


class TestNothingIsMissed:
    """The bounds are checked on a grid of 20001 points, which misses less than 1e-5 of any of these curves."""

    @given(centre=st.floats(0.07, 0.93), width=st.floats(2 * STEP, 0.5), tol=st.sampled_from([1e-2, 1e-3, 1e-4]))
    @settings(max_examples=60, deadline=None)
    def test_a_bump(self, centre, width, tol):
        curve = bump(centre, width)
        alphas, values, _ = scan(curve, tol)
        assert missed(curve, alphas, values) <= tol
        assert len(alphas) <= 40

    @given(
        low=st.floats(0.07, 0.4),
        high=st.floats(0.6, 0.93),
        widths=st.tuples(st.floats(2 * STEP, 0.3), st.floats(2 * STEP, 0.3)),
        height=st.floats(0.9, 1.3),
    )
    @example(low=0.25, high=0.91015625, widths=(0.25, 2 * STEP), height=1.25)  # the last fourth difference is near 0
    @settings(max_examples=60, deadline=None)
    def test_two_bumps_of_nearly_one_height(self, low, high, widths, height):
        def curve(x):
            return bump(low, widths[0])(x) + bump(high, widths[1], height)(x)

        alphas, values, _ = scan(curve)
        assert missed(curve, alphas, values) <= 1e-3

    @given(
        centre=st.floats(0.07, 0.93),
        width=st.floats(2 * STEP, 0.3),
        height=st.floats(0.2, 1.0),
        middle=st.floats(0.2, 0.8),
    )
    @settings(max_examples=60, deadline=None)
    def test_a_bump_on_a_hill(self, centre, width, height, middle):
        def curve(x):
            return normal(middle, 0.3)(x) + bump(centre, width, height)(x)

        alphas, values, _ = scan(curve)
        assert missed(curve, alphas, values) <= 1e-3

    @given(left=st.floats(0.05, 0.5), width=st.floats(0.1, 0.4), slope=st.floats(5, 40))
    @settings(max_examples=40, deadline=None)
    def test_a_plateau(self, left, width, slope):
        curve = plateau(left, left + width, slope)
        alphas, values, _ = scan(curve)
        assert missed(curve, alphas, values) <= 1e-3

    @given(centre=st.floats(0.05, 0.95), left=st.floats(0.5, 5), right=st.floats(0.5, 5))
    @settings(max_examples=60, deadline=None)
    def test_a_cusp(self, centre, left, right):
        curve = cusp(centre, left, right)
        alphas, values, _ = scan(curve)
        assert missed(curve, alphas, values, np.sort(np.append(FINE, centre))) <= 1e-3

    @pytest.mark.parametrize("name", SMOOTH)
    @pytest.mark.parametrize("tol", [1e-2, 1e-3, 1e-4])
    def test_smooth_curves(self, name, tol):
        alphas, values, refinement = scan(SMOOTH[name], tol)
        assert missed(SMOOTH[name], alphas, values) <= refinement.bound + 1e-6 <= tol + 1e-6

    @pytest.mark.parametrize("curve", [lambda x: np.exp(-3 * x), lambda x: 2 * x, lambda x: -np.sin(np.pi * x), abs])
    def test_curves_whose_maximum_is_an_end_need_the_coarse_grid_alone(self, curve):
        alphas, _, refinement = scan(curve)
        assert alphas.tolist() == (np.arange(17) / 16).tolist()
        assert refinement.bound <= 1e-3


class TestPoints:
    @pytest.mark.parametrize("name", ["normal", "narrow normal", "quadratic", "waves"])
    def test_a_third_of_the_grid_that_is_as_exact(self, name):
        """A grid is as exact as one finds the maximum from its steps alone: wherever its points lie, by half a step."""
        curve = SMOOTH[name]
        alphas, values, _ = scan(curve)
        error = max(missed(curve, alphas, values), 1e-6)
        peak = FINE[np.argmax(curve(FINE))]
        steps = next(n for n in range(2, 5000) if curve(peak) - curve(peak + 0.5 / n) <= error)
        assert len(alphas) <= (steps + 1) / 3

    def test_they_gather_around_the_maximum(self):
        alphas, _, _ = scan(normal(0.3, 0.1))
        added = sorted(set(alphas) - set(np.arange(17) / 16))
        assert 0 < len(added) <= 10
        assert all(abs(alpha - 0.3) < 0.1 for alpha in added)

    def test_the_order_is_marks_coarse_grid_refinement(self):
        found = {}
        for alpha in Refinement(found, tol=1e-3, aim="barrier", metrics=["loss"], higher_is_better=[], max_points=100):
            found[alpha] = {"data": {"loss": float(normal(0.3, 0.1)(alpha))}}
        order = list(found)
        assert order[:5] == [0, 1, 0.5, 1 / 16, 2 / 16]
        assert sorted(order[:17]) == (np.arange(17) / 16).tolist()

    @pytest.mark.parametrize("name", SMOOTH)
    def test_the_whole_curve(self, name):
        alphas, values, refinement = scan(SMOOTH[name], aim="curve")
        distance = np.abs(np.interp(FINE, alphas, values) - SMOOTH[name](FINE)).max()
        assert distance <= refinement.bound <= 1e-3

    def test_the_whole_curve_takes_more_points_where_it_is_curved(self):
        alphas, _, _ = scan(normal(0.25, 0.05), aim="curve")
        assert (alphas < 0.5).sum() > 4 * (alphas > 0.5).sum()

    def test_a_jump_ends_at_the_resolution_of_the_weights(self):
        alphas, _, refinement = scan(lambda x: np.where(x > 0.4137, 1.0, 0.0))
        above = np.searchsorted(alphas, 0.4137)
        assert alphas[above] - alphas[above - 1] <= 2.0**-20
        assert np.diff(alphas).min() > 2.0**-20 / 17
        assert refinement.bound > 1e-3


class TestGaps:
    def test_a_cubic_is_known_exactly(self):
        """x (1 - x) (x + 1) = x - x^3 has its maximum 2 / (3 sqrt 3) at 1 / sqrt 3; points are seen in sixteenths."""
        alphas = np.array([0, 0.2, 0.5, 0.7, 0.8, 1.0])
        values = alphas - alphas**3
        gaps, where = gaps_between(alphas, values[None], "barrier")
        assert gaps.shape == where.shape == (2, 5)
        assert where[0, 2] == pytest.approx(0.5 + 0.2 * 6 / 16)
        assert gaps[0, 2] == pytest.approx(where[0, 2] - where[0, 2] ** 3 - 0.375 + 6 * 0.2**2 / 4 * 0.6 / 6, abs=1e-12)
        assert np.array_equal(gaps[0], gaps[1])  # the chord is zero

    def test_the_parabolas_differ_by_the_third_difference(self):
        """For x^3 the third divided difference is 1: parabolas differ by (x4 - x1) h^2 / 4 in the middle."""
        alphas = np.array([0.0, 1, 2, 3, 4])
        gaps, where = gaps_between(alphas, alphas[None] ** 3, "curve")
        assert where[0].tolist() == [0.5, 1.5, 2.5, 3.5]
        # from the chord over [1, 2], x^3 lies 0.375 - 4.5 + ... below: (x - 1)(x - 2)(x + 3), most at 1.5
        middle = 1 + np.arange(1, 16) / 16
        assert gaps[0, 1] == pytest.approx(np.abs((middle - 1) * (middle - 2) * (middle + 3)).max() + 3 / 4)

    def test_the_fourth_difference(self):
        """For x^4 the fourth divided difference is 1: 14 times the largest |x (x - 1) (x - 2) (x - 3)| in between."""
        alphas = np.arange(6.0)
        gaps, _ = gaps_between(alphas, alphas[None] ** 4, "curve")
        middle = 1 + np.arange(1, 16) / 16
        cubic = middle**4 - middle * (middle - 1) * (middle - 2) * (middle - 3)
        assert gaps[0, 1] == pytest.approx(np.abs(cubic - (15 * middle - 14)).max() + 14 * 0.5625)


class Curve(nn.Module):
    """The model f(x) = w, whose loss is any function of w."""

    def __init__(self, w: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w], dtype=torch.float64))

    def forward(self, x):
        return self.w.expand(len(x))


def scan_models(evaluate, **options):
    return scan_line(Curve(), Curve(0.0), Curve(1.0), evaluate, "adaptive", **options)


class TestScanLine:
    def test_what_was_asked_for_and_found_is_told(self):
        result = scan_models(lambda m: float(normal(0.53, 0.2)(m.w.item())), tol=1e-3)
        told = result.choices["adaptive"]
        assert told["points"] == len(result.alphas) < 24
        assert told["coarse_points"] == 17
        assert told["max_points"] == 201
        assert (told["tol"], told["refine"], told["refine_by"]) == (1e-3, "barrier", ["loss"])
        assert 0 <= told["bound"] <= 1e-3
        assert result.summary["data"]["loss"].linear_barrier == pytest.approx(
            metrics.linear_barrier(FINE, normal(0.53, 0.2)(FINE), result.summary["data"]["loss"].ends).height, abs=1e-3
        )
        assert PathResult.from_json(result.to_json()).choices["adaptive"] == told
        assert scan_line(Curve(), Curve(), Curve(1.0), lambda m: 0.0, 3).choices["adaptive"] is None

    def test_numbers_of_numpy_are_written_as_numbers(self):
        result = scan_models(lambda m: 0.0, max_points=np.int64(50), tol=np.float64(0.5))
        told = json.loads(result.to_json())["choices"]["adaptive"]
        assert (told["max_points"], told["tol"]) == (50, 0.5)

    def test_every_split_counts(self):
        evaluate = {
            "val": lambda m: float(normal(0.3, 0.1)(m.w.item())),
            "test": lambda m: float(normal(0.7, 0.1)(m.w.item())),
        }
        result = scan_models(evaluate)
        added = np.setdiff1d(result.alphas, np.arange(17) / 16)
        assert ((added > 0.2) & (added < 0.4)).any()
        assert ((added > 0.6) & (added < 0.8)).any()

    def test_metrics_are_chosen_and_scores_turned_round(self):
        def evaluate(model):
            dip = float(normal(0.3, 0.1)(model.w.item()))
            return {"loss": float(normal(0.7, 0.1)(model.w.item())), "score": 1 - dip}

        options = {"refine_by": ["score"], "higher_is_better": ["score"]}
        result = scan_models(evaluate, **options)
        added = np.setdiff1d(result.alphas, np.arange(17) / 16)
        assert len(added)
        assert (added < 0.5).all()
        lost = result.summary["data"]["score"].linear_barrier
        assert lost == pytest.approx(normal(0.3, 0.1)(FINE).max() - normal(0.3, 0.1)(0.0) * 0.7, abs=2e-3)

    def test_a_curve_with_nan_counts_no_more(self):
        def evaluate(model):
            w = model.w.item()
            return {"loss": float(normal(0.3, 0.1)(w)), "other": math.nan if w == 0.5 else float(normal(0.8, 0.05)(w))}

        result = scan_models(evaluate, refine_by=["loss", "other"])
        assert (np.setdiff1d(result.alphas, np.arange(17) / 16) < 0.5).all()
        assert math.isnan(result.summary["data"]["other"].barrier)
        assert not math.isnan(result.choices["adaptive"]["bound"])

    def test_no_curve_without_nan_warns(self):
        with pytest.warns(IsthmusWarning, match="stopped at its first 17 points: every curve of loss has a value"):
            result = scan_models(lambda m: math.inf if m.w.item() == 0.5 else 0.0)
        assert len(result.alphas) == 17
        assert math.isnan(result.choices["adaptive"]["bound"])
        assert result.summary["data"]["loss"].barrier == math.inf

    def test_too_few_points_warn_at_the_users_line(self):
        with pytest.warns(
            IsthmusWarning, match=r"stopped at 20 points with the curve known to about .*tol=1e-05"
        ) as seen:
            result = scan_models(lambda m: float(normal(0.5, 0.1)(m.w.item())), tol=1e-5, refine="curve", max_points=20)
        assert len(result.alphas) == 20
        assert result.complete
        assert result.choices["adaptive"]["bound"] > 1e-5
        assert seen[0].filename == __file__

    def test_enough_points_do_not_warn(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scan_models(lambda m: float(normal(0.5, 0.1)(m.w.item())))

    def test_it_goes_on_from_a_checkpoint(self, tmp_path):
        calls = []

        def evaluate(model):
            calls.append(model.w.item())
            if len(calls) == 20:
                raise KeyboardInterrupt
            return float(normal(0.53, 0.1)(calls[-1]))

        with pytest.raises(KeyboardInterrupt) as caught:
            scan_models(evaluate, checkpoint=tmp_path / "scan")
        assert caught.value.partial.choices["adaptive"]["points"] == 19
        seen = calls[:19]
        resumed = scan_models(evaluate, checkpoint=tmp_path / "scan")
        assert not set(calls[20:]) & (set(seen) - {0, 0.5, 1})
        whole = scan_models(lambda m: float(normal(0.53, 0.1)(m.w.item())))
        assert resumed.alphas.tolist() == whole.alphas.tolist()
        assert resumed.values["data"]["loss"].tolist() == whole.values["data"]["loss"].tolist()

    def test_an_interrupt_in_the_coarse_grid_has_no_bound(self):
        with pytest.raises(RuntimeError) as caught:
            scan_models(lambda m: 0.0, progress=interrupt_after(9))
        told = json.loads(caught.value.partial.to_json())["choices"]["adaptive"]
        assert (told["points"], told["bound"]) == (9, "nan")

    def test_progress_tells_of_the_points_that_are_known_to_follow(self):
        seen = []
        result = scan_models(
            lambda m: float(normal(0.53, 0.1)(m.w.item())), progress=lambda *args: seen.append(args[:2])
        )
        assert [done for done, _ in seen] == list(range(1, len(result.alphas) + 1))
        assert all(total == 17 for done, total in seen if done <= 17)
        assert all(total >= done for done, total in seen)
        assert seen[-1][1] == len(result.alphas)
        assert any(total > done for done, total in seen[17:])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"tol": 0.0}, "tol=0.0, expected a positive number"),
            ({"tol": math.nan}, "tol=nan, expected a positive number"),
            ({"tol": "small"}, "tol='small'"),
            ({"refine": "barriers"}, "refine='barriers' is unknown"),
            ({"max_points": 16}, "max_points=16, but an adaptive scan begins with 17 points"),
            ({"refine_by": "loss"}, "refine_by='loss', expected a sequence"),
            ({"refine_by": []}, "expected a sequence of at least one"),
            ({"refine_by": ["error"]}, r"refine_by=\['error'\], but no split has such a metric; there are loss"),
        ],
    )
    def test_bad_options_are_named(self, options, message):
        with pytest.raises(InputError, match=message):
            scan_models(lambda m: 0.0, **options)

    def test_other_words_are_named(self):
        with pytest.raises(InputError, match="alphas='adaptiv', expected one of: 'adaptive', a number of points"):
            scan_line(Curve(), Curve(), Curve(), lambda m: 0.0, "adaptiv")


def interrupt_after(points):
    def progress(done, total, values):
        if done == points:
            raise RuntimeError("stop")

    return progress
