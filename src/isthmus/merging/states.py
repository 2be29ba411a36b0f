"""Interpolation between flat states: the merge that scans repeat at every point."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus import ops
from isthmus.errors import InputError
from isthmus.flat import FlatState

from .entries import is_counter


def lerp_states(
    a: FlatState, b: FlatState, weight: float | Tensor, *, out: FlatState | None = None, backend: str = "auto"
) -> FlatState:
    """Linear interpolation between two models, ``a`` at weight 0 and ``b`` at weight 1; see ``isthmus.ops.lerp``.

    Floating-point and complex entries are interpolated, running statistics of normalisation layers included. Integer
    and boolean entries are never averaged: they must be equal in both models, except ``num_batches_tracked``, which
    follows ``a``.

    Args:
        a: the model at weight 0.
        b: the model at weight 1, of the same layout.
        weight: the interpolation factor.
        out: where to write; ``a``, ``b`` or a third state of the same layout. By default a new state.
        backend: as for ``isthmus.ops.lerp``.

    Raises:
        InputError: the layouts differ, or an integer or boolean entry differs.
    """
    a.layout.check(b.layout, name="b", expected="a")
    if out is None:
        out = FlatState.zeros(a.layout, device=a.device)
    else:
        a.layout.check(out.layout, name="out", expected="a")
    for dtype, buffer in out.buffers.items():
        if dtype.is_floating_point or dtype.is_complex:
            continue
        if not torch.equal(a.buffers[dtype], b.buffers[dtype]):
            _check_exact(a, b, dtype)
        if out is not a:
            buffer.copy_(a.buffers[dtype])
    ops.lerp(a.averaged, b.averaged, weight, out=out.averaged, backend=backend)
    return out


def _check_exact(a: FlatState, b: FlatState, dtype: torch.dtype) -> None:
    """Check that the entries of an integer or boolean dtype are equal, batch counters aside."""
    for key, entry in a.layout.entries.items():
        if entry.dtype == dtype and not is_counter(key) and not torch.equal(a[key], b[key]):
            raise InputError(
                f"{key!r} is {dtype} and differs between the models; integer and boolean entries are not averaged. "
                "Make them equal, or leave the entry out of both."
            )
