"""Walks over lines and planes, where first layers need not be computed at every point."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from .evaluate import Evaluator
from .shared import SharedLayers
from .walk import Evaluate, Point, Result, Walk


class AffineWalk(Walk[Point, Result]):
    r"""A walk whose weights are affine in a few coordinates, :math:`\theta(x) = \theta_0 + \sum_k x_k d_k`.

    The outputs of the first layer on an ``Evaluator``'s data are remembered at the anchors, whose coordinates are 0 and
    the unit vectors, and combined at other points (``isthmus.path.shared``).

    Attributes:
        anchors: points that are evaluated first, in this order; none where nothing is to be shared.
        models: name -> point of the models that the scan is about. They are evaluated in full, and what autocast
            changes is reported there.
    """

    def __init__(self, model: nn.Module, evaluate: Evaluate | Mapping[str, Evaluate], **shared: Any) -> None:
        """Arguments as for every walk."""
        super().__init__(model, evaluate, **shared)
        self.anchors: tuple[Point, ...] = ()
        self.models: dict[str, Point] = {}
        self._shared: dict[str, SharedLayers] = {}
        self._autocast: dict[str, dict[str, dict[str, float]]] = {}

    @abstractmethod
    def coordinates(self, point: Point) -> Sequence[float]:
        """The coordinates of a point, in which the anchors are 0, (1, 0, ...), (0, 1, ...) and so on."""

    @property
    def landmarks(self) -> Sequence[Point]:
        """The last anchors, or where there are none, models."""
        return (self.anchors or tuple(self.models.values()))[-2:]

    def remeasured(self, point: Point) -> bool:
        """Anchors, of which outputs are kept."""
        return point in self.anchors

    def late(self, point: Point) -> bool:
        """Not the models; nor a point where combining first layers is compared with computing them."""
        return super().late(point) and point not in self.models.values() and all(map(self._settled, self.splits))

    def first_layers(self, split: str) -> SharedLayers | None:
        """Those that are combined at all points but anchors and models."""
        shared = self._shared.get(split)
        return shared if shared is not None and shared.active else None

    def measure(self, split: str, evaluate: Evaluate, point: Point) -> dict[str, float]:
        """The metrics at one point."""
        if not isinstance(evaluate, Evaluator):
            return super().measure(split, evaluate, point)
        evaluate.calibrate(self.model)  # its forward passes are not to be remembered
        with self._sharing(split, evaluate, point):
            values = evaluate(self.model)
        self.note_autocast(split, evaluate, point, values)
        return values

    def _shares(self, evaluator: Evaluator) -> bool:
        """Whether first layers may be combined."""
        return bool(self.anchors) and bool(evaluator.share_first_layer) and evaluator.dtype is None

    def _settled(self, split: str) -> bool:
        """Whether it is known which layers are combined on a split."""
        evaluate = self.splits[split]
        if not isinstance(evaluate, Evaluator) or not self._shares(evaluate):
            return True
        return split in self._shared and self._shared[split].checked

    def _sharing(self, split: str, evaluator: Evaluator, point: Point) -> AbstractContextManager[None]:
        """Remember first layers at an anchor, combine them at other points that are no models."""
        if not self._shares(evaluator):
            return nullcontext()
        if split not in self._shared:
            measured = evaluator.share_first_layer == "auto"
            directions = len(self.anchors) - 1
            self._shared[split] = SharedLayers(self.model, evaluator.inputs, directions=directions, measured=measured)
        if point in self.anchors:
            return self._shared[split].record(self.anchors.index(point))
        return nullcontext() if point in self.models.values() else self._shared[split].combine(self.coordinates(point))

    def note_autocast(self, split: str, evaluator: Evaluator, point: Point, values: Mapping[str, float]) -> None:
        """At a model, keep what autocast changed of ``values``."""
        names = [name for name, place in self.models.items() if place == point]
        if evaluator.dtype is not None and names:
            difference = evaluator.autocast_difference(self.model, values)
            self._autocast.setdefault(split, {}).update(dict.fromkeys(names, difference))

    def choices(self) -> dict[str, Any]:
        """What was resolved on the way; for each split also how its first layers were computed."""
        choices = super().choices()
        for split, resolved in choices["splits"].items():
            sharing = split in self._shared and self._shared[split].active
            resolved["first_layer"] = "shared" if sharing else "computed"
            resolved["autocast_difference"] = self._autocast.get(split, {})
        return choices
