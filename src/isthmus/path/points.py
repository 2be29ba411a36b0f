"""The points of a scan along a line or an axis, as they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import InputError


def equally_spaced(start: float, stop: float, size: int) -> NDArray[np.float64]:
    """``size`` coordinates from ``start`` to ``stop``; decimal fractions come out as they are written."""
    steps = np.arange(size, dtype=np.float64)
    spaced: NDArray[np.float64] = (start * steps[::-1] + stop * steps) / (size - 1)
    return spaced


def scan_points(
    alphas: int | Sequence[float] | str, start: float, stop: float, marks: Sequence[float], words: Sequence[str] = ()
) -> list[float]:
    """The points that ``alphas=`` asks for, increasing, with ``marks`` among them.

    Args:
        alphas: the number of points, equally spaced from ``start`` to ``stop``; or the points themselves.
        start: the first of equally spaced points.
        stop: the last.
        marks: points that are added where they are missing.
        words: what else may be given, for the error message.

    Raises:
        InputError: ``alphas`` is neither, or fewer than 2 points are asked for.
    """
    if isinstance(alphas, int | np.integer):
        if alphas < 2:
            raise InputError(f"alphas={alphas} points do not reach from end to end; give at least 2.")
        given = equally_spaced(start, stop, int(alphas))
    else:
        try:
            given = np.asarray(alphas, dtype=np.float64)
        except (TypeError, ValueError):
            given = np.array(np.nan)
        if given.ndim != 1 or not np.isfinite(given).all():
            accepted = ", ".join([*map(repr, words), "a number of points", "a sequence of finite numbers"])
            raise InputError(f"alphas={alphas!r:.80}, expected one of: {accepted}.")
    return sorted({*given.tolist(), *marks})
