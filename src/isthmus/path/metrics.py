r"""Figures of merit of a path between two models. Pure functions; every one states its formula and its source.

Values are one number per point :math:`\alpha_i`. Formulas are written for a loss :math:`L`, of which less is better;
for a score, of which more is better (accuracy), pass ``higher_is_better=True`` and the signs turn round, so that a
barrier is always a worsening and a gain always an improvement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn import functional

from isthmus.merging.companions import to_compute

from .tasks import accuracy, cross_entropy

Array = NDArray[np.float64]


class Peak(NamedTuple):
    """The largest worsening along a path, and the alpha where it lies; both NaN where a value is NaN."""

    height: float
    alpha: float


def barrier(alphas: ArrayLike, values: ArrayLike, ends: tuple[float, float], *, higher_is_better: bool = False) -> Peak:
    r"""The height above the mean of the ends, :math:`\max_\alpha L(\alpha) - \tfrac12 (L_A + L_B)`.

    Source: Frankle et al., "Linear Mode Connectivity and the Lottery Ticket Hypothesis", arXiv 1912.05671, section 2
    ("error barrier height"). It can be positive on a straight descent; see ``linear_barrier``.

    Args:
        alphas: the points, shape (n,).
        values: :math:`L` at the points, shape (n,).
        ends: :math:`(L_A, L_B)`.
        higher_is_better: whether the values are a score.
    """
    return _peak(alphas, np.asarray(values, np.float64) - np.mean(ends), higher_is_better)


def linear_barrier(
    alphas: ArrayLike, values: ArrayLike, ends: tuple[float, float], *, higher_is_better: bool = False
) -> Peak:
    r"""The height above the chord, :math:`\max_\alpha \left[ L(\alpha) - (1 - \alpha) L_A - \alpha L_B \right]`.

    It is at least 0 if both ends are points.

    Source: Entezari et al., "The Role of Permutation Invariance in Linear Mode Connectivity", arXiv 2110.06296,
    equation 1. Arguments as for ``barrier``.
    """
    points = np.asarray(alphas, np.float64)
    chord = (1 - points) * ends[0] + points * ends[1]
    return _peak(points, np.asarray(values, np.float64) - chord, higher_is_better)


def gain(merged: float, ends: tuple[float, float], *, higher_is_better: bool = False) -> float:
    r"""How much better than the mean of the ends a merged model M is, :math:`\tfrac12 (L_A + L_B) - L_M`.

    Source: Zhang et al., arXiv 2510.04686.
    """
    difference = float(np.mean(ends)) - merged
    return -difference if higher_is_better else difference


def gain_over_better(merged: float, ends: tuple[float, float], *, higher_is_better: bool = False) -> float:
    r"""How much better than the better end a merged model M is, :math:`\min(L_A, L_B) - L_M`."""
    return merged - float(np.max(ends)) if higher_is_better else float(np.min(ends)) - merged


def relative_cut(before: float, after: float) -> float:
    r"""How much of a barrier is gone, :math:`1 - h_\text{after} / h_\text{before}`; NaN if there was none."""
    return 1 - after / before if before > 0 else math.nan


def integral(values: ArrayLike, positions: ArrayLike) -> float:
    r"""The mean along a path weighted by length, :math:`\int L\,\mathrm ds / \int \mathrm ds`, by the trapezoidal rule.

    Source: Garipov et al., "Loss Surfaces, Mode Connectivity, and Fast Ensembling of DNNs", arXiv 1802.10026, equation
    1. On a straight line, where length is proportional to :math:`\alpha`, pass the alphas.

    Args:
        values: :math:`L` at the points, shape (n,).
        positions: how far along the path each point lies, increasing, shape (n,).
    """
    points, heights = np.asarray(positions, np.float64), np.asarray(values, np.float64)
    return float(np.diff(points) @ (heights[:-1] + heights[1:]) / 2 / (points[-1] - points[0]))


def inner_products(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    r"""The real inner products :math:`\operatorname{Re} \sum_i \bar x_i y_i` of tensors of one shape, in float64.

    They are read from the device together.
    """
    products = [torch.vdot(to_compute(x).flatten(), to_compute(y).flatten()).real for x, y in pairs]
    read: list[float] = torch.stack(products).tolist() if products else []
    return read


def distances(a: Sequence[Tensor], b: Sequence[Tensor], base: Sequence[Tensor] | None = None) -> dict[str, float]:
    r"""How far apart two models are, over all elements of their tensors, in float64.

    A complex element counts as its real and its imaginary part.

    Args:
        a: the tensors of model A.
        b: those of model B, in the same order.
        base: those of the base :math:`\theta_0` of task vectors, if there is one.

    Returns:
        ``l2``: :math:`\lVert A - B \rVert`;
        ``relative``: :math:`\lVert A - B \rVert / \sqrt{\lVert A \rVert \lVert B \rVert}`;
        ``cosine``: :math:`\cos(A, B)`; and with a base
        ``task_cosine``: :math:`\cos(A - \theta_0, B - \theta_0)`, with the norms ``task_norm_a`` and ``task_norm_b``.
        NaN where a vector of norm 0 is divided by.
    """
    differences = (to_compute(x) - to_compute(y) for x, y in zip(a, b, strict=True))
    squared = sum(inner_products((difference, difference) for difference in differences))
    norm_a, norm_b, cosine = _cosine(a, b)
    scale = math.sqrt(norm_a * norm_b)
    result = {"l2": math.sqrt(squared), "relative": math.sqrt(squared) / scale if scale else math.nan, "cosine": cosine}
    if base is not None:
        task_a = [to_compute(x) - to_compute(o) for x, o in zip(a, base, strict=True)]
        task_b = [to_compute(x) - to_compute(o) for x, o in zip(b, base, strict=True)]
        result["task_norm_a"], result["task_norm_b"], result["task_cosine"] = _cosine(task_a, task_b)
    return result


def disagreement(outputs_a: Tensor, outputs_b: Tensor) -> float:
    """The fraction of samples for which two models predict different classes.

    Source: Fort et al., "Deep Ensembles: A Loss Landscape Perspective", arXiv 1912.02757, section 4.

    Args:
        outputs_a: logits of A, shape (n, classes, ...).
        outputs_b: logits of B, of the same shape.
    """
    return float((outputs_a.argmax(1) != outputs_b.argmax(1)).double().mean())


def ensemble(outputs: Sequence[Tensor], targets: Tensor) -> dict[str, float]:
    r"""Loss and accuracy of the ensemble of m models, :math:`p = \frac1m \sum_k \mathrm{softmax}(z_k)`.

    Source: Lakshminarayanan et al., "Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles",
    arXiv 1612.01474, section 2.4. Computed as a log-mean-exp in float64, and averaged over samples as an ``Evaluator``
    does: a target of -100 has loss 0 and is not predicted.

    Args:
        outputs: logits of each model, shape (n, classes, ...).
        targets: class indices, shape (n, ...).

    Returns:
        ``loss`` (mean negative log likelihood, in nats) and ``accuracy``.
    """
    logs = torch.stack([functional.log_softmax(z.double(), dim=1) for z in outputs])
    mixture = logs.logsumexp(0) - math.log(len(outputs))
    return {
        "loss": float(cross_entropy(mixture, targets).mean()),
        "accuracy": float(accuracy(mixture, targets).double().mean()),
    }


def linear_cka(x: Tensor, y: Tensor) -> float:
    r"""Debiased linear centred kernel alignment of two representations of the same n samples.

    .. math::

        \mathrm{CKA} = \frac{\mathrm{HSIC}_u(K, L)}{\sqrt{\mathrm{HSIC}_u(K, K)\,\mathrm{HSIC}_u(L, L)}}, \qquad
        \mathrm{HSIC}_u(K, L) = \frac{1}{n (n - 3)} \left[ \operatorname{tr}(\tilde K \tilde L)
        + \frac{1^\top \tilde K 1 \; 1^\top \tilde L 1}{(n - 1)(n - 2)}
        - \frac{2}{n - 2} 1^\top \tilde K \tilde L 1 \right]

    with :math:`K = X X^\top`, :math:`L = Y Y^\top`, and a tilde for a zeroed diagonal. 1 for representations equal up
    to rotation, scale and shift; near 0, on either side, for unrelated ones however wide they are.

    Source: Kornblith et al., arXiv 1905.00414; the estimator is equation 5 of Song et al., "Feature Selection via
    Dependence Maximization", as used by Nguyen et al., arXiv 2010.15327, equation 3.

    Args:
        x: representation of the first model, shape (n, ...), n at least 4; flattened to one vector per sample.
        y: that of the second, shape (n, ...), of any width.

    Returns:
        The alignment; NaN if a representation is constant.
    """
    x, y = x.flatten(1).double(), y.flatten(1).double()
    if bool((x == x[0]).all()) or bool((y == y[0]).all()):
        return math.nan
    x, y = x - x.mean(0), y - y.mean(0)  # changes nothing but rounding
    scale = math.sqrt(max(0.0, _hsic(x, x)) * max(0.0, _hsic(y, y)))
    return _hsic(x, y) / scale if scale else math.nan


def _peak(alphas: ArrayLike, excess: Array, higher_is_better: bool) -> Peak:
    worsening = 0.0 - excess if higher_is_better else excess  # 0 - 0 is 0, not -0
    if np.isnan(worsening).any():
        return Peak(math.nan, math.nan)
    highest = int(np.argmax(worsening))
    return Peak(float(worsening[highest]), float(np.asarray(alphas, np.float64)[highest]))


def _cosine(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[float, float, float]:
    """Both norms and the cosine of the angle."""
    dot = sum(inner_products(zip(a, b, strict=True)))
    squared_a, squared_b = (sum(inner_products((x, x) for x in each)) for each in (a, b))
    scale = math.sqrt(squared_a) * math.sqrt(squared_b)
    return math.sqrt(squared_a), math.sqrt(squared_b), dot / scale if scale else math.nan


def _hsic(x: Tensor, y: Tensor) -> float:
    """N (n - 3) times the unbiased HSIC of linear kernels, through the smaller of the matrices X'Y and XX', YY'."""
    n = len(x)
    diagonal_x, diagonal_y = x.square().sum(1), y.square().sum(1)
    rows_x, rows_y = x @ x.sum(0) - diagonal_x, y @ y.sum(0) - diagonal_y  # row sums of the kernels without diagonals
    product = (x.T @ y).square().sum() if x.shape[1] * y.shape[1] <= n * n else ((x @ x.T) * (y @ y.T)).sum()
    trace = product - diagonal_x @ diagonal_y
    return float(trace + rows_x.sum() * rows_y.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (rows_x @ rows_y))
