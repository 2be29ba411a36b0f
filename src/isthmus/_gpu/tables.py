"""Tables in device memory of the rows of a call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus._operands import Rows, laid_out
from isthmus.kernels.table import ALIGNMENT, Table, make, to_device
from isthmus.reference import compute_dtype

Column = list[Tensor]

SIGNS = {"positive": 1, "negative": -1, "zero": 0}  # what kernels call a sign that is elected where a vote cancels


class Part(NamedTuple):
    """The rows of a call that have one dtype, as a table.

    Attributes:
        table: of the rows that have elements.
        rows: their places in the call.
    """

    table: Table
    rows: list[int]

    def of_rows(self, values: Tensor) -> Tensor:
        """Of a value or line for each row of the call those of this part, on its device; of a single one that."""
        return of_rows(values, self.rows, self.table.device)


def run(
    columns: Sequence[Column], outputs: Column, launch: Callable[[Part], None], *, block: int, c_order: bool = False
) -> None:
    """Call ``launch`` with every part of a call; outputs that are not laid out like the inputs are written after."""
    rows = laid_out(columns, outputs, c_order=c_order)
    for part in parts(rows.inputs, rows.results, block=block):
        launch(part)
    for target, result in rows.late:
        target.copy_(result)


def parts(inputs: Sequence[Sequence[Tensor]], results: Sequence[Tensor], *, block: int) -> list[Part]:
    """The tables of rows that are laid out; rows of several dtypes are widened to what they are computed in."""
    by_dtype: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    widened = [list(row) for row in inputs]
    for place, (row, result) in enumerate(zip(widened, results, strict=True)):
        if result.numel() == 0:
            continue
        dtypes = {tensor.dtype for tensor in row}
        if dtypes != {result.dtype}:
            row[:] = [tensor.to(compute_dtype(dtypes)) for tensor in row]
        by_dtype.setdefault((row[0].dtype, result.dtype), []).append(place)
    return [
        Part(
            make(
                [[tensor.data_ptr() for tensor in (*widened[place], results[place])] for place in places],
                [results[place].numel() for place in places],
                dtype=dtype,
                out_dtype=out_dtype,
                block=block,
                device=results[0].device,
                keep_alive=[tensor for place in places for tensor in widened[place]],
            ),
            places,
        )
        for (dtype, out_dtype), places in by_dtype.items()
    ]


def of_rows(values: Tensor, rows: Sequence[int], device: torch.device) -> Tensor:
    """Of a value or line for each row of a call those of these rows, on a device; of a single one that."""
    if len(values) not in (1, len(rows)):
        values = values[to_device(torch.tensor(rows), values.device)]
    moved: Tensor = to_device(values.contiguous(), device)
    return moved


def first_groups(numel: Sequence[int], lengths: Sequence[int] | None) -> list[int]:
    """For each row the place of its first group: each is one, or has one for each of its pieces."""
    groups = [1] * len(numel) if lengths is None else [n // length for n, length in zip(numel, lengths, strict=True)]
    return list(itertools.accumulate(groups, initial=0))[:-1]


def in_place(rows: Rows) -> bool:
    """Whether an output is an input of its row."""
    return any(
        result.data_ptr() == x.data_ptr() and result.numel() > 0
        for row, result in zip(rows.inputs, rows.results, strict=True)
        for x in row
    )


def aligned(tensor: Tensor) -> Tensor:
    """The tensor in C-order, at an address from which a thread can read 16 bytes at once; a copy if need be."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
