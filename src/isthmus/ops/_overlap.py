"""Outputs and inputs that share memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from isthmus.errors import InputError


class Placed(NamedTuple):
    """A tensor that is read or written."""

    name: str  # what errors call it
    place: int  # its row: an output may be an input of its own row
    tensor: Tensor


def refuse_overlap(outputs: Iterable[Placed], inputs: Iterable[Placed]) -> None:
    """Check that each output is disjoint from all inputs and outputs, or is exactly an input of its own row.

    Raises:
        InputError: two overlap, or an output is a lazily conjugated or negated view.
    """
    spans = []
    for written, group in ((True, outputs), (False, inputs)):
        for placed in group:
            if written and (placed.tensor.is_conj() or placed.tensor.is_neg()):
                raise InputError(
                    f"{placed.name} is a lazily conjugated or negated view; pass a tensor with memory of its own."
                )
            spans.append((*_span(placed.tensor), written, placed))
    spans.sort(key=lambda span: span[:2])
    open_spans: list[tuple[int, int, bool, Placed]] = []
    for span in spans:
        start, stop, written, placed = span
        open_spans = [other for other in open_spans if other[1] > start]
        for _, _, other_written, other in open_spans if start < stop else ():
            own = written != other_written and placed.place == other.place and _is_same(placed.tensor, other.tensor)
            if (written or other_written) and not own:
                first, second = (placed.name, other.name) if written else (other.name, placed.name)
                raise InputError(
                    f"{first} and {second} overlap in memory; an output must be disjoint from every input, "
                    "or be exactly one input of its own place."
                )
        open_spans.append(span)


def _span(tensor: Tensor) -> tuple[int, int]:
    """First address of a tensor and the one after its last, an upper bound of the memory it covers."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _is_same(x: Tensor, y: Tensor) -> bool:
    return (x.data_ptr(), x.dtype, x.shape, x.stride()) == (y.data_ptr(), y.dtype, y.shape, y.stride())
