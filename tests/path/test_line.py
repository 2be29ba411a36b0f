"""Scans of the line between two models."""

from __future__ import annotations

import copy
import math
import random
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from isthmus import norms
from isthmus.errors import EvaluationError, FileError, InputError, IsthmusWarning
from isthmus.flat import FlatState
from isthmus.io import save_state
from isthmus.path import Evaluator, PathResult, accuracy, cross_entropy, metrics, scan_line


class Scalar(nn.Module):
    """The model f(x) = w."""

    def __init__(self, w: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w]))

    def forward(self, x):
        return self.w.expand(len(x))


def weight(model: Scalar) -> float:
    return model.w.item()


def mlp(seed: int, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Flatten(), nn.Linear(144, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.ReLU()]
    return nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(16, 5))


def data(samples: int = 50, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 12, 12, generator=generator), torch.randint(5, (samples,), generator=generator)


def test_values_by_hand():
    result = scan_line(Scalar(), Scalar(1.0), Scalar(3.0), lambda m: (weight(m) - 2) ** 2, 5)
    assert result.alphas.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert result.values["data"]["loss"].tolist() == [1, 0.25, 0, 0.25, 1]
    figures = result.summary["data"]["loss"]
    assert (figures.ends, figures.merged, figures.gain, figures.gain_over_better) == ((1, 1), 0, 1, 1)
    assert (figures.barrier, figures.linear_barrier) == (0, 0)
    assert figures.integral == (0.5 + 0.25 + 0 + 0.25 + 0.5) / 4
    assert result.distances["l2"] == 2
    assert result.complete


@pytest.mark.parametrize(
    ("alphas", "expected"),
    [
        (2, [0, 0.5, 1]),
        (3, [0, 0.5, 1]),
        (4, [0, 1 / 3, 0.5, 2 / 3, 1]),
        ([0.9, 0.1, 0.9], [0, 0.1, 0.5, 0.9, 1]),
        ([-0.5, 1.5], [-0.5, 0, 0.5, 1, 1.5]),
        ([], [0, 0.5, 1]),
    ],
)
def test_ends_and_midpoint_are_always_points(alphas, expected):
    result = scan_line(Scalar(), Scalar(0.0), Scalar(6.0), weight, alphas)
    assert result.alphas.tolist() == expected
    assert result.values["data"]["loss"] == pytest.approx([6 * alpha for alpha in expected])


def test_eleven_points_are_eleven_from_end_to_end():
    result = scan_line(Scalar(), Scalar(0.0), Scalar(6.0), weight, 11)
    assert len(result.alphas) == 11
    assert (result.alphas[0], result.alphas[-1]) == (0.0, 1.0)
    assert result.alphas == pytest.approx(np.linspace(0, 1, 11), abs=1e-15)
    assert (result.values["data"]["loss"][0], result.values["data"]["loss"][-1]) == (0.0, 6.0)


@given(points=st.integers(2, 200))
@settings(max_examples=30, deadline=None)
def test_equally_spaced_points_have_one_midpoint(points):
    result = scan_line(Scalar(), Scalar(0.0), Scalar(1.0), lambda m: 0.0, points)
    assert len(result.alphas) == points + (points % 2 == 0)
    assert (result.alphas == 0.5).sum() == 1


def test_barriers_are_within_the_ends():
    result = scan_line(Scalar(), Scalar(0.0), Scalar(1.0), lambda m: weight(m) ** 2, [-3, 3])
    assert result.summary["data"]["loss"].barrier == 0.5


def test_weights_are_those_of_the_line_to_the_bit():
    a, b, seen = mlp(1), mlp(2), {}

    def keep(model):
        seen[len(seen)] = [parameter.detach().clone() for parameter in model.parameters()]
        return 0.0

    scan_line(mlp(3), a, b, keep, [0.25])  # in the order A, B, midpoint, rest
    for got, x in zip(seen[0], a.parameters(), strict=True):
        assert torch.equal(got, x)
    for got, y in zip(seen[1], b.parameters(), strict=True):
        assert torch.equal(got, y)
    for got, x, y in zip(seen[3], a.parameters(), b.parameters(), strict=True):
        assert torch.equal(got, x + 0.25 * (y - x))


def test_splits_and_several_metrics():
    evaluate = {"val": lambda m: {"loss": weight(m), "score": -weight(m)}, "test": lambda m: 2 * weight(m)}
    result = scan_line(Scalar(), Scalar(0.0), Scalar(1.0), evaluate, 3, higher_is_better=["score"])
    assert result.values["test"]["loss"].tolist() == [0, 1, 2]
    assert result.summary["val"]["score"].barrier == result.summary["val"]["loss"].barrier == 0.5
    assert result.higher_is_better == ("score",)


@pytest.mark.parametrize("kind", ["module", "state dict", "prefixed", "flat", "file"])
def test_models_come_in_many_forms(kind, tmp_path):
    a, b = mlp(1), mlp(2)
    save_state(tmp_path / "b.safetensors", b.state_dict())
    source = {
        "module": b,
        "state dict": b.state_dict(),
        "prefixed": {f"module.{key}": value for key, value in b.state_dict().items()},
        "flat": FlatState.from_module(b),
        "file": tmp_path / "b.safetensors",
    }[kind]
    evaluator = Evaluator(data())
    result = scan_line(mlp(3), a, source, evaluator, 3)
    assert result.values["data"]["loss"][-1] == pytest.approx(evaluator(b)["loss"], rel=1e-6)


def test_the_model_may_be_an_end():
    a, b = mlp(1), mlp(2)
    before = copy.deepcopy(a.state_dict())
    result = scan_line(a, a, b, Evaluator(data()), 3)
    again = scan_line(mlp(3), a, b, Evaluator(data()), 3)
    assert np.array_equal(result.values["data"]["loss"], again.values["data"]["loss"])
    assert all(torch.equal(value, before[key]) for key, value in a.state_dict().items())


class Tied(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encode = nn.Linear(4, 4, bias=False)
        self.decode = nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(self.encode(x))


def test_tied_tensors_may_be_stored_once_per_key():
    a, b = Tied(1), Tied(2)
    untied = {key: value.clone() for key, value in b.state_dict().items()}
    evaluate = Evaluator((torch.eye(4), torch.arange(4)))
    expected = scan_line(Tied(0), a, b, evaluate, 3).values["data"]["loss"]
    assert np.array_equal(scan_line(Tied(0), a, untied, evaluate, 3).values["data"]["loss"], expected)
    for lacking in ("encode.weight", "decode.weight"):
        stored = {key: value for key, value in untied.items() if key != lacking}
        assert np.array_equal(scan_line(Tied(0), a, stored, evaluate, 3).values["data"]["loss"], expected)
    untied["decode.weight"] += 1
    with pytest.raises(InputError, match=r"'(en|de)code.weight' is tied .* but b has different values"):
        scan_line(Tied(0), a, untied, evaluate, 3)


class Noisy(nn.Module):
    """Touches everything a scan must give back: random states, modes, both kinds of buffer, gradients and flags."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("calls", torch.zeros(1), persistent=False)
        self.register_buffer("kept", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        self.kept = self.kept + 1
        return self.norm(self.linear(x))


def vandal(fail_at: float | None, error: type[BaseException]):
    calls = []

    def evaluate(model: Noisy) -> float:
        model.train()
        torch.rand(1), np.random.rand(), random.random()
        loss = model(torch.randn(4, 2)).square().sum()
        loss.backward()
        model.linear.weight.requires_grad_(False)
        with torch.no_grad():
            model.linear.bias.fill_(7)
        calls.append(loss)
        if fail_at is not None and len(calls) == fail_at:
            raise error("stop")
        return loss.item()

    return evaluate


@pytest.mark.parametrize(
    ("fail_at", "error", "raised"),
    [
        (None, ValueError, None),
        (1, ValueError, EvaluationError),
        (4, ValueError, EvaluationError),
        (4, KeyboardInterrupt, KeyboardInterrupt),
    ],
)
def test_everything_comes_back(fail_at, error, raised):
    model, a, b = Noisy(), Noisy(), Noisy()
    model.norm.eval()
    model.linear.bias.requires_grad_(False)
    gradient = model.linear.weight.grad = torch.full((2, 2), 3.0)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {key: tensor.detach().clone() for key, tensor in tensors.items()}
    ends = copy.deepcopy([a.state_dict(), b.state_dict()])
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IsthmusWarning)
        if raised is None:
            scan_line(model, a, b, vandal(fail_at, error), 5)
        else:
            with pytest.raises(raised) as caught:
                scan_line(model, a, b, vandal(fail_at, error), 5)
            partial = caught.value.partial
            assert not partial.complete
            assert partial.alphas.tolist() == [0, 0.5, 1][: fail_at - 1]

    assert {**dict(model.named_parameters()), **dict(model.named_buffers())}.keys() == tensors.keys()
    for key, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        assert tensor is tensors[key]
        assert torch.equal(tensor, values[key]), key
    assert model.linear.weight.grad is gradient
    assert torch.equal(gradient, torch.full((2, 2), 3.0))
    assert (model.linear.weight.requires_grad, model.linear.bias.requires_grad) == (True, False)
    assert (model.training, model.linear.training, model.norm.training) == (True, True, False)
    for module, end in zip((a, b), ends, strict=True):
        assert all(torch.equal(value, end[key]) for key, value in module.state_dict().items())
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1][1])
    assert torch.equal(torch.get_rng_state(), states[2])
    model(torch.randn(3, 2)).sum().backward()  # autograd still works


def test_an_evaluator_that_raises_is_named_and_chained():
    def evaluate(model):
        if weight(model) == 0.25:
            raise ZeroDivisionError("by hand")
        return weight(model)

    with pytest.raises(
        EvaluationError, match=r"split 'val' failed at alpha = 0.25 \(ZeroDivisionError: by hand\)"
    ) as e:
        scan_line(Scalar(), Scalar(0.0), Scalar(1.0), {"val": evaluate}, 5)
    assert isinstance(e.value.__cause__, ZeroDivisionError)
    assert e.value.partial.alphas.tolist() == [0, 0.5, 1]
    assert e.value.partial.summary["val"]["loss"].merged == 0.5


@pytest.mark.parametrize(("error", "raised"), [(ValueError, EvaluationError), (KeyboardInterrupt, KeyboardInterrupt)])
def test_point_57_of_101_fails_and_56_are_left(error, raised, tmp_path):
    seen = []

    def evaluate(model):
        if len(seen) == 56:
            raise error("by hand")
        seen.append(weight(model))
        return seen[-1]

    with pytest.raises(raised) as caught:
        scan_line(Scalar(), Scalar(0.0), Scalar(1.0), evaluate, 101)
    partial = caught.value.partial
    assert not partial.complete
    assert len(partial.alphas) == len(partial.seconds) == 56
    assert partial.values["data"]["loss"] == pytest.approx(partial.alphas)
    partial.to_json(tmp_path / "partial.json")
    assert len(PathResult.from_json(tmp_path / "partial.json").alphas) == 56
    if raised is EvaluationError:
        assert "failed at alpha = 0.55 (ValueError: by hand)" in str(caught.value)  # after 0, 1, 1/2, 0.01 to 0.54


def test_a_scan_interrupted_at_once_has_an_empty_result():
    def evaluate(model):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        scan_line(Scalar(), Scalar(0.0), Scalar(1.0), evaluate)
    assert caught.value.partial.alphas.tolist() == []
    assert caught.value.partial.summary == {}


def test_a_progress_callback_that_raises_keeps_the_point():
    def stop(done, total, values):
        assert values == {"data": {"loss": 0.0}}
        raise RuntimeError(f"{done}/{total}")

    with pytest.raises(RuntimeError, match="1/5") as caught:
        scan_line(Scalar(), Scalar(0.0), Scalar(1.0), weight, 5, progress=stop)
    assert caught.value.partial.alphas.tolist() == [0]


def test_progress_counts_all_points():
    seen = []
    scan_line(Scalar(), Scalar(0.0), Scalar(1.0), weight, 4, progress=lambda *args: seen.append(args[:2]))
    assert seen == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]


def test_nan_is_recorded_and_the_scan_goes_on():
    result = scan_line(Scalar(), Scalar(0.0), Scalar(1.0), lambda m: math.nan if weight(m) == 0.25 else 1.0, 5)
    assert np.isnan(result.values["data"]["loss"]).tolist() == [False, True, False, False, False]
    figures = result.summary["data"]["loss"]
    assert math.isnan(figures.barrier)
    assert figures.gain == 0


def test_correctness_disagreement_ensemble_and_cka():
    a, b = mlp(1), mlp(2)
    inputs, targets = data()
    result = scan_line(mlp(3), a, b, {"test": Evaluator((inputs, targets))}, 3, representation="3")
    a.eval(), b.eval()
    middle = copy.deepcopy(a)
    for m, x, y in zip(middle.parameters(), a.parameters(), b.parameters(), strict=True):
        m.data = (x.data.double() / 2 + y.data.double() / 2).float()
    with torch.no_grad():
        logits = [model(inputs) for model in (a, middle, b)]
        hidden = [model[:4](inputs) for model in (a, b)]
    correct = torch.stack([z.argmax(1) == targets for z in logits]).numpy()
    assert np.array_equal(result.correct["test"], correct)
    assert result.values["test"]["accuracy"].tolist() == correct.mean(1).tolist()
    assert result.disagreement["test"] == (logits[0].argmax(1) != logits[2].argmax(1)).double().mean()
    mixture = (logits[0].softmax(1) + logits[2].softmax(1)) / 2
    assert result.ensemble["test"]["accuracy"] == (mixture.argmax(1) == targets).double().mean()
    assert result.ensemble["test"]["loss"] == pytest.approx(-mixture[range(50), targets].log().mean().item(), rel=1e-5)
    assert result.cka["test"] == pytest.approx(metrics.linear_cka(*hidden), rel=1e-5)
    assert result.choices["splits"]["test"]["cka_samples"] == 50


def test_the_loss_of_an_ensemble_is_told_where_it_compares_with_the_ends():
    def ensemble(**options):
        return scan_line(mlp(3), mlp(1), mlp(2), Evaluator(data(), **options), 3).ensemble["data"]

    both = ensemble()
    smooth = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    assert ensemble(loss=smooth) == ensemble(metrics=["accuracy"]) == {"accuracy": both["accuracy"]}
    assert ensemble(metrics={"loss": cross_entropy, "accuracy": accuracy}) == both


def test_the_ensemble_of_a_model_with_itself_is_the_model_where_targets_are_ignored():
    inputs, targets = data()
    targets[::3] = -100
    model = mlp(1)
    result = scan_line(mlp(3), model, model, Evaluator((inputs, targets)), 3)
    ends = {name: values[0] for name, values in result.values["data"].items()}
    assert result.ensemble["data"] == pytest.approx(ends, rel=1e-6)


def test_outputs_of_dense_predictions_are_not_kept(monkeypatch):
    inputs = torch.randn(40, 2, 6)
    evaluator = Evaluator((inputs, torch.randint(3, (40, 6))), batch_size=8)
    models = [nn.Conv1d(2, 3, 1) for _ in range(3)]
    monkeypatch.setattr(evaluator, "outputs", None)
    result = scan_line(*models, evaluator, 3)
    assert result.values["data"]["accuracy"][0] == evaluator(models[1])["accuracy"]
    assert result.ensemble == result.disagreement == result.correct == {}


def test_functions_see_models_in_evaluation_mode_whatever_ran_before():
    seen = []

    def first(model):
        seen.append([module.training for module in model.modules()])
        model.train()
        return 0.0

    def second(model):
        seen.append([module.training for module in model.modules()])
        return 0.0

    model = mlp(0)
    scan_line(model, mlp(1), mlp(2), {"train": first, "test": second}, 3)
    assert len(seen) == 6
    assert not any(map(any, seen))
    assert model.training


def test_base_gives_the_cosine_of_task_vectors():
    result = scan_line(Scalar(), Scalar(1.0), Scalar(-1.0), weight, 3, base=Scalar(0.5))
    assert result.distances["task_cosine"] == -1
    assert result.distances["task_norm_b"] == 1.5


class TestBatchNorm:
    def test_auto_resets_with_data_at_the_ends_too(self):
        a, b = mlp(1, norm=True), mlp(2, norm=True)
        inputs, targets = data()
        train = data(64, seed=1)[0]
        evaluator = Evaluator((inputs, targets))
        result = scan_line(mlp(3, norm=True), a, b, evaluator, 5, bn_data=train, bn_batch_size=32)
        assert (result.choices["bn"], result.choices["bn_samples"], result.choices["bn_batch_size"]) == (
            "reset",
            64,
            32,
        )
        for index, model in ((0, a), (4, b)):
            norms.reset_statistics(model, train, 32)
            assert result.values["data"]["loss"][index] == pytest.approx(evaluator(model)["loss"], rel=1e-6)
        kept = scan_line(mlp(3, norm=True), mlp(1, norm=True), b, evaluator, 5, bn="keep")
        assert kept.values["data"]["loss"][0] != result.values["data"]["loss"][0]
        for scan in (result, kept):  # gains are against the ends of the same policy
            first, merged, last = scan.values["data"]["loss"][[0, 2, 4]]
            assert scan.summary["data"]["loss"].gain == (first + last) / 2 - merged

    def test_the_cost_of_resetting_is_told_apart(self):
        models = [mlp(seed, norm=True) for seed in range(3)]
        result = scan_line(*models, Evaluator(data()), 5, bn_data=data(64))
        assert result.bn_seconds.shape == (5,)
        assert (result.bn_seconds > 0).all()
        assert (result.bn_seconds < result.seconds).all()
        assert np.array_equal(PathResult.from_json(result.to_json()).bn_seconds, result.bn_seconds)
        assert scan_line(*models, Evaluator(data()), 5, bn="keep").bn_seconds is None

    def test_kept_weights_and_buffers_are_those_of_the_ends_to_the_bit(self):
        a, b, seen = mlp(1, norm=True), mlp(2, norm=True), []
        for model in (a, b):
            model(data()[0] * 3 + 1)  # statistics of its own

        def keep(model):
            seen.append({key: value.clone() for key, value in model.state_dict().items()})
            return 0.0

        scan_line(mlp(3, norm=True), a, b, keep, 5, bn="keep")
        for found, end in zip(seen[:2], (a, b), strict=True):
            assert found.keys() == end.state_dict().keys()
            assert all(torch.equal(found[key], value) for key, value in end.state_dict().items())

    def test_auto_without_data_keeps_and_warns(self):
        with pytest.warns(IsthmusWarning, match="bn_data=") as seen:
            result = scan_line(mlp(3, norm=True), mlp(1, norm=True), mlp(2, norm=True), Evaluator(data()), 3)
        assert result.choices["bn"] == "keep"
        assert [warning.filename for warning in seen] == [__file__]

    def test_keep_does_not_warn(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            models = [mlp(seed, norm=True) for seed in range(3)]
            scan_line(*models, Evaluator(data()), 3, bn="keep")
            scan_line(mlp(0), mlp(1), mlp(2), Evaluator(data()), 3)

    def test_data_may_come_with_targets(self):
        models = [mlp(seed, norm=True) for seed in range(3)]
        one = scan_line(*models, Evaluator(data()), 3, bn="reset", bn_data=data(64))
        two = scan_line(*models, Evaluator(data()), 3, bn="reset", bn_data=data(64)[0])
        assert np.array_equal(one.values["data"]["loss"], two.values["data"]["loss"])

    def test_what_cannot_be_done_is_named(self):
        models = [mlp(seed, norm=True) for seed in range(3)]
        with pytest.raises(InputError, match="pass bn_data="):
            scan_line(*models, Evaluator(data()), bn="reset")
        with pytest.raises(InputError, match="no BatchNorm layer"):
            scan_line(mlp(0), mlp(1), mlp(2), Evaluator(data()), bn="reset", bn_data=data())
        with pytest.raises(InputError, match="bn='rest' is unknown"):
            scan_line(*models, Evaluator(data()), bn="rest")

    def test_counters_may_differ(self):
        models = [mlp(seed, norm=True) for seed in range(3)]
        models[2](data()[0])
        scan_line(*models, Evaluator(data()), 3, bn="keep")


def test_models_that_do_not_fit_are_named(tmp_path):
    a, b = mlp(1), mlp(2)
    other = nn.Sequential(nn.Flatten(), nn.Linear(144, 17), nn.Identity(), nn.ReLU(), nn.Dropout(), nn.Linear(17, 5))
    with pytest.raises(InputError, match=r"^b does not have the tensors of the model: '1.bias' has shape \(17,\)"):
        scan_line(mlp(3), a, other, Evaluator(data()))
    state = {key: value for key, value in a.state_dict().items() if key != "1.bias"}
    with pytest.raises(InputError, match=r"'1.bias' is missing"):
        scan_line(mlp(3), state, b, Evaluator(data()))
    with pytest.raises(InputError, match=r"has dtype torch.float64"):
        scan_line(mlp(3), a, b, Evaluator(data()), base=mlp(0).double())
    with pytest.raises(InputError, match="a is a int"):
        scan_line(mlp(3), 3, b, Evaluator(data()))
    with pytest.raises(FileError):
        scan_line(mlp(3), a, tmp_path / "missing.safetensors", Evaluator(data()))


@pytest.mark.parametrize("alphas", [1, 0, -3, [0.0, math.nan], [math.inf], [[0.0, 1.0]], ["a"], 0.5, None])
def test_bad_alphas_are_named(alphas):
    with pytest.raises(InputError, match="alphas"):
        scan_line(Scalar(), Scalar(), Scalar(), weight, alphas)


def test_bad_evaluations_are_named():
    with pytest.raises(InputError, match="at least one evaluator"):
        scan_line(Scalar(), Scalar(), Scalar(), {})
    with pytest.raises(InputError, match="'6' is no submodule"):
        scan_line(mlp(0), mlp(1), mlp(2), Evaluator(data()), representation="6")
    with pytest.raises(InputError, match="at least 4 samples"):
        scan_line(mlp(0), mlp(1), mlp(2), Evaluator(data(3)), representation="3")
    names = iter("abcd")
    with pytest.raises(EvaluationError, match="got the metrics"):
        scan_line(Scalar(), Scalar(), Scalar(), lambda m: {next(names): 0.0})
