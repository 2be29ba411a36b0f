"""Gathers along every axis of tensors, alone and within an interpolation.

A result is made of *units*: the most bytes, up to 16, that lie together in it and in its source wherever its indices
lead, so that values of every type are moved in the same way. Where a unit comes from is told by *axes* from inner to
outer, each with its size, the stride between its entries in units of the source, and the address of an index or 0.
Axes that stay and lie one after the other are one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .elementwise import interpolated
from .numbers import DTYPES, EXACT, INTERPRETED, TABLES, computed_in, narrow, widen
from .table import ALIGNMENT, to_device

_THREADS = 128
_UNITS = 1 << 15 if INTERPRETED else 4 * _THREADS  # of one program: as many loads of a thread are in flight
_FIELDS = tl.constexpr(4)  # of a row, before its addresses
_ARRAYS = [*TABLES, "rows", "axes"]


@dataclass(frozen=True)
class Row:
    """A result to gather: the addresses of its source and of what is read and written in order, its units and axes."""

    addresses: Sequence[int]
    units: int
    axes: Sequence[tuple[int, int, int]]


@dataclass(frozen=True, eq=False)
class Gathers:
    """Rows whose units have one size, on the device: one launch serves all.

    Attributes:
        rows: int64 (rows, 4 + addresses): how many units, the first block, the first axis, how many axes, and the
            addresses.
        axes: int64 (axes, 3).
        row_of_block: int32 (blocks,): which row each block is of.
        block: units of a block.
    """

    rows: Tensor
    axes: Tensor
    row_of_block: Tensor
    block: int


def gathers(rows: Sequence[Row], device: torch.device) -> Gathers:
    """What a launch needs of rows with at least one unit each and as many addresses."""
    block = _UNITS
    if INTERPRETED:  # no more lanes than are needed
        block = min(block, triton.next_power_of_2(max(row.units for row in rows)))
    blocks = [triton.cdiv(row.units, block) for row in rows]
    first_block = [0, *itertools.accumulate(blocks)]
    first_axis = [0, *itertools.accumulate(len(row.axes) for row in rows)]
    fields = [(row.units, first_block[r], first_axis[r], len(row.axes), *row.addresses) for r, row in enumerate(rows)]
    flat = [*itertools.chain(*fields), *itertools.chain(*(axis for row in rows for axis in row.axes)), *blocks]
    on_device = to_device(torch.tensor(flat, dtype=torch.int64), device)
    described, axes, counts = on_device.split([len(rows) * len(fields[0]), 3 * first_axis[-1], len(rows)])
    return Gathers(
        described.view(len(rows), -1),
        axes.view(-1, 3),
        torch.repeat_interleave(
            torch.arange(len(rows), dtype=torch.int32, device=device), counts, output_size=first_block[-1]
        ),
        block,
    )


@triton.jit
def _sources(row, axes, at):
    """Where units of a result lie in its source, also beyond its end somewhere within."""
    rest = at
    place = tl.zeros_like(at).to(tl.int64)
    axis = axes + 3 * tl.load(row + 2)
    for _ in range(tl.load(row + 3)):
        size = tl.load(axis).to(rest.dtype)
        outer = rest // size
        entry = (rest - outer * size).to(tl.int64)
        index = tl.load(axis + 2)
        if index != 0:
            entry = tl.load(index.to(tl.pointer_type(tl.int64)) + entry)
        place += entry * tl.load(axis + 1)
        rest = outer
        axis += 3
    return place


@triton.jit
def _places(row, axes, begin, lanes: tl.constexpr, block: tl.constexpr):
    """Of the values of a block of units: where they lie in the source, where in the result, and which are within it."""
    at = begin + tl.arange(0, block)
    units = tl.load(row)
    if units < 0x7F000000:  # noqa: SIM108 - divisions of 32 bits take a fraction of the time
        source = _sources(row, axes, at.to(tl.int32))
    else:
        source = _sources(row, axes, at)
    inside = at < units
    if lanes > 1:
        lane = tl.arange(0, lanes)
        source = source[:, None] * lanes + lane[None, :]
        at = at[:, None] * lanes + lane[None, :]
        inside = tl.broadcast_to(inside[:, None], (block, lanes))
    return source, at, inside


@triton.jit
def _pointer(row, which: tl.constexpr, dtype: tl.constexpr, lanes: tl.constexpr):
    found = tl.load(row + _FIELDS + which).to(tl.pointer_type(dtype))
    if lanes > 1:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=_ARRAYS)
def _permute(
    rows, width, axes, row_of_block, unit: tl.constexpr, lanes: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    row = rows + tl.load(row_of_block + tl.program_id(0)).to(tl.int64) * width
    begin = (tl.program_id(0) - tl.load(row + 1)) * block
    source, at, inside = _places(row, axes, begin, lanes, block)
    x = tl.load(_pointer(row, 0, unit, lanes) + source)
    result = _pointer(row, 1, unit, lanes) + at
    if begin + block <= tl.load(row):
        tl.store(result, x)
    else:
        tl.store(result, x, mask=inside)


_UNIT_TYPES = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64, 16: tl.uint64}


def permute(table: Gathers, unit: int) -> None:
    """Write results whose units have so many bytes, a power of two; addresses: of the source and of the result."""
    _permute[(len(table.row_of_block),)](
        table.rows,
        table.rows.shape[1],
        table.axes,
        table.row_of_block,
        unit=_UNIT_TYPES[unit],
        lanes=2 if unit == ALIGNMENT else 1,
        block=table.block,
        num_warps=_THREADS // 32,
    )


@triton.jit(do_not_specialize=["width", "weight_stride"], do_not_specialize_on_alignment=_ARRAYS)
def _lerp_permuted(
    rows, width, axes, row_of_block, weights, weight_stride,
    dtype: tl.constexpr, out: tl.constexpr, compute: tl.constexpr, lanes: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    which = tl.load(row_of_block + tl.program_id(0)).to(tl.int64)
    row = rows + which * width
    begin = (tl.program_id(0) - tl.load(row + 1)) * block
    source, at, inside = _places(row, axes, begin, lanes, block)
    weight = tl.load(weights + which * weight_stride)
    b = widen(tl.load(_pointer(row, 0, dtype, lanes) + source), compute)
    from_a, result = _pointer(row, 1, dtype, lanes) + at, _pointer(row, 2, out, lanes) + at
    if begin + block <= tl.load(row):
        a = widen(tl.load(from_a), compute)
        tl.store(result, narrow(interpolated(a, b, weight, compute), out))
    else:
        a = widen(tl.load(from_a, mask=inside), compute)
        tl.store(result, narrow(interpolated(a, b, weight, compute), out), mask=inside)


def lerp_permuted(table: Gathers, weights: Tensor, dtype: torch.dtype, out_dtype: torch.dtype, lanes: int) -> None:
    """Write interpolations of a and of the units that b is gathered by, each of ``lanes`` elements.

    Addresses are those of b, of a and of the result; ``weights`` is float64, (1,) or (rows,).
    """
    _lerp_permuted[(len(table.row_of_block),)](
        table.rows,
        table.rows.shape[1],
        table.axes,
        table.row_of_block,
        weights,
        int(len(weights) > 1),
        dtype=DTYPES[dtype],
        out=DTYPES[out_dtype],
        compute=computed_in(dtype),
        lanes=lanes,
        block=table.block,
        num_warps=_THREADS // 32,
        **EXACT,
    )
