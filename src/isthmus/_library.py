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
from .errors import InputError
from .reference import (
    Cuts,
    Groups,
    Plan,
    Random,
    Selected,
    Stats,
    compute_dtype,
    consensus_gradient,
    random_keys,
)

_library = torch.library.Library("isthmus", "DEF")
_library.define("lerp(Tensor a, Tensor b, Tensor weight, str backend) -> Tensor")
_library.define("lerp_out(Tensor a, Tensor b, Tensor weight, str backend, *, Tensor(out!) out) -> ()")
_library.define("weighted_sum(Tensor[] tensors, Tensor weights, str backend) -> Tensor")
_library.define("weighted_sum_out(Tensor[] tensors, Tensor weights, str backend, *, Tensor(out!) out) -> ()")
_library.define("permute(Tensor tensor, Tensor[] indices, int[] axes, str backend) -> Tensor")
_library.define("permute_out(Tensor tensor, Tensor[] indices, int[] axes, str backend, *, Tensor(out!) out) -> ()")
_library.define("permute_adjoint(Tensor gradient, Tensor[] indices, int[] axes, str backend) -> Tensor")
_library.define(
    "multi_linear(Tensor x, Tensor weight_a, Tensor weight_b, Tensor? bias_a, Tensor? bias_b, Tensor alphas, "
    "str backend) -> Tensor"
)

# A plan as arguments, and the columns, base first, one after the other.
_PLAN = (
    "Tensor[] tensors, Tensor weights, Tensor scaling, Tensor?[] tables, int[]? lengths, int[]? starts, "
    "bool based, bool tally_rows, bool inverse, str vote, str zero_sign, str merge_func, str divisor"
)
_library.define(f"consensus({_PLAN}, str backend) -> (Tensor[], Tensor)")
_library.define(f"consensus_out({_PLAN}, str backend, *, Tensor(out!)[] out) -> Tensor")
_library.define(f"l1({_PLAN}, str backend) -> Tensor")
_library.define(
    "select(Tensor[] tensors, bool based, bool whole, int[]? lengths, Tensor ranks, bool exact, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define("random_keys(Tensor density, str seed, str[] names) -> Tensor")
_library.define(f"consensus_backward(Tensor[] gradients, {_PLAN}) -> Tensor[]")

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
    return _dispatch.lerp([a], [b], weight.reshape(1), out=None, backend=backend)[0]


def _lerp_out(a: Tensor, b: Tensor, weight: Tensor, backend: str, *, out: Tensor) -> None:
    _dispatch.lerp([a], [b], weight.reshape(1), out=[out], backend=backend)


def _weighted_sum(tensors: list[Tensor], weights: Tensor, backend: str) -> Tensor:
    return _dispatch.weighted_sum([[x] for x in tensors], weights, out=None, backend=backend)[0]


def _weighted_sum_out(tensors: list[Tensor], weights: Tensor, backend: str, *, out: Tensor) -> None:
    _dispatch.weighted_sum([[x] for x in tensors], weights, out=[out], backend=backend)


def _permute(tensor: Tensor, indices: list[Tensor], axes: list[int], backend: str) -> Tensor:
    return _dispatch.permute([tensor], [_by_axis(tensor, indices, axes)], out=None, backend=backend)[0]


def _permute_out(tensor: Tensor, indices: list[Tensor], axes: list[int], backend: str, *, out: Tensor) -> None:
    _dispatch.permute([tensor], [_by_axis(tensor, indices, axes)], out=[out], backend=backend)


def _permute_adjoint(gradient: Tensor, indices: list[Tensor], axes: list[int], backend: str) -> Tensor:
    return _dispatch.permute_adjoint(gradient, _by_axis(gradient, indices, axes), backend=backend)


def _multi_linear(
    x: Tensor,
    weight_a: Tensor,
    weight_b: Tensor,
    bias_a: Tensor | None,
    bias_b: Tensor | None,
    alphas: Tensor,
    backend: str,
) -> Tensor:
    return _dispatch.multi_linear(x, weight_a, weight_b, alphas, bias_a=bias_a, bias_b=bias_b, backend=backend)


def _by_axis(tensor: Tensor, indices: list[Tensor], axes: list[int]) -> list[Tensor | None]:
    """An index for each dimension, or None where it stays."""
    given = dict(zip(axes, indices, strict=True))
    return [given.get(axis) for axis in range(tensor.dim())]


for _name, _kernel in {
    "lerp": _lerp,
    "lerp_out": _lerp_out,
    "weighted_sum": _weighted_sum,
    "weighted_sum_out": _weighted_sum_out,
    "permute": _permute,
    "permute_out": _permute_out,
    "permute_adjoint": _permute_adjoint,
    "multi_linear": _multi_linear,
}.items():
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")


def _fake_lerp(a: Tensor, b: Tensor, weight: Tensor, backend: str) -> Tensor:
    return torch.empty_like(a)


def _fake_weighted_sum(tensors: list[Tensor], weights: Tensor, backend: str) -> Tensor:
    return torch.empty_like(tensors[0])


def _fake_permute(tensor: Tensor, indices: list[Tensor], axes: list[int], backend: str) -> Tensor:
    return torch.empty_like(tensor)


def _fake_multi_linear(
    x: Tensor, weight_a: Tensor, weight_b: Tensor, _: Any, __: Any, alphas: Tensor, ___: str
) -> Tensor:
    return x.new_empty(alphas.shape[0], x.shape[-2], weight_a.shape[0])


def _fake_out(*args: Any, out: Tensor) -> None:
    return None


torch.library.register_fake("isthmus::lerp", _fake_lerp, lib=_library)
torch.library.register_fake("isthmus::weighted_sum", _fake_weighted_sum, lib=_library)
torch.library.register_fake("isthmus::lerp_out", _fake_out, lib=_library)
torch.library.register_fake("isthmus::weighted_sum_out", _fake_out, lib=_library)
torch.library.register_fake("isthmus::permute", _fake_permute, lib=_library)
torch.library.register_fake("isthmus::permute_out", _fake_out, lib=_library)
torch.library.register_fake("isthmus::permute_adjoint", _fake_permute, lib=_library)
torch.library.register_fake("isthmus::multi_linear", _fake_multi_linear, lib=_library)


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


# permute is linear, and its adjoint's adjoint is permute again.


def _save_indices(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, indices, ctx.axes, ctx.backend = inputs
    ctx.save_for_backward(*indices)


def _permute_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    result = torch.ops.isthmus.permute_adjoint(grad, list(ctx.saved_tensors), ctx.axes, ctx.backend)
    return result, *_no_gradients(ctx.axes)


def _permute_adjoint_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    result = torch.ops.isthmus.permute(grad, list(ctx.saved_tensors), ctx.axes, ctx.backend)
    return result, *_no_gradients(ctx.axes)


def _no_gradients(axes: list[int]) -> tuple[Any, ...]:
    """Those of indices, axes and the backend; autograd takes an empty list of numbers for one of tensors."""
    return [None for _ in axes], None if axes else [], None


torch.library.register_autograd("isthmus::permute", _permute_backward, setup_context=_save_indices, lib=_library)
torch.library.register_autograd(
    "isthmus::permute_adjoint", _permute_adjoint_backward, setup_context=_save_indices, lib=_library
)


def permute(tensor: Tensor, indices: Sequence[Tensor | None], *, out: Tensor | None, backend: str) -> Tensor:
    """``isthmus.ops.permute`` of one tensor."""
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if out is None:
        return torch.ops.isthmus.permute(tensor, given, axes, backend)  # type: ignore[no-any-return]
    torch.ops.isthmus.permute_out(tensor, given, axes, backend, out=out)
    return out


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


def _save_multi_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _multi_linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Those of linear layers with W(α), and through W to the ends and to α as through ``lerp``."""
    x, weight_a, weight_b, bias_a, bias_b, alphas = ctx.saved_tensors
    compute = compute_dtype((x.dtype,))
    wide, inputs = grad.to(compute), x.to(compute).expand(len(alphas), *x.shape[-2:])
    need_x, need_weights, need_biases = (
        any(ctx.needs_input_grad[at] for at in place) for place in ((0,), (1, 2), (3, 4))
    )
    need_alphas = ctx.needs_input_grad[5]
    to_x = to_alphas = None
    if need_x:
        layers = torch.stack([torch.ops.isthmus.lerp(weight_a, weight_b, alpha, ctx.backend) for alpha in alphas])
        to_x = wide @ layers.to(compute)
        to_x = (to_x.sum(0) if x.dim() == 2 else to_x).to(x.dtype)
    to_weights = wide.mT @ inputs if need_weights or need_alphas else None
    to_biases = wide.sum(1) if bias_a is not None and (need_biases or need_alphas) else None
    w = alphas.to(device=grad.device, dtype=compute)
    if need_alphas and to_weights is not None:
        to_alphas = _inner_of_each(to_weights, weight_b.to(compute) - weight_a.to(compute))
        if to_biases is not None:
            to_alphas = to_alphas + _inner_of_each(to_biases, bias_b.to(compute) - bias_a.to(compute))
        to_alphas = to_alphas.to(alphas)
    return (
        to_x,
        *_to_ends(to_weights, w, weight_a, ctx.needs_input_grad[1:3]),
        *_to_ends(to_biases, w, bias_a, ctx.needs_input_grad[3:5]),
        to_alphas,
        None,
    )


def _inner_of_each(x: Tensor, y: Tensor) -> Tensor:
    """The inner product of each x[k] with y."""
    return (x * y).flatten(1).sum(1)


def _to_ends(gradients: Tensor | None, w: Tensor, end: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
    """Gradients of interpolations, added up to those of a and b."""
    if gradients is None:
        return [None, None]
    return [
        torch.tensordot(factors, gradients, dims=1).to(end.dtype) if need else None
        for factors, need in zip((1 - w, w), needed, strict=True)
    ]


torch.library.register_autograd(
    "isthmus::multi_linear", _multi_linear_backward, setup_context=_save_multi_linear, lib=_library
)


def multi_linear(
    x: Tensor,
    weight_a: Tensor,
    weight_b: Tensor,
    alphas: Tensor,
    *,
    bias_a: Tensor | None,
    bias_b: Tensor | None,
    backend: str,
) -> Tensor:
    """``isthmus.ops.multi_linear``."""
    return torch.ops.isthmus.multi_linear(x, weight_a, weight_b, bias_a, bias_b, alphas, backend)  # type: ignore[no-any-return]


# Consensus is one op for all rows, because a majority may be that of all of them.


def _flat_plan(columns: Sequence[list[Tensor]], plan: Plan) -> tuple[Any, ...]:
    """The columns and the plan as the arguments of the ops."""
    keep, drop, random = plan.keep, plan.drop, plan.random
    tables = [
        *((None, None) if keep is None else keep),
        *((None, None) if drop is None else drop),
        plan.rescale,
        *((None, None, None) if random is None else (random.keys, random.density, random.epsilon)),
    ]
    return (
        [tensor for column in columns for tensor in column],
        plan.weights,
        plan.scaling,
        tables,
        plan.lengths,
        None if random is None else random.starts,
        plan.based,
        plan.tally_rows,
        random is not None and random.inverse,
        plan.vote,
        plan.zero_sign,
        plan.merge_func,
        plan.divisor,
    )


def _nested_plan(
    tensors: list[Tensor],
    weights: Tensor,
    scaling: Tensor,
    tables: list[Tensor | None],
    lengths: list[int] | None,
    starts: list[int] | None,
    based: bool,
    tally_rows: bool,
    inverse: bool,
    vote: str,
    zero_sign: str,
    merge_func: str,
    divisor: str,
) -> tuple[list[list[Tensor]], Plan]:
    """The inverse of ``_flat_plan``."""
    rows = len(scaling)
    columns = [list(tensors[at : at + rows]) for at in range(0, len(tensors), rows)]
    keep_value, keep_index, drop_value, drop_index, rescale, keys, density, epsilon = tables
    plan = Plan(
        based=based,
        weights=weights,
        scaling=scaling,
        vote=vote,
        zero_sign=zero_sign,
        tally_rows=tally_rows,
        merge_func=merge_func,
        divisor=divisor,
        rescale=rescale,
        keep=None if keep_value is None or keep_index is None else Cuts(keep_value, keep_index),
        drop=None if drop_value is None or drop_index is None else Cuts(drop_value, drop_index),
        lengths=None if lengths is None else list(lengths),
        random=None
        if keys is None or density is None or starts is None
        else Random(keys, density, epsilon, inverse, list(starts)),
    )
    return columns, plan


def _consensus(*args: Any) -> tuple[list[Tensor], Tensor]:
    columns, plan = _nested_plan(*args[:-1])
    out = [torch.empty_like(tensor) for tensor in columns[0]]  # of their own: no op returns views of one buffer
    results, stats = _dispatch.consensus(columns, plan, out=out, backend=args[-1], stats=True)
    return results, _stats_table(stats)


def _consensus_out(*args: Any, out: list[Tensor]) -> Tensor:
    columns, plan = _nested_plan(*args[:-1])
    _, stats = _dispatch.consensus(columns, plan, out=list(out), backend=args[-1], stats=True)
    return _stats_table(stats)


def _consensus_backward_kernel(gradients: list[Tensor], *args: Any) -> list[Tensor]:
    columns, weights, scaling = consensus_gradient(*_nested_plan(*args), gradients)
    return [*(tensor for column in columns for tensor in column), weights, scaling]


def _l1(*args: Any) -> Tensor:
    columns, plan = _nested_plan(*args[:-1])
    return _dispatch.l1(columns, plan, backend=args[-1])


def _select(
    tensors: list[Tensor],
    based: bool,
    whole: bool,
    lengths: list[int] | None,
    ranks: Tensor,
    exact: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = len(tensors) // (ranks.shape[1] + based)
    columns = [list(tensors[at : at + rows]) for at in range(0, len(tensors), rows)]
    groups = Groups(whole, None if lengths is None else list(lengths))
    selected = _dispatch.select(columns, based=based, groups=groups, ranks=ranks, exact=exact, backend=backend)
    if selected.nonfinite is not None:
        raise InputError(
            f"tensors[{selected.nonfinite[1]}] has NaN or infinite entries in tensor {selected.nonfinite[0]}, so its "
            "magnitudes cannot be ranked. Repair the model, or merge without trimming (density 1)."
        )
    values, indices = (torch.stack(parts, dim=2) for parts in zip(*selected.cuts, strict=True))
    return values, indices, selected.above.clone(), selected.equal.clone()


def _random_keys(density: Tensor, seed: str, names: list[str]) -> Tensor:
    return random_keys(int(seed), names, density.shape[1])


def _stats_table(stats: Stats | None) -> Tensor:
    assert stats is not None  # it was asked for
    return torch.cat([stats.kept, torch.stack(stats[1:], dim=1)], dim=1)


def _fake_consensus(tensors: list[Tensor], weights: Tensor, *args: Any) -> tuple[list[Tensor], Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors[: len(weights)]], _fake_stats(weights)


def _fake_consensus_out(tensors: list[Tensor], weights: Tensor, *args: Any, out: list[Tensor]) -> Tensor:
    return _fake_stats(weights)


def _fake_l1(tensors: list[Tensor], weights: Tensor, *args: Any) -> Tensor:
    return weights.new_empty(*weights.shape, 2)


def _fake_select(
    tensors: list[Tensor], based: bool, whole: bool, lengths: Any, ranks: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(ranks, dtype=torch.float64),
        torch.empty_like(ranks),
        torch.empty_like(ranks),
        torch.empty_like(ranks),
    )


def _fake_random_keys(density: Tensor, seed: str, names: list[str]) -> Tensor:
    return density.new_empty(*density.shape, 4, dtype=torch.int64)


def _fake_stats(weights: Tensor) -> Tensor:
    return weights.new_empty(weights.shape[0], weights.shape[1] + 4, dtype=torch.int64)


def _fake_consensus_backward(
    gradients: list[Tensor], tensors: list[Tensor], weights: Tensor, scaling: Tensor, *args: Any
) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in (*tensors, weights, scaling)]


for _name, _kernel, _fake in (
    ("consensus", _consensus, _fake_consensus),
    ("consensus_out", _consensus_out, _fake_consensus_out),
    ("consensus_backward", _consensus_backward_kernel, _fake_consensus_backward),
    ("l1", _l1, _fake_l1),
    ("select", _select, _fake_select),
    ("random_keys", _random_keys, _fake_random_keys),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"isthmus::{_name}", _fake, lib=_library)


def _save_consensus(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, weights, scaling, tables, *ctx.options, _ = inputs
    ctx.save_for_backward(weights, scaling, *tables, *tensors)
    ctx.tables = len(tables)


def _consensus_backward(ctx: Any, gradients: list[Tensor], _: Tensor | None) -> tuple[Any, ...]:
    weights, scaling, *rest = ctx.saved_tensors
    args = (rest[ctx.tables :], weights, scaling, rest[: ctx.tables], *ctx.options)
    if torch.is_grad_enabled() and not _dispatch_modes():  # in the open, for a gradient of the gradient
        results = _consensus_backward_kernel(gradients, *args)
    else:
        results = torch.ops.isthmus.consensus_backward(gradients, *args)
    *to_tensors, to_weights, to_scaling = results
    need_tensors, need_weights, need_scaling, *others = ctx.needs_input_grad
    return (
        [x if need else None for x, need in zip(to_tensors, need_tensors, strict=True)],
        to_weights if need_weights else None,
        to_scaling if need_scaling else None,
        *(None for _ in others),
    )


torch.library.register_autograd("isthmus::consensus", _consensus_backward, setup_context=_save_consensus, lib=_library)


def consensus(
    columns: Sequence[list[Tensor]], plan: Plan, *, out: list[Tensor] | None, backend: str, stats: bool
) -> tuple[list[Tensor], Stats | None]:
    """``isthmus.ops.consensus`` of validated columns, the base first."""
    args = _flat_plan(columns, plan)
    if out is None:
        results, table = torch.ops.isthmus.consensus(*args, backend)
    else:
        results, table = out, torch.ops.isthmus.consensus_out(*args, backend, out=out)
    models = plan.weights.shape[1]
    return list(results), Stats(table[:, :models], *table[:, models:].unbind(1)) if stats else None


def select(
    columns: Sequence[list[Tensor]], *, based: bool, groups: Groups, ranks: Tensor, exact: bool, backend: str
) -> Selected:
    """The cuts at which the largest magnitudes of each task vector end; refuses what is not finite when it runs."""
    tensors = [tensor.detach() for column in columns for tensor in column]
    values, indices, above, equal = torch.ops.isthmus.select(
        tensors, based, groups.whole, groups.lengths, ranks, exact, backend
    )
    cuts = [Cuts(*pair) for pair in zip(values.unbind(2), indices.unbind(2), strict=True)]
    return Selected(cuts, above, equal, None)


def l1(columns: Sequence[list[Tensor]], plan: Plan, *, backend: str) -> Tensor:
    """Σ|τ| of each row and model, before and after trimming."""
    tensors, *args = _flat_plan(columns, plan)
    return torch.ops.isthmus.l1([x.detach() for x in tensors], *args, backend)  # type: ignore[no-any-return]


def seeded_keys(density: Tensor, seed: int, names: list[str]) -> Tensor:
    """The keys of random masks for tensors of these names, for as many models as ``density`` has columns."""
    return torch.ops.isthmus.random_keys(density, str(seed), names)  # type: ignore[no-any-return]
