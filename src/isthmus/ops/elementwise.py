"""Interpolation and weighted sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from isthmus import _dispatch, _library
from isthmus.errors import InputError

from ._validate import any_requires_grad, column, factor, factor_tensor, refuse_gradient_of_out, validate


@overload
def lerp(
    a: Tensor, b: Tensor, weight: float | Tensor, *, out: Tensor | None = None, backend: str = "auto"
) -> Tensor: ...
@overload
def lerp(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    weight: float | Tensor,
    *,
    out: Sequence[Tensor] | None = None,
    backend: str = "auto",
) -> list[Tensor]: ...
def lerp(
    a: Tensor | Sequence[Tensor],
    b: Tensor | Sequence[Tensor],
    weight: float | Tensor,
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
        weight: w, a float or a tensor of one element; rounded once from float64 to the type computed in.
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
        w = factor_tensor(weight)
        results = [
            _library.lerp(x, y, w, out=None if targets is None else targets[i], backend=backend)
            for i, (x, y) in enumerate(zip(*columns, strict=True))
        ]
    else:
        results = _dispatch.lerp(columns[0], columns[1], [factor(weight)], out=targets, backend=backend, table=table)
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
    weights: Sequence[float] | Tensor,
    *,
    out: Sequence[Tensor] | None = None,
    backend: str = "auto",
) -> list[Tensor]: ...
def weighted_sum(
    tensors: Sequence[Tensor] | Sequence[Sequence[Tensor]],
    weights: Sequence[float] | Tensor,
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
        weights: one finite float per model, or a 1-D tensor of them; each rounded once from float64 to the type
            computed in.
        out: where to write; each is disjoint from all inputs or is exactly one of its own.
        backend: "auto", "reference", "cpp", "cuda" or "triton"; a backend asked for by name never falls back.

    Raises:
        InputError: there is no tensor, the numbers of tensors and weights differ, shapes, devices or dtypes cannot be
            combined, a weight is NaN or infinite, or ``out`` overlaps an input.
        BackendError: the backend is not available here.
    """
    models = list(tensors)
    if not models:
        raise InputError("weighted_sum got no tensors; give at least one.")
    single = isinstance(models[0], Tensor)
    names = [f"tensors[{k}]" for k in range(len(models))]
    columns = [column(model, name) for model, name in zip(models, names, strict=True)]
    count = len(weights) if not isinstance(weights, Tensor) else weights.numel() if weights.dim() == 1 else -1
    if count != len(columns):
        came = f"a tensor of shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else f"{count} weights"
        raise InputError(f"weighted_sum got {len(columns)} tensors and {came}; give one weight for each, in order.")
    targets = None if out is None else column(out, "out")
    table = validate(columns, names, targets)
    requires_grad = any_requires_grad(weights, columns, table)
    if _library.is_needed(requires_grad):
        refuse_gradient_of_out(requires_grad, targets)
        w = weights if isinstance(weights, Tensor) else torch.tensor([factor(w) for w in weights], dtype=torch.float64)
        results = [
            _library.weighted_sum(row, w, out=None if targets is None else targets[i], backend=backend)
            for i, row in enumerate(zip(*columns, strict=True))
        ]
    else:
        values = weights.tolist() if isinstance(weights, Tensor) else weights
        results = _dispatch.weighted_sum(
            columns, [factor(w) for w in values], out=targets, backend=backend, table=table
        )
    return results[0] if single else results
