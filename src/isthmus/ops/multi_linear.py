"""Linear layers between two models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus import _dispatch, _library
from isthmus.errors import InputError

from ._validate import any_requires_grad, factor, stays_unread, validate

_REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def multi_linear(
    x: Tensor,
    weight_a: Tensor,
    weight_b: Tensor,
    alphas: Sequence[float] | Tensor,
    *,
    bias_a: Tensor | None = None,
    bias_b: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""A linear layer at several places between two models: y[k] = x[k] W(α_k)ᵀ + bias(α_k).

    W(α) and bias(α) are what ``lerp`` makes of the ends, to the bit: exact at α = 0 and α = 1, and rounded to their
    dtype before the product. Products are summed in float32, on a GPU never in TensorFloat-32, or in float64 where the
    tensors are, and rounded once. The order of the sums differs between backends, and the results by their rounding
    errors: in float32 those of an element stay under 1e-6 ‖x‖ ‖W(α)‖, with the norms of its rows, for random inputs.

    On a GPU all α are one launch, which reads both weights and interpolates them on the way: no W(α) is written to
    memory. On the CPU torch's own product of matrices serves, with "auto" as with "reference".

    Args:
        x: the inputs, (n, inputs) for all α alike, or (len(alphas), n, inputs).
        weight_a: the weight at α = 0, (outputs, inputs).
        weight_b: the weight at α = 1.
        alphas: finite floats, or a tensor of shape (len(alphas),). A tensor on a GPU beside ``x`` is read there: the
            host does not wait for it, and α that are not finite propagate instead of being an error.
        bias_a: the bias at α = 0, (outputs,), or None for layers without one.
        bias_b: the bias at α = 1.
        backend: "auto", "reference" or "triton"; a backend asked for by name never falls back.

    Returns:
        (len(alphas), n, outputs), in the one dtype that all tensors have: float64, float32, bfloat16 or float16.

    Raises:
        InputError: shapes, devices or dtypes do not fit each other, there is no α or one of them is not finite, or one
            bias is given without the other.
        BackendError: the backend is not available here, or has no such op.
    """
    validate([[weight_a], [weight_b]], ("weight_a", "weight_b"), None, dtypes=_REAL)
    validate([[x]], ("x",), None, dtypes=_REAL)
    tensors = {"x": x, "weight_a": weight_a, "weight_b": weight_b}
    if (bias_a is None) != (bias_b is None):
        given, other = ("bias_b", "bias_a") if bias_a is None else ("bias_a", "bias_b")
        raise InputError(f"{given} is given and {other} is None; give both, or neither.")
    if bias_a is not None and bias_b is not None:
        validate([[bias_a], [bias_b]], ("bias_a", "bias_b"), None, dtypes=_REAL)
        tensors |= {"bias_a": bias_a, "bias_b": bias_b}
    if isinstance(alphas, Tensor) and alphas.dim() != 1:
        raise InputError(
            f"alphas is a tensor of shape {tuple(alphas.shape)}, expected one axis, with a number for each."
        )
    _check_shapes(x, weight_a, bias_a, len(alphas))
    for name, tensor in tensors.items():
        if tensor.dtype != x.dtype:
            raise InputError(f"{name} has dtype {tensor.dtype}, expected {x.dtype} as x; convert one of them.")
        if tensor.device != x.device:
            raise InputError(f"{name} is on {tensor.device}, expected {x.device} as x; move one of them.")
    if _library.is_needed(any_requires_grad(alphas, [[tensor] for tensor in tensors.values()], None)):
        places = alphas if isinstance(alphas, Tensor) else torch.tensor(_floats(alphas), dtype=torch.float64)
        return _library.multi_linear(x, weight_a, weight_b, places, bias_a=bias_a, bias_b=bias_b, backend=backend)
    values = alphas if stays_unread(alphas, [x]) else _floats(alphas)
    return _dispatch.multi_linear(x, weight_a, weight_b, values, bias_a=bias_a, bias_b=bias_b, backend=backend)


def _floats(alphas: Sequence[float] | Tensor) -> list[float]:
    values = alphas.tolist() if isinstance(alphas, Tensor) else alphas
    return [factor(alpha, f"alphas[{k}]") for k, alpha in enumerate(values)]


def _check_shapes(x: Tensor, weight: Tensor, bias: Tensor | None, alphas: int) -> None:
    if alphas == 0:
        raise InputError("alphas is empty, expected at least one number.")
    if weight.dim() != 2:
        raise InputError(f"weight_a has shape {tuple(weight.shape)}, expected two axes, (outputs, inputs).")
    outputs, inputs = weight.shape
    if x.dim() not in (2, 3) or x.shape[-1] != inputs or (x.dim() == 3 and len(x) != alphas):
        raise InputError(
            f"x has shape {tuple(x.shape)}, expected (n, {inputs}) for all {alphas} alphas alike, or "
            f"({alphas}, n, {inputs}) for a weight of shape {tuple(weight.shape)}; flatten other axes into n."
        )
    if bias is not None and bias.shape != (outputs,):
        raise InputError(f"bias_a has shape {tuple(bias.shape)}, expected ({outputs},), one for each output.")
