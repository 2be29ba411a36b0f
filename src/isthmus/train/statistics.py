"""Bootstrap statistics of merging gains: intervals of medians, and where along the noise scale the gain peaks.

The unit of evidence is a pair of models. Pairs are resampled with replacement, the same draw at every noise scale
because seeds are shared across scales, and so are the test examples, the same draw for every pair because they are
evaluated on one test set (a two-way bootstrap; Owen, "The pigeonhole bootstrap", Annals of Applied Statistics 1(2),
2007).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isthmus.errors import InputError

LEVEL = 0.95  # of every interval, and one minus the size of the test for an interior peak
RESAMPLES = 4000
MIN_PAIRS = 5  # a bootstrap of fewer pairs has intervals that are far too short
_CHUNK = 1 << 22  # numbers drawn at once: 32 MB
_ROUNDING = 1e-12  # differences of gains below this are rounding


@dataclass(frozen=True)
class CriticalScale:
    """The noise scale with the largest median gain, and whether the data show that it is a peak.

    Attributes:
        noise_scale: S of the largest median gain; None if no noise scale has enough pairs.
        interval: percentile interval of that S over the bootstrap, at level 0.95; None where ``noise_scale`` is.
        p_value: of the hypothesis that no noise scale inside the range has a larger median gain than both of its ends.
        resolved: whether that hypothesis is rejected at 0.05.
        reason: why it is resolved or not, as one clause.
    """

    noise_scale: float | None
    interval: tuple[float, float] | None
    p_value: float | None
    resolved: bool
    reason: str

    @property
    def verdict(self) -> str:
        """One sentence for tables and figures."""
        if not self.resolved or self.noise_scale is None or self.interval is None:
            return f"critical S not resolved: {self.reason}"
        low, high = self.interval
        return f"critical S = {self.noise_scale:.3g}, {LEVEL:.0%} interval {low:.3g} to {high:.3g}: {self.reason}"


def example_gains(correct: ArrayLike) -> NDArray[np.float64]:
    """Each example's part in the gain in accuracy of a pair: merged − (a + b) / 2, of 0 (wrong) and 1 (right).

    Args:
        correct: booleans of shape (3, examples): model a, the merged model, model b.

    Returns:
        Float64 array (examples,) with values in {−1, −½, 0, ½, 1}, whose mean is the gain.
    """
    array = np.asarray(correct)
    if array.ndim != 2 or array.shape[0] != 3 or array.shape[1] == 0 or array.dtype != bool:
        raise InputError(
            "correct must be booleans of shape (3, examples) for a, merged and b, "
            f"got {array.dtype} of shape {array.shape}."
        )
    a, merged, b = np.asarray(correct, dtype=np.float64)
    gain: NDArray[np.float64] = merged - (a + b) / 2
    return gain


def median(values: ArrayLike) -> NDArray[np.float64]:
    """The median along the last axis, of the values that are not NaN; NaN where none is left."""
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=-1)  # NaN sorts last
    count = np.sum(~np.isnan(ordered), axis=-1, keepdims=True)
    low = np.take_along_axis(ordered, np.maximum(count - 1, 0) // 2, axis=-1)
    high = np.take_along_axis(ordered, np.minimum(count // 2, ordered.shape[-1] - 1), axis=-1)
    return np.where(count > 0, (low + high) / 2, np.nan)[..., 0]


def bootstrap_medians(gains: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0) -> NDArray[np.float64]:
    """Resample pairs and examples, and take the median gain over pairs at every noise scale.

    Args:
        gains: (scales, pairs, examples) from ``example_gains``. The same position along ``pairs`` is the same seed at
            every scale. A pair that does not count (untrained, diverged, not there) is NaN throughout.
        resamples: number of bootstrap draws.
        seed: of the draws; the same seed gives the same numbers.

    Returns:
        Float64 array (resamples, scales); NaN where a draw has no pair that counts.
    """
    array = np.asarray(gains, dtype=np.float64)
    if array.ndim != 3 or 0 in array.shape:
        raise InputError(f"gains must have shape (scales, pairs, examples), none of them 0, got {array.shape}.")
    scales, pairs, examples = array.shape
    flat = array.reshape(scales * pairs, examples).T
    rng = np.random.default_rng(seed)
    step = max(1, _CHUNK // examples)
    medians = []
    for start in range(0, resamples, step):
        draws = min(step, resamples - start)
        drawn = rng.integers(examples, size=(draws, examples)) + examples * np.arange(draws)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=draws * examples).reshape(draws, examples)
        pair_gains = (counts / examples @ flat).reshape(draws, scales, pairs)
        chosen = rng.integers(pairs, size=(draws, 1, pairs))
        medians.append(median(np.take_along_axis(pair_gains, chosen, axis=-1)))
    return np.concatenate(medians)


def interval(samples: ArrayLike, level: float = LEVEL) -> tuple[float, float]:
    """The central percentile interval of ``samples``, NaN left out; (NaN, NaN) if nothing is left."""
    array = np.asarray(samples, dtype=np.float64)
    array = array[~np.isnan(array)]
    if array.size == 0:
        return (float("nan"), float("nan"))
    low, high = np.quantile(array, [(1 - level) / 2, (1 + level) / 2])
    return (float(low), float(high))


def critical_scale(noise_scales: ArrayLike, pair_gains: ArrayLike, drawn: ArrayLike) -> CriticalScale:
    """Find the noise scale with the largest median gain, and test whether it is a peak inside the range.

    There is no such peak if one end of the range has a median gain at least as large as every scale inside. For an
    end e and an interior scale k, d_ke is the difference of their median gains, and s_ke its bootstrap standard
    deviation. T_e = max_k d_ke / s_ke is compared with the bootstrap distribution of max_k (d*_ke − d_ke) / s_ke, which
    keeps the chance of calling a flat or monotone curve peaked near or under 0.05 whatever the number of scales (a
    single-step max-t correction; Romano and Wolf, Econometrica 73(4), 2005). Every end must be rejected: the p-value is
    the largest of theirs (an intersection-union test; Berger, Technometrics 24(4), 1982). Taking the argmax alone would
    not do: of eight equal scales, six are inside the range.

    Args:
        noise_scales: S of each scale, shape (scales,), in any order; several may have one S.
        pair_gains: gain of each pair, shape (scales, pairs); NaN for a pair that does not count. Scales with fewer than
            5 pairs that count are left out.
        drawn: (resamples, scales), the ``bootstrap_medians`` of the same pairs.
    """
    s, array, samples = (np.asarray(value, dtype=np.float64) for value in (noise_scales, pair_gains, drawn))
    if s.ndim != 1 or array.ndim != 2 or samples.ndim != 2 or not len(s) == len(array) == samples.shape[1]:
        raise InputError(
            "noise_scales, pair_gains and drawn must have shapes (scales,), (scales, pairs) and (resamples, scales), "
            f"got {s.shape}, {array.shape} and {samples.shape}."
        )
    enough = np.sum(~np.isnan(array), axis=-1) >= MIN_PAIRS
    if not enough.any():
        return CriticalScale(None, None, None, False, f"no noise scale has {MIN_PAIRS} or more pairs that count")
    s, observed, samples = s[enough], median(array[enough]), samples[:, enough]
    samples = samples[~np.isnan(samples).any(axis=1)]

    best = int(np.argmax(observed))
    peaks = s[np.argmax(samples, axis=1)]
    low, high = np.quantile(peaks, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="inverted_cdf")  # S that were measured
    peak, span = float(s[best]), (min(float(low), float(s[best])), max(float(high), float(s[best])))

    smallest, largest = np.flatnonzero(s == s.min()), np.flatnonzero(s == s.max())
    interior = np.flatnonzero((s > s.min()) & (s < s.max()))
    if interior.size == 0:
        reason = f"fewer than three different noise scales have {MIN_PAIRS} or more pairs that count"
        return CriticalScale(peak, span, None, False, reason)
    ends = np.concatenate([smallest, largest])
    difference = observed[interior][:, None] - observed[ends]
    drawn_difference = samples[:, interior][:, :, None] - samples[:, ends][:, None, :]
    spread = drawn_difference.std(axis=0)
    spread = np.maximum(spread, _ROUNDING)  # a difference that never varies decides by its sign
    statistic = (difference / spread).max(axis=0)
    null = ((drawn_difference - difference) / spread).max(axis=1)
    p_value = float(np.max((1 + np.sum(null >= statistic, axis=0)) / (1 + len(null))))
    if p_value <= 1 - LEVEL:
        return CriticalScale(peak, span, p_value, True, f"the gain peaks inside the range (p = {p_value:.2g})")
    if peak in (s.min(), s.max()):
        reason = f"the largest median gain is at the {'smallest' if peak == s.min() else 'largest'} S"
    else:
        reason = f"the gain at S = {peak:.3g} is not clearly above both ends of the range (p = {p_value:.2g})"
    return CriticalScale(peak, span, p_value, False, reason)
