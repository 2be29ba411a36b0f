"""Kernels with known faults: what finds faults in machine code must find these."""

from __future__ import annotations

import triton
import triton.language as tl
from aot_record import Variant

BLOCK = 2048


@triton.jit
def quotient(a, b, out, plain: tl.constexpr, block: tl.constexpr):
    """(a b + a) / b; ``plain``: by the division that is not rounded to nearest in float32."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    x, y = tl.load(a + at), tl.load(b + at)
    dividend = x * y + x
    tl.store(out + at, dividend / y if plain else tl.div_rn(dividend, y))


@triton.jit
def straggling(a, out, n, block: tl.constexpr):
    """A copy whose accesses are masked, so that they are not of 16 bytes."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + at, tl.load(a + at, mask=at < n), mask=at < n)


@triton.jit
def spilling(a, out, n, block: tl.constexpr):
    """Keeps more than registers hold, in a loop."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(a + at)
    for _ in range(n):
        x += tl.sum(x[None, :] * x[:, None], axis=0)
    tl.store(out + at, x)


def probes() -> dict[str, Variant]:
    """One without a fault, and one for each kind of them."""

    def variant(function, pointers, constants, *, scalars=(), fusion=False, warps=4):
        names = function.arg_names
        signature = {name: "*fp32" if name in pointers else "i32" if name in scalars else "constexpr" for name in names}
        values = {(names.index(name),): value for name, value in constants.items()}
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
        options = {"num_warps": warps, "enable_fp_fusion": fusion}
        types = {name: kind for name, kind in signature.items() if kind != "constexpr"}
        shown = {name: str(value) for name, value in constants.items()}
        return Variant(function.__name__, shown, types, options, (function, signature, values, attributes))

    operands, rounded = ("a", "b", "out"), {"plain": False, "block": BLOCK}
    return {
        "exact": variant(quotient, operands, rounded),
        "fused": variant(quotient, operands, rounded, fusion=True),
        "approximate": variant(quotient, operands, {"plain": True, "block": BLOCK}),
        "straggling": variant(straggling, ("a", "out"), {"block": BLOCK}, scalars=("n",)),
        "spilling": variant(spilling, ("a", "out"), {"block": 256}, scalars=("n",), warps=1),
    }
