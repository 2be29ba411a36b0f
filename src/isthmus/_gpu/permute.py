"""Gathers as rows of units, for kernels on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus._operands import laid_out, real
from isthmus.kernels import permute as launch
from isthmus.kernels.permute import Row
from isthmus.kernels.table import ALIGNMENT
from isthmus.reference import compute_dtype

from .tables import Column, of_rows

Indices = Sequence[Tensor | None]  # of one tensor, one for each dimension


def permute(tensors: Column, indices: Sequence[Indices], results: Column) -> None:
    """Write tensors, gathered along their axes, to ``results``, which have no gaps."""
    by_unit: dict[int, list[Row]] = {}
    kept = [_contiguous(entry) for entry in indices]
    for tensor, index, result in zip(tensors, kept, results, strict=True):
        if result.numel() > 0:
            axes = _axes(tensor, index, result)
            unit = _unit(axes, tensor.data_ptr(), result.data_ptr())
            by_unit.setdefault(unit, []).append(_row(axes, unit, [tensor, result], result.nbytes))
    for unit, rows in by_unit.items():
        launch.permute(launch.gathers(rows, results[0].device), unit)


def lerp_permuted(a: Column, b: Column, outputs: Column, weights: Tensor, indices: Sequence[Indices]) -> None:
    """Write interpolations of ``a`` and of ``b`` gathered; ``weights`` is float64, (1,) or (rows,), on any device."""
    laid = laid_out([a], outputs, c_order=False)
    kinds: dict[tuple[torch.dtype, torch.dtype, int], tuple[list[int], list[Row]]] = {}
    kept = []  # until the kernels are launched
    for place, ([x], y, entry, result) in enumerate(zip(laid.inputs, b, indices, laid.results, strict=True)):
        if result.numel() == 0:
            continue
        index = _contiguous((*entry, None) if y.is_complex() else entry)
        dtype = compute_dtype([x.dtype, y.dtype]) if real(y).dtype != x.dtype else x.dtype
        first, second = x.to(dtype), real(y).to(dtype)
        axes = _axes(second, index, result)
        size = second.element_size()
        whole = _unit(axes, *(tensor.data_ptr() for tensor in (second, first, result))) == ALIGNMENT
        unit = ALIGNMENT if whole else size
        places, rows = kinds.setdefault((dtype, result.dtype, unit // size), ([], []))
        places.append(place)
        rows.append(_row(axes, unit, [second, first, result], second.numel() * size))
        kept.append((first, second, index))
    for (dtype, out_dtype, lanes), (places, rows) in kinds.items():
        device = laid.results[0].device
        table = launch.gathers(rows, device)
        launch.lerp_permuted(table, of_rows(weights, places, device), dtype, out_dtype, lanes)
    for target, result in laid.late:
        target.copy_(result)


def _contiguous(index: Indices) -> list[Tensor | None]:
    return [None if entry is None else entry.contiguous() for entry in index]


Axis = tuple[int, int, Tensor | None]  # size, stride in bytes, index


def _axes(tensor: Tensor, index: Indices, result: Tensor) -> list[Axis]:
    """The axes of a result from inner to outer, the bytes of an element first, neighbours joined where both stay."""
    axes: list[Axis] = [(tensor.element_size(), 1, None)]
    for d in sorted((d for d in range(tensor.dim()) if tensor.shape[d] > 1), key=result.stride):
        size, stride = tensor.shape[d], tensor.stride(d) * tensor.element_size()
        inner_size, inner_stride, inner_index = axes[-1]
        if index[d] is None and inner_index is None and stride == inner_stride * inner_size:
            axes[-1] = (inner_size * size, inner_stride, None)
        else:
            axes.append((size, stride, index[d]))
    return axes


def _unit(axes: list[Axis], *addresses: int) -> int:
    """The most bytes, up to 16 and a power of two, that are moved together wherever the indices lead."""
    return math.gcd(ALIGNMENT, axes[0][0], *(stride for _, stride, _ in axes[1:]), *addresses)


def _row(axes: list[Axis], unit: int, tensors: Sequence[Tensor], size: int) -> Row:
    """A row of units, of ``size`` bytes of the source's type."""
    in_units = [(axes[0][0] // unit, 1, 0)] if axes[0][0] > unit else []
    in_units += [(n, stride // unit, 0 if index is None else index.data_ptr()) for n, stride, index in axes[1:]]
    return Row([tensor.data_ptr() for tensor in tensors], size // unit, in_units)
