"""Compare two models tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .sources import Source, read_model

BLOCK = 2**20  # elements compared at a time
INTEGERS = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # bytes -> the integers that hold a float's bits


@dataclass(frozen=True)
class TensorDiff:
    """How one tensor differs.

    Values are compared as real numbers: −0 equals 0, and NaN equals NaN. Where shapes differ nothing else is known, and
    norms are NaN.

    Attributes:
        key: the canonical key.
        shapes: in A and in B.
        dtypes: in A and in B, such as "float32".
        numel: number of elements; the parts of complex numbers count one each, here and below.
        changed: how many of them differ.
        max_abs: the largest |a − b|; infinity where only one is NaN.
        max_ulp: the largest distance in units in the last place, counted in representable numbers between a and b, of
            the dtype of lower precision if they have two; ``None`` for integer and boolean tensors, and where a NaN
            differs.
        norms: ‖a‖ and ‖b‖ over their finite elements, in float64.
        distance: ‖a − b‖, in float64.
        relative: ‖a − b‖ / ‖a‖; infinity if a is zero and b is not.
    """

    key: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    numel: int
    changed: int
    max_abs: float
    max_ulp: int | None
    norms: tuple[float, float]
    distance: float
    relative: float

    @property
    def equal(self) -> bool:
        """Whether shapes, dtypes and all values are equal."""
        return self.shapes[0] == self.shapes[1] and self.dtypes[0] == self.dtypes[1] and self.changed == 0


@dataclass(frozen=True)
class Diff:
    """How two models differ.

    Attributes:
        tensors: key -> comparison, for the keys that both have, sorted.
        only_a: keys that B lacks, sorted.
        only_b: keys that A lacks, sorted.
    """

    tensors: dict[str, TensorDiff]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether both have the same keys, shapes, dtypes and values."""
        return not self.only_a and not self.only_b and all(tensor.equal for tensor in self.tensors.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as for JSON."""
        return {"equal": self.equal, **asdict(self)}


def diff(a: Source, b: Source) -> Diff:
    """Compare two models tensor by tensor.

    Args:
        a: a module, a state dict, a ``FlatState``, or the path of a safetensors file.
        b: the other.

    Raises:
        InputError: a source cannot be read as a model.
        FileError: a file is missing or not a safetensors file.
    """
    first, second = read_model(a, "a").tensors, read_model(b, "b").tensors
    return Diff(
        {key: _compare(key, first[key], second[key]) for key in sorted(first.keys() & second.keys())},
        tuple(sorted(first.keys() - second.keys())),
        tuple(sorted(second.keys() - first.keys())),
    )


@torch.no_grad()
def _compare(key: str, a: Tensor, b: Tensor) -> TensorDiff:
    shapes, dtypes = (tuple(a.shape), tuple(b.shape)), (_name(a.dtype), _name(b.dtype))
    if shapes[0] != shapes[1]:
        unknown = (math.nan, math.nan)
        return TensorDiff(key, shapes, dtypes, a.numel(), a.numel(), math.inf, None, unknown, math.inf, math.inf)
    changed, max_abs, max_ulp, nan, numel = 0, 0.0, 0, False, 0
    squares = [0.0, 0.0, 0.0]  # of a, of b and of what is between them
    exact = not (a.is_floating_point() or a.is_complex()) or not (b.is_floating_point() or b.is_complex())
    for x, y in _blocks(a, b):
        wide_x, wide_y = x.to(torch.float64), y.to(torch.float64)
        both_nan = wide_x.isnan() & wide_y.isnan()
        differs = (x != y if exact else wide_x != wide_y) & ~both_nan
        gap = torch.where(differs, wide_x - wide_y, 0).abs()
        lone = gap.isnan()
        gap = gap.masked_fill(lone, math.inf)
        numel += x.numel()
        changed += int(differs.sum())
        nan |= bool(lone.any())
        max_abs = max(max_abs, float(gap.max()))
        for place, values in enumerate((wide_x, wide_y)):
            squares[place] += float(values.masked_fill(~values.isfinite(), 0).square().sum())
        squares[2] += float(gap.square().sum())
        if not exact:
            max_ulp = max(max_ulp, _max_ulp(x, y, differs & ~lone))
    norm, other, distance = map(math.sqrt, squares)
    relative = 0.0 if distance == 0 else math.inf if norm == 0 else distance / norm
    ulp = None if exact or nan else max_ulp
    return TensorDiff(key, shapes, dtypes, numel, changed, max_abs, ulp, (norm, other), distance, relative)


def _blocks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of both tensors as real numbers, on the CPU."""
    if a.is_complex() != b.is_complex():
        a, b = a.to(torch.complex128), b.to(torch.complex128)
    x, y = _real(a).reshape(-1), _real(b).reshape(-1)
    for start in range(0, x.numel(), BLOCK):
        yield x[start : start + BLOCK].cpu(), y[start : start + BLOCK].cpu()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()


def _max_ulp(x: Tensor, y: Tensor, where: Tensor) -> int:
    """The largest number of steps between representable values, both in the dtype of lower precision."""
    if not bool(where.any()):
        return 0
    dtype = max(x.dtype, y.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    first, second = (_ordinal(tensor[where].to(dtype)) for tensor in (x, y))
    steps = torch.maximum(first, second) - torch.minimum(first, second)
    wrapped = steps[steps < 0]  # beyond 2⁶³, as float64 may be
    return int(wrapped.max()) + 2**64 if len(wrapped) else int(steps.max())


def _ordinal(tensor: Tensor) -> Tensor:
    """Integers in the order of the numbers, consecutive for neighbours; 0 for both zeros."""
    bits = tensor.view(INTEGERS[tensor.element_size()]).to(torch.int64)
    sign_bit = -(1 << (8 * tensor.element_size() - 1))
    return torch.where(bits < 0, sign_bit - bits, bits)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
