import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from isthmus.errors import InputError
from isthmus.train import statistics


def test_example_gains_by_hand():
    correct = np.array([[1, 1, 0, 0, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 1]], dtype=bool)
    assert statistics.example_gains(correct).tolist() == [0.0, 0.5, 1.0, 0.0, -1.0]


@pytest.mark.parametrize("bad", [np.zeros((2, 5), bool), np.zeros((3, 5)), np.zeros((3, 0), bool), np.zeros(3, bool)])
def test_example_gains_refuses_other_shapes_and_dtypes(bad):
    with pytest.raises(InputError, match="booleans of shape"):
        statistics.example_gains(bad)


@given(hnp.arrays(bool, st.tuples(st.just(3), st.integers(1, 40))))
def test_mean_of_example_gains_is_the_gain(correct):
    a, merged, b = correct.mean(axis=1)
    assert statistics.example_gains(correct).mean() == pytest.approx(merged - (a + b) / 2, abs=1e-12)


@given(hnp.arrays(np.float64, hnp.array_shapes(max_dims=3), elements=st.one_of(st.just(np.nan), st.floats(-1, 1))))
def test_median_leaves_nan_out(values):
    expected = np.full(values.shape[:-1], np.nan)
    for index in itertools.product(*map(range, values.shape[:-1])):
        kept = values[index][~np.isnan(values[index])]
        if kept.size:
            expected[index] = np.median(kept)
    np.testing.assert_array_equal(statistics.median(values), expected)


def test_interval_by_hand_and_without_samples():
    samples = np.append(np.arange(101.0), np.nan)
    assert statistics.interval(samples) == pytest.approx((2.5, 97.5))
    assert statistics.interval(samples, 0.5) == pytest.approx((25.0, 75.0))
    assert np.isnan(statistics.interval([np.nan])).all()


def test_bootstrap_of_constant_gains_is_constant():
    gains = np.full((2, 3, 7), 0.25)
    gains[1] = -0.5
    drawn = statistics.bootstrap_medians(gains, resamples=50)
    assert drawn.shape == (50, 2)
    np.testing.assert_allclose(drawn, np.tile([0.25, -0.5], (50, 1)), rtol=1e-12)


def test_bootstrap_is_seeded_and_every_chunk_is_a_new_draw(monkeypatch):
    gains = np.random.default_rng(0).integers(-1, 2, size=(2, 6, 30)).astype(float)
    first = statistics.bootstrap_medians(gains, resamples=40, seed=3)
    np.testing.assert_array_equal(first, statistics.bootstrap_medians(gains, resamples=40, seed=3))
    assert not np.array_equal(first, statistics.bootstrap_medians(gains, resamples=40, seed=4))
    monkeypatch.setattr(statistics, "_CHUNK", 30 * 7)
    chunked = statistics.bootstrap_medians(gains, resamples=40, seed=3)
    assert chunked.shape == (40, 2)
    assert not np.array_equal(chunked[:7], chunked[7:14])


def test_bootstrap_spread_has_both_sources():
    """One pair: the median is that pair's gain, and its spread is that of a mean of n examples."""
    rng = np.random.default_rng(1)
    examples = rng.choice([-1.0, 0.0, 1.0], size=(1, 1, 400))
    drawn = statistics.bootstrap_medians(examples, resamples=4000)[:, 0]
    assert drawn.mean() == pytest.approx(examples.mean(), abs=4 * examples.std() / 20 / 63)
    assert drawn.std() == pytest.approx(examples.std() / 20, rel=0.05)
    # Pairs that differ, examples that do not: the spread is that of a median of resampled pairs, here of {0, 0.5, 1}.
    # It is 0 or 1 with probability 7/27 each (two or three draws of that value), else 0.5.
    pairs = np.broadcast_to(np.array([0.0, 0.5, 1.0])[None, :, None], (1, 3, 5))
    drawn = statistics.bootstrap_medians(pairs, resamples=27000)[:, 0]
    shares = [np.mean(np.isclose(drawn, value)) for value in (0.0, 0.5, 1.0)]
    assert shares == pytest.approx([7 / 27, 13 / 27, 7 / 27], abs=0.012)


def test_draws_are_shared_across_scales():
    gains = np.random.default_rng(2).choice([-1.0, 0.0, 1.0], size=(1, 8, 50))
    drawn = statistics.bootstrap_medians(np.concatenate([gains, gains + 0.1]), resamples=100)
    np.testing.assert_allclose(drawn[:, 1] - drawn[:, 0], 0.1, atol=1e-12)


def test_missing_pairs_are_left_out_of_the_bootstrap():
    gains = np.full((1, 4, 3), 0.5)
    gains[0, 1:] = np.nan
    drawn = statistics.bootstrap_medians(gains, resamples=400)[:, 0]
    kept = drawn[~np.isnan(drawn)]
    assert np.allclose(kept, 0.5)
    assert np.isnan(drawn).mean() == pytest.approx(0.75**4, abs=0.08)


@pytest.mark.parametrize("shape", [(2, 3), (0, 3, 4), (2, 3, 0)])
def test_bootstrap_refuses_other_shapes(shape):
    with pytest.raises(InputError, match="scales, pairs, examples"):
        statistics.bootstrap_medians(np.zeros(shape))


def simulate(means, *, spread, seed, pairs=10, examples=300):
    """Gains per example of pairs whose own gains are drawn around ``means``."""
    rng = np.random.default_rng(seed)
    pair_means = np.asarray(means)[:, None] + rng.normal(0, spread, size=(len(means), pairs))
    up = np.clip(0.1 + pair_means / 2, 0, 1)[..., None]
    down = np.clip(0.1 - pair_means / 2, 0, 1)[..., None]
    draw = rng.random((len(means), pairs, examples))
    return (draw < up).astype(float) - (draw > 1 - down)


def judge(noise_scales, gains, resamples=1000):
    drawn = statistics.bootstrap_medians(gains, resamples=resamples)
    return statistics.critical_scale(noise_scales, gains.mean(axis=-1), drawn)


def test_a_clear_peak_is_resolved():
    gains = simulate([0.0, 0.02, 0.12, 0.02, -0.1], spread=0.01, seed=0)
    found = judge([1, 2, 3, 4, 5], gains)
    assert found.resolved
    assert found.noise_scale == 3
    assert found.interval == (3, 3)
    assert found.p_value < 0.01
    assert "critical S = 3" in found.verdict


def test_order_of_the_scales_does_not_matter():
    gains = simulate([0.0, 0.02, 0.12, 0.02, -0.1], spread=0.01, seed=0)
    order = [3, 0, 4, 2, 1]
    found = judge(np.array([1, 2, 3, 4, 5])[order], gains[order])
    assert (found.noise_scale, found.resolved) == (3, True)


@pytest.mark.parametrize(("means", "end"), [([0.0, 0.05, 0.1, 0.2], "largest"), ([0.2, 0.1, 0.05, 0.0], "smallest")])
def test_a_monotone_curve_is_not_resolved(means, end):
    found = judge([1, 2, 3, 4], simulate(means, spread=0.01, seed=1))
    assert not found.resolved
    assert found.noise_scale == {"largest": 4, "smallest": 1}[end]
    assert f"at the {end} S" in found.verdict
    assert found.verdict.startswith("critical S not resolved")


def test_flat_curves_are_seldom_called_peaked():
    """Of 60 flat curves of 8 scales, a test of size 0.05 may reject 3; 8 or more would be a chance under 1 %."""
    rejected = sum(
        judge(np.arange(8), simulate([0.02] * 8, spread=0.02, seed=s, examples=100), resamples=300).resolved
        for s in range(60)
    )
    assert rejected <= 7


def test_equal_pairs_at_every_scale_are_not_resolved():
    found = judge([1, 2, 3], np.full((3, 5, 4), 0.5))
    assert not found.resolved
    assert found.p_value == 1.0


def test_gains_without_any_spread_decide_by_sign():
    gains = np.broadcast_to(np.array([0.0, 0.5, 0.0])[:, None, None], (3, 5, 4))
    assert judge([1, 2, 3], gains).resolved


def test_too_few_pairs_or_scales_are_not_resolved():
    gains = simulate([0.0, 0.2, 0.0], spread=0.001, seed=0)
    few = judge([1, 2, 3], gains[:, :4])
    assert (few.resolved, few.noise_scale, few.interval) == (False, None, None)
    assert "5 or more pairs" in few.verdict
    gains[0, 4:] = np.nan  # the smallest S keeps four pairs
    two = judge([1, 2, 3], gains)
    assert (two.resolved, two.noise_scale, two.p_value) == (False, 2, None)
    assert "fewer than three" in two.verdict


def test_critical_scale_refuses_shapes_that_do_not_fit():
    with pytest.raises(InputError, match="noise_scales, pair_gains and drawn"):
        statistics.critical_scale([1, 2], np.zeros((3, 5)), np.zeros((10, 3)))
