"""The ops as ``torch.ops.isthmus``: schemas, fake kernels and gradients, for ``torch.compile`` and autograd.

Factors and weights are tensors here, because a Python float would be a constant of the compiled graph. Functional and
in-place forms are ops of their own, and lists of tensors are looped over by the caller, so that no op returns views of
one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _dispatch
from .reference import compute_dtype

_library = torch.library.Library("isthmus", "DEF")
_library.define("lerp(Tensor a, Tensor b, Tensor weight, str backend) -> Tensor")
_library.define("lerp_out(Tensor a, Tensor b, Tensor weight, str backend, *, Tensor(out!) out) -> ()")
_library.define("weighted_sum(Tensor[] tensors, Tensor weights, str backend) -> Tensor")
_library.define("weighted_sum_out(Tensor[] tensors, Tensor weights, str backend, *, Tensor(out!) out) -> ()")


_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack


def is_needed(requires_grad: bool) -> bool:
    """Whether a call must go through ``torch.ops``: something compiles, records or transforms it.

    ``requires_grad`` says whether any of its tensors requires a gradient.
    """
    return (
        torch.compiler.is_compiling()
        or (requires_grad and torch.is_grad_enabled())
        or _dispatch_modes() > 0
        or _functorch_level() is not None
    )


def _lerp(a: Tensor, b: Tensor, weight: Tensor, backend: str) -> Tensor:
    return _dispatch.lerp([a], [b], [weight.item()], out=None, backend=backend)[0]


def _lerp_out(a: Tensor, b: Tensor, weight: Tensor, backend: str, *, out: Tensor) -> None:
    _dispatch.lerp([a], [b], [weight.item()], out=[out], backend=backend)


def _weighted_sum(tensors: list[Tensor], weights: Tensor, backend: str) -> Tensor:
    return _dispatch.weighted_sum([[x] for x in tensors], weights.tolist(), out=None, backend=backend)[0]


def _weighted_sum_out(tensors: list[Tensor], weights: Tensor, backend: str, *, out: Tensor) -> None:
    _dispatch.weighted_sum([[x] for x in tensors], weights.tolist(), out=[out], backend=backend)


for _name, _kernel in {
    "lerp": _lerp,
    "lerp_out": _lerp_out,
    "weighted_sum": _weighted_sum,
    "weighted_sum_out": _weighted_sum_out,
}.items():
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")


def _fake_lerp(a: Tensor, b: Tensor, weight: Tensor, backend: str) -> Tensor:
    return torch.empty_like(a)


def _fake_weighted_sum(tensors: list[Tensor], weights: Tensor, backend: str) -> Tensor:
    return torch.empty_like(tensors[0])


def _fake_out(*args: Any, out: Tensor) -> None:
    return None


torch.library.register_fake("isthmus::lerp", _fake_lerp, lib=_library)
torch.library.register_fake("isthmus::weighted_sum", _fake_weighted_sum, lib=_library)
torch.library.register_fake("isthmus::lerp_out", _fake_out, lib=_library)
torch.library.register_fake("isthmus::weighted_sum_out", _fake_out, lib=_library)


def _save_lerp(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, weight, _ = inputs
    ctx.save_for_backward(a, b, weight)


def _lerp_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """d/da = 1 - w, d/db = w, d/dw = Σ g (b - a)."""
    a, b, weight = ctx.saved_tensors
    compute = compute_dtype((a.dtype, b.dtype))
    wide = grad.to(_like(compute, grad))
    w = weight.to(device=grad.device, dtype=compute)
    need_a, need_b, need_w, _ = ctx.needs_input_grad
    return (
        (wide * (1 - w)).to(a.dtype) if need_a else None,
        (wide * w).to(b.dtype) if need_b else None,
        _inner(wide, b.to(wide.dtype) - a.to(wide.dtype)).to(weight) if need_w else None,
        None,
    )


def _save_weighted_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, weights, _ = inputs
    ctx.save_for_backward(weights, *tensors)


def _weighted_sum_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """d/dxᵢ = wᵢ, d/dwᵢ = Σ g xᵢ."""
    weights, *tensors = ctx.saved_tensors
    compute = compute_dtype(tensor.dtype for tensor in tensors)
    wide = grad.to(_like(compute, grad))
    w = weights.to(device=grad.device, dtype=compute)
    need_tensors, need_weights, _ = ctx.needs_input_grad
    return (
        [
            (wide * w[i]).to(tensor.dtype) if need else None
            for i, (tensor, need) in enumerate(zip(tensors, need_tensors, strict=True))
        ],
        torch.stack([_inner(wide, tensor.to(wide.dtype)) for tensor in tensors]).to(weights) if need_weights else None,
        None,
    )


def _like(compute: torch.dtype, grad: Tensor) -> torch.dtype:
    """The dtype in which gradients of rules that compute in ``compute`` are formed: complex where the gradient is."""
    return torch.promote_types(compute, grad.dtype)


def _inner(x: Tensor, y: Tensor) -> Tensor:
    """The real inner product Re Σ x̄ y, the gradient of a real factor."""
    product = x.conj() * y
    return (product.real if product.is_complex() else product).sum()


torch.library.register_autograd("isthmus::lerp", _lerp_backward, setup_context=_save_lerp, lib=_library)
torch.library.register_autograd(
    "isthmus::weighted_sum", _weighted_sum_backward, setup_context=_save_weighted_sum, lib=_library
)


def lerp(a: Tensor, b: Tensor, weight: Tensor, *, out: Tensor | None, backend: str) -> Tensor:
    """``isthmus.ops.lerp`` of one pair of tensors."""
    if out is None:
        return torch.ops.isthmus.lerp(a, b, weight, backend)  # type: ignore[no-any-return]
    torch.ops.isthmus.lerp_out(a, b, weight, backend, out=out)
    return out


def weighted_sum(tensors: Sequence[Tensor], weights: Tensor, *, out: Tensor | None, backend: str) -> Tensor:
    """``isthmus.ops.weighted_sum`` of one row of tensors."""
    if out is None:
        return torch.ops.isthmus.weighted_sum(tensors, weights, backend)  # type: ignore[no-any-return]
    torch.ops.isthmus.weighted_sum_out(tensors, weights, backend, out=out)
    return out
