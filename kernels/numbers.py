"""How values are read, widened and rounded; the arithmetic between is that of ``isthmus.reference``.

Values are computed in float32, or in float64 where an input is, and rounded once when they are stored: to nearest, ties
to even. Kernels are launched with ``EXACT`` so that no multiplication and addition are fused, and divide by
``tl.div_rn``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret  # kernels run on the CPU, one program after the other
BLOCK = 1 << 16 if INTERPRETED else 2048  # elements of one program; the interpreter's cost is by the program
EXACT = {"enable_fp_fusion": False}  # at a launch: results are promised to the bit
TABLES = ["addresses", "numel", "first_block", "row_of_block", "weights"]  # parts of uploads: aligned as it happens

DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def pointer(addresses, at, dtype: tl.constexpr, aligned: tl.constexpr):
    """The pointer that stands at ``at`` in a table of addresses."""
    found = tl.load(addresses + at).to(tl.pointer_type(dtype))
    if aligned:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def widen(x, compute: tl.constexpr):
    """Exactly, to the type that a rule computes in; of bfloat16 the bits, which the interpreter does not convert so."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(compute)


@triton.jit
def to_float32_odd(x):
    """Round float64 to float32 towards zero, with the last bit set where that was inexact."""
    nearest = x.to(tl.float32)
    back = nearest.to(tl.float64)
    bits = nearest.to(tl.int32, bitcast=True)
    bits = tl.where(tl.abs(back) > tl.abs(x), bits - 1, bits)
    return tl.where(back != x, bits | 1, bits).to(tl.float32, bitcast=True)


@triton.jit
def to_bfloat16(x):
    """Round float32 to nearest even, in integers: conversions differ between the interpreter and devices."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    bits = tl.where(x != x, bits | 0x400000, rounded) >> 16
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Round what was computed once to the type that is stored."""
    if dtype == tl.float64 or dtype == tl.float32:
        rounded = x.to(dtype)
    else:  # the compiler reads what follows an early return, too
        if x.dtype == tl.float64:
            x = to_float32_odd(x)
        rounded = to_bfloat16(x) if dtype == tl.bfloat16 else x.to(tl.float16)
    return rounded


def computed_in(dtype: torch.dtype) -> tl.dtype:
    """The type that values of a dtype are computed in."""
    return tl.float64 if dtype == torch.float64 else tl.float32
