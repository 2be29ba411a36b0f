"""Tensors of any strides and complex ones as rows of memory that kernels can walk through side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Real tensors without gaps, those of a row laid out alike.

    Attributes:
        inputs: for each row one tensor of each column.
        results: for each row the tensor to write.
        late: pairs of an output and of the result that is to be copied there when it is written.
    """

    inputs: list[list[Tensor]]
    results: list[Tensor]
    late: list[tuple[Tensor, Tensor]]


def laid_out(columns: Sequence[list[Tensor]], outputs: list[Tensor], *, c_order: bool) -> Rows:
    """The rows of ``columns`` and ``outputs``, through contiguous copies where need be.

    Tensors of a row that are dense and alike need none, unless places are counted in C-order (``c_order``).
    """
    rows = Rows([], [], [])
    for target, *row in zip(outputs, *columns, strict=True):
        inputs = [real(tensor) for tensor in row]
        result = real(target)
        dense = not c_order and result.stride() == torch.empty_like(result).stride()
        if not dense or any(x.stride() != result.stride() for x in inputs):
            inputs = [x.contiguous() for x in inputs]
            if not result.is_contiguous():
                rows.late.append((result, torch.empty_like(result, memory_format=torch.contiguous_format)))
                result = rows.late[-1][1]
        rows.inputs.append(inputs)
        rows.results.append(result)
    return rows


def real(tensor: Tensor) -> Tensor:
    """``tensor`` without lazy conjugation or negation; a complex one as pairs of real numbers."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
