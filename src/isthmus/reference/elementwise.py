"""Interpolation and weighted sums, and the roundings that every rule shares."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def compute_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype in which tensors of these dtypes are combined: as torch promotes them, but at least float32."""
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


def to_float32_odd(x: Tensor) -> Tensor:
    """Round float64 to float32 by round-to-odd: towards zero, the last bit set where that was inexact.

    Rounding the result to bfloat16 or float16 then equals rounding ``x`` once (Boldo and Melquiond, "Emulation of FMA
    and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """
    nearest = x.to(torch.float32)
    back = nearest.to(torch.float64)
    bits = nearest.view(torch.int32)
    bits = torch.where(back.abs() > x.abs(), bits - 1, bits)
    return torch.where(back != x, bits | 1, bits).view(torch.float32)


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round ``x`` (float32 or float64) once to ``dtype``, to nearest with ties to even; always a new tensor."""
    if x.dtype == torch.float64 and dtype in (torch.bfloat16, torch.float16):
        x = to_float32_odd(x)
    return x.to(dtype, copy=True)


def lerp(a: Tensor, b: Tensor, weight: float, *, dtype: torch.dtype | None = None) -> Tensor:
    """Linear interpolation, a + w (b - a); see ``isthmus.ops.lerp``."""
    compute = compute_dtype((a.dtype, b.dtype))
    dtype = a.dtype if dtype is None else dtype
    a, b = a.to(compute), b.to(compute)
    if weight == 0 or weight == 1:
        return narrow(b if weight else a, dtype)
    if weight < 0.5:
        return narrow(a + scalar(weight, a) * (b - a), dtype)
    return narrow(b - scalar(1 - weight, a) * (b - a), dtype)


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[float], *, dtype: torch.dtype | None = None) -> Tensor:
    """w₁x₁ + w₂x₂ + ..., a left fold from its first term; see ``isthmus.ops.weighted_sum``."""
    compute = compute_dtype(tensor.dtype for tensor in tensors)
    terms = (scalar(w, x) * x for w, x in zip(weights, (tensor.to(compute) for tensor in tensors), strict=True))
    total = functools.reduce(torch.add, terms)
    return narrow(total, tensors[0].dtype if dtype is None else dtype)


def scalar(value: float, like: Tensor) -> Tensor:
    """A float64 scalar rounded once to the dtype of ``like``."""
    return torch.tensor(value, dtype=like.dtype, device=like.device)
