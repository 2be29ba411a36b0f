"""A linear layer between two models, at several places at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .elementwise import compute_dtype, lerp, narrow


def multi_linear(
    x: Tensor,
    weight_a: Tensor,
    weight_b: Tensor,
    alphas: Sequence[float],
    *,
    bias_a: Tensor | None = None,
    bias_b: Tensor | None = None,
) -> Tensor:
    """y[k] = x[k] W(α_k)ᵀ + bias(α_k), layer after layer; see ``isthmus.ops.multi_linear``."""
    compute = compute_dtype((x.dtype,))
    results = []
    for k, alpha in enumerate(alphas):
        result = (x if x.dim() == 2 else x[k]).to(compute) @ lerp(weight_a, weight_b, alpha).to(compute).T
        if bias_a is not None and bias_b is not None:
            result = result + lerp(bias_a, bias_b, alpha).to(compute)
        results.append(narrow(result, x.dtype))
    return torch.stack(results)
