"""Permutations of units along the axes of tensors, alone and within an interpolation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from isthmus import _dispatch, _library
from isthmus.errors import InputError

from ._overlap import Placed, refuse_overlap
from ._validate import (
    DTYPES,
    any_requires_grad,
    column,
    factor,
    factor_tensor,
    refuse_gradient_of_out,
    validate,
    weight_of_each,
)

PERMUTED = (*DTYPES, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

Indices = Sequence[Tensor | None] | None  # of one tensor: an index for each dimension


@overload
def permute(tensors: Tensor, indices: Indices, *, out: Tensor | None = None, backend: str = "auto") -> Tensor: ...
@overload
def permute(
    tensors: Sequence[Tensor],
    indices: Sequence[Indices],
    *,
    out: Sequence[Tensor] | None = None,
    backend: str = "auto",
) -> list[Tensor]: ...
def permute(
    tensors: Tensor | Sequence[Tensor],
    indices: Indices | Sequence[Indices],
    *,
    out: Tensor | Sequence[Tensor] | None = None,
    backend: str = "auto",
) -> Tensor | list[Tensor]:
    """Reorder tensors along any of their axes at once.

    Computes result[i₀, i₁, ...] = tensor[idx₀[i₀], idx₁[i₁], ...]. An index is most often a permutation, but any
    entries within its axis will do. Values are moved, never computed with: results are equal to the bit, NaNs included.
    Gradients flow back to where entries were read, added up where one was read more than once: by torch, whichever
    backend was asked for.

    Args:
        tensors: the tensor, or tensors, to reorder; also of integers and booleans.
        indices: for the tensor, or for each of the tensors, one entry per dimension: an int64 tensor of shape (size of
            the dimension,) on the tensor's device, or None where the dimension stays as it is. None in place of all
            entries of a tensor copies it.
        out: where to write; of the tensors' dtypes, and disjoint from all inputs.
        backend: "auto", "reference", "cpp", "cuda" or "triton"; a backend asked for by name never falls back.

    Raises:
        InputError: an index has another dtype, shape or device, or an entry outside its dimension; a tensor is of no
            known kind; or ``out`` overlaps an input or has another dtype.
        BackendError: the backend is not available here.
    """
    columns = [column(tensors, "tensors")]
    targets = None if out is None else column(out, "out")
    each: Any = [indices] if isinstance(tensors, Tensor) else indices
    sources = None
    if not torch.compiler.is_compiling():
        sources = _dispatch.plain_sources(columns[0], each, targets, same_dtype=True)
    if sources is None:
        validate(columns, ("tensors",), targets, dtypes=PERMUTED)
        _check_indices(columns[0], each, "tensors")
    if sources is None and targets is not None:
        _refuse_in_place(targets, columns[0], "tensors", each)
        for row, (target, tensor) in enumerate(zip(targets, columns[0], strict=True)):
            if target.dtype != tensor.dtype:
                raise InputError(
                    f"{_label('out', row, targets)} has dtype {target.dtype}, expected {tensor.dtype}: a permutation "
                    "moves values as they are. Convert before or after."
                )
    given = _by_axis(columns[0], each)
    requires_grad = any_requires_grad(None, columns, sources)
    if _library.is_needed(requires_grad):
        refuse_gradient_of_out(requires_grad, targets)
        results = [
            _library.permute(x, index, out=None if targets is None else targets[row], backend=backend)
            for row, (x, index) in enumerate(zip(columns[0], given, strict=True))
        ]
    else:
        results = _dispatch.permute(columns[0], given, out=targets, backend=backend, sources=sources)
    return results[0] if isinstance(tensors, Tensor) else results


@overload
def lerp_permuted(
    a: Tensor,
    b: Tensor,
    weight: float | Tensor,
    indices: Indices,
    *,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor: ...
@overload
def lerp_permuted(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    weight: float | Tensor | Sequence[float],
    indices: Sequence[Indices],
    *,
    out: Sequence[Tensor] | None = None,
    backend: str = "auto",
) -> list[Tensor]: ...
def lerp_permuted(
    a: Tensor | Sequence[Tensor],
    b: Tensor | Sequence[Tensor],
    weight: float | Tensor | Sequence[float],
    indices: Indices | Sequence[Indices],
    *,
    out: Tensor | Sequence[Tensor] | None = None,
    backend: str = "auto",
) -> Tensor | list[Tensor]:
    """Linear interpolation between ``a`` and a permuted ``b``, in one pass and without a permuted copy.

    Equal to ``lerp(a, permute(b, indices), weight)`` to the bit.

    Args:
        a: the tensor, or tensors, at weight 0.
        b: the tensor, or tensors, that are permuted and then stand at weight 1; shapes as in ``a``.
        weight: as in ``lerp``.
        indices: the indices of ``b``, as in ``permute``.
        out: where to write; each is disjoint from all inputs or is exactly its own ``a``.
        backend: "auto", "reference", "cpp", "cuda" or "triton"; a backend asked for by name never falls back.

    Raises:
        InputError: what ``lerp`` and ``permute`` refuse, or ``out`` is a tensor of ``b``.
        BackendError: the backend is not available here.
    """
    columns = [column(a, "a"), column(b, "b")]
    targets = None if out is None else column(out, "out")
    table = validate(columns, ("a", "b"), targets)
    each: Any = [indices] if isinstance(b, Tensor) else indices
    sources = None if table is None else _dispatch.plain_sources(columns[1], each, targets, same_dtype=False)
    if sources is None:
        _check_indices(columns[1], each, "b")
        if targets is not None:
            _refuse_in_place(targets, columns[1], "b", each)
    given = _by_axis(columns[1], each)
    weights = weight_of_each(weight, len(columns[0]))
    requires_grad = any_requires_grad(weight, columns, table)
    if _library.is_needed(requires_grad):
        refuse_gradient_of_out(requires_grad, targets)
        factors = [factor_tensor(w) for w in weights]
        results = [
            _library.lerp(
                x,
                _library.permute(y, index, out=None, backend=backend),
                factors[row % len(factors)],
                out=None if targets is None else targets[row],
                backend=backend,
            )
            for row, (x, y, index) in enumerate(zip(*columns, given, strict=True))
        ]
    else:
        values = [factor(w) for w in weights]
        results = _dispatch.lerp_permuted(
            columns[0], columns[1], values, given, out=targets, backend=backend, table=table, sources=sources
        )
    return results[0] if isinstance(a, Tensor) else results


def _check_indices(tensors: list[Tensor], indices: object, name: str) -> None:
    """Check all of the indices but their values."""
    rows = _entries(indices)
    if rows is None or len(rows) != len(tensors):
        came = f"is a {type(indices).__name__}" if rows is None else f"has {len(rows)} entries"
        raise InputError(f"indices {came}, expected {len(tensors)}, one for each of {name}.")
    for row, (tensor, entry) in enumerate(zip(tensors, rows, strict=True)):
        if entry is None:
            continue
        label, axes = _label(name, row, tensors), _entries(entry)
        if axes is None or len(axes) != tensor.dim():
            came = f"a {type(entry).__name__}" if axes is None else f"{len(axes)} entries"
            raise InputError(
                f"the indices of {label} are {came}, expected {tensor.dim()}, one for each dimension: "
                "an index, or None where it stays."
            )
        for axis, (size, index) in enumerate(zip(tensor.shape, axes, strict=True)):
            if index is not None:
                _check_index(index, size, tensor, f"the index of {label} along axis {axis}")


def _by_axis(tensors: list[Tensor], indices: Sequence[Indices]) -> list[Sequence[Tensor | None]]:
    """An entry for each dimension of each tensor."""
    return [[None] * tensor.dim() if entry is None else entry for tensor, entry in zip(tensors, indices, strict=True)]


def _entries(value: object) -> Sequence[Any] | None:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else None


def _check_index(index: object, size: int, tensor: Tensor, label: str) -> None:
    if not isinstance(index, Tensor):
        raise InputError(f"{label} is a {type(index).__name__}, expected an int64 tensor.")
    if index.dtype != torch.int64:
        raise InputError(f"{label} has dtype {index.dtype}, expected torch.int64; convert it with .long().")
    if index.shape != (size,):
        raise InputError(f"{label} has shape {tuple(index.shape)}, expected ({size},), one entry for each place.")
    if index.device != tensor.device:
        raise InputError(f"{label} is on {index.device}, expected {tensor.device} as the tensor; move one of them.")


def _refuse_in_place(
    targets: list[Tensor], tensors: list[Tensor], name: str, indices: list[list[Tensor | None]]
) -> None:
    """Check that outputs are neither permuted tensors, which are disjoint from them or the same here, nor indices."""
    if torch.compiler.is_compiling():
        return
    for row, (target, tensor) in enumerate(zip(targets, tensors, strict=True)):
        if target.data_ptr() == tensor.data_ptr() and target.numel() > 0:
            raise InputError(
                f"{_label('out', row, targets)} has the memory of {_label(name, row, tensors)}, and no tensor is "
                "permuted in place; pass an out= with memory of its own, or none."
            )
    given = {id(index): index for entry in indices for index in entry or () if index is not None}
    storages = {index.untyped_storage().data_ptr() for index in given.values()}
    near = [row for row, target in enumerate(targets) if target.untyped_storage().data_ptr() in storages]
    if near:
        refuse_overlap(
            [Placed(_label("out", row, targets), row, targets[row]) for row in near],
            [Placed("an index", -1, index) for index in given.values()],
        )


def _label(name: str, row: int, tensors: list[Tensor]) -> str:
    return f"{name}[{row}]" if len(tensors) > 1 else name
