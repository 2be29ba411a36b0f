"""Rules of operators that keep positions apart: element-wise functions, reductions, normalisations, constants."""

from __future__ import annotations

from . import terms
from .rules import CONSTANT, Call, broadcast, mix, rule, stay, touch
from .terms import Axis

Axes = tuple[Axis, ...]


@rule(
    "abs acos acosh add addcdiv addcmul alias angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift "
    "bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip clone conj "
    "contiguous copy copysign cos cosh deg2rad detach div dropout elu eq erf erfc erfinv exp exp2 expm1 fill floor "
    "floor_divide fmax fmin fmod frac ge gelu gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot isfinite "
    "isinf isnan le leaky_relu lerp lift_fresh_copy lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2 "
    "logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul nan_to_num ne neg "
    "positive pow rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign signbit silu sin "
    "sinc sinh softplus softshrink softsign sqrt square sub tan tanh threshold to _to_copy trunc type_as where xlogy "
    "feature_dropout alpha_dropout _assert_tensor_metadata"
)
def _elementwise(call: Call) -> list[Axes]:
    return [broadcast(call.values, call.shapes[0])] if call.shapes else []


@rule("prelu _prelu_kernel")
def _prelu(call: Call) -> list[Axes]:
    source, weight = call.values
    axes = list(source.axes)
    if len(weight.axes) == 1 and weight.shape[0] > 1:
        axes[1] = terms.unify(axes[1], weight.axes[0])
    return [tuple(axes)]


@rule(
    "full zeros ones empty empty_strided scalar_tensor full_like zeros_like ones_like empty_like new_zeros new_ones "
    "new_full new_empty zero"
)
def _filled(call: Call) -> list[Axes]:
    return [tuple(map(terms.constant, call.shapes[0]))]


@rule("arange linspace logspace eye tril_indices triu_indices range")
def _counted(call: Call) -> list[Axes]:
    return [tuple(terms.fixed(size, CONSTANT) for size in call.shapes[0])]


@rule(
    "sum mean amax amin prod any all var std norm linalg_vector_norm logsumexp nansum var_mean std_mean count_nonzero"
)
def _reduction(call: Call) -> list[Axes]:
    source = call.source
    dims = call.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or range(len(source.axes))
    reduced = {dim % len(source.axes) for dim in dims} if source.axes else set()
    if len(call.shapes[0]) == len(source.axes):
        kept: Axes = tuple(((),) if dim in reduced else axis for dim, axis in enumerate(source.axes))
    else:
        kept = tuple(axis for dim, axis in enumerate(source.axes) if dim not in reduced)
    return [kept] * len(call.shapes)


@rule("max min median argmax argmin sort argsort topk cumsum cumprod cummax cummin logcumsumexp kthvalue mode")
def _ordered(call: Call) -> list[Axes]:
    """Positions along one axis are counted or told by number; without an axis, all that is left is one number."""
    source = call.source
    if len(call.values) > 1:
        return [broadcast(call.values, call.shapes[0])]  # the larger of two tensors
    if call.get("dim") is None and call.shapes[0] == ():
        if call.name.startswith("arg"):
            stay(source.axes, f"aten.{call.name} tells its positions by number")
        return [()] * len(call.shapes)
    dimension = call.dimension()
    reason = f"aten.{call.name} tells its positions by number"
    full = list(source.shape)
    if len(call.shapes[0]) == len(full):
        full[dimension] = call.shapes[0][dimension]
        return [touch(source, [dimension], reason, full)] * len(call.shapes)
    axes = touch(source, [dimension], reason, full)
    return [tuple(axis for dim, axis in enumerate(axes) if dim != dimension)] * len(call.shapes)


@rule("softmax _softmax log_softmax _log_softmax")
def _softmax(call: Call) -> list[Axes]:
    mix(call.source, [call["dim"]])
    return [call.source.axes]


@rule("layer_norm native_layer_norm rms_norm _fused_rms_norm")
def _layer_norm(call: Call) -> list[Axes]:
    source = call.source
    count = len(call["normalized_shape"])
    mix(source, range(-count, 0))
    axes = list(source.axes)
    for name in ("weight", "bias"):
        value = call.get(name)
        if value is not None:
            axes[-count:] = [terms.unify(*pair) for pair in zip(axes[-count:], value.axes, strict=True)]
    outer: Axes = (*axes[:-count], *(((),) for _ in range(count)))
    return [tuple(axes), outer, outer][: len(call.shapes)]


@rule("group_norm native_group_norm")
def _group_norm(call: Call) -> list[Axes]:
    source = call.source
    groups = call.get("num_groups") or call["group"]
    axes = list(source.axes)
    channels = axes[1]
    if groups > 1:
        parts = terms.regroup(terms.digits(channels), [groups, terms.length(channels) // groups])
        if parts is None:
            (axes[1],) = stay([channels], "its group norm divides it in another way")
        else:
            axes[1] = ((*parts[0][0], *parts[1][0]),)
    for name in ("weight", "bias"):
        if call[name] is not None:
            axes[1] = terms.unify(axes[1], call[name].axes[0])
    mix(source, range(2, len(axes)))
    statistics = (axes[0], terms.fixed(groups, "it is a statistic of groups"))
    return [tuple(axes), statistics, statistics][: len(call.shapes)]


@rule(
    "batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
    "_native_batch_norm_legit_functional _batch_norm_no_update instance_norm"
)
def _batch_norm(call: Call) -> list[Axes]:
    source = call.source
    axes = list(source.axes)
    for value in call.values[1:]:
        axes[1] = terms.unify(axes[1], value.axes[0])
    mix(source, [0, *range(2, len(axes))])
    return [tuple(axes), *(tuple(axes[1:2]) if shape != (0,) else ((),) for shape in call.shapes[1:])]
