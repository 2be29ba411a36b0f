"""Random words by Philox4x32-10, those of ``isthmus.reference.random``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _blocks(seed, upper, block):
    """The four words of each counter, whose upper half is ``upper``; seed, upper and counters are 64 bits each."""
    low, high = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    third, fourth = upper.to(tl.uint32), (upper >> 32).to(tl.uint32)
    return tl.philox(seed, low, high, low * 0 + third, low * 0 + fourth)


@triton.jit
def words(seed, upper, first, count: tl.constexpr):
    """The uint32 words of ``count`` elements from ``first``: element i has word i mod 4 of the counter ⌊i/4⌋."""
    block = first // 4 + tl.arange(0, count // 4)
    w0, w1, w2, w3 = _blocks(seed, upper, block)
    shift = first % 4
    if shift != 0:  # the elements of a thread are of two counters
        v0, v1, v2, _ = _blocks(seed, upper, block + 1)
        if shift == 1:
            w0, w1, w2, w3 = w1, w2, w3, v0
        elif shift == 2:
            w0, w1, w2, w3 = w2, w3, v0, v1
        else:
            w0, w1, w2, w3 = w3, v0, v1, v2
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [count])
