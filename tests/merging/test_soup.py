"""Greedy soups, with scores that were worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from isthmus.errors import EvaluationError, InputError
from isthmus.flat import FlatState
from isthmus.io import save_state
from isthmus.merging.merge import merge
from isthmus.merging.soup import SoupReport, greedy_soup


def states(*values):
    return [{"w": torch.tensor([float(value)], dtype=torch.float64)} for value in values]


def nearness(target):
    """A score that falls with the distance of the weight from ``target``."""
    return lambda state: -abs(state["w"].item() - target)


def test_by_hand():
    # scores −3, −1, −2, −9 by |w − 4|: order 5, 2, 1, 13. (5 + 2)/2 = 3.5 scores −.5: kept. (5 + 2 + 1)/3 = 2⅔ scores
    # −1⅓: dropped. (5 + 2 + 13)/3 = 6⅔ scores −2⅔: dropped.
    soup, report = greedy_soup(states(1, 5, 2, 13), nearness(4), return_report=True)
    assert soup["w"].tolist() == [3.5]
    assert report == SoupReport(
        scores=(-3.0, -1.0, -2.0, -9.0),
        order=(1, 2, 0, 3),
        trials=(-1.0, -0.5, pytest.approx(-4 / 3), pytest.approx(-8 / 3)),
        kept=(1, 2),
        maximize=True,
    )
    assert report.score == -0.5


def test_losses_are_minimised():
    soup, report = greedy_soup(
        states(1, 5, 2, 13), lambda state: abs(state["w"].item() - 4), maximize=False, return_report=True
    )
    assert soup["w"].tolist() == [3.5]
    assert (report.order, report.kept, report.score, report.maximize) == ((1, 2, 0, 3), (1, 2), 0.5, False)


def test_equal_scores_are_kept_and_keep_their_order():
    soup, report = greedy_soup(states(3, 1, 2), lambda state: 1, return_report=True)
    assert (report.order, report.kept) == ((0, 1, 2), (0, 1, 2))
    assert soup["w"].tolist() == [2]


def test_one_model():
    soup, report = greedy_soup(states(3), nearness(0), return_report=True)
    assert soup["w"].tolist() == [3]
    assert report == SoupReport((-3.0,), (0,), (-3.0,), (0,), True)


def test_each_model_is_scored_once_and_each_average_once():
    seen = []

    def evaluate(state):
        seen.append(state["w"].item())
        return -abs(seen[-1] - 4)

    greedy_soup(states(1, 5, 2), evaluate)
    assert seen == [1, 5, 2, 3.5, pytest.approx(8 / 3)]


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=6), st.floats(-100, 100))
def test_soup_is_the_uniform_average_of_what_it_keeps_and_no_worse_than_the_best(values, target):
    models = states(*values)
    soup, report = greedy_soup(models, nearness(target), return_report=True)
    uniform = merge([models[index] for index in sorted(report.kept)], method="linear")
    assert torch.equal(soup["w"], uniform["w"])
    assert nearness(target)(soup) == report.score >= max(report.scores)
    assert sorted(report.order) == list(range(len(values)))
    assert [report.scores[index] for index in report.order] == sorted(report.scores, reverse=True)


def test_nothing_accumulates():
    # twenty equal float16 models: their average is that model to the bit, however many are added
    model = {"w": torch.linspace(-1, 1, 77).half()}
    assert torch.equal(greedy_soup([model] * 20, lambda state: 0)["w"], model["w"])


def net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))


def test_sources_of_every_kind(tmp_path):
    modules = [net(seed) for seed in range(4)]
    save_state(tmp_path / "model.safetensors", modules[3].state_dict())
    prefixed = {f"module.{key}": value for key, value in modules[1].state_dict().items()}
    sources = [modules[0], prefixed, FlatState.from_module(modules[2]), tmp_path / "model.safetensors"]
    soup = greedy_soup(sources, lambda state: 0)
    assert soup.keys() == modules[0].state_dict().keys()
    mean = sum(module[0].weight.detach().double() for module in modules) / 4
    torch.testing.assert_close(soup["0.weight"].double(), mean)
    assert soup["0.weight"].data_ptr() != modules[0][0].weight.data_ptr()


def test_with_a_module():
    models = [net(seed) for seed in range(3)]
    x, y = torch.randn(50, 3), torch.randint(2, (50,))
    target = net(seed=9).train()
    target[1].eval()
    target[0].weight.grad = torch.ones(4, 3)
    before = {key: value.clone() for key, value in target.state_dict().items()}
    pointers = [parameter.data_ptr() for parameter in target.parameters()]
    modes = [layer.training for layer in target.modules()]
    random = torch.get_rng_state()

    def evaluate(module):
        assert module is target
        assert module[0].weight.grad is None
        module.eval()
        torch.rand(1)
        with torch.no_grad():
            return nn.functional.cross_entropy(module(x), y)

    def evaluate_state(state):
        other = net()
        other.load_state_dict(state)
        with torch.no_grad():
            return nn.functional.cross_entropy(other.eval()(x), y).item()

    soup, report = greedy_soup(models, evaluate, model=target, maximize=False, return_report=True)
    expected, expected_report = greedy_soup(models, evaluate_state, maximize=False, return_report=True)
    assert report == expected_report
    assert all(torch.equal(soup[key], value) for key, value in expected.items())
    assert all(torch.equal(value, before[key]) for key, value in target.state_dict().items())
    assert [parameter.data_ptr() for parameter in target.parameters()] == pointers
    assert [layer.training for layer in target.modules()] == modes
    assert torch.equal(target[0].weight.grad, torch.ones(4, 3))
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_module_comes_back_after_an_error(error):
    target = net(seed=9)
    before = {key: value.clone() for key, value in target.state_dict().items()}
    random = torch.get_rng_state()
    calls = []

    def evaluate(module):
        module.eval()
        calls.append(torch.rand(1))
        if len(calls) == 3:
            raise error
        return 0

    with pytest.raises(error):
        greedy_soup([net(0), net(1)], evaluate, model=target)
    assert len(calls) == 3
    assert all(torch.equal(value, before[key]) for key, value in target.state_dict().items())
    assert all(layer.training for layer in target.modules())
    assert torch.equal(torch.get_rng_state(), random)


def test_statistics_that_an_evaluator_changes_do_not_enter_the_soup():
    models = [net(0), net(1)]

    def evaluate(module):
        module[1].running_mean.fill_(7)
        return 0

    soup = greedy_soup(models, evaluate, model=net(2))
    assert soup["1.running_mean"].tolist() == [0, 0, 0, 0]
    assert models[0][1].running_mean.tolist() == [0, 0, 0, 0]


def test_models_are_not_modified_by_an_evaluator_that_writes_into_its_state_dict():
    models = states(1, 2)

    def evaluate(state):
        state["w"].fill_(math.pi)
        return 0

    assert greedy_soup(models, evaluate)["w"].tolist() == [1.5]
    assert [model["w"].item() for model in models] == [1, 2]


@pytest.mark.parametrize(
    ("scores", "name"),
    [
        ([1, math.nan, 0], "model 2"),
        ([3, 1, 2, math.nan, 0], "the average of models 1, 3"),  # the third model comes second in order
        ([3, 1, 2, 3, math.nan], "the average of models 1, 2, 3"),
    ],
)
def test_nan_names_the_model(scores, name):
    values = iter(scores)  # of three models, then of two averages
    with pytest.raises(EvaluationError, match=f"NaN for {name};"):
        greedy_soup(states(0, 0, 0), lambda state: next(values))


def test_infinite_scores_are_compared():
    scores = {1: -math.inf, 2: 0.5}
    soup, report = greedy_soup(states(1, 2), lambda state: scores.get(state["w"].item(), -1), return_report=True)
    assert soup["w"].tolist() == [2]
    assert report.order == (1, 0)


@pytest.mark.parametrize(
    ("models", "evaluate", "message"),
    [
        ([], lambda state: 0, "got no models"),
        (states(1, 2), lambda state: {"accuracy": 1}, "evaluate returned a dict for model 1, expected a number"),
        (states(1, 2), lambda state: torch.ones(2), "evaluate returned a Tensor for model 1"),
        (states(1, 2), lambda state: None, "evaluate returned a NoneType for model 1"),
        ([{"w": torch.ones(2)}, {"w": torch.ones(3)}], pytest.fail, r"'w' has shape \(3,\) in model 2"),
        ([{"w": torch.ones(2)}, {"v": torch.ones(2)}], pytest.fail, "model 2 lacks 'w'"),
        ([{"w": torch.ones(2)}, 3], pytest.fail, "model 2 is a int"),
    ],
)
def test_bad_input(models, evaluate, message):
    with pytest.raises(InputError, match=message):
        greedy_soup(models, evaluate)


def test_models_that_do_not_fit_the_module_are_found_before_any_evaluation():
    with pytest.raises(InputError, match="the module Linear"):
        greedy_soup(states(1, 2), pytest.fail, model=nn.Linear(2, 2))
