"""Magnitudes as integers of the same order, and where they lie to brackets, over tables.

A magnitude |τ|, τ = x - b or x, is looked at as its bits, an int32 or, where any tensor of a call is float64, an int64:
integers that are ordered as the magnitudes are, with infinity and NaN above all others.

The tensors of a group, which are ranked together, or the parts of tensors, are *pieces*, numbered across all tables of
a call. A *segment* is what one program sweeps over: ``table.block`` elements, in ``STEPS`` steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .numbers import DTYPES, EXACT, INTERPRETED, TABLES, computed_in, pointer, widen
from .table import Table

STEPS = 2 if INTERPRETED else 16  # at most 31: what a lane counts is packed into few bits
_LANES = 1 << 15 if INTERPRETED else 1024
INFINITY = {torch.int32: 0x7F800000, torch.int64: 0x7FF0000000000000}
_TAKEN = 1 << 14 if INTERPRETED else 1024  # magnitudes that one program copies

_ARRAYS = [
    *TABLES, "place_of_row", "first_search", "searches", "opened", "counts", "histogram", "nonfinite", "row_of_piece",
    "pieces", "begins", "lengths", "keys", "models", "values", "left", "found",
]  # fmt: skip


def segment_of(longest: int) -> int:
    """The block of a table whose longest row has so many elements."""
    lanes = min(_LANES, triton.next_power_of_2(longest)) if INTERPRETED else _LANES
    return STEPS * lanes


@triton.jit
def _magnitudes(
    places, model, based, at, mask, dtype: tl.constexpr, compute: tl.constexpr, key: tl.constexpr,
    aligned: tl.constexpr,
):  # fmt: skip
    """The bits of |τ| of one model, in the type ``key``, where the mask is set."""
    tau = widen(tl.load(pointer(places, model + based, dtype, aligned) + at, mask=mask), compute)
    if based:
        tau -= widen(tl.load(pointer(places, 0, dtype, aligned) + at, mask=mask), compute)
    if key == tl.int64:
        bits = tau.to(tl.float64).to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        bits = tau.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return bits


@triton.jit(do_not_specialize=["width", "based", "runs", "run", "first_model"], do_not_specialize_on_alignment=_ARRAYS)
def _take(
    addresses, numel, width, based, row_of_piece, pieces, begins, lengths, runs, run, first_model, keys,
    dtype: tl.constexpr, compute: tl.constexpr, key: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    which, step = j // run, j % run
    exists = which < runs
    row = tl.load(row_of_piece + tl.load(pieces + which, mask=exists, other=0), mask=exists, other=-1)
    mine = row >= 0
    row = tl.maximum(row, 0)
    n = tl.load(numel + row)
    at = (tl.load(begins + which, mask=mine, other=0) + step) % n
    taken = mine & (step < tl.load(lengths + which, mask=mine, other=0))
    model = tl.program_id(1)
    bits = _magnitudes(addresses + row * (width + 1), first_model + model, based, at, taken, dtype, compute, key, False)
    tl.store(keys + model * runs * run + j, tl.where(taken, bits, -1), mask=mine)


def take(
    table: Table, row_of_piece: Tensor, runs: tuple[Tensor, Tensor, Tensor], based: bool, first_model: int, keys: Tensor
) -> None:
    """Copy runs of the magnitudes of some models to ``keys``, int32 or int64 (models, runs, run).

    A run is given by its piece, where it begins there and its length, each int64 (runs,); it goes on at the piece's
    start where it is beyond the end, and what is left of ``keys`` is filled with -1. Pieces that the table does not
    have, of which ``row_of_piece`` is -1, are left out.
    """
    models, count, run = keys.shape
    block = min(_TAKEN, triton.next_power_of_2(count * run)) if INTERPRETED else _TAKEN
    _take[(triton.cdiv(count * run, block), models)](
        table.addresses,
        table.numel,
        table.width,
        int(based),
        row_of_piece,
        *runs,
        count,
        run,
        first_model,
        keys,
        **_types(table, keys.dtype),
        block=block,
        **EXACT,
    )


@triton.jit
def _count(
    places, model, based, begin, n, low, high, shift, of_search,
    dtype: tl.constexpr, compute: tl.constexpr, key: tl.constexpr, aligned: tl.constexpr, masked: tl.constexpr,
    block: tl.constexpr, steps: tl.constexpr,
):  # fmt: skip
    """How the magnitudes of a segment lie: (above, at the high end, at the low end, the largest)."""
    counted, inside = tl.zeros((block,), tl.int32), tl.zeros((block,), tl.int32)
    largest = tl.zeros((block,), key)
    lane = tl.arange(0, block)
    last = tl.minimum(tl.cdiv(n - begin, block), steps).to(tl.int32) if masked else steps
    for step in tl.range(0, last, loop_unroll_factor=4):
        at = begin + step * block + lane
        if masked:
            x = _magnitudes(places, model, based, at, at < n, dtype, compute, key, aligned)
            x = tl.where(at < n, x, -1)
        else:
            x = _magnitudes(places, model, based, at, None, dtype, compute, key, aligned)
        within = ((x > low) & (x < high)).to(tl.int32)
        counted += (x > high).to(tl.int32) + ((x == high).to(tl.int32) << 8) + ((x == low).to(tl.int32) << 16)
        counted += within << 24
        inside |= within << step
        largest = tl.maximum(largest, x)
    # Few are inside of a bracket, in one or two steps of a thread: these are read again, so that the loop above has no
    # scattered accesses, for which the compiler would move all elements between threads.
    for _ in range(tl.max(counted >> 24)):
        lowest = inside & -inside
        place = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        found = inside != 0
        x = _magnitudes(places, model, based, begin + place * block + lane, found, dtype, compute, key, False)
        tl.atomic_add(of_search + ((x - low) >> shift), tl.full((block,), 1, tl.int64), found, "relaxed")
        inside ^= lowest
    return (
        tl.sum(counted & 255),
        tl.sum((counted >> 8) & 255),
        tl.sum((counted >> 16) & 255),
        tl.max(largest),
    )


@triton.jit(
    do_not_specialize=["width", "based", "size", "total", "bins", "infinity"], do_not_specialize_on_alignment=_ARRAYS
)
def _sweep(
    addresses, numel, first_block, row_of_block, width, based, place_of_row, first_search, searches, size, opened,
    counts, total, histogram, bins, nonfinite, infinity,
    dtype: tl.constexpr, compute: tl.constexpr, key: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr,
    steps: tl.constexpr,
):  # fmt: skip
    if tl.load(opened) == 0:
        return
    row = tl.load(row_of_block + tl.program_id(0)).to(tl.int64)
    local = tl.program_id(0) - tl.load(first_block + row)
    n = tl.load(numel + row)
    begin = local * (block * steps)
    places = addresses + row * (width + 1)
    models = width - based
    of_group = first_search + tl.load(place_of_row + 3 * row) * models
    segment = tl.load(place_of_row + 3 * row + 1) + local
    code = tl.load(place_of_row + 3 * row + 2) * models
    for model in range(models):
        for s in range(tl.load(of_group + model), tl.load(of_group + model + 1)):
            if tl.load(searches + 3 * size + s) != 0:
                low, high = tl.load(searches + s).to(key), tl.load(searches + size + s).to(key)
                shift = tl.load(searches + 2 * size + s).to(key)
                of_search = histogram + s * bins
                if begin + block * steps <= n:
                    above, at_high, at_low, largest = _count(
                        places, model, based, begin, n, low, high, shift, of_search,
                        dtype, compute, key, aligned, False, block, steps,
                    )  # fmt: skip
                else:
                    above, at_high, at_low, largest = _count(
                        places, model, based, begin, n, low, high, shift, of_search,
                        dtype, compute, key, aligned, True, block, steps,
                    )  # fmt: skip
                to = counts + tl.load(searches + 4 * size + s) + segment
                tl.store(to, above)
                tl.store(to + total, at_high)
                tl.store(to + 2 * total, at_low)
                tl.atomic_min(nonfinite, code + model, largest >= infinity, "relaxed")


def sweep(
    table: Table,
    place_of_row: Tensor,
    based: bool,
    first_search: Tensor,
    searches: Tensor,
    opened: Tensor,
    counts: Tensor,
    histogram: Tensor,
    nonfinite: Tensor,
    key: torch.dtype,
) -> None:
    """Count how magnitudes lie to the brackets of searches; one sweep over the table, by segments.

    Args:
        table: of pieces.
        place_of_row: int64 (rows, 3): the group of each row, its first segment, and its number in ``nonfinite``.
        based: whether the first input of a row is a base.
        first_search: int64 (groups * models + 1,): where the searches of each group and model begin.
        searches: int64 (5, searches): the low and the high end of each bracket; by how many bits magnitudes are
            shifted in its histogram; whether it is open, else it is left out; and, without the number of the first
            segment of its group, where its first count is to be written.
        opened: bool (): nothing is done unless it is set.
        counts: int32 (3, n): for each segment how many are above the high end, at it, and at the low end. Written.
        histogram: int64 (searches, bins): how many lie between both ends, by (bits - low) >> shift. Added to.
        nonfinite: int64 (1,): lowered to number * models + model where a magnitude of an open search is not finite.
        key: int64 or int32, the type of magnitudes.
    """
    _sweep[(table.blocks,)](
        table.addresses,
        table.numel,
        table.first_block,
        table.row_of_block,
        table.width,
        int(based),
        place_of_row,
        first_search,
        searches,
        searches.shape[1],
        opened,
        counts,
        counts.shape[1],
        histogram,
        histogram.shape[1],
        nonfinite,
        INFINITY[key],
        **_types(table, key),
        aligned=table.aligned and (key == torch.int32 or table.dtype == torch.float64),  # else it is rare
        block=table.block // STEPS,
        steps=STEPS,
        **EXACT,
    )


@triton.jit(do_not_specialize=["width", "based"], do_not_specialize_on_alignment=_ARRAYS)
def _locate(
    addresses, numel, width, based, row_of_piece, pieces, begins, models, opened, values, left, found,
    dtype: tl.constexpr, compute: tl.constexpr, block: tl.constexpr, steps: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0)
    row = tl.load(row_of_piece + tl.load(pieces + s))
    if (row >= 0) & (tl.load(opened + s) != 0):
        n = tl.load(numel + row)
        begin, model = tl.load(begins + s), tl.load(models + s)
        wanted, before = tl.load(left + s), tl.zeros((), tl.int64)
        bits = tl.load(values + s).to(tl.int64, bitcast=True)
        place = tl.zeros((), tl.int64)
        for step in range(steps):
            at = begin + step * block + tl.arange(0, block)
            x = _magnitudes(
                addresses + row * (width + 1), model, based, at, at < n, dtype, compute, tl.int64, False
            )  # fmt: skip
            same = ((x == bits) & (at < n)).to(tl.int64)
            rank = before + tl.cumsum(same)
            place += tl.sum(tl.where((rank == wanted) & (same != 0), at + 1, 0))
            before += tl.sum(same)
        tl.store(found + s, place)


def locate(
    table: Table,
    row_of_piece: Tensor,
    based: bool,
    pieces: Tensor,
    begins: Tensor,
    models: Tensor,
    opened: Tensor,
    values: Tensor,
    left: Tensor,
    found: Tensor,
) -> None:
    """Find the ``left``-th magnitude of a segment that equals a value, counted from 1.

    All are of shape (searches,) and int64 but the values, which are float64: the piece of the segment, where it begins
    there, the model, whether anything is looked for, and in ``found`` the place in the piece, plus 1.
    """
    _locate[(len(pieces),)](
        table.addresses,
        table.numel,
        table.width,
        int(based),
        row_of_piece,
        pieces,
        begins,
        models,
        opened,
        values,
        left,
        found,
        dtype=DTYPES[table.dtype],
        compute=computed_in(table.dtype),
        block=table.block // STEPS,
        steps=STEPS,
        **EXACT,
    )


def _types(table: Table, key: torch.dtype) -> dict[str, object]:
    """The compile-time constants of a launch."""
    return {
        "dtype": DTYPES[table.dtype],
        "compute": computed_in(table.dtype),
        "key": tl.int64 if key == torch.int64 else tl.int32,
    }
