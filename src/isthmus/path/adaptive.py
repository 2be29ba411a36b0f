r"""Points of a scan that are chosen by what was found: more of them where the curve may still hold something.

Between two neighbouring points :math:`x_i < x_{i+1}`, :math:`h` apart, a curve is taken to be the cubic :math:`p`
through the nearest four points, give or take

.. math::

    e = \max\left( 14\, \lvert f[x_{i-2}, \dots, x_{i+2}] \rvert \max_x \prod_{j=i-1}^{i+2} \lvert x - x_j \rvert, \;
        \lvert f[x_{i-1}, x_i, x_{i+1}] - f[x_i, x_{i+1}, x_{i+2}] \rvert\, \frac{h^2}{4} \right),

the larger of the first term for this interval's five points and for those one further (inwards, at the ends). The
first term is the error of a cubic through four of five points; on equal steps, 14 makes it twice the error with which
the four neighbours of a point predict that point. The second is the distance between the parabolas through three of the
four points, which notices corners. Both are estimates: what lies between two points and leaves no trace at any cannot
be seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import InputError

from .line_walk import MIDPOINT, A, B
from .points import equally_spaced
from .progress import Values

Array = NDArray[np.float64]

COARSE_POINTS = 17  # equal steps at first; a bump two of them wide is seen by a point at half its height or more
SAFETY = 14.0
MIN_STEP = 2.0**-20  # intervals are not divided below this, where float32 weights hardly differ
INNER = np.linspace(0, 1, 17)[1:-1]  # where an interval's cubic is looked at
CHOSEN = slice(2, -2)  # of these, what may become a point: very unequal neighbours would blow up the differences
AIMS = ("barrier", "curve")


class Refinement(Iterator[float]):
    """The points of an adaptive scan, each chosen when the values at those before are known.

    After a coarse grid, the next point lies in the interval that can change the result most, until none can change it
    by more than the tolerance: about where the interval's cubic is highest ("barrier"), or in its middle ("curve").
    """

    def __init__(
        self,
        found: Mapping[float, Values],
        *,
        tol: float,
        aim: str,
        metrics: Sequence[str],
        higher_is_better: Sequence[str],
        max_points: int,
    ) -> None:
        """Begin a scan; arguments as in ``scan_line``.

        Args:
            found: point -> split -> metric -> value, to which the scan adds every point before it asks for the next.
            tol: see ``scan_line``.
            aim: what ``scan_line`` calls ``refine``.
            metrics: what it calls ``refine_by``.
            higher_is_better: the metrics that are scores.
            max_points: see ``scan_line``.

        Raises:
            InputError: an argument is out of range.
        """
        if not (isinstance(tol, int | float) and 0 < tol < math.inf):
            raise InputError(f"tol={tol!r}, expected a positive number, in units of the metrics that are refined by.")
        if aim not in AIMS:
            raise InputError(f"refine={aim!r} is unknown; it is 'barrier' or 'curve'.")
        if max_points < COARSE_POINTS:
            raise InputError(f"max_points={max_points}, but an adaptive scan begins with {COARSE_POINTS} points.")
        if isinstance(metrics, str) or not metrics:
            raise InputError(f"refine_by={metrics!r}, expected a sequence of at least one metric's name.")
        self.tol = tol
        self._found = found
        self._aim = aim
        self._metrics = tuple(metrics)
        self._scores = frozenset(higher_is_better)
        self._max_points = max_points
        grid: list[float] = equally_spaced(A, B, COARSE_POINTS).tolist()
        self._coarse = [*(alpha for alpha in reversed(grid) if alpha not in (A, MIDPOINT, B)), MIDPOINT, B, A]
        self._open = 0

    def __next__(self) -> float:
        if self._coarse:
            return self._coarse.pop()
        alphas, curves = self._curves()
        gaps, where = gaps_between(alphas, curves, self._aim)
        gaps[:, np.diff(alphas) <= MIN_STEP] = 0
        self._open = int((gaps > self.tol).any(axis=0).sum())
        if not self._open or len(alphas) >= self._max_points:
            raise StopIteration
        curve, interval = np.unravel_index(gaps.argmax(), gaps.shape)
        return float(where[curve, interval])

    def __length_hint__(self) -> int:
        """How many points are known to follow: one for each interval that is not resolved."""
        return len(self._coarse) or max(0, self._open - 1)

    @property
    def bound(self) -> float:
        """By how much the result may change at most, as estimated from the points that are there; NaN before that."""
        if not all(alpha in self._found for alpha in (A, MIDPOINT, B)) or len(self._found) < COARSE_POINTS:
            return math.nan
        gaps, _ = gaps_between(*self._curves(), self._aim)
        return float(gaps.max(initial=0.0)) if len(gaps) else math.nan

    def choices(self) -> dict[str, Any]:
        """What was asked for and what came of it, as results keep it."""
        return {
            "tol": self.tol,
            "refine": self._aim,
            "refine_by": list(self._metrics),
            "coarse_points": COARSE_POINTS,
            "max_points": self._max_points,
            "points": len(self._found),
            "bound": self.bound,
        }

    def _curves(self) -> tuple[Array, Array]:
        """The points, and one row for each curve whose values are finite; of losses, negative where they are scores."""
        alphas = sorted(self._found)
        rows = [
            [(-1 if name in self._scores else 1) * self._found[alpha][split][name] for alpha in alphas]
            for split, table in self._found[A].items()
            for name in self._metrics
            if name in table
        ]
        if not rows:
            known = list(dict.fromkeys(name for table in self._found[A].values() for name in table))
            raise InputError(
                f"refine_by={list(self._metrics)}, but no split has such a metric; there are {', '.join(known)}."
            )
        curves = np.array(rows, dtype=np.float64)
        return np.array(alphas), curves[np.isfinite(curves).all(axis=1)]


def gaps_between(alphas: Array, curves: Array, aim: str) -> tuple[Array, Array]:
    r"""How much each interval between neighbouring points can change the result, and where a point would tell most.

    With the cubic :math:`p` and its error :math:`e` of the module's docstring, that is for "barrier"
    :math:`\max_x p(x) + e - \max_k f(x_k)`, of the curve and of the curve above the chord between its ends; for
    "curve" :math:`\max_x \lvert p(x) - l(x) \rvert + e`, where :math:`l` is the straight line between the points.

    Args:
        alphas: the points, increasing, shape (points,), at least 5.
        curves: values at the points, of which less is better, shape (curves, points).
        aim: "barrier" or "curve".

    Returns:
        Changes and points, both of shape (curves, points - 1), or (2 curves, points - 1) for "barrier".
    """
    inside, cubic, error = _interpolated(alphas, curves)
    if aim == "curve":
        line = curves[:, :-1, None] + np.diff(curves)[:, :, None] * INNER
        middle = np.broadcast_to((alphas[:-1] + alphas[1:]) / 2, error.shape)
        return np.abs(cubic - line).max(axis=2) + error, middle
    first, last = curves[:, :1], curves[:, -1:]
    chord = first + (last - first) * alphas
    chord_inside = first[:, :, None] + (last - first)[:, :, None] * inside
    heights = np.concatenate([curves, curves - chord])
    between = np.concatenate([cubic, cubic - chord_inside])
    gaps = between.max(axis=2) + np.concatenate([error, error]) - heights.max(axis=1, keepdims=True)
    highest = between[:, :, CHOSEN].argmax(axis=2)
    return gaps, inside[:, CHOSEN][np.arange(len(alphas) - 1), highest]


def _interpolated(alphas: Array, curves: Array) -> tuple[Array, Array, Array]:
    """Points within each interval, the cubics' values there, and their errors.

    Of shapes (intervals, inner), (curves, intervals, inner) and (curves, intervals).
    """
    count = len(alphas)
    step = np.diff(alphas)
    interval = np.arange(count - 1)
    nearest = np.clip(interval - 1, 0, count - 4)[:, None] + np.arange(4)
    inside = alphas[:-1, None] + step[:, None] * INNER
    offsets = inside[:, :, None] - alphas[nearest][:, None, :]
    cubic = np.zeros((len(curves), count - 1, len(INNER)))
    for j in range(4):
        others = [k for k in range(4) if k != j]
        spans = alphas[nearest[:, j], None] - alphas[nearest[:, others]]
        basis = (offsets[:, :, others] / spans[:, None, :]).prod(axis=2)
        cubic += curves[:, nearest[:, j], None] * basis

    differences = [curves]  # the k-th divided differences
    for order in range(1, 5):
        differences.append(np.diff(differences[-1]) / (alphas[order:] - alphas[:-order]))
    third, fourth = np.abs(differences[3]), np.abs(differences[4])
    left = np.clip(interval - 2, 0, max(0, count - 6))  # five points around either end, different ones at the ends too:
    right = np.minimum(left + 1, count - 5)  # the difference of a single five may vanish by chance
    around = np.clip(interval - 1, 0, count - 4)
    parabolas = third[:, around] * (alphas[around + 3] - alphas[around]) * step**2 / 4
    beyond = SAFETY * np.maximum(fourth[:, left], fourth[:, right]) * np.abs(offsets.prod(axis=2)).max(axis=1)
    return inside, cubic, np.maximum(parabolas, beyond)
