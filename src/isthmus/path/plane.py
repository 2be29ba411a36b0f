"""Scan planes through weight space: between models, around one model, along a training run."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from isthmus.errors import InputError
from isthmus.merging.sources import Source

from . import metrics
from .directions import dot, norm, parameter_keys, principal_directions, random_directions
from .evaluate import Data
from .plane_result import PlaneResult
from .plane_walk import Plane, PlaneWalk
from .points import equally_spaced
from .walk import Evaluate, Progress

Array = NDArray[np.float64]
Range = tuple[float, float]

MARGIN = 0.25  # of the models' extent, beyond which a plane with distances to scale goes on
COLLINEAR = 1e-6  # sine of the angle below which three models lie on a line


def scan_plane(
    model: nn.Module,
    base: Source,
    models: Sequence[Source],
    evaluate: Evaluate | Mapping[str, Evaluate],
    grid: tuple[int, int] = (41, 41),
    *,
    coordinates: str = "task",
    x_range: Range | None = None,
    y_range: Range | None = None,
    names: Sequence[str] = ("base", "A", "B"),
    higher_is_better: Sequence[str] = ("accuracy",),
    bn: str = "auto",
    bn_data: Data | Tensor | None = None,
    bn_batch_size: int = 256,
    backend: str = "auto",
    progress: Progress | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> PlaneResult:
    r"""Evaluate the models on the plane through three models.

    With ``coordinates="task"`` x and y are the coefficients of two task vectors,

    .. math:: \theta(x, y) = \theta_0 + x\,(A - \theta_0) + y\,(B - \theta_0),

    so that the models lie at (0, 0), (1, 0) and (0, 1). With ``coordinates="metric"`` they are Euclidean distances in
    weight space, over the parameters: with :math:`u = A - \theta_0`, :math:`w = B - \theta_0` and
    :math:`v = w - \langle w, u \rangle u / \lVert u \rVert^2`,

    .. math:: \theta(x, y) = \theta_0 + x\, u / \lVert u \rVert + y\, v / \lVert v \rVert

    (Garipov et al., arXiv 1802.10026, first footnote), so that the models lie at :math:`(0, 0)`,
    :math:`(\lVert u \rVert, 0)` and :math:`(\langle w, u \rangle / \lVert u \rVert, \lVert v \rVert)`; any three
    models will do.

    Each :math:`\theta(x, y)` is one weighted sum of the three models, in one pass over the flat buffer that the model's
    parameters and buffers are views of; where a model lies it is that model to the bit. Running statistics go along as
    entries like others, unless they are re-estimated (``bn=``): beyond the triangle of the models a running variance
    can become negative, and the loss NaN, which is recorded like any value. Integer
    entries must be equal, BatchNorm's counters of batches aside, which are the base's everywhere.

    The three models are always evaluated, also where the grid does not meet them. All of them, ``model`` and the global
    random states come back untouched, also after an error or an interrupt; the exception's attribute ``partial`` then
    holds the ``PlaneResult`` of the points that were finished.

    Args:
        model: the architecture; its own weights are not used.
        base: the model :math:`\theta_0` at the origin: a module, a state dict, a ``FlatState``, or the path of a
            safetensors file.
        models: A and B.
        evaluate: as for ``scan_line``.
        grid: the numbers of columns (values of x) and rows (values of y), at least 2 each.
        coordinates: "task" or "metric".
        x_range: the first and last x; by default -0.5 and 1.5 for task coordinates, and for metric ones the extent of
            the models with a quarter of its width on either side. Coordinates of the grid that differ from a model's by
            rounding alone are the model's.
        y_range: the first and last y; by default likewise.
        names: what the three models are called.
        higher_is_better: the metrics that are scores rather than losses.
        bn: as for ``scan_line``.
        bn_data: as for ``scan_line``.
        bn_batch_size: as for ``scan_line``.
        backend: as for ``isthmus.ops.weighted_sum``.
        progress: as for ``scan_line``.
        checkpoint: as for ``scan_line``.

    Raises:
        InputError: the models do not have the tensors of ``model``, an argument is out of range, or distances are to
            scale and the three models lie on a line.
        FileError: a file is missing or not a safetensors file.
        EvaluationError: an evaluator raised; ``partial`` has the points before.
    """
    if coordinates not in ("task", "metric"):
        raise InputError(f"coordinates={coordinates!r} is unknown; they are 'task' or 'metric'.")
    if isinstance(models, str | nn.Module | Mapping) or len(models) != 2:
        raise InputError("a plane is spanned by a base and a list of two models.")
    if len(names) != 3 or len(set(names)) != 3:
        raise InputError(f"names={names!r}, expected three different names, of the base and of the two models.")
    columns, rows = _grid(grid)
    walk = PlaneWalk(
        *(model, evaluate),
        higher_is_better=tuple(higher_is_better),
        bn=bn,
        bn_data=bn_data,
        bn_batch_size=bn_batch_size,
        backend=backend,
        progress=progress,
        checkpoint=checkpoint,
    )
    sources = zip((base, *models), ("base", "models[0]", "models[1]"), strict=True)
    origin, a, b = (walk.load(source, name) for source, name in sources)
    keys = parameter_keys(model)
    distances = metrics.distances(*([state[key] for key in keys] for state in (a, b, origin)))
    p, q, r = (1.0, 0.0, 1.0) if coordinates == "task" else _spans(distances)
    placed = dict(zip(names, [(0.0, 0.0), (p, 0.0), (q, r)], strict=True))
    if coordinates == "task":
        default_x = default_y = (-0.5, 1.5)
    else:
        default_x, default_y = _extent([0.0, p, q]), _extent([0.0, r])
    plane = Plane(
        states=(origin, a, b),
        spans=(p, q, r),
        models=placed,
        coordinates=coordinates,
        distances=distances,
        choices={"coordinates": coordinates},
    )
    x = _axis("x_range", default_x if x_range is None else x_range, columns, [0.0, p, q])
    y = _axis("y_range", default_y if y_range is None else y_range, rows, [0.0, r])
    return walk.scan(plane, x, y)


def random_plane(
    model: nn.Module,
    evaluate: Evaluate | Mapping[str, Evaluate],
    grid: tuple[int, int] = (41, 41),
    *,
    distance: float = 1.0,
    normalization: str = "filter",
    seed: int = 0,
    exclude: str | Sequence[str] = (),
    orthogonal: bool = True,
    higher_is_better: Sequence[str] = ("accuracy",),
    bn: str = "auto",
    bn_data: Data | Tensor | None = None,
    bn_batch_size: int = 256,
    backend: str = "auto",
    progress: Progress | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> PlaneResult:
    r"""Evaluate the models around one model on the plane of two random directions, its loss surface.

    .. math:: \theta(x, y) = \theta + x\, d_1 + y\, d_2, \qquad -D \le x, y \le D,

    with Gaussian directions as ``isthmus.path.random_directions`` makes them. By the default normalization a step of 1
    is as long, filter by filter, as the model itself (Li et al., "Visualizing the Loss Landscape of Neural Nets", arXiv
    1712.09913, section 4). Buffers do not move. The model itself is always evaluated, and given back untouched.

    Args:
        model: the model whose weights are the origin.
        evaluate: as for ``scan_line``.
        grid: the numbers of columns and rows, at least 2 each; odd ones have the model in the middle.
        distance: the largest coordinate D, positive.
        normalization: "filter", "layer", "model" or "none".
        seed: decides the directions.
        exclude: parameters that do not move: key patterns, or "1d" for biases and norm parameters.
        orthogonal: whether the second direction is made orthogonal to the first.
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
    columns, rows = _grid(grid)
    if not 0 < distance < math.inf:
        raise InputError(f"distance={distance} is no extent of a plane; give a positive number.")
    walk = PlaneWalk(
        *(model, evaluate),
        higher_is_better=tuple(higher_is_better),
        bn=bn,
        bn_data=bn_data,
        bn_batch_size=bn_batch_size,
        backend=backend,
        progress=progress,
        checkpoint=checkpoint,
    )
    drawn = {"normalization": normalization, "seed": seed, "exclude": exclude, "orthogonal": orthogonal}
    first, second = random_directions(model, 2, **drawn)  # type: ignore[arg-type]
    origin, keys = walk.load(model, "model"), parameter_keys(model)
    norm_x, norm_y = norm(first, keys), norm(second, keys)
    plane = Plane(
        states=(origin, first, second),
        spans=None,
        models={"model": (0.0, 0.0)},
        coordinates="random",
        distances={
            "norm_x": norm_x,
            "norm_y": norm_y,
            "cosine": dot(first, second, keys) / (norm_x * norm_y),
            "norm_model": norm(origin, keys),
        },
        choices=drawn,
    )
    extent = (-distance, distance)
    return walk.scan(plane, _axis("distance", extent, columns, [0.0]), _axis("distance", extent, rows, [0.0]))


def trajectory_plane(
    model: nn.Module,
    checkpoints: Sequence[Source],
    evaluate: Evaluate | Mapping[str, Evaluate],
    grid: tuple[int, int] = (41, 41),
    *,
    center: bool = True,
    x_range: Range | None = None,
    y_range: Range | None = None,
    higher_is_better: Sequence[str] = ("accuracy",),
    bn: str = "auto",
    bn_data: Data | Tensor | None = None,
    bn_batch_size: int = 256,
    backend: str = "auto",
    progress: Progress | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> PlaneResult:
    r"""Evaluate the models on the plane of a training run: through its last checkpoint, along its principal directions.

    .. math:: \theta(x, y) = \theta_n + x\, v_1 + y\, v_2

    with the unit vectors of ``isthmus.path.directions.principal_directions`` (Li et al., "Visualizing the Loss
    Landscape of Neural Nets", arXiv 1712.09913, section 7.2). Coordinates are Euclidean distances in weight space, over
    the parameters. ``trajectory`` in the result says where the checkpoints are projected to, ``off_plane`` how far from
    the plane they lie and ``explained`` how much of the variance is within it: values on the plane are those of the
    checkpoints only as far as these say. Buffers are the last checkpoint's.

    Args:
        model: the architecture; its own weights are not used.
        checkpoints: in the order of training, each as for ``scan_line``; at least four, or three if their mean is not
            taken off. All are held on the model's device at once.
        evaluate: as for ``scan_line``.
        grid: the numbers of columns and rows, at least 2 each.
        center: whether the mean of the checkpoints is taken off, as principal component analysis does; it takes a
            dimension off what they span.
        x_range: the first and last x; by default the extent of the trajectory with a quarter of its width on either
            side.
        y_range: the first and last y; by default likewise.
        higher_is_better: the metrics that are scores rather than losses.
        bn: as for ``scan_line``.
        bn_data: as for ``scan_line``.
        bn_batch_size: as for ``scan_line``.
        backend: as for ``isthmus.ops.weighted_sum``.
        progress: as for ``scan_line``.
        checkpoint: as for ``scan_line``; a file to go on from, not one of the ``checkpoints``.

    Raises:
        InputError: the checkpoints do not have the model's tensors or lie on a line, or an argument is out of range.
        FileError: a file is missing or not a safetensors file.
        EvaluationError: an evaluator raised; ``partial`` has the points before.
    """
    columns, rows = _grid(grid)
    if isinstance(checkpoints, str | nn.Module | Mapping) or len(checkpoints) < (4 if center else 3):
        raise InputError(
            "the plane of a trajectory needs a list of at least four checkpoints, or of three with center=False."
        )
    walk = PlaneWalk(
        *(model, evaluate),
        higher_is_better=tuple(higher_is_better),
        bn=bn,
        bn_data=bn_data,
        bn_batch_size=bn_batch_size,
        backend=backend,
        progress=progress,
        checkpoint=checkpoint,
    )
    states = [walk.load(source, f"checkpoints[{index}]") for index, source in enumerate(checkpoints)]
    found = principal_directions(states, parameter_keys(model), center=center)
    default_x, default_y = (_extent(along.tolist()) for along in found.coordinates.T)
    x = _axis("x_range", default_x if x_range is None else x_range, columns, [0.0])
    y = _axis("y_range", default_y if y_range is None else y_range, rows, [0.0])
    first, second = found.directions
    plane = Plane(
        states=(states[-1], first, second),
        spans=None,
        models={"last": (0.0, 0.0)},
        coordinates="principal",
        trajectory=found.coordinates,
        off_plane=found.off,
        explained=found.explained,
        choices={"center": center, "checkpoints": len(states)},
    )
    return walk.scan(plane, x, y)


def _spans(distances: Mapping[str, float]) -> tuple[float, float, float]:
    """(p, q, r): A lies at (p, 0) and B at (q, r) if the base is at (0, 0)."""
    p, length, cosine = (distances[name] for name in ("task_norm_a", "task_norm_b", "task_cosine"))
    sine = math.sqrt((1 - cosine) * (1 + cosine)) if abs(cosine) < 1 else 0.0
    if not sine > COLLINEAR:
        raise InputError(
            "the base and the two models lie on a line, or two of them are equal, so that no plane with distances to "
            "scale goes through them; use scan_line, or coordinates='task'."
        )
    return p, length * cosine, length * sine


def _extent(places: Sequence[float]) -> Range:
    margin = MARGIN * (max(places) - min(places))
    return min(places) - margin, max(places) + margin


def _grid(grid: Any) -> tuple[int, int]:
    sizes = tuple(grid) if isinstance(grid, Sequence) else ()
    if len(sizes) != 2 or not all(isinstance(size, int | np.integer) and size >= 2 for size in sizes):
        raise InputError(f"grid={grid!r} is no grid; give the numbers of columns and rows, at least 2 each: (41, 41).")
    return int(sizes[0]), int(sizes[1])


def _axis(name: str, extent: Any, size: int, places: Sequence[float]) -> Array:
    """``size`` equally spaced coordinates; those that differ from a model's by rounding alone are the model's."""
    ends = tuple(extent)
    if len(ends) != 2 or not all(map(math.isfinite, ends)) or not ends[0] < ends[1]:
        raise InputError(f"{name}={extent!r} is no range; give the first and the last coordinate, increasing.")
    axis = equally_spaced(*ends, size)
    for place in places:
        axis[np.abs(axis - place) < 1e-9 * (ends[1] - ends[0])] = place
    return axis
