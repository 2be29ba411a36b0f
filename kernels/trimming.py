"""What survives of task vectors: by magnitude, or at random.

A magnitude is compared by the bits of |t|, which as integers are in the order of the numbers, so that a cut needs no
rounding of its own. How each model is trimmed stands in a table of four int64, one line for each row or piece:

- ``BY_ROW`` and ``BY_PIECE``: low, at, high, until. An entry at a place of its row or piece survives if its magnitude
  is at least low, and from the place ``at`` on at least low + 1; and if it is at most high, from ``until`` on high + 1.
- ``AT_RANDOM``: the key, the upper half of the counter, and a limit: an entry survives if its word is below it.
- ``BY_RANK``: the same where the limit is 0 or 2³²; else limits and factors stand in tables, one for each entry.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .numbers import INTERPRETED, widen
from .philox import words
from .table import Table

BY_ROW, BY_PIECE, AT_RANDOM, BY_RANK = (tl.constexpr(kind) for kind in range(4))
_ALL = tl.constexpr(1 << 32)
TABLES = ["cuts", "places", "limits", "factors"]  # arguments of kernels that trim


class Trimming(NamedTuple):
    """How the task vectors of a table's rows are trimmed; tensors on its device.

    Attributes:
        kind: ``BY_ROW``, ``BY_PIECE``, ``AT_RANDOM`` or ``BY_RANK``.
        cuts: int64 (lines, models, 4), as this module says.
        places: int64 (rows, 5): of each row the first line of ``cuts``, the length of its pieces, the index of its
            first element in the tensor that it is a part of, its line in what is counted, and its first entry in
            ``limits`` and ``factors``.
        limits: int32 (models, entries), by bits unsigned, of the kind ``BY_RANK``.
        factors: what survivors are multiplied by, in the type that is computed in.
    """

    kind: int
    cuts: Tensor
    places: Tensor
    limits: Tensor
    factors: Tensor


def block_of(longest: int, block: int) -> int:
    """How many elements one program takes: ``block``, in the interpreter whole rows if the longest is short enough."""
    return min(1 << 16, max(1024, triton.next_power_of_2(longest))) if INTERPRETED else block


def tile_of(table: Table) -> int:
    """How many elements are computed on at once: each of 128 threads reads 16 bytes of an input."""
    return table.block if INTERPRETED else 128 * 16 // table.dtype.itemsize


@triton.jit
def entries(source, at, mask, compute: tl.constexpr):
    """Elements of one input; 0, which takes no part in anything, where the mask says that there are none."""
    x = tl.load(source + at) if mask is None else tl.load(source + at, mask=mask, other=0.0)
    return widen(x, compute)


@triton.jit
def magnitude(x):
    """The bits of |x| as a signed integer."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return bits


@triton.jit
def cut(cuts, line, k, models, present):
    """Four numbers that say how model k is trimmed; so that nothing survives where it is not present."""
    at = cuts + 4 * (line * models + k)
    low, high = tl.load(at, mask=present, other=2), tl.load(at + 2, mask=present, other=0)
    return low, tl.load(at + 1, mask=present, other=0), high, tl.load(at + 3, mask=present, other=0)


@triton.jit
def pieces(begin, length, tile: tl.constexpr):
    """For each of the elements from ``begin`` the piece that it is in, and its place there."""
    first = begin // length
    over = begin - first * length + tl.arange(0, tile)
    if length < tile:  # division is quicker in 32 bits
        further = (over.to(tl.int32) // length.to(tl.int32)).to(tl.int64)
    else:
        further = (over >= length).to(tl.int64)
    return first + further, over - further * length


@triton.jit
def survivor(
    t, mask, factor, low, at, high, until, line, place, begin, start, cuts, limits, factors, odds, k, models, present,
    kind: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """The entries that survive times a factor, else 0.

    ``t`` is the task vector of model k from the element ``begin`` of its row, of which the elements under ``mask``
    exist, or all. The next five are the factor, which ``BY_RANK`` replaces, and what ``cut`` gave. ``line`` is for
    each entry that of its piece in ``cuts``, if the kind is ``BY_PIECE``, and ``place`` its place in the row or piece.
    ``start`` is the index of the row's first element in the tensor that it is a part of, ``odds`` where the limits and
    factors of model k for this row begin, and ``present`` says whether model k is one of the models.
    """
    if kind == BY_ROW:
        size = magnitude(t)
        lowest, highest = low.to(size.dtype), high.to(size.dtype)
        kept = (size >= lowest + (begin >= at).to(size.dtype)) & (size <= highest + (begin >= until).to(size.dtype))
        if ((begin < at) & (at < begin + tile)) | ((begin < until) & (until < begin + tile)):
            kept = (size >= lowest + (place >= at).to(size.dtype)) & (size <= highest + (place >= until).to(size.dtype))
        rho = factor * t
    elif kind == BY_PIECE:
        size = magnitude(t)
        if mask is not None:
            present = present & mask
        low, at, high, until = cut(cuts, line, k, models, present)
        kept = (size >= low + (place >= at).to(tl.int64)) & (size <= high + (place >= until).to(tl.int64))
        rho = factor * t
    else:
        kept = tl.full([tile], 1, tl.int1) & (high > 0)
        rho = factor * t
        if (high > 0) & (high < _ALL):
            word = words(low, at, start + begin, tile)
            if kind == BY_RANK:
                kept = word < tl.load(limits + odds + place, mask=mask).to(tl.uint32, bitcast=True)
                rho = tl.load(factors + odds + place, mask=mask) * t
            else:
                kept = word < high.to(tl.uint32)
    if mask is not None:
        kept = kept & mask
    return tl.where(kept, rho, 0.0)
