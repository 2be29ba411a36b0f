"""Streaming moments against those of all samples at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.match.moments import CrossMoments, Moments

sizes = st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(sum)


@settings(deadline=None)
@given(sizes, st.integers(0, 10**6))
def test_batches_of_any_size_give_the_moments_of_all_samples(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), 3, generator=generator, dtype=torch.float64)
    y = torch.randn(sum(sizes), 2, generator=generator, dtype=torch.float64) + x[:, :1]
    moments = CrossMoments(3, 2)
    for first, second in zip(x.split(sizes), y.split(sizes), strict=True):
        moments.update(first, second)
    centred = x - x.mean(0), y - y.mean(0)
    assert moments.first.count == len(x)
    torch.testing.assert_close(moments.first.mean, x.mean(0))
    torch.testing.assert_close(moments.second.variance, y.var(0, correction=0))
    torch.testing.assert_close(moments.covariance, centred[0].T @ centred[1] / len(x))


def test_hand_worked_values():
    moments = CrossMoments(1, 1)
    moments.update(torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [0.0]]))
    moments.update(torch.tensor([[8.0]]), torch.tensor([[10.0]]))
    assert moments.first.mean.item() == pytest.approx(4)
    assert moments.first.variance.item() == pytest.approx(26 / 3)  # deviations -3, -1, 4
    assert moments.first.deviation.item() == pytest.approx((26 / 3) ** 0.5)
    assert moments.covariance.item() == pytest.approx(34 / 3)  # -3 · -2 + -1 · -4 + 4 · 6
    assert moments.correlation.item() == pytest.approx(34 / (26 * 56) ** 0.5)


def test_large_means_do_not_cancel():
    """In float64, E[xx] − E[x]² of these loses every digit; the mean itself is exact to 1e-7 deviations."""
    x = torch.tensor([[1e9 + 1], [1e9 - 1]], dtype=torch.float64).repeat(50, 1)
    moments = Moments(1)
    for batch in x.split(3):
        moments.update(batch)
    assert moments.variance.item() == pytest.approx(1, rel=1e-6)


def test_half_precision_samples_are_added_in_float64():
    moments = Moments(1)
    for _ in range(3):
        moments.update(torch.full((4096, 1), 3.0, dtype=torch.float16))
    assert moments.mean.dtype == torch.float64
    assert (moments.mean.item(), moments.variance.item()) == (3.0, 0.0)


def test_dead_units_correlate_with_nothing():
    moments = CrossMoments(2, 1)
    moments.update(torch.tensor([[1.0, 5.0], [2.0, 5.0]]), torch.tensor([[0.0], [1.0]]))
    assert moments.correlation.tolist() == [[pytest.approx(1.0)], [0.0]]


def test_no_samples_have_no_moments():
    moments = CrossMoments(2, 3)
    assert moments.first.variance.isnan().all()
    assert moments.covariance.shape == (2, 3)
    assert moments.covariance.isnan().all()


def test_batches_are_not_modified():
    batch = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    copy = batch.clone()
    moments = Moments(2)
    moments.update(batch)
    moments.update(batch)
    assert torch.equal(batch, copy)
