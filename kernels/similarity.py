"""Products of matrices over gathered rows: similarities of units, without copies of what is multiplied.

The rows are summed in as many parts as fill a GPU, each by one program for a tile of the result, from its first row to
its last; the caller adds the parts in order. How many there are depends on the shapes alone, and so does the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .numbers import INTERPRETED

_TILE = 64  # units of each model in a tile of the result
_ROWS = 128 if INTERPRETED else 16  # rows of one step; the interpreter's cost is by the operation
_STEPS = 16  # that a part has at least
_PROGRAMS = 512  # for which a sum is split


@triton.jit(
    do_not_specialize=["others", "total", "of_part"],
    do_not_specialize_on_alignment=["index", "rows", "before", "parts"],
)
def _products(
    a, b, index, rows, before, parts, others, total, of_part, units_a, units_b,
    update: tl.constexpr, tile: tl.constexpr, step: tl.constexpr, counted: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % tl.cdiv(total, of_part)
    place = tl.program_id(0) // tl.cdiv(total, of_part)
    across = tl.cdiv(units_b, tile)
    i = (place // across).to(tl.int64) * tile + tl.arange(0, tile)
    j = (place % across).to(tl.int64) * tile + tl.arange(0, tile)
    in_a, in_b = (i < units_a)[None, :], (j < units_b)[None, :]
    begin = part.to(counted) * of_part
    end = begin + tl.minimum(of_part, total - begin)
    sums = tl.zeros((tile, tile), tl.float32)
    for start in range(begin, end, step):
        at = start + tl.arange(0, step)
        inside = at < end
        row, other = at // others, at % others
        mine = tl.load(rows + row, mask=inside, other=0) if update else row.to(tl.int64)
        theirs = tl.load(index + row, mask=inside, other=0) * others + other
        x = tl.load(a + (mine * others + other)[:, None] * units_a + i[None, :], mask=inside[:, None] & in_a, other=0.0)
        y = tl.load(b + theirs[:, None] * units_b + j[None, :], mask=inside[:, None] & in_b, other=0.0)
        if update:
            old = tl.load(before + row, mask=inside, other=0) * others + other
            y -= tl.load(b + old[:, None] * units_b + j[None, :], mask=inside[:, None] & in_b, other=0.0)
        sums = tl.dot(x.trans(), y, sums, input_precision="ieee")
    target = parts + (part.to(tl.int64) * units_a + i)[:, None] * units_b + j[None, :]
    tl.store(target, sums, mask=(i < units_a)[:, None] & in_b)


def products(a: Tensor, b: Tensor, index: Tensor, rows: Tensor | None, before: Tensor | None) -> Tensor:
    """Σ_r a[r]ᵀ b[index[r]], or Σ_r a[rows[r]]ᵀ (b[index[r]] − b[before[r]]), in parts: (parts, units of a, of b).

    ``a`` and ``b`` are float32, (rows, others, units), contiguous, at multiples of 16 bytes; the indices are int64, of
    one length, on their device.
    """
    (_, others, units_a), units_b = a.shape, b.shape[2]
    total = len(index) * others
    tiles = triton.cdiv(units_a, _TILE) * triton.cdiv(units_b, _TILE)
    wanted = max(1, min(_PROGRAMS // tiles, triton.cdiv(total, _STEPS * _ROWS)))
    of_part = triton.cdiv(triton.cdiv(total, wanted), _ROWS) * _ROWS
    parts = torch.empty(triton.cdiv(total, of_part), units_a, units_b, dtype=torch.float32, device=a.device)
    update = rows is not None
    _products[(tiles * len(parts),)](
        a,
        b,
        index,
        rows if update else index,
        before if update else index,
        parts,
        others,
        total,
        of_part,
        units_a,
        units_b,
        update=update,
        tile=_TILE,
        step=_ROWS,
        counted=tl.int32 if total < 2**31 - _ROWS else tl.int64,  # of a step past the end; 32 bits are quicker divided
        num_warps=8,
    )
    return parts
