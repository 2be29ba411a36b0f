"""Products of matrices on Triton kernels. Importing this module imports triton."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.kernels import multi_linear as layers
from isthmus.kernels import similarity
from isthmus.kernels.table import to_device

from .tables import aligned


def multi_linear(
    x: Tensor, weight_a: Tensor, weight_b: Tensor, biases: tuple[Tensor, Tensor] | None, alphas: Tensor
) -> Tensor:
    """The outputs of layers between two models; ``alphas`` is float64, (layers,), on any device."""
    y = x.new_empty(len(alphas), x.shape[-2], len(weight_a))
    if y.numel() > 0:
        layers.multi_linear(
            aligned(x),
            aligned(weight_a),
            aligned(weight_b),
            None if biases is None else (biases[0].contiguous(), biases[1].contiguous()),
            to_device(alphas, x.device).contiguous(),
            y,
        )
    return y


def add_product(
    out: Tensor, a: Tensor, b: Tensor, index: Tensor | None, rows: Tensor | None, before: Tensor | None
) -> None:
    """Add a product over gathered rows; the indices are on the CPU."""
    if index is None:
        index = torch.arange(len(a), device=a.device)
    elif rows is None or before is None:
        index = to_device(index.contiguous(), a.device)
    else:
        index, rows, before = to_device(torch.stack([index[rows], rows, before[rows]]), a.device)
    if index.numel() * a.shape[1] * out.numel() > 0:
        out += similarity.products(aligned(a), aligned(b), index, rows, before).sum(0)
