"""Evaluate the models on the straight line between two models."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from isthmus.errors import warn
from isthmus.merging.sources import Source

from .adaptive import COARSE_POINTS, Refinement
from .align import scan_aligned
from .evaluate import Data
from .line_walk import MIDPOINT, A, B, LineWalk
from .points import scan_points
from .result import PathResult
from .walk import Evaluate, Progress

if TYPE_CHECKING:
    from .align import Align

ADAPTIVE = "adaptive"
MARKS = (A, B, MIDPOINT)  # evaluated first, because results are measured by them


def scan_line(
    model: nn.Module,
    a: Source,
    b: Source,
    evaluate: Evaluate | Mapping[str, Evaluate],
    alphas: int | Sequence[float] | Literal["adaptive"] = 21,
    *,
    tol: float = 1e-3,
    refine: Literal["barrier", "curve"] = "barrier",
    refine_by: Sequence[str] = ("loss",),
    max_points: int = 201,
    base: Source | None = None,
    align: Align | None = None,
    bn: str = "auto",
    bn_data: Data | Tensor | None = None,
    bn_batch_size: int = 256,
    representation: str | None = None,
    higher_is_better: Sequence[str] = ("accuracy",),
    backend: str = "auto",
    progress: Progress | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> PathResult:
    r"""Evaluate :math:`\theta(\alpha) = (1 - \alpha) A + \alpha B` at many :math:`\alpha`.

    The model's parameters and buffers become views of one flat buffer, into which each :math:`\theta(\alpha)` is
    written in one pass (``isthmus.merging.lerp_states``); at 0 and 1 they equal A and B to the bit. The ends and the
    midpoint are always points of the scan, because barriers and gains are measured by them, and are evaluated first,
    under the same BatchNorm policy as all others. Evaluation is in evaluation mode.

    ``model``, ``a``, ``b``, ``base`` and the global random states come back untouched, also after an error or an
    interrupt; the exception's attribute ``partial`` then holds the ``PathResult`` of the points that were finished. A
    NaN loss is a value like any other, and makes the barrier NaN.

    Args:
        model: the architecture; its own weights are not used. A, B and the data must fit its device.
        a: model A: a module, a state dict, a ``FlatState``, or the path of a safetensors file.
        b: model B.
        evaluate: an ``Evaluator``; or a function from the model to a number, called "loss", or to several by name; or
            a mapping from the names of splits to such. A single one is the split "data". With an ``Evaluator`` whose
            accuracy is the built-in one and whose samples have one class each, ends and midpoint also yield
            correctness per sample, disagreement and ensemble.
        alphas: the number of points, equally spaced from 0 to 1; or the points themselves, also beyond the ends. They
            are sorted, and 0, 1/2 and 1 are added where they are missing (an even number of points grows by one).
            "adaptive": 17 equally spaced points at first, then as many more as ``tol`` asks for, where the curve is
            curved. A bump is seen if it is at least two of those first steps wide, 1/8.
        tol: how exact an adaptive scan is, in units of the metrics in ``refine_by``. It is an estimate, stated in
            ``isthmus.path.adaptive``, with a wide margin on smooth curves. Below the rounding of the metrics (about
            1e-5 for losses in float32) it cannot be met.
        refine: what it is that is within ``tol``. "barrier": the barrier and the linear barrier. "curve": the distance
            everywhere between the curve and the straight lines between its points, as plots and the integral have it.
        refine_by: the metrics that count, on every split that has them. Those that move in steps, like an accuracy on
            few samples, take many points. A curve with a value that is not finite counts no more.
        max_points: an adaptive scan has at most as many points, and warns if they do not suffice.
        base: the model from which the task vectors of A and B are measured, for their cosine.
        align: a ``PermutationSpec``: the units of B are matched to A's by ``isthmus.match.weight_matching``, and both
            lines are scanned, from A to B in the order found and to B as it is. The result is that of the first, the
            other is its ``naive``, and ``barrier_cut`` compares them. A tuple of a spec and a permutation or
            ``Matching`` is taken as it is, with more starts, ``(spec, weight_matching(spec, a, b, restarts=10))``, for
            instance. Progress counts each line by itself.
        bn: what happens to running statistics of BatchNorm layers: "keep" interpolates them like weights; "reset"
            re-estimates them at every point (``isthmus.norms.reset_statistics``); "auto" resets where the model has
            such layers and ``bn_data`` is given, else keeps, with a warning if it has such layers.
        bn_data: training data for that, unaugmented: a tensor of inputs, or data as for ``Evaluator``.
        bn_batch_size: examples per forward pass of the re-estimation, part of what is measured: leave it alone.
        representation: name of a submodule whose outputs at both ends are compared by CKA, on at most the first 4096
            samples of each split that has an ``Evaluator``.
        higher_is_better: the metrics that are scores rather than losses.
        backend: as for ``isthmus.ops.lerp``.
        progress: True for a bar in the terminal, with points, losses and the time left (needs rich); or a function,
            called after each point with the number of points done, of all points as far as is known, and the point's
            metrics by split.
        checkpoint: a file that every finished point is appended to at once. A scan that was interrupted, given the same
            file, goes on; a longer one takes the points that it has. Ends and midpoint are evaluated again, because
            their outputs are compared. What decides the values (models, data, metrics, BatchNorm policy) stands in the
            file too, and must be the same; of metrics and evaluators that are functions, their names. With ``align=``
            this is the file of the naive line, so that one of a scan without alignment serves; the aligned line has a
            file of its own, with ``.aligned`` after the name.

    Raises:
        InputError: A, B or the base do not have the model's tensors, an argument is out of range, or the checkpoint
            belongs to a scan of other models, data or settings.
        FileError: a file is missing or not a safetensors file; the checkpoint is no checkpoint, is damaged, or cannot
            be written.
        EvaluationError: an evaluator raised; ``partial`` has the points before.

    Warns:
        IsthmusWarning: an adaptive scan reached ``max_points``, or the resolution of the weights, before ``tol``, or
            found values that are not finite on every curve; or running statistics are kept for lack of ``bn_data``.
    """
    points = line_points(alphas)

    def scan(b: Source, checkpoint: str | os.PathLike[str] | None) -> PathResult:
        walk = LineWalk(
            *(model, a, b, evaluate),
            base=base,
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

    if align is None:
        return scan(b, checkpoint)
    return scan_aligned(scan, align, a, b, checkpoint=checkpoint, backend=backend)


def line_points(alphas: int | Sequence[float] | str) -> list[float] | None:
    """The points of a scan in the order of evaluation, ends and midpoint first; None if it is adaptive."""
    if isinstance(alphas, str) and alphas == ADAPTIVE:
        return None
    points = scan_points(alphas, A, B, MARKS, words=[ADAPTIVE])
    return [*MARKS, *(alpha for alpha in points if alpha not in MARKS)]


def run_line(
    walk: LineWalk,
    points: list[float] | None,
    *,
    tol: float,
    refine: str,
    refine_by: Sequence[str],
    higher_is_better: Sequence[str],
    max_points: int,
) -> PathResult:
    """Evaluate what ``line_points`` returned; if that is None, as many points as ``Refinement`` asks for.

    Other arguments, errors and warnings are as in ``scan_line``.
    """
    if points is not None:
        return walk.run(points, len(points))
    walk.refinement = Refinement(
        walk.values,
        tol=tol,
        aim=refine,
        metrics=refine_by,
        higher_is_better=higher_is_better,
        max_points=max_points,
    )
    result = walk.run(walk.refinement, COARSE_POINTS, dependent=True)
    bound = walk.refinement.bound
    if math.isnan(bound):
        warn(
            f"The adaptive scan stopped at its first {len(result.alphas)} points: every curve of {', '.join(refine_by)}"
            " has a value that is not finite, so that nothing tells where more are needed. Give a number of points, or "
            "other metrics as refine_by=."
        )
    elif bound > tol:
        warn(
            f"The adaptive scan stopped at {len(result.alphas)} points with the {refine} known to about {bound:.2g}, "
            f"not to tol={tol:g}. Give a larger tol= or max_points= (it is {max_points}), or smoother metrics as "
            "refine_by=."
        )
    return result
