"""Scans of a line before and after the units of one end are put in the other's order."""

from __future__ import annotations

import copy
import csv
import json
import math

import matplotlib as mpl
import numpy as np
import pytest
import torch
from torch import nn

from isthmus.errors import EvaluationError, InputError
from isthmus.flat import FlatState
from isthmus.io import save_state
from isthmus.match import PermutationSpec, apply_permutation, random_permutation, weight_matching
from isthmus.match.permutation import invert
from isthmus.path import Evaluator, PathResult, metrics, scan_line

mpl.use("agg")

AXES = {
    "0.weight": ("h", None),
    "0.bias": ("h",),
    "1.weight": ("h",),
    "1.bias": ("h",),
    "1.running_mean": ("h",),
    "1.running_var": ("h",),
    "3.weight": (None, "h"),
    "3.bias": (None,),
}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))


def data(samples: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(5))
    return inputs, inputs[:, :3].argmax(1)


@pytest.fixture(scope="module")
def models():
    """A spec, a trained network, the same in another order, and that order's inverse."""
    a = network()
    inputs, targets = data()
    for _ in range(60):
        gradients = torch.autograd.grad(nn.functional.cross_entropy(a(inputs), targets), list(a.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(a.parameters(), gradients, strict=True):
                parameter -= 0.3 * gradient
    spec = PermutationSpec.from_dict(AXES, a.state_dict())
    order = random_permutation(spec, torch.Generator().manual_seed(1))
    return spec, a, apply_permutation(spec, order, a), invert(spec, order)


def scan(models, align="spec", **options):
    spec, a, b, inverse = models
    if isinstance(align, str):
        align = {"spec": spec, "permutation": (spec, inverse)}[align]
    return scan_line(network(3), a, b, Evaluator(data()), 5, align=align, **({"bn": "keep"} | options))


@pytest.mark.parametrize("align", ["spec", "permutation"])
def test_a_planted_permutation_has_no_barrier_once_aligned(models, align):
    result = scan(models, align)
    figures, naive = result.summary["data"]["loss"], result.naive.summary["data"]["loss"]
    assert naive.linear_barrier > 0.1
    assert figures.linear_barrier == pytest.approx(0, abs=1e-5)
    assert result.distances["l2"] == pytest.approx(0, abs=1e-5)
    assert result.barrier_cut["data"]["loss"] == pytest.approx(1, abs=1e-4)
    assert figures.ends == pytest.approx(naive.ends)
    assert torch.equal(torch.from_numpy(result.permutation["h"]), models[3]["h"])


def test_the_naive_line_is_the_one_without_alignment(models):
    result, plain = scan(models), scan(models, None)
    assert result.naive.values["data"]["loss"].tolist() == plain.values["data"]["loss"].tolist()
    assert (plain.naive, plain.permutation, plain.barrier_cut) == (None, {}, {})
    assert plain.columns() == PathResult.COLUMNS


def test_what_was_aligned_is_told(models):
    spec, a, b, _ = models
    told = scan(models).choices["align"]
    report = weight_matching(spec, a, b).report
    assert (told["groups"], told["units"], told["method"]) == (1, 32, report.method)
    assert told["moved"] == 32 - report.groups["h"].fixed
    assert told["objective"] == report.objective
    assert "method" not in scan(models, "permutation").choices["align"]
    matched = scan(models, (spec, weight_matching(spec, a, b)))
    assert matched.choices["align"]["similarity"] == pytest.approx(1)


class Attention(nn.Module):
    """Two heads of two columns each."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(4, 4)) for _ in range(4))

    def forward(self, x):
        q, k, v = (nn.functional.linear(x, w).unflatten(-1, (2, 2)).movedim(-2, 0) for w in (self.q, self.k, self.v))
        return ((q @ k.mT).softmax(-1) @ v).movedim(0, -2).flatten(-2) @ self.o.T


def test_columns_of_heads_that_move_have_moved():
    torch.manual_seed(0)
    a, inputs = Attention(), torch.randn(5, 3, 4)
    axes = dict.fromkeys("qk", (("heads", "columns"), None)) | {"v": (("heads", 2), None), "o": (None, ("heads", 2))}
    spec = PermutationSpec.from_dict(axes, a.state_dict(), within={"columns": "heads"}, sizes={"heads": 2})
    swapped = {"heads": torch.tensor([1, 0])}
    b = apply_permutation(spec, swapped, a)
    result = scan_line(a, a, b, lambda model: model(inputs).square().mean().item(), 3, align=(spec, swapped), bn="keep")
    assert result.distances["l2"] == 0
    told = result.choices["align"]
    assert (told["groups"], told["units"], told["moved"]) == (2, 2 + 4, 2 + 4)
    assert told["moved"] == told["units"] - sum(
        group.fixed for group in weight_matching(spec, a, b).report.groups.values()
    )


def test_models_from_files_and_states(models, tmp_path):
    spec, a, b, _ = models
    save_state(tmp_path / "b.safetensors", b.state_dict())
    expected = scan(models).values["data"]["loss"]
    for first, second in ((a.state_dict(), tmp_path / "b.safetensors"), (a, FlatState.from_module(b))):
        found = scan_line(network(3), first, second, Evaluator(data()), 5, align=spec, bn="keep")
        assert found.values["data"]["loss"].tolist() == expected.tolist()


def test_the_result_shares_no_memory_with_the_permutation_given(models):
    spec, a, b, inverse = models
    given = {name: order.clone() for name, order in inverse.items()}
    result = scan(models, (spec, given))
    given["h"].copy_(torch.arange(32))
    assert torch.equal(torch.from_numpy(result.permutation["h"]), inverse["h"])
    found = weight_matching(spec, a, b)
    result = scan(models, (spec, found))
    result.permutation["h"][:] = 0
    assert torch.equal(found.permutation["h"], inverse["h"])


def test_models_come_back_untouched(models):
    _, a, b, _ = models
    before = [copy.deepcopy(model.state_dict()) for model in (a, b)]
    state = torch.get_rng_state()
    scan(models)
    assert torch.equal(torch.get_rng_state(), state)
    for model, saved in zip((a, b), before, strict=True):
        assert all(torch.equal(value, saved[key]) for key, value in model.state_dict().items())


def test_batch_norm_statistics_are_estimated_on_both_lines(models):
    result = scan(models, bn="reset", bn_data=data()[0])
    assert result.bn_seconds is not None
    assert result.naive.bn_seconds is not None
    assert (result.choices["bn"], result.naive.choices["bn"]) == ("reset", "reset")


def test_an_adaptive_scan_chooses_points_for_each_line(models):
    spec, a, b, _ = models
    result = scan_line(network(3), a, b, Evaluator(data()), "adaptive", tol=1e-4, align=spec, bn="keep")
    assert len(result.alphas) < len(result.naive.alphas)
    assert result.choices["adaptive"]["bound"] <= 1e-4
    assert result.naive.choices["adaptive"]["bound"] <= 1e-4
    assert result.barrier_cut["data"]["loss"] == pytest.approx(1, abs=1e-3)
    whole = scan_line(network(3), a, b, Evaluator(data()), "adaptive", tol=1e-4, bn="keep")
    assert result.naive.alphas.tolist() == whole.alphas.tolist()


def test_cut_by_hand():
    assert metrics.relative_cut(2.0, 0.5) == 0.75
    assert metrics.relative_cut(2.0, 3.0) == -0.5
    assert math.isnan(metrics.relative_cut(0.0, 0.0))
    assert math.isnan(metrics.relative_cut(math.nan, 1.0))


def line(middle: float, **fields) -> PathResult:
    return PathResult(
        alphas=np.array([0.0, 0.5, 1.0]),
        values={"val": {"loss": np.array([1.0, middle, 1.0]), "accuracy": np.array([0.5, 0.5, 0.5])}},
        seconds=np.ones(3),
        **fields,
    )


class TestResult:
    def test_cut(self):
        cut = line(2.0, naive=line(5.0)).barrier_cut["val"]
        assert cut["loss"] == 0.75
        assert math.isnan(cut["accuracy"])

    def test_json_and_back(self, tmp_path):
        result = line(2.0, naive=line(5.0), permutation={"h": np.array([1, 0, 2])})
        text = result.to_json(tmp_path / "path.json")
        back = PathResult.from_json(tmp_path / "path.json")
        assert back.to_json() == text
        assert back.naive.values["val"]["loss"].tolist() == [1, 5, 1]
        assert back.permutation["h"].dtype == np.int64
        assert json.loads(text)["barrier_cut"]["val"]["loss"] == 0.75

    def test_files_without_alignment_are_read(self):
        content = line(2.0).to_dict()
        for name in ("naive", "permutation", "barrier_cut"):
            del content[name]
        back = PathResult.from_dict(content)
        assert (back.naive, back.permutation) == (None, {})

    def test_the_table_says_which_line_a_row_is_of(self, tmp_path):
        result = line(2.0, naive=line(5.0))
        result.to_csv(tmp_path / "path.csv")
        with (tmp_path / "path.csv").open(newline="") as file:
            header, *rows = list(csv.reader(file))
        assert header == ["line", "split", "alpha", "metric", "value"]
        assert len(rows) == 12
        assert ["aligned", "val", "0.5", "loss", "2.0"] in rows
        assert ["naive", "val", "0.5", "loss", "5.0"] in rows
        assert list(result.to_frame().columns) == header

    def test_both_lines_are_drawn(self):
        loss, _ = line(2.0, naive=line(5.0)).plot()
        labels = [text.get_text() for text in loss.get_legend().get_texts()]
        assert labels == ["val, naive: barrier 4", "val, aligned: gain -1, barrier 1"]
        assert loss.lines[0].get_ydata().tolist() == [1, 5, 1]
        assert loss.lines[1].get_ydata().tolist() == [1, 2, 1]


class TestInterrupted:
    def stopping(self, after: int):
        """An evaluator that fails at the evaluation after so many."""
        evaluate, calls = Evaluator(data(), batch_size=64), [0]

        def run(model):
            calls[0] += 1
            if calls[0] > after:
                raise KeyboardInterrupt
            return evaluate(model)

        return run

    def scan(self, models, evaluate, checkpoint):
        spec, a, b, _ = models
        return scan_line(network(3), a, b, evaluate, 5, align=spec, bn="keep", checkpoint=checkpoint)

    def test_within_the_aligned_line(self, models):
        with pytest.raises(KeyboardInterrupt) as raised:
            self.scan(models, self.stopping(2), None)
        partial = raised.value.partial
        assert (len(partial.alphas), partial.complete, partial.naive) == (2, False, None)
        assert "h" in partial.permutation

    def test_within_the_naive_line(self, models):
        with pytest.raises(KeyboardInterrupt) as raised:
            self.scan(models, self.stopping(7), None)
        partial = raised.value.partial
        assert (len(partial.alphas), len(partial.naive.alphas)) == (5, 2)
        assert (partial.complete, partial.naive.complete) == (False, False)
        assert PathResult.from_json(partial.to_json()).to_json() == partial.to_json()

    @pytest.mark.parametrize("after", [3, 8])
    def test_a_checkpoint_goes_on(self, models, tmp_path, after):
        whole = self.scan(models, self.stopping(100), None)
        with pytest.raises(KeyboardInterrupt):
            self.scan(models, self.stopping(after), tmp_path / "kept")
        assert (tmp_path / "kept").exists() == (after > 5)
        again = self.scan(models, self.stopping(100), tmp_path / "kept")
        for name in ("kept", "kept.aligned"):
            assert len((tmp_path / name).read_text().splitlines()) == 6
        for result, expected in ((again, whole), (again.naive, whole.naive)):
            assert result.values["data"]["loss"].tolist() == expected.values["data"]["loss"].tolist()

    def test_the_points_of_a_scan_without_alignment_are_used_again(self, models, tmp_path):
        _, a, b, _ = models
        options = {"bn": "keep", "checkpoint": tmp_path / "kept"}
        plain = scan_line(network(3), a, b, self.stopping(100), 5, **options)
        again = self.scan(models, self.stopping(5 + 3), tmp_path / "kept")  # aligned, and the marks of the naive line
        assert again.naive.values["data"]["loss"].tolist() == plain.values["data"]["loss"].tolist()
        assert again.complete

    def test_an_evaluator_that_fails(self, models):
        spec, a, b, _ = models
        with pytest.raises(EvaluationError) as raised:
            scan_line(network(3), a, b, lambda _: 1 / 0, 5, align=spec, bn="keep")
        assert raised.value.partial.choices["align"]["groups"] == 1


@pytest.mark.parametrize("align", [{"h": torch.arange(32)}, "spec", ("spec", {})])
def test_what_is_no_alignment_is_refused(models, align):
    _, a, b, _ = models
    with pytest.raises(InputError, match=r"expected a PermutationSpec, or a tuple"):
        scan_line(network(3), a, b, Evaluator(data()), 5, align=align, bn="keep")


def test_a_permutation_that_does_not_fit_is_refused(models):
    spec, a, b, _ = models
    with pytest.raises(InputError, match="group 'g'"):
        scan_line(network(3), a, b, Evaluator(data()), 5, align=(spec, {"g": torch.arange(32)}), bn="keep")
