"""Norms and dots, added up in one fixed order, so that no thread count or instruction set changes them.

The order: blocks of 4096 elements from the vector's start; in a block 16 float64 lanes, lane j taking the elements j,
j + 16, ... in order; the lanes added from the first to the last, and the blocks likewise. Every sum starts from +0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .elementwise import compute_dtype

BLOCK = 4096
LANES = 16
_CHUNK = 256 * BLOCK  # elements worked on at once: temporaries stay small


def block_sums(x: Tensor) -> Tensor:
    """Sums of the blocks of each line of ``x``, float64 of shape (lines, elements): shape (lines, blocks)."""
    lines, length = x.shape
    width = min(BLOCK, -(-length // LANES) * LANES)  # short lines need no whole block
    blocks = -(-length // BLOCK)
    if length < blocks * width:  # a padded 0 changes no sum that started from +0
        x = torch.nn.functional.pad(x, (0, blocks * width - length))
    steps = x.reshape(lines, blocks, width // LANES, LANES).unbind(2)
    return add_in_order(add_in_order(steps, x.new_zeros(lines, blocks, LANES)).unbind(2), x.new_zeros(lines, blocks))


def add_in_order(terms: Sequence[Tensor], start: Tensor) -> Tensor:
    """``start`` plus the terms, from the first to the last; ``start`` is written to."""
    for term in terms:
        start += term
    return start


def gram(columns: Sequence[Sequence[Tensor]], *, based: bool, lengths: Sequence[int] | None = None) -> Tensor:
    """The dots of the models' vectors with each other, for every tensor: G[r, i, j] = Σ τᵢ τⱼ.

    The vectors are the tensors in C-order, or with ``based`` their differences from the base, rounded in the compute
    dtype; products and sums are float64, so that float16 and float32 vectors cannot overflow.

    Args:
        columns: the base if ``based``, then the models, each a list of R tensors.
        based: whether the first column is a base.
        lengths: for each row of tensors, the number of elements after which a new vector starts; without it every
            tensor is one vector.

    Returns:
        Float64 of shape (vectors, models, models) on the CPU, the vectors in order.
    """
    models = len(columns) - based
    parts = [
        _gram_row(row, based, None if lengths is None else lengths[index])
        for index, row in enumerate(zip(*columns, strict=True))
    ]
    return torch.cat(parts) if parts else torch.zeros(0, models, models, dtype=torch.float64)


def _gram_row(row: Sequence[Tensor], based: bool, length: int | None) -> Tensor:
    compute = compute_dtype(tensor.dtype for tensor in row)
    length = row[0].numel() if length is None else length
    flat = [tensor.detach().reshape(-1, length) if length else tensor.new_empty(1, 0) for tensor in row]
    models = len(row) - based
    result = torch.zeros(len(flat[0]), models, models, dtype=torch.float64)
    span = max(1, min(length, _CHUNK))
    lines = max(1, _CHUNK // span)
    for top in range(0, len(flat[0]), lines):
        total = result[top : top + lines]
        for left in range(0, length, span):
            part = [x[top : top + lines, left : left + span].to(compute) for x in flat]
            vectors = [(x - part[0]).double() for x in part[1:]] if based else [x.double() for x in part]
            for i in range(models):
                for j in range(i + 1):
                    sums = block_sums(vectors[i] * vectors[j]).cpu()
                    total[:, i, j] = add_in_order(sums.unbind(1), total[:, i, j].clone())
    lower = result.tril(-1)
    return result.tril() + lower.transpose(1, 2)
