"""Interpolations and sums of flat states: the merges that scans repeat at every point."""

from __future__ import annotations

from collections.abc import Sequence

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
    check_exact([a, b])
    write_lerp(a, b, weight, out, backend=backend)
    return out


def write_lerp(a: FlatState, b: FlatState, weight: float | Tensor, out: FlatState, *, backend: str = "auto") -> None:
    """``lerp_states`` of models for which ``check_exact`` was called before; on a GPU the host waits for nothing."""
    _copy_exact(a, out)
    ops.lerp(a.averaged, b.averaged, weight, out=out.averaged, backend=backend)


def weighted_sum_states(
    states: Sequence[FlatState], weights: Sequence[float], *, out: FlatState | None = None, backend: str = "auto"
) -> FlatState:
    """The weighted sum w₁θ₁ + w₂θ₂ + ... of models; see ``isthmus.ops.weighted_sum``.

    Terms of weight 0 are left out, so that a model of weight 1 among weights of 0 is itself to the bit. Integer and
    boolean entries are never summed: they must be equal in all models, except ``num_batches_tracked``, which follows
    the first.

    Args:
        states: the models, of one layout.
        weights: one finite float for each, not all of them 0.
        out: where to write; one of the models or another state of the same layout. By default a new state.
        backend: as for ``isthmus.ops.weighted_sum``.

    Raises:
        InputError: there is not one weight for each model, the layouts differ, an integer or boolean entry differs, or
            all weights are 0.
    """
    if len(states) != len(weights) or not states:
        raise InputError(f"got {len(states)} models and {len(weights)} weights; give at least one, and one for each.")
    first = states[0]
    for index, state in enumerate(states[1:], start=1):
        first.layout.check(state.layout, name=f"states[{index}]", expected="states[0]")
    if out is None:
        out = FlatState.zeros(first.layout, device=first.device)
    else:
        first.layout.check(out.layout, name="out", expected="states[0]")
    if not any(weights):
        raise InputError("the weights of a sum of models are all 0; give at least one that is not.")
    check_exact(states)
    write_weighted_sum(states, weights, out, backend=backend)
    return out


def write_weighted_sum(
    states: Sequence[FlatState], weights: Sequence[float], out: FlatState, *, backend: str = "auto"
) -> None:
    """``weighted_sum_states`` of models for which ``check_exact`` was called; on a GPU the host waits for nothing."""
    terms = [(state.averaged, weight) for state, weight in zip(states, weights, strict=True) if weight != 0]
    _copy_exact(states[0], out)
    ops.weighted_sum([term for term, _ in terms], [weight for _, weight in terms], out=out.averaged, backend=backend)


def check_exact(states: Sequence[FlatState]) -> None:
    """Check that the integer and boolean entries of models of one layout, batch counters aside, are equal.

    Raises:
        InputError: one differs.
    """
    first = states[0]
    for dtype in _exact(first):
        for other in states[1:]:
            if not torch.equal(first.buffers[dtype], other.buffers[dtype]):
                _check_exact(first, other, dtype)


def _copy_exact(first: FlatState, out: FlatState) -> None:
    """Copy the integer and boolean entries."""
    if out is not first:
        for dtype in _exact(first):
            out.buffers[dtype].copy_(first.buffers[dtype])


def _exact(state: FlatState) -> list[torch.dtype]:
    """The integer and boolean dtypes of a model."""
    return [dtype for dtype in state.buffers if not (dtype.is_floating_point or dtype.is_complex)]


def _check_exact(a: FlatState, b: FlatState, dtype: torch.dtype) -> None:
    """Check that the entries of an integer or boolean dtype are equal, batch counters aside."""
    for key, entry in a.layout.entries.items():
        if entry.dtype == dtype and not is_counter(key) and not torch.equal(a[key], b[key]):
            raise InputError(
                f"{key!r} is {dtype} and differs between the models; integer and boolean entries are not averaged. "
                "Make them equal, or leave the entry out of both."
            )
