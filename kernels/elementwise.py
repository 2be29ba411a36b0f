"""Interpolation and weighted sums over tables.

A block that is whole is read and written without a mask: with one, the compiler could not join the accesses of a thread
to 16 bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .numbers import DTYPES, EXACT, TABLES, computed_in, narrow, pointer, widen
from .table import Table

_AT_ONCE = tl.constexpr(4)  # inputs whose loads are in flight together


@triton.jit
def interpolated(a, b, weight, compute: tl.constexpr):
    """The ends at w = 0 and w = 1, a + w (b - a) below one half, else b - (1 - w)(b - a); ``weight`` is float64."""
    w, u = weight.to(compute), (1 - weight).to(compute)
    near_a, near_b = a + w * (b - a), b - u * (b - a)
    inside = tl.where(weight < 0.5, near_a, near_b)
    return tl.where(weight == 0, a, tl.where(weight == 1, b, inside))


@triton.jit
def _lerp_block(
    addresses, row, at, mask, weight, dtype: tl.constexpr, out: tl.constexpr, compute: tl.constexpr,
    aligned: tl.constexpr,
):  # fmt: skip
    a = tl.load(pointer(addresses, 3 * row, dtype, aligned) + at, mask=mask)
    b = tl.load(pointer(addresses, 3 * row + 1, dtype, aligned) + at, mask=mask)
    result = narrow(interpolated(widen(a, compute), widen(b, compute), weight, compute), out)
    tl.store(pointer(addresses, 3 * row + 2, out, aligned) + at, result, mask=mask)


@triton.jit(do_not_specialize=["weight_stride"], do_not_specialize_on_alignment=TABLES)
def _lerp(
    addresses, numel, first_block, row_of_block, weights, weight_stride,
    dtype: tl.constexpr, out: tl.constexpr, compute: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.load(row_of_block + tl.program_id(0)).to(tl.int64)
    begin = (tl.program_id(0) - tl.load(first_block + row)) * block
    n = tl.load(numel + row)
    at = begin + tl.arange(0, block)
    weight = tl.load(weights + row * weight_stride)
    if begin + block <= n:
        _lerp_block(addresses, row, at, None, weight, dtype, out, compute, aligned)
    else:
        _lerp_block(addresses, row, at, at < n, weight, dtype, out, compute, aligned)


def lerp(table: Table, weights: Tensor) -> None:
    """Write the interpolation of both inputs of every row; ``weights`` is float64, (1,) or (rows,)."""
    _lerp[(table.blocks,)](
        table.addresses,
        table.numel,
        table.first_block,
        table.row_of_block,
        weights,
        int(len(weights) > 1),
        **_types(table),
        **EXACT,
    )


@triton.jit
def _sum_block(
    addresses, row, at, mask, weights, width, dtype: tl.constexpr, out: tl.constexpr, compute: tl.constexpr,
    aligned: tl.constexpr,
):  # fmt: skip
    places = addresses + row * (width + 1)
    first = widen(tl.load(pointer(places, 0, dtype, aligned) + at, mask=mask), compute)
    total = tl.load(weights).to(compute) * first
    for begin in range(1, width, _AT_ONCE):
        for step in tl.static_range(_AT_ONCE):
            k = tl.minimum(begin + step, width - 1)  # the last is read again where there are no more
            x = widen(tl.load(pointer(places, k, dtype, aligned) + at, mask=mask), compute)
            total = tl.where(begin + step < width, total + tl.load(weights + k).to(compute) * x, total)
    tl.store(pointer(places, width, out, aligned) + at, narrow(total, out), mask=mask)


@triton.jit(do_not_specialize=["weight_stride", "width"], do_not_specialize_on_alignment=TABLES)
def _weighted_sum(
    addresses, numel, first_block, row_of_block, weights, weight_stride, width,
    dtype: tl.constexpr, out: tl.constexpr, compute: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.load(row_of_block + tl.program_id(0)).to(tl.int64)
    begin = (tl.program_id(0) - tl.load(first_block + row)) * block
    n = tl.load(numel + row)
    at = begin + tl.arange(0, block)
    of_row = weights + row * weight_stride
    if begin + block <= n:
        _sum_block(addresses, row, at, None, of_row, width, dtype, out, compute, aligned)
    else:
        _sum_block(addresses, row, at, at < n, of_row, width, dtype, out, compute, aligned)


def weighted_sum(table: Table, weights: Tensor) -> None:
    """Write the weighted sum of the inputs of every row; ``weights`` is float64, (1 or rows, width)."""
    _weighted_sum[(table.blocks,)](
        table.addresses,
        table.numel,
        table.first_block,
        table.row_of_block,
        weights,
        table.width if len(weights) > 1 else 0,
        table.width,
        **_types(table),
        **EXACT,
    )


def _types(table: Table) -> dict[str, object]:
    """The compile-time constants of a launch."""
    return {
        "dtype": DTYPES[table.dtype],
        "out": DTYPES[table.out_dtype],
        "compute": computed_in(table.dtype),
        "aligned": table.aligned,
        "block": table.block,
    }
