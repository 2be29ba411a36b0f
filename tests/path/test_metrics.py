"""Figures of merit of a path, against values worked out by hand or by their definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.path import Evaluator, metrics

ALPHAS = [0.0, 0.25, 0.5, 0.75, 1.0]
LOSSES = [1.0, 4.0, 3.0, 2.5, 2.0]  # mean of the ends 1.5, chord 1, 1.25, 1.5, 1.75, 2
ENDS = (1.0, 2.0)

finite = st.floats(-1e3, 1e3)


def test_barriers_by_hand():
    assert metrics.barrier(ALPHAS, LOSSES, ENDS) == (2.5, 0.25)
    assert metrics.linear_barrier(ALPHAS, LOSSES, ENDS) == (2.75, 0.25)


def test_barriers_of_a_score_turn_round():
    scores = [0.5, 0.25, 0.75, 1.0, 1.0]
    assert metrics.barrier(ALPHAS, scores, (0.5, 1.0), higher_is_better=True) == (0.5, 0.25)
    assert metrics.linear_barrier(ALPHAS, scores, (0.5, 1.0), higher_is_better=True) == (0.375, 0.25)


def test_straight_descent_has_a_barrier_but_no_linear_barrier():
    straight = [1.0, 1.25, 1.5, 1.75, 2.0]
    assert metrics.barrier(ALPHAS, straight, ENDS) == (0.5, 1.0)
    assert metrics.linear_barrier(ALPHAS, straight, ENDS) == (0.0, 0.0)


@given(st.lists(finite, min_size=3, max_size=20))
def test_linear_barrier_is_never_negative(values):
    alphas = np.linspace(0, 1, len(values))
    assert metrics.linear_barrier(alphas, values, (values[0], values[-1])).height >= 0


@given(st.lists(finite, min_size=3, max_size=20))
def test_a_score_is_a_negated_loss(values):
    alphas = np.linspace(0, 1, len(values))
    loss, score = values, [-value for value in values]
    ends = (values[0], values[-1])
    for function in (metrics.barrier, metrics.linear_barrier):
        assert function(alphas, loss, ends) == function(alphas, score, (-ends[0], -ends[1]), higher_is_better=True)
    for function in (metrics.gain, metrics.gain_over_better):
        turned = function(score[1], (-ends[0], -ends[1]), higher_is_better=True)
        assert function(loss[1], ends) == turned


def test_no_barrier_is_a_positive_zero():
    assert math.copysign(1, metrics.linear_barrier(ALPHAS, [0.5] * 5, (0.5, 0.5), higher_is_better=True).height) == 1


def test_nan_is_not_hidden():
    losses = [1.0, math.nan, 3.0, 2.5, 2.0]
    assert all(math.isnan(part) for part in metrics.barrier(ALPHAS, losses, ENDS))
    assert all(math.isnan(part) for part in metrics.linear_barrier(ALPHAS, losses, ENDS))
    assert math.isnan(metrics.integral(losses, ALPHAS))
    assert math.isnan(metrics.gain_over_better(0.0, (math.nan, 1.0)))
    assert math.isnan(metrics.gain_over_better(0.0, (1.0, math.nan), higher_is_better=True))


def test_gains_by_hand():
    assert metrics.gain(1.25, ENDS) == 0.25
    assert metrics.gain_over_better(1.25, ENDS) == -0.25
    assert metrics.gain(0.75, (0.5, 0.875), higher_is_better=True) == 0.0625
    assert metrics.gain_over_better(0.75, (0.5, 0.875), higher_is_better=True) == -0.125


def test_integral_weights_by_length():
    assert metrics.integral([0.0, 1.0, 1.0], [0.0, 1.0, 4.0]) == (0.5 + 3.0) / 4
    assert metrics.integral([2.0, 2.0, 2.0], [0.0, 0.1, 1.0]) == pytest.approx(2.0)


def test_distances_by_hand():
    a = [torch.tensor([3.0, 0.0]), torch.tensor([[0.0]])]
    b = [torch.tensor([0.0, 4.0]), torch.tensor([[0.0]])]
    found = metrics.distances(a, b)
    assert found == {"l2": 5.0, "relative": pytest.approx(5 / math.sqrt(12)), "cosine": 0.0}
    base = [torch.tensor([0.0, 1.0]), torch.tensor([[0.0]])]  # task vectors (3, -1) and (0, 3)
    found = metrics.distances(a, b, base)
    assert found["task_norm_a"] == pytest.approx(math.sqrt(10))
    assert found["task_norm_b"] == 3
    assert found["task_cosine"] == pytest.approx(-1 / math.sqrt(10))


def test_complex_elements_count_in_both_parts():
    a, b = [torch.tensor([3j, 1.0])], [torch.tensor([4.0, 1 + 1j])]  # (0, 3, 1, 0) and (4, 0, 1, 1)
    found = metrics.distances(a, b, [torch.zeros(2, dtype=torch.complex64)])
    assert found["l2"] == pytest.approx(math.sqrt(16 + 9 + 1))
    assert (found["task_norm_a"], found["task_norm_b"]) == pytest.approx((math.sqrt(10), math.sqrt(18)))
    assert found["cosine"] == found["task_cosine"] == pytest.approx(1 / math.sqrt(180))
    assert found["relative"] == pytest.approx(math.sqrt(26) / 180**0.25)


def test_distances_from_a_model_of_zeros_have_no_direction():
    found = metrics.distances([torch.zeros(2)], [torch.ones(2)])
    assert found["l2"] == pytest.approx(math.sqrt(2))
    assert math.isnan(found["cosine"])
    assert math.isnan(found["relative"])


def test_disagreement():
    a = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    b = torch.tensor([[3.0, 2], [1, 2], [0, 1], [0, 9]])
    assert metrics.disagreement(a, b) == 0.25


def test_ensemble_averages_probabilities_not_logits():
    half, sure = torch.log(torch.tensor([[0.5, 0.5]])), torch.log(torch.tensor([[0.9, 0.1]]))
    found = metrics.ensemble([half, sure + 7], torch.tensor([0]))  # p = (0.7, 0.3)
    assert found["loss"] == pytest.approx(-math.log(0.7), rel=1e-6)
    assert found["accuracy"] == 1
    assert metrics.ensemble([half, sure], torch.tensor([1]))["accuracy"] == 0


def test_ensemble_is_averaged_like_an_evaluation():
    torch.manual_seed(0)
    outputs, targets = torch.randn(6, 3), torch.tensor([0, 1, -100, 2, -100, 1])
    outputs[3, 0] = math.nan
    one = metrics.ensemble([outputs, outputs], targets)  # of two equal models, which are their ensemble
    assert one == pytest.approx(Evaluator((outputs, targets))(torch.nn.Identity()), nan_ok=True)
    outputs[3, 0] = 0.0
    one = metrics.ensemble([outputs, outputs], targets)
    assert one == pytest.approx(Evaluator((outputs, targets))(torch.nn.Identity()))


def test_ensemble_of_impossible_logits_stays_finite():
    logits = torch.tensor([[1000.0, 0.0]])
    assert metrics.ensemble([logits, -logits], torch.tensor([1]))["loss"] == pytest.approx(math.log(2))


def cka_by_definition(x: torch.Tensor, y: torch.Tensor) -> float:
    """Unbiased HSIC written out over distinct index tuples of the centred-nowhere kernels, as matrices."""

    def hsic(k: torch.Tensor, l: torch.Tensor) -> torch.Tensor:  # noqa: E741
        n = len(k)
        k, l = k - k.diag().diag(), l - l.diag().diag()  # noqa: E741
        one = torch.ones(n, dtype=k.dtype)
        correction = (one @ k @ one) * (one @ l @ one) / ((n - 1) * (n - 2)) - 2 / (n - 2) * (one @ k @ l @ one)
        return ((k @ l).trace() + correction) / (n * (n - 3))

    k, l = x @ x.T, y @ y.T  # noqa: E741
    return float(hsic(k, l) / (hsic(k, k) * hsic(l, l)).sqrt())


@pytest.mark.parametrize(("n", "p", "q"), [(12, 5, 3), (6, 9, 20)])  # through X'Y, and through XX' and YY'
def test_cka_is_its_definition(n, p, q):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, p, generator=generator, dtype=torch.float64) + 3
    y = torch.randn(n, q, generator=generator, dtype=torch.float64) + x[:, :1]
    assert metrics.linear_cka(x, y) == pytest.approx(cka_by_definition(x, y), rel=1e-9)


def test_cka_ignores_rotation_scale_and_shift():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30, 4, generator=generator)
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=generator))[0]
    assert metrics.linear_cka(x, 3 * x @ rotation + 5) == pytest.approx(1, abs=1e-6)


def test_cka_of_unrelated_wide_representations_is_near_zero():
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(2, 64, 2000, generator=generator)
    assert abs(metrics.linear_cka(x, y)) < 0.05  # the biased estimator gives 0.97


def test_cka_of_a_constant_is_nan():
    assert math.isnan(metrics.linear_cka(torch.ones(8, 3), torch.arange(8.0)[:, None]))
