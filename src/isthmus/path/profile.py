"""Scan a random line through one model: the profile of its loss."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from isthmus.errors import InputError
from isthmus.flat import FlatState
from isthmus.merging.states import check_exact, write_weighted_sum

from .affine_walk import AffineWalk
from .directions import norm, parameter_keys, random_directions
from .evaluate import Data
from .files import Recorded, array, floats
from .points import scan_points
from .tables import line_rows, numbers_at, values_at
from .walk import Evaluate, Progress, versions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]

MODEL = 0.0  # the point where the model itself lies


@dataclass(frozen=True, eq=False)
class ProfileResult(Recorded):
    """The metrics of the models along a direction through one model, which lies at alpha = 0.

    Attributes:
        alphas: the points, increasing, shape (points,), float64.
        values: split -> metric -> values at the points, shape (points,), float64.
        seconds: time that each point took, shape (points,).
        bn_seconds: how much of ``seconds`` went into re-estimating BatchNorm statistics, shape (points,); None where
            that was not done.
        distances: ``norm``, the Euclidean length of a step of 1, and ``norm_model``, that of the model, over the
            parameters.
        higher_is_better: the metrics that are scores.
        choices: what was resolved on the way: seed, normalization, BatchNorm policy, backend, and so on.
        versions: package -> version.
        complete: False if the scan was interrupted; then the points are those that were finished.
    """

    KIND = "profile result"
    SCHEMA = 1
    COLUMNS = ("split", "alpha", "metric", "value")

    alphas: Array
    values: dict[str, dict[str, Array]]
    seconds: Array
    bn_seconds: Array | None = None
    distances: dict[str, float] = field(default_factory=dict)
    higher_is_better: tuple[str, ...] = ("accuracy",)
    choices: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    complete: bool = True

    def rows(self) -> Iterator[tuple[str, float, str, float]]:
        """The tidy table: (split, alpha, metric, value)."""
        return line_rows(self.alphas, self.values)

    def content(self) -> dict[str, Any]:
        """Everything by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> ProfileResult:
        """The result with this content."""
        return cls(
            alphas=array(content["alphas"]),
            values={s: {m: array(v) for m, v in table.items()} for s, table in content["values"].items()},
            seconds=array(content["seconds"]),
            bn_seconds=None if content["bn_seconds"] is None else array(content["bn_seconds"]),
            distances=floats(content["distances"]),
            higher_is_better=tuple(content["higher_is_better"]),
            choices=dict(content["choices"]),
            versions=dict(content["versions"]),
            complete=content["complete"],
        )

    def plot(
        self, ax: Axes | Sequence[Axes] | None = None, *, metrics: Sequence[str] | None = None, split: str | None = None
    ) -> list[Axes]:
        """Draw the metrics along the line, one panel each; see ``isthmus.path.plane_plot.plot_profile``."""
        from .plane_plot import plot_profile

        return plot_profile(self, ax, metrics=metrics, split=split)


class ProfileWalk(AffineWalk[float, ProfileResult]):
    """The evaluations along a direction through one model; points are multiples of the direction."""

    def __init__(
        self,
        model: nn.Module,
        evaluate: Evaluate | Mapping[str, Evaluate],
        drawn: Mapping[str, Any],
        *,
        higher_is_better: tuple[str, ...],
        **shared: Any,
    ) -> None:
        """Draw the direction, as ``random_directions`` is told by ``drawn``; ``shared`` are those of every walk."""
        super().__init__(model, evaluate, **shared)
        self._drawn = dict(drawn)
        self._higher_is_better = higher_is_better
        self.models = {"model": MODEL}
        self._states: list[FlatState] = [self.load(model, "model"), *random_directions(model, **drawn)]
        check_exact(self._states)
        keys = parameter_keys(model)
        self._distances = {name: norm(s, keys) for name, s in zip(("norm_model", "norm"), self._states, strict=True)}

    def settings(self) -> dict[str, Any]:
        """What decides the values of a point, the direction among it."""
        return super().settings() | {"direction": self._drawn}

    def scan(self, alphas: Sequence[float]) -> ProfileResult:
        """Evaluate the model and the farthest point, which all others share their first layers with, and the rest."""
        farthest = max(alphas, key=abs)
        self.anchors = (MODEL, farthest) if farthest != MODEL else ()
        points = list(dict.fromkeys([MODEL, farthest, *alphas]))
        return self.run(points, len(points))

    def write(self, point: float, out: FlatState) -> None:
        """Go from the model along the direction; at 0 it is the model to the bit."""
        write_weighted_sum(self._states, [1.0, point], out, backend=self.backend)

    def coordinates(self, point: float) -> tuple[float]:
        """The multiple in units of that of the farthest point."""
        return (point / self.anchors[-1],)

    def result(self, complete: bool) -> ProfileResult:
        """What was found so far, by increasing multiple."""
        alphas = sorted(self.seconds)
        return ProfileResult(
            alphas=np.array(alphas, dtype=np.float64),
            values=values_at(alphas, self.values),
            seconds=numbers_at(alphas, self.seconds),
            bn_seconds=numbers_at(alphas, self.bn_seconds) if self.bn_seconds else None,
            distances=self._distances,
            higher_is_better=self._higher_is_better,
            choices=self.choices() | self._drawn,
            versions=versions(),
            complete=complete,
        )


def random_line(
    model: nn.Module,
    evaluate: Evaluate | Mapping[str, Evaluate],
    alphas: int | Sequence[float] = 41,
    *,
    distance: float = 1.0,
    normalization: str = "filter",
    seed: int = 0,
    exclude: str | Sequence[str] = (),
    higher_is_better: Sequence[str] = ("accuracy",),
    bn: str = "auto",
    bn_data: Data | Tensor | None = None,
    bn_batch_size: int = 256,
    backend: str = "auto",
    progress: Progress | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> ProfileResult:
    r"""Evaluate the models :math:`\theta + \alpha d` along a random direction d through one model.

    The direction is the first of ``random_plane`` with the same seed. The model itself, at 0, is always evaluated, and
    given back untouched; all else is as there.

    Args:
        model: the model whose weights are the origin.
        evaluate: as for ``scan_line``.
        alphas: the number of points, equally spaced from -D to D; or the points themselves. They are sorted, and 0 is
            added where it is missing.
        distance: the largest multiple D, positive; unused where the points are given.
        normalization: "filter", "layer", "model" or "none".
        seed: decides the direction.
        exclude: parameters that do not move: key patterns, or "1d" for biases and norm parameters.
        higher_is_better: the metrics that are scores rather than losses.
        bn: as for ``scan_line``.
        bn_data: as for ``scan_line``.
        bn_batch_size: as for ``scan_line``.
        backend: as for ``isthmus.ops.weighted_sum``.
        progress: as for ``scan_line``.
        checkpoint: as for ``scan_line``.

    Raises:
        InputError: an argument is out of range.
        EvaluationError: an evaluator raised; ``partial`` has the points before.
    """
    if not 0 < distance < math.inf:
        raise InputError(f"distance={distance} is no extent of a line; give a positive number.")
    points = scan_points(alphas, -distance, distance, [MODEL])
    walk = ProfileWalk(
        *(model, evaluate, {"normalization": normalization, "seed": seed, "exclude": exclude}),
        higher_is_better=tuple(higher_is_better),
        bn=bn,
        bn_data=bn_data,
        bn_batch_size=bn_batch_size,
        backend=backend,
        progress=progress,
        checkpoint=checkpoint,
    )
    return walk.scan(points)
