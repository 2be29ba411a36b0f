"""Input makers and error budgets, for tests and benchmarks alike."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}

FLOATS = tuple(_BITS)


def awkward(numel: int, dtype: torch.dtype, *, seed: int) -> Tensor:
    """A 1-D tensor over the whole range of ``dtype``: random exponents, subnormals, both zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    exponent = torch.empty(numel, dtype=torch.float64).normal_(generator=generator) * 8
    x = torch.randn(numel, generator=generator, dtype=torch.float64) * torch.exp2(exponent)
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), info.smallest_normal, info.max, -info.max]
    special += [info.smallest_normal * info.eps * k for k in (1, -1, 3)]  # the smallest subnormals
    for i, place in enumerate(torch.randint(max(numel, 1), (min(numel, 4 * len(special)),), generator=generator)):
        x[place] = special[i % len(special)]
    return x.to(dtype)


def finite(numel: int, dtype: torch.dtype, *, seed: int) -> Tensor:
    """Awkward values without NaN and infinity, of which no difference overflows."""
    info = torch.finfo(dtype)
    return (
        awkward(numel, dtype, seed=seed).nan_to_num(nan=0.5, posinf=1.0, neginf=-1.0).clamp(info.min / 4, info.max / 4)
    )


def contested(numel: int, dtype: torch.dtype, *, seed: int) -> Tensor:
    """Halves of small integers: many are equal, many are zero, and many of two such tensors cancel each other."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) * 2).round().to(dtype) / 2


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two floating-point tensors are equal to the bit, signs of zeros included, payloads of NaNs excepted."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    nan = x.isnan()
    bits = _BITS[x.dtype]
    same = x.contiguous().view(bits) == y.contiguous().view(bits)
    return bool(torch.equal(nan, y.isnan()) and (same | nan).all())


def lerp_error_bound(a: Tensor, b: Tensor, weight: float) -> Tensor:
    """Bound of |lerp - exact| for 0 <= w <= 1, elementwise, in float64.

    With u the unit roundoff of the compute type, the difference, the factor, the product and the sum each round once:
    |error| <= u (|result| + 3 |b - a| min(w, 1 - w)) + O(u²); the store rounds once more, to the unit of the storage
    type.
    """
    compute = torch.finfo(torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)).eps / 2
    store = torch.finfo(a.dtype)
    a, b = a.double(), b.double()
    exact = a + weight * (b - a)
    bound = 1.01 * compute * (exact.abs() + 3 * (b - a).abs() * min(weight, 1 - weight))
    return bound + 1.01 * (store.eps / 2) * exact.abs() + store.smallest_normal * store.eps
