"""Norms and dots over tables: float64 sums of blocks, then of the blocks of a row or of its pieces.

The order of additions is fixed, and another than that of ``isthmus.reference.reductions``. Of n terms, each of the two
orders adds any one of them to others fewer than n / 4096 + 300 times, and each addition errs by at most 2⁻⁵³ of its
result. So sums differ from the reference's by at most 2⁻⁵³ (n / 2048 + 600) Σ|terms|, up to terms of second order; the
terms themselves are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .numbers import DTYPES, EXACT, computed_in, pointer
from .numbers import TABLES as ROWS
from .table import Table, to_device
from .trimming import AT_RANDOM, BY_PIECE, BY_ROW, TABLES, Trimming, cut, entries, pieces, survivor, tile_of

BLOCK = 8192  # elements of a row that one program adds up, but in the interpreter
_LINES = 64  # short vectors that one program takes
_SHORT = 1024  # elements of the longest of them
_AT_ONCE = 2  # models on each side of the matrix that one program multiplies
_PARTS = 1024  # partial sums that are read at once
_PROGRAMS = 2**31 - 1  # of one launch at most; along further axes of a grid they would be 65535
_ALIGNED = tl.constexpr(8)  # elements that two threads' accesses are apart at least, whatever the dtype


@triton.jit(
    do_not_specialize=["odds_stride", "models", "based"],
    do_not_specialize_on_alignment=[*ROWS, *TABLES, "sums"],
)
def _l1(
    addresses, numel, first_block, row_of_block, cuts, places, limits, factors, odds_stride, sums, models, based,
    dtype: tl.constexpr, compute: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
    kind: tl.constexpr,
):  # fmt: skip
    here = tl.program_id(0)
    row = tl.load(row_of_block + here).to(tl.int64)
    group = tl.load(places + 5 * row)
    begin = (here - tl.load(first_block + row)) * block
    end = tl.minimum(begin + block, tl.load(numel + row))
    addresses += row * (models + based + 1)
    tables = (cuts, places + 5 * row, limits, factors, odds_stride.to(tl.int64))
    for k in range(0, models):
        model = cut(cuts, group, k, models, True)
        whole, left = tl.zeros([tile], tl.float64), tl.zeros([tile], tl.float64)
        for at in range(begin, end, tile):
            if at + tile <= end:
                t, rho = _survivor(
                    addresses, at, None, k, model, tables, models, based, dtype, compute, aligned, tile, kind
                )
            else:
                mask = at + tl.arange(0, tile) < end
                t, rho = _survivor(
                    addresses, at, mask, k, model, tables, models, based, dtype, compute, aligned, tile, kind
                )
            whole += tl.abs(t.to(tl.float64))
            left += tl.abs(rho.to(tl.float64))
        tl.store(sums + 2 * (here.to(tl.int64) * models + k), tl.sum(whole))
        tl.store(sums + 2 * (here.to(tl.int64) * models + k) + 1, tl.sum(left))


@triton.jit
def _survivor(
    addresses, begin, mask, k, model, tables, models, based, dtype: tl.constexpr, compute: tl.constexpr,
    aligned: tl.constexpr, tile: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """The task vector of model k from the element ``begin``, and what survives of it."""
    cuts, row, limits, factors, stride = tables
    low, at, high, until = model
    place = begin + tl.arange(0, tile)
    t = _task(addresses, k, place, mask, based, dtype, compute, aligned)
    line = place
    if kind == BY_PIECE:
        line, place = pieces(begin, tl.load(row + 1), tile)
        line += tl.load(row)
    rho = survivor(
        t, mask, 1.0, low, at, high, until, line, place, begin, tl.load(row + 2), cuts, limits, factors,
        tl.load(row + 4) + k * stride, k, models, True, kind, tile,
    )  # fmt: skip
    return t, rho


@triton.jit
def _task(
    addresses, k, at, mask, based, dtype: tl.constexpr, compute: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
    """Elements of the task vector of model k, or of the model where there is no base."""
    x = entries(pointer(addresses, based + k, dtype, aligned), at, mask, compute)
    if based:
        x = x - entries(pointer(addresses, 0, dtype, aligned), at, mask, compute)
    return x


@triton.jit
def _with_dots(
    dots, addresses, at, mask, top, left, models, based, dtype: tl.constexpr, compute: tl.constexpr,
    aligned: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """Add the products of the models from ``top`` with those from ``left``."""
    xs, ys, added = (), (), ()
    for k in tl.static_range(at_once):
        i, j = tl.minimum(top + k, models - 1), tl.minimum(left + k, models - 1)
        xs = xs + (_task(addresses, i, at, mask, based, dtype, compute, aligned).to(tl.float64),)
        ys = ys + (_task(addresses, j, at, mask, based, dtype, compute, aligned).to(tl.float64),)
    for pair in tl.static_range(at_once * at_once):
        added = added + (dots[pair] + xs[pair // at_once] * ys[pair % at_once],)
    return added


@triton.jit(do_not_specialize=["models", "based"], do_not_specialize_on_alignment=[*ROWS, "vectors", "sums"])
def _gram(
    addresses, first_block, row_of_block, vectors, sums, models, based,
    dtype: tl.constexpr, compute: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
    lines: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(models, at_once)
    here = tl.program_id(0) // (tiles * tiles)  # what reads the same vectors runs side by side
    row = tl.load(row_of_block + here).to(tl.int64)
    length, parts = tl.load(vectors + 4 * row), tl.load(vectors + 4 * row + 1)
    last, place = tl.load(vectors + 4 * row + 2), tl.load(vectors + 4 * row + 3)
    first = (here - tl.load(first_block + row)) * lines
    part = first + tl.arange(0, lines)
    begin = part // parts * length + part % parts * block
    end = tl.where(part < last, tl.minimum(begin + block, (part // parts + 1) * length), begin)
    inside = tl.minimum(block, length - first % parts * block) if lines == 1 else 0  # of the only line
    top = tl.program_id(0) // tiles % tiles * at_once
    left = tl.program_id(0) % tiles * at_once
    if left > top:  # the matrix is symmetric
        return
    addresses += row * (models + based + 1)
    dots = ()
    for _ in tl.static_range(at_once * at_once):
        dots = dots + (tl.zeros([lines, tile], tl.float64),)
    for offset in range(0, tl.minimum(block, length), tile):
        at = begin[:, None] + (offset + tl.arange(0, tile))[None, :]
        if aligned:
            at = tl.multiple_of(at, [1, _ALIGNED])
        if offset + tile <= inside:
            dots = _with_dots(dots, addresses, at, None, top, left, models, based, dtype, compute, aligned, at_once)
        else:
            mask = at < end[:, None]
            dots = _with_dots(dots, addresses, at, mask, top, left, models, based, dtype, compute, aligned, at_once)
    for pair in tl.static_range(at_once * at_once):
        i, j = top + pair // at_once, left + pair % at_once
        to = sums + ((place + part) * models + i) * models + j
        tl.store(to, tl.sum(dots[pair], axis=1), mask=(part < last) & (i < models) & (j < models))


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["sums", "first", "count", "totals"])
def _add_up(sums, first, count, totals, width, at_once: tl.constexpr):
    """Add partial sums, ``width`` lines of them side by side."""
    here, line = tl.program_id(0) // width, tl.program_id(0) % width
    begin, parts = tl.load(first + here), tl.load(count + here)
    total = tl.zeros([at_once], tl.float64)
    for offset in range(0, parts, at_once):
        at = offset + tl.arange(0, at_once)
        total += tl.load(sums + (begin + at) * width + line, mask=at < parts, other=0.0)
    tl.store(totals + here.to(tl.int64) * width + line, tl.sum(total))


def l1(table: Table, trimming: Trimming, *, based: bool) -> Tensor:
    """Σ|τ| of each row and model, over all and over the survivors, whose factors are 1: float64 (rows, models, 2)."""
    models = table.width - based
    sums = torch.empty(table.blocks, models, 2, dtype=torch.float64, device=table.device)
    _l1[(table.blocks,)](
        table.addresses,
        table.numel,
        table.first_block,
        table.row_of_block,
        *trimming[1:],
        trimming.limits.shape[-1],
        sums,
        models,
        int(based),
        dtype=DTYPES[table.dtype],
        compute=computed_in(table.dtype),
        aligned=table.aligned and trimming.kind in (BY_ROW.value, AT_RANDOM.value),
        block=table.block,
        tile=tile_of(table),
        kind=trimming.kind,
        **EXACT,
    )
    counts = -(-table.numel // table.block)
    return _totals(sums, table.first_block, counts)


def gram(table: Table, sizes: Sequence[int], lengths: Sequence[int], *, based: bool) -> Tensor:
    """The dots of the models of each vector, in the lower triangles: float64 (vectors, models, models).

    The partial sums take memory: 8 models² bytes for each block of a long vector, which is models / 4096 of what the
    models take themselves in float32, and models / 2048 in 16 bits.

    Args:
        table: of rows of vectors, one after the other.
        sizes: the number of elements of each row.
        lengths: of the vectors of each row.
        based: the first column is a base, and the vectors are differences from it.
    """
    models = table.width - based
    tiles = triton.cdiv(models, _AT_ONCE)
    vectors = torch.tensor(sizes) // torch.tensor(lengths)
    parts = torch.tensor([1 if length <= _SHORT else -(-length // table.block) for length in lengths])
    place = (vectors * parts).cumsum(0) - vectors * parts
    described = torch.stack([torch.tensor(lengths), parts, vectors * parts, place], dim=1)
    of_vector = parts.repeat_interleave(vectors)
    first = of_vector.cumsum(0) - of_vector
    on_device = to_device(torch.cat([described.view(-1), first, of_vector]), table.device)
    described, first, of_vector = on_device.split([described.numel(), len(first), len(first)])
    sums = torch.empty(int((vectors * parts).sum()), models, models, dtype=torch.float64, device=table.device)
    straight = table.aligned and all(n == m or n % _ALIGNED.value == 0 for n, m in zip(lengths, sizes, strict=True))
    for lines in (1, _LINES):
        programs = torch.tensor(
            [
                triton.cdiv(count, lines) if (length <= _SHORT) == (lines > 1) else 0
                for count, length in zip((vectors * parts).tolist(), lengths, strict=True)
            ]
        )
        if programs.sum() == 0:
            continue
        rows = torch.arange(len(programs)).repeat_interleave(programs)
        launched = to_device(torch.cat([programs.cumsum(0) - programs, rows]), table.device)
        _gram[(len(rows) * tiles * tiles,)](
            table.addresses,
            launched[: len(programs)],
            launched[len(programs) :],
            described,
            sums,
            models,
            int(based),
            dtype=DTYPES[table.dtype],
            compute=computed_in(table.dtype),
            aligned=straight and lines == 1,
            block=table.block,
            tile=tile_of(table) // lines,
            lines=lines,
            at_once=_AT_ONCE,
            **EXACT,
        )
    return sums if len(sums) == len(first) else _totals(sums, first, of_vector)


def _totals(sums: Tensor, first: Tensor, counts: Tensor) -> Tensor:
    """The sums of consecutive partial sums: so many from each first."""
    totals = torch.empty(len(first), *sums.shape[1:], dtype=torch.float64, device=sums.device)
    width = sums.shape[1:].numel()
    step = max(1, _PROGRAMS // width)
    for begin in range(0, len(first), step):
        some = slice(begin, begin + step)
        _add_up[(len(first[some]) * width,)](
            sums, first[some], counts[some], totals[some], width, at_once=_PARTS, **EXACT
        )
    return totals
