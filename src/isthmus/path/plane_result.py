"""What the scan of a plane found: values on a grid, where the models lie, and the figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import InputError

from .files import Recorded, array, floats
from .tables import Tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]


class BestPoint(NamedTuple):
    """The best point of a plane by one metric on one split, and all that was measured there.

    Attributes:
        x: its first coordinate.
        y: its second coordinate.
        values: split -> metric -> value: what the point that was chosen on one split is worth on the others.
    """

    x: float
    y: float
    values: dict[str, dict[str, float]]


@dataclass(frozen=True, eq=False)
class PlaneResult(Recorded):
    r"""The metrics of the models on a plane through weight space.

    Attributes:
        x: first coordinates of the grid, increasing, shape (columns,), float64.
        y: second coordinates of the grid, increasing, shape (rows,), float64.
        values: split -> metric -> values on the grid, shape (rows, columns), float64: row i, column j is the value at
            (x[j], y[i]). NaN where a value is, or where nothing was evaluated.
        seconds: time that each point of the grid took, shape (rows, columns); NaN where nothing was evaluated.
        bn_seconds: how much of ``seconds`` went into re-estimating BatchNorm statistics, of the same shape; None where
            that was not done.
        models: name -> coordinates (x, y) of the models that span the plane.
        model_values: split -> metric -> values of these models, in their order, shape (models,).
        model_seconds: time that each of them took, shape (models,); NaN where it was not evaluated.
        coordinates: what the coordinates count: "task" (task vectors), "metric" (Euclidean distance in weight space),
            "random" (random directions) or "principal" (Euclidean distance along principal directions).
        distances: how the models lie to each other: for task and metric coordinates as ``metrics.distances`` names it,
            with the base at the origin; for random ones ``norm_x``, ``norm_y`` and ``cosine`` of the directions and
            ``norm_model``.
        trajectory: where the checkpoints are projected to, shape (checkpoints, 2); empty unless there are some.
        off_plane: distances of the checkpoints from their projections, shape (checkpoints,).
        explained: fractions of the trajectory's variance along the two directions, shape (2,), or empty.
        higher_is_better: the metrics that are scores.
        choices: what was resolved on the way: BatchNorm policy, backend, dtypes, seeds, and so on.
        versions: package -> version.
        complete: False if the scan was interrupted; then values are those of the points that were finished.
    """

    KIND = "plane result"
    SCHEMA = 1
    COLUMNS = ("split", "x", "y", "metric", "value")

    x: Array
    y: Array
    values: Tables
    seconds: Array
    models: dict[str, tuple[float, float]]
    model_values: Tables
    model_seconds: Array
    coordinates: str
    bn_seconds: Array | None = None
    distances: dict[str, float] = field(default_factory=dict)
    trajectory: Array = field(default_factory=lambda: np.empty((0, 2)))
    off_plane: Array = field(default_factory=lambda: np.empty(0))
    explained: Array = field(default_factory=lambda: np.empty(0))
    higher_is_better: tuple[str, ...] = ("accuracy",)
    choices: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    complete: bool = True

    def best(self, metric: str, split: str | None = None) -> BestPoint:
        """The best point of the grid and the models by ``metric``: the lowest loss, or the highest score.

        Choose on one split and report on another: ``result.best("loss", "val").values["test"]``. Of equal points the
        first, in the order of rows; NaN is never the best.

        Args:
            metric: the metric.
            split: on which split; by default the first that has the metric.

        Raises:
            InputError: there is no such metric or split, or no value but NaN.
        """
        split = self.split_with(metric, split)
        points = list(self._points())
        candidates = [(tables[split][metric], index) for index, (_, _, tables) in enumerate(points)]
        sign = -1 if metric in self.higher_is_better else 1
        finite = [(sign * value, index) for value, index in candidates if not math.isnan(value)]
        if not finite:
            raise InputError(f"every value of {metric!r} on the split {split!r} is NaN; there is no best point.")
        return BestPoint(*points[min(finite)[1]])

    def split_with(self, metric: str, split: str | None = None) -> str:
        """``split`` if it has ``metric``, by default the first that has it.

        Raises:
            InputError: there is none.
        """
        having = [name for name, table in self.values.items() if metric in table]
        chosen = having[0] if split is None and having else split
        if chosen not in having:
            known = {name: list(table) for name, table in self.values.items()}
            raise InputError(
                f"the plane has no metric {metric!r}"
                + (f" on a split {split!r}" if split is not None else "")
                + f"; it has {known or 'none'}."
            )
        return chosen

    def rows(self) -> Iterator[tuple[str, float, float, str, float]]:
        """The tidy table of the points that were evaluated: (split, x, y, metric, value).

        First the grid, row by row; then the models that lie beside it.
        """
        for x, y, tables in self._points():
            for split, table in tables.items():
                for metric, value in table.items():
                    yield split, x, y, metric, value

    def _points(self) -> Iterator[tuple[float, float, dict[str, dict[str, float]]]]:
        """Every point that was evaluated, once: coordinates and split -> metric -> value."""
        xs, ys = self.x.tolist(), self.y.tolist()
        for i, j in zip(*np.nonzero(~np.isnan(self.seconds)), strict=True):
            yield xs[j], ys[i], _pick(self.values, (i, j))
        for index, (x, y) in enumerate(self.models.values()):
            if (x not in xs or y not in ys) and not math.isnan(self.model_seconds[index]):
                yield x, y, _pick(self.model_values, index)

    def content(self) -> dict[str, Any]:
        """Everything by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> PlaneResult:
        """The result with this content."""
        return cls(
            x=array(content["x"]),
            y=array(content["y"]),
            values=_tables(content["values"]),
            seconds=array(content["seconds"]),
            models={name: (float(x), float(y)) for name, (x, y) in content["models"].items()},
            model_values=_tables(content["model_values"]),
            model_seconds=array(content["model_seconds"]),
            coordinates=content["coordinates"],
            bn_seconds=None if content["bn_seconds"] is None else array(content["bn_seconds"]),
            distances=floats(content["distances"]),
            trajectory=array(content["trajectory"]).reshape(-1, 2),
            off_plane=array(content["off_plane"]),
            explained=array(content["explained"]),
            higher_is_better=tuple(content["higher_is_better"]),
            choices=dict(content["choices"]),
            versions=dict(content["versions"]),
            complete=content["complete"],
        )

    def plot(
        self, ax: Axes | Sequence[Axes] | None = None, *, metrics: Sequence[str] | None = None, split: str | None = None
    ) -> list[Axes]:
        """Draw contours of the metrics, one panel each; see ``isthmus.path.plane_plot.plot_plane``."""
        from .plane_plot import plot_plane

        return plot_plane(self, ax, metrics=metrics, split=split)


def _tables(tables: Mapping[str, Mapping[str, Any]]) -> Tables:
    return {split: {metric: array(values) for metric, values in table.items()} for split, table in tables.items()}


def _pick(tables: Tables, index: Any) -> dict[str, dict[str, float]]:
    return {s: {metric: float(values[index]) for metric, values in table.items()} for s, table in tables.items()}
