"""Interpolation and weighted sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from isthmus import _dispatch, _library
from isthmus.errors import InputError

from ._validate import (
    any_requires_grad,
    column,
    factor,
    factor_tensor,
    factors,
    models_of,
    per_model,
    refuse_gradient_of_out,
    stays_unread,
    validate,
    weight_of_each,
)


@overload
def lerp(
    a: Tensor, b: Tensor, weight: float | Tensor, *, out: Tensor | None = None, backend: str = "auto"
) -> Tensor: ...
@overload
def lerp(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    weight: float | Tensor | Sequence[float],
    *,
    out: Sequence[Tensor] | None = None,
    backend: str = "auto",
) -> list[Tensor]: ...
def lerp(
    a: Tensor | Sequence[Tensor],
    b: Tensor | Sequence[Tensor],
    weight: float | Tensor | Sequence[float],
    *,
    out: Tensor | Sequence[Tensor] | None = None,
    backend: str = "auto",
) -> Tensor | list[Tensor]:
    """Linear interpolation between ``a`` (weight 0) and ``b`` (weight 1).

    Computes a + w (b - a) for w < ½ and b - (1 - w)(b - a) otherwise, each operation rounded, so that the result is
    exact at both ends: at w = 0 and w = 1 it is a copy. Weights outside [0, 1] extrapolate. Every backend, instruction
    set and thread count gives the same bits, up to the payload of NaNs.

    Args:
        a: the tensor, or tensors, at weight 0.
        b: the tensor, or tensors, at weight 1; shapes as in ``a``.
        weight: w, a float or a tensor of one element, or a list or 1-D tensor of one for each tensor; rounded once from
            float64 to the type computed in. A tensor on a GPU beside ``a`` is read there: the host does not wait
            for it, and a weight that is not finite propagates instead of being an error.
        out: where to write; each is disjoint from all inputs or is exactly one of its own.
        backend: "auto", "reference", "cpp", "cuda" or "triton"; a backend asked for by name never falls back.

    Raises:
        InputError: shapes, devices or dtypes cannot be combined, the weight is NaN or infinite, or ``out`` overlaps an
            input.
        BackendError: the backend is not available here.
    """
    columns = [column(a, "a"), column(b, "b")]
    targets = None if out is None else column(out, "out")
    table = validate(columns, ("a", "b"), targets)
    requires_grad = any_requires_grad(weight, columns, table)
    if _library.is_needed(requires_grad):
        refuse_gradient_of_out(requires_grad, targets)
        given = [factor_tensor(w) for w in weight_of_each(weight, len(columns[0]))]
        results = [
            _library.lerp(x, y, given[i % len(given)], out=None if targets is None else targets[i], backend=backend)
            for i, (x, y) in enumerate(zip(*columns, strict=True))
        ]
    else:
        values = factors(weight, columns[0])
        results = _dispatch.lerp(columns[0], columns[1], values, out=targets, backend=backend, table=table)
    return results[0] if isinstance(a, Tensor) else results


@overload
def weighted_sum(
    tensors: Sequence[Tensor],
    weights: Sequence[float] | Tensor,
    *,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor: ...
@overload
def weighted_sum(
    tensors: Sequence[Sequence[Tensor]],
    weights: Sequence[float] | Sequence[Sequence[float]] | Tensor,
    *,
    out: Sequence[Tensor] | None = None,
    backend: str = "auto",
) -> list[Tensor]: ...
def weighted_sum(
    tensors: Sequence[Tensor] | Sequence[Sequence[Tensor]],
    weights: Sequence[float] | Sequence[Sequence[float]] | Tensor,
    *,
    out: Tensor | Sequence[Tensor] | None = None,
    backend: str = "auto",
) -> Tensor | list[Tensor]:
    """The weighted sum w₁x₁ + w₂x₂ + ... of one or more models.

    The sum is a left fold in the order given, from its first term, each operation rounded. Weights are used as they
    are: to average, let them sum to one. Every backend, instruction set and thread count gives the same bits, up to the
    payload of NaNs.

    Args:
        tensors: one tensor per model, or one list of tensors per model.
        weights: one finite float per model, or a list of one for each of its tensors; or a tensor of shape (models,) or
            (models, number of tensors). Each is rounded once from float64 to the type computed in. A tensor on a GPU
            beside the tensors is read there: the host does not wait for it, and weights that are not finite propagate
            instead of being an error.
        out: where to write; each is disjoint from all inputs or is exactly one of its own.
        backend: "auto", "reference", "cpp", "cuda" or "triton"; a backend asked for by name never falls back.

    Raises:
        InputError: there is no tensor, the numbers of tensors and weights differ, shapes, devices or dtypes cannot be
            combined, a weight is NaN or infinite, or ``out`` overlaps an input.
        BackendError: the backend is not available here.
    """
    columns, names, single = models_of(tensors, "weighted_sum")
    rows = len(columns[0])
    count = len(weights) if not isinstance(weights, Tensor) or weights.dim() else 0
    if isinstance(weights, Tensor) and (weights.dim() > 2 or weights.shape[1:] not in ((), (rows,))):
        count = -1
    if count != len(columns):
        came = f"a tensor of shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else f"{count} weights"
        raise InputError(f"weighted_sum got {len(columns)} tensors and {came}; give one weight for each, in order.")
    targets = None if out is None else column(out, "out")
    table = validate(columns, names, targets)
    requires_grad = any_requires_grad(weights, columns, table)
    if _library.is_needed(requires_grad):
        refuse_gradient_of_out(requires_grad, targets)
        w = _weight_tensor(weights, rows)
        results = [
            _library.weighted_sum(
                row, w if w.dim() == 1 else w[:, i], out=None if targets is None else targets[i], backend=backend
            )
            for i, row in enumerate(zip(*columns, strict=True))
        ]
    else:
        values: Any
        if stays_unread(weights, columns[0]):
            values = weights.t()
        else:
            values = _weight_lists(weights.tolist() if isinstance(weights, Tensor) else weights, rows)
        results = _dispatch.weighted_sum(columns, values, out=targets, backend=backend, table=table)
    return results[0] if single else results


def _weight_lists(weights: Any, rows: int) -> list[Any]:
    """The weights of all rows, or a list of them for each row, which of no row is one empty list."""
    if any(isinstance(entry, Sequence) for entry in weights):
        return per_model(weights, "weights", rows, len(weights)) or [[]]
    return [factor(w) for w in weights]


def _weight_tensor(weights: Any, rows: int) -> Tensor:
    """Weights as a tensor of shape (models,) or (models, rows)."""
    if isinstance(weights, Tensor):
        return weights
    return torch.tensor(_weight_lists(weights, rows), dtype=torch.float64).t()
