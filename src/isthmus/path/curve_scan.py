"""Evaluate the models on a curve through weight space."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from isthmus.errors import InputError
from isthmus.flat import FlatState

from .curve import Curve, point_weights
from .device import InOrder
from .evaluate import Data
from .line import line_points, run_line
from .line_walk import MIDPOINT, A, B, LineWalk
from .result import PathResult
from .several import SeveralModels
from .walk import Evaluate, Progress, Walk


class CurveWalk(LineWalk):
    """The evaluations on a curve between two models; points are its t."""

    def __init__(
        self, model: nn.Module, curve: Curve, evaluate: Evaluate | Mapping[str, Evaluate], **shared: Any
    ) -> None:
        """Load the curve; arguments as in ``scan_curve``."""
        super().__init__(model, curve.a, curve.b, evaluate, base=None, **shared)
        self.anchors = (A, B, MIDPOINT)
        self._curve = replace(curve, a=self._a, theta=self.load(curve.theta, "theta"), b=self._b)

    def write(self, point: float, out: FlatState) -> None:
        """Write the model at t; 0 and 1 are the ends to the bit."""
        self._curve.at(point, out=out, backend=self.backend)

    def several(self, device: InOrder) -> SeveralModels | str:
        """Nothing: a model of the curve is a combination of three."""
        return Walk.several(self, device)

    def coordinates(self, point: float) -> tuple[float, float]:
        """The weights of B and of the midpoint when the model at t is a combination of these two and A."""
        _, theta, b = point_weights(self._curve.kind, point)
        if self._curve.kind == "polygon":  # θ is the midpoint
            return b, theta
        return b - theta / 2, 2 * theta  # θ is twice the midpoint less the mean of A and B

    def settings(self) -> dict[str, Any]:
        """What decides the values; the kind of the curve too."""
        return super().settings() | {"kind": self._curve.kind}

    def result(self, complete: bool) -> PathResult:
        """What was found so far, by increasing t, with the lengths of the curve."""
        found = super().result(complete)
        return replace(
            found,
            positions=self._curve.positions(found.alphas),
            distances=found.distances | {"arc_length": self._curve.length},
        )

    def choices(self) -> dict[str, Any]:
        """What was resolved on the way; also the curve's kind and how it was trained."""
        return super().choices() | {"curve": self._curve.kind, "training": self._curve.training}


def scan_curve(
    model: nn.Module,
    curve: Curve,
    evaluate: Evaluate | Mapping[str, Evaluate],
    alphas: int | Sequence[float] | Literal["adaptive"] = 21,
    *,
    tol: float = 1e-3,
    refine: Literal["barrier", "curve"] = "barrier",
    refine_by: Sequence[str] = ("loss",),
    max_points: int = 201,
    bn: str = "auto",
    bn_data: Data | Tensor | None = None,
    bn_batch_size: int = 256,
    representation: str | None = None,
    higher_is_better: Sequence[str] = ("accuracy",),
    backend: str = "auto",
    progress: Progress | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> PathResult:
    r"""Evaluate the models :math:`\phi(t)` on a curve at many t.

    As ``scan_line``, of which this is the curved counterpart: the ``alphas`` of the result are the t, barriers and
    gains are those along t, with the model at t = 1/2 as the merged one, and BatchNorm statistics are re-estimated at
    every point where ``bn_data`` is given. ``positions`` has the length of the curve up to each point, in which the
    ``integral`` of the summary is a mean, :math:`\int L(\phi) \, \mathrm ds / \int \mathrm ds` (Garipov et al.,
    arXiv 1802.10026, equation 1); ``distances`` has the length of the curve, ``arc_length``, beside the straight
    distance ``l2``.

    Args:
        model: the architecture; its own weights are not used.
        curve: a ``Curve``, as ``fit_curve`` returns it.
        evaluate: an evaluator, or a mapping from the names of splits to such.
        alphas: the number of t, equally spaced from 0 to 1; or the t themselves, in [0, 1]. 0, 1/2 and 1 are added
            where they are missing. "adaptive": as many as ``tol`` asks for, as for ``scan_line``.
        tol: how exact an adaptive scan is, as for ``scan_line``.
        refine: what it is that is within ``tol``: "barrier" or "curve".
        refine_by: the metrics that count for that.
        max_points: an adaptive scan has at most as many points, and warns if they do not suffice.
        bn: "auto", "keep" or "reset"; "keep" combines running statistics like weights.
        bn_data: training data for their re-estimation.
        bn_batch_size: examples per forward pass of it.
        representation: name of a submodule whose outputs at both ends are compared by CKA.
        higher_is_better: the metrics that are scores rather than losses.
        backend: as for ``isthmus.ops.lerp``.
        progress: as for ``scan_line``.
        checkpoint: a file that finished points are written to, and that an interrupted scan goes on from.

    Raises:
        InputError: the curve does not have the model's tensors, or an argument is out of range.
        FileError: the checkpoint cannot be read or written.
        EvaluationError: an evaluator raised; ``partial`` has the points before.

    Warns:
        IsthmusWarning: as for ``scan_line``.
    """
    points = line_points(alphas)
    if points is not None and (min(points) < A or max(points) > B):
        raise InputError(f"alphas from {min(points)} to {max(points)} leave the curve, which runs from t = 0 to t = 1.")
    walk = CurveWalk(
        *(model, curve, evaluate),
        representation=representation,
        higher_is_better=tuple(higher_is_better),
        bn=bn,
        bn_data=bn_data,
        bn_batch_size=bn_batch_size,
        backend=backend,
        progress=progress,
        checkpoint=checkpoint,
    )
    return run_line(
        *(walk, points),
        tol=tol,
        refine=refine,
        refine_by=refine_by,
        higher_is_better=higher_is_better,
        max_points=max_points,
    )
