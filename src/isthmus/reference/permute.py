"""Gathers along every axis of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def permute(tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """result[i₀, i₁, ...] = tensor[idx₀[i₀], idx₁[i₁], ...]; see ``isthmus.ops.permute``. Always a new tensor."""
    result = tensor.clone()
    for axis, index in enumerate(indices):
        if index is not None:
            result = result.index_select(axis, index)
    return result


def permute_adjoint(gradient: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """The adjoint of ``permute``: entries are added up where they were read from, and zero where nothing was."""
    result = gradient.clone()
    for axis, index in enumerate(indices):
        if index is not None:
            result = torch.zeros_like(result).index_add(axis, index, result)
    return result
