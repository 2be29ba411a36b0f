"""Values found at points, as the tables that results keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .progress import Values

Array = NDArray[np.float64]
Tables = dict[str, dict[str, Array]]  # split -> metric -> values


def numbers_at(points: list[Any], numbers: Mapping[Any, float]) -> Array:
    """The numbers of points, in lists of any depth, as an array of that shape; NaN where there is none."""
    if points and isinstance(points[0], list):
        return np.array([numbers_at(row, numbers) for row in points])
    return np.array([numbers.get(point, np.nan) for point in points], dtype=np.float64)


def values_at(points: list[Any], found: Mapping[Any, Values]) -> Tables:
    """Split -> metric -> values at points, in lists of any depth; NaN where nothing was found.

    Args:
        points: the points; without any there are no tables.
        found: point -> split -> metric -> value, with the same splits and metrics at every point.
    """
    names = next(iter(found.values()), {}) if points else {}
    return {
        split: {
            metric: numbers_at(points, {point: values[split][metric] for point, values in found.items()})
            for metric in table
        }
        for split, table in names.items()
    }


def line_rows(alphas: Array, tables: Tables) -> Iterator[tuple[str, float, str, float]]:
    """The tidy table of values along a line: (split, alpha, metric, value)."""
    for split, table in tables.items():
        for metric, values in table.items():
            for alpha, value in zip(alphas.tolist(), values.tolist(), strict=True):
                yield split, alpha, metric, value
