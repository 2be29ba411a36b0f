"""Dots and norms of large tensors in float64, a block at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 2**20  # elements widened at a time


def dot(x: Tensor, y: Tensor, minus: Tensor | None = None) -> float:
    """Re ⟨x − z, y − z⟩ with z what is to be taken away, in float64; shapes are equal."""
    flat = [tensor.reshape(-1) for tensor in (x, y)]
    origin = None if minus is None else minus.reshape(-1)
    total = 0.0
    for start in range(0, x.numel(), BLOCK):
        a, b = (_wide(tensor[start : start + BLOCK]) for tensor in flat)
        if origin is not None:
            z = _wide(origin[start : start + BLOCK])
            a, b = a - z, b - z
        total += float(torch.vdot(a, b).real)
    return total


def norm(x: Tensor, minus: Tensor | None = None) -> float:
    """‖x − z‖ with z what is to be taken away, in float64."""
    return math.sqrt(dot(x, x, minus))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
