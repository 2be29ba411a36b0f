"""Tables of tensors in device memory: one launch serves all tensors of a model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes that one thread reads at once


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of ``width`` inputs and one output, each row of one length; row r is worked on in blocks of its elements.

    Attributes:
        addresses: int64 (rows, width + 1): of the inputs of each row, then of its output.
        numel: int64 (rows,): how many elements each tensor of a row has; at least 1.
        first_block: int64 (rows,): the place of each row's first block among all blocks.
        row_of_block: int32 (blocks,): which row each block is of.
        dtype: of all inputs.
        out_dtype: of all outputs.
        aligned: whether every address is a multiple of 16.
        width: inputs of a row.
        block: elements of a block, but for the last one of a row.
        keep_alive: tensors that must live as long as the table.
    """

    addresses: Tensor
    numel: Tensor
    first_block: Tensor
    row_of_block: Tensor
    dtype: torch.dtype
    out_dtype: torch.dtype
    aligned: bool
    width: int
    block: int
    keep_alive: Sequence[Tensor]

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.numel)

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return len(self.row_of_block)

    @property
    def device(self) -> torch.device:
        """Where the table and its tensors are."""
        return self.numel.device


def make(
    addresses: Sequence[Sequence[int]],
    numel: Sequence[int],
    *,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    block: int,
    device: torch.device,
    keep_alive: Sequence[Tensor] = (),
) -> Table:
    """A table of these addresses: for each row those of its inputs, then that of its output."""
    blocks = [-(-n // block) for n in numel]
    first = [0, *itertools.accumulate(blocks)][:-1]
    flat = [address for row in addresses for address in row]
    on_device = to_device(torch.tensor([*flat, *numel, *first, *blocks], dtype=torch.int64), device)
    places, lengths, starts, counts = on_device.split([len(flat), *[len(numel)] * 3])
    return Table(
        addresses=places.view(len(numel), -1),
        numel=lengths,
        first_block=starts,
        row_of_block=torch.repeat_interleave(
            torch.arange(len(numel), dtype=torch.int32, device=device), counts, output_size=sum(blocks)
        ),
        dtype=dtype,
        out_dtype=out_dtype,
        aligned=all(address % ALIGNMENT == 0 for address in flat),
        width=len(addresses[0]) - 1,
        block=block,
        keep_alive=keep_alive,
    )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device; the host does not wait for the copy to a GPU."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
