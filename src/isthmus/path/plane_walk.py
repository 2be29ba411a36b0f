"""The walk over a plane through weight space: how a point's weights are made of three states, and what is returned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from isthmus.flat import FlatState
from isthmus.merging.states import check_exact, write_weighted_sum

from .affine_walk import AffineWalk
from .plane_result import PlaneResult
from .tables import numbers_at, values_at
from .walk import Evaluate, versions

Array = NDArray[np.float64]
Point = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Plane:
    r"""A plane through weight space, :math:`\theta(x, y) = \sum_k w_k(x, y)\, \theta_k`.

    Either three models span it, the first at (0, 0), the second at (p, 0) and the third at (q, r); then the weights are
    the barycentric coordinates :math:`(1 - s - t, s, t)` with :math:`t = y / r` and :math:`s = (x - t q) / p`, of which
    one is 1 and the others are 0, exactly, where a model lies. Or a model and two directions do; then they are
    :math:`(1, x, y)`.

    Attributes:
        states: three models; or a model and two directions.
        spans: (p, q, r) of three models; None for directions.
        models: name -> coordinates of the models that are marked, and always evaluated.
        coordinates, distances, trajectory, off_plane, explained: as in ``PlaneResult``.
        choices: how the plane was made.
    """

    states: tuple[FlatState, FlatState, FlatState]
    spans: tuple[float, float, float] | None
    models: dict[str, Point]
    coordinates: str
    distances: dict[str, float] = field(default_factory=dict)
    trajectory: Array = field(default_factory=lambda: np.empty((0, 2)))
    off_plane: Array = field(default_factory=lambda: np.empty(0))
    explained: Array = field(default_factory=lambda: np.empty(0))
    choices: dict[str, Any] = field(default_factory=dict)

    def weights(self, point: Point) -> tuple[float, float, float]:
        """The weights of the states at a point."""
        x, y = point
        if self.spans is None:
            return 1.0, x, y
        p, q, r = self.spans
        t = y / r
        s = (x - t * q) / p
        return 1.0 - s - t, s, t


class PlaneWalk(AffineWalk[Point, PlaneResult]):
    """The evaluations on a plane; points are coordinates (x, y)."""

    def __init__(
        self,
        model: nn.Module,
        evaluate: Evaluate | Mapping[str, Evaluate],
        *,
        higher_is_better: tuple[str, ...],
        **shared: Any,
    ) -> None:
        """Arguments as in ``scan_plane``, ``shared`` those of every walk."""
        super().__init__(model, evaluate, **shared)
        self._higher_is_better = higher_is_better

    def scan(self, plane: Plane, x: Array, y: Array) -> PlaneResult:
        """Evaluate three corners of the grid, which all share their first layers with, the models, and the rest."""
        check_exact(plane.states)
        self._plane, self._x, self._y = plane, x, y
        self.models = plane.models
        grid = [(column, row) for row in y.tolist() for column in x.tolist()]
        self.anchors = (grid[0], grid[len(x) - 1], grid[-len(x)])
        points = list(dict.fromkeys([*self.anchors, *plane.models.values(), *grid]))
        return self.run(points, len(points))

    def settings(self) -> dict[str, Any]:
        """What decides the values of a point, how the plane was made among it."""
        return super().settings() | {"plane": self._plane.choices}

    def write(self, point: Point, out: FlatState) -> None:
        """Sum the states of the plane; a model of the plane is itself to the bit."""
        write_weighted_sum(self._plane.states, self._plane.weights(point), out, backend=self.backend)

    def coordinates(self, point: Point) -> tuple[float, float]:
        """How far from the first corner of the grid towards the second and the third."""
        (left, bottom), (right, _), (_, top) = self.anchors
        return (point[0] - left) / (right - left), (point[1] - bottom) / (top - bottom)

    def name(self, point: Point) -> str:
        """What error messages call a point."""
        return f"x = {point[0]:g}, y = {point[1]:g}"

    def result(self, complete: bool) -> PlaneResult:
        """What was found so far; NaN elsewhere."""
        plane = self._plane
        grid = [[(column, row) for column in self._x.tolist()] for row in self._y.tolist()]
        models = list(plane.models.values())
        return PlaneResult(
            x=self._x,
            y=self._y,
            values=values_at(grid, self.values),
            seconds=numbers_at(grid, self.seconds),
            models=plane.models,
            model_values=values_at(models, self.values),
            model_seconds=numbers_at(models, self.seconds),
            coordinates=plane.coordinates,
            bn_seconds=numbers_at(grid, self.bn_seconds) if self.bn_seconds else None,
            distances=plane.distances,
            trajectory=plane.trajectory,
            off_plane=plane.off_plane,
            explained=plane.explained,
            higher_is_better=self._higher_is_better,
            choices=self.choices(),
            versions=versions(),
            complete=complete,
        )

    def choices(self) -> dict[str, Any]:
        """What was resolved on the way, and how the plane was made."""
        return super().choices() | self._plane.choices
