"""Rules of operators that multiply and sum: linear layers, convolutions, matrix products, attention."""

from __future__ import annotations

import math

import torch

from . import terms
from .rules import Call, Value, broadcast, mix, rule, stay, unlike
from .terms import Axis

Axes = tuple[Axis, ...]


@rule("linear")
def _linear(call: Call) -> list[Axes]:
    source, weight, bias = call["input"], call["weight"], call["bias"]
    terms.unify(source.axes[-1], weight.axes[-1])
    axes = (*source.axes[:-1], *weight.axes[:-1])
    if bias is not None:
        axes = (*axes[:-1], terms.unify(axes[-1], bias.axes[-1]))
    return [axes]


@rule("mm bmm matmul mv dot vdot")
def _matmul(call: Call) -> list[Axes]:
    return [_product(call, *call.values)]


@rule("addmm baddbmm addmv")
def _addmm(call: Call) -> list[Axes]:
    bias, one, other = call.values
    return [broadcast([Value(_product(call, one, other)), bias], call.shapes[0])]


def _product(call: Call, one: Value, other: Value) -> Axes:
    """The axes of a matrix product: batch axes meet first, on which the order of the summed axis may depend."""
    rows, columns = one.axes[-2:-1], other.axes[-1:] if len(other.axes) > 1 else ()
    batches = [Value(value.axes[:-2]) for value in (one, other)]
    batch = broadcast(batches, torch.broadcast_shapes(*(value.shape for value in batches)))
    terms.unify(one.axes[-1], other.axes[-2] if len(other.axes) > 1 else other.axes[-1])
    if one.key is None and other.key is None:
        call.hint(batch, "heads")
        call.hint(one.axes[-1:], "query_key")
        call.hint(columns, "value")
    return (*batch, *rows, *columns)


@rule("_weight_norm _weight_norm_interface")
def _weight_norm(call: Call) -> list[Axes]:
    """Directions times magnitudes: of each position along ``dim``, or, where that is -1, of all together."""
    direction, magnitude = call["v"], call["g"]
    dim = call.dimension(of=direction)
    mix(direction, [d for d in range(len(direction.axes)) if d != dim or call["dim"] == -1])
    axes = broadcast([direction, magnitude], direction.shape)
    return [axes, magnitude.axes][: len(call.shapes)]


@rule("bilinear")
def _bilinear(call: Call) -> list[Axes]:
    one, other, weight, bias = (call[name] for name in ("input1", "input2", "weight", "bias"))
    outer = [terms.unify(*pair) for pair in zip(one.axes[:-1], other.axes[:-1], strict=True)]
    terms.unify(one.axes[-1], weight.axes[1])
    terms.unify(other.axes[-1], weight.axes[2])
    return [(*outer, weight.axes[0] if bias is None else terms.unify(weight.axes[0], bias.axes[0]))]


@rule("einsum")
def _einsum(call: Call) -> list[Axes]:
    """Axes of one letter are one."""
    inputs, arrow, output = call["equation"].replace(" ", "").partition("->")
    if not arrow or "..." in inputs:
        return unlike(call.values, call.shapes, f"no rule for the einsum {call['equation']}")
    axes: dict[str, Axis] = {}
    pairs = [
        pair
        for part, value in zip(inputs.split(","), call.values, strict=True)
        for pair in zip(part, value.axes, strict=True)
    ]
    for letter, axis in sorted(
        pairs, key=lambda pair: pair[0] not in output
    ):  # batch axes first, as in matrix products
        if letter not in axes or terms.length(axes[letter]) == 1:
            axes[letter] = axis
        elif terms.length(axis) > 1:
            axes[letter] = terms.unify(axes[letter], axis)
    return [tuple(axes[letter] for letter in output)]


@rule("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d")
def _convolution(call: Call) -> list[Axes]:
    source, weight, bias = call["input"], call["weight"], call["bias"]
    groups = call["groups"]
    spatial = len(weight.axes) - 2
    batch, channels = source.axes[: -spatial - 1], source.axes[-spatial - 1]
    transposed = "transpose" in call.name or bool(call.get("transposed"))
    inner, outer = (weight.axes[0], weight.axes[1]) if transposed else (weight.axes[1], weight.axes[0])
    if groups == 1:
        terms.unify(channels, inner)
        result = outer
    elif transposed:
        return unlike(call.values, call.shapes, "no rule for transposed convolutions of several groups")
    else:
        result = _grouped(channels, inner, outer, groups)
    if bias is not None:
        result = terms.unify(result, bias.axes[0])
    places = source.axes[-spatial:]
    if math.prod(weight.shape[2:]) > 1 or (places != () and call.shapes[0][-spatial:] != source.shape[-spatial:]):
        terms.freeze(weight.axes[2:], "it holds the places of a kernel")
        terms.freeze(places, "a kernel moves over it")
        places = tuple(terms.fixed(size, "a kernel moves over it") for size in call.shapes[0][-spatial:])
    return [(*batch, result, *places)]


def _grouped(channels: Axis, inner: Axis, outer: Axis, groups: int) -> Axis:
    """The output channels of a grouped convolution: blocks move as the blocks of the input do."""
    size = terms.length(outer)
    sources = terms.regroup(terms.digits(channels), [groups, terms.length(channels) // groups])
    results = terms.regroup(terms.digits(outer), [groups, size // groups])
    if sources is None or results is None:
        reason = f"a convolution of {groups} groups cuts through it"
        terms.freeze([channels, inner], reason)
        return stay([outer], reason)[0]
    terms.unify(sources[0], results[0])
    terms.unify(sources[1], inner)
    return outer


@rule("scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu")
def _attention(call: Call) -> list[Axes]:
    query, key, value, mask = call["query"], call["key"], call["value"], call.get("attn_mask")
    if call.get("enable_gqa") and (repeats := query.shape[-3] // key.shape[-3]) > 1:
        key, value = (
            Value((*part.axes[:-3], ((*terms.digits(part.axes[-3]), *terms.constant(repeats)[0]),), *part.axes[-2:]))
            for part in (key, value)
        )
    batch = broadcast([Value(part.axes[:-2]) for part in (query, key, value)], call.shapes[0][:-2])
    terms.unify(key.axes[-2], value.axes[-2])
    columns = terms.unify(query.axes[-1], key.axes[-1])
    scores = (*batch, query.axes[-2], key.axes[-2])
    if call.get("is_causal"):
        terms.freeze(scores[-2:], "attention looks back along it")
    if mask is not None:
        shape = tuple(map(terms.length, scores))
        scores = broadcast([Value(scores), mask], shape)
    mix(Value(scores), [-1])
    call.hint(batch, "heads")
    call.hint([columns], "query_key")
    call.hint(value.axes[-1:], "value")
    return [(*scores[:-1], value.axes[-1]), scores[:-1]][: len(call.shapes)]
