"""Rules of operators that move, cut and join axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from . import terms
from .rules import Call, Value, broadcast, rule, stay, touch, unlike
from .terms import Axis

Axes = tuple[Axis, ...]


@rule("view reshape _unsafe_view _reshape_alias flatten unflatten view_as reshape_as view_copy")
def _reshape(call: Call) -> list[Axes]:
    return [reshaped(call.source, call.shapes[0])]


def reshaped(value: Value, shape: Sequence[int]) -> Axes:
    """The axes of a value in another shape: runs of axes of equal product are merged and cut anew."""
    if 0 in shape:
        return tuple(((),) if size == 1 else terms.fixed(size, "it is empty") for size in shape)
    result: list[Axis] = []
    sizes = list(shape)
    left = list(value.axes)
    while left or sizes:
        old, new = [left.pop(0)] if left else [], [sizes.pop(0)] if sizes else []
        while (before := math.prod(map(terms.length, old))) != (after := math.prod(new)):
            if before < after:
                old.append(left.pop(0))
            else:
                new.append(sizes.pop(0))
        if len(old) == len(new) == 1:
            result += old
            continue
        axes = terms.regroup([digit for axis in old for digit in terms.digits(axis)], new)
        if axes is None:
            lengths = tuple(map(terms.length, old))
            reason = f"a reshape from {lengths} to {tuple(new)} cuts through it"
            terms.freeze(old, reason)
            axes = [terms.fixed(size, reason) for size in new]
        result += axes
    return tuple(result)


@rule("permute transpose t numpy_T mT swapaxes movedim unsqueeze squeeze permute_copy transpose_copy")
def _rearranged(call: Call) -> list[Axes]:
    axes = list(call.source.axes)
    if call.name.startswith("permute"):
        return [tuple(axes[dim] for dim in call["dims"])]
    if call.name.startswith("transpose"):
        one, other = call.dimension("dim0"), call.dimension("dim1")
        axes[one], axes[other] = axes[other], axes[one]
    elif call.name == "unsqueeze":
        axes.insert(int(call["dim"]) % (len(axes) + 1), ((),))
    elif call.name == "squeeze":
        dims = call.get("dim")
        dims = range(len(axes)) if dims is None else [dims] if isinstance(dims, int) else dims
        gone = {dim % len(axes) for dim in dims} if axes else set()
        axes = [axis for dim, axis in enumerate(axes) if dim not in gone or terms.length(axis) > 1]
    elif call.name in ("t", "mT", "numpy_T"):
        axes = axes[::-1] if call.name != "mT" else [*axes[:-2], axes[-1], axes[-2]]
    else:
        return unlike(call.values, call.shapes, f"no rule for aten.{call.name}")
    return [tuple(axes)]


@rule("expand expand_as broadcast_to expand_copy")
def _expanded(call: Call) -> list[Axes]:
    return [broadcast([call.source], call.shapes[0])]


@rule("repeat tile")
def _repeated(call: Call) -> list[Axes]:
    source, shape = call.source, call.shapes[0]
    axes = [*(((),) for _ in range(len(shape) - len(source.axes))), *source.axes]
    return [
        tuple(
            axis if size == terms.length(axis) else _times(terms.constant(size // terms.length(axis)), axis)
            for axis, size in zip(axes, shape, strict=True)
        )
    ]


@rule("repeat_interleave")
def _repeat_interleaved(call: Call) -> list[Axes]:
    if not isinstance(call.get("repeats"), int) or call.get("dim") is None:
        return unlike(call.values, call.shapes, "aten.repeat_interleave repeats its positions unequally")
    axes = list(call.source.axes)
    dimension = call.dimension()
    axes[dimension] = _times(axes[dimension], terms.constant(call["repeats"]))
    return [tuple(axes)]


def _times(outer: Axis, inner: Axis) -> Axis:
    return ((*terms.digits(outer), *terms.digits(inner)),)


@rule("select")
def _select(call: Call) -> list[Axes]:
    dimension = call.dimension()
    index = call["index"] % call.source.shape[dimension]
    axes = piece(call.source, dimension, index, index + 1)
    call.pieces.append((call.source.axes[dimension], axes[dimension]))
    call.read.append(axes[dimension])
    return [(*axes[:dimension], *axes[dimension + 1 :])]


@rule("slice narrow slice_copy")
def _slice(call: Call) -> list[Axes]:
    source, dimension = call.source, call.dimension()
    size, taken = source.shape[dimension], call.shapes[0][dimension]
    start = call.get("start") or 0
    if call.get("step") not in (None, 1):
        return [touch(source, [dimension], "a slice with a step takes some of its positions", call.shapes[0])]
    start = min(max(start + size if start < 0 else start, 0), size)
    axes = piece(source, dimension, start, start + taken)
    call.pieces.append((source.axes[dimension], axes[dimension]))
    return [axes]


@rule("split split_with_sizes chunk unbind tensor_split split_copy split_with_sizes_copy unbind_copy")
def _split(call: Call) -> list[Axes]:
    source, dimension = call.source, call.dimension()
    results, start = [], 0
    for shape in call.shapes:
        stop = start + (1 if call.name.startswith("unbind") else shape[dimension])
        axes = piece(source, dimension, start, stop)
        call.pieces.append((source.axes[dimension], axes[dimension]))
        if call.name.startswith("unbind"):
            call.read.append(axes[dimension])
            axes = (*axes[:dimension], *axes[dimension + 1 :])
        results.append(axes)
        start = stop
    return results


def piece(value: Value, dimension: int, start: int, stop: int) -> Axes:
    """The axes of a value of which only some positions along one dimension are kept."""
    if start == stop:
        return tuple(terms.fixed(0, "it is empty") if d == dimension else axis for d, axis in enumerate(value.axes))
    found = terms.part_of(value.axes[dimension], start, stop)
    if found is None:
        reason = f"taking positions {start} to {stop - 1} of {value.shape[dimension]} cuts through it"
        return touch(
            value, [dimension], reason, [*value.shape[:dimension], stop - start, *value.shape[dimension + 1 :]]
        )
    axis, choices = found
    axes = [axis if d == dimension else other for d, other in enumerate(value.axes)]
    for concatenation, part in choices:
        axes = [
            other
            if d == dimension
            else tuple(tuple(terms.chosen(atom, concatenation, part) for atom in segment) for segment in other)
            for d, other in enumerate(axes)
        ]
    return tuple(axes)


@rule("slice_scatter select_scatter")
def _scattered(call: Call) -> list[Axes]:
    source, new = call.values
    dimension = call.dimension()
    if call.name == "select_scatter":
        start = call["index"] % source.shape[dimension]
        stop = start + 1
        new = Value((*new.axes[:dimension], ((),), *new.axes[dimension:]))
    else:
        start = call.get("start") or 0
        start = min(max(start + source.shape[dimension] if start < 0 else start, 0), source.shape[dimension])
        stop = start + new.shape[dimension]
    if call.get("step") not in (None, 1):
        return unlike(call.values, call.shapes, "a slice with a step is written into it")
    axes = list(source.axes)
    if new.shape[dimension] < source.shape[dimension]:
        axes[dimension] = _placed(source.axes[dimension], new.axes[dimension], start, stop)
    else:
        axes[dimension] = terms.unify(axes[dimension], new.axes[dimension])
    for other in range(len(axes)):
        if other != dimension:
            axes[other] = terms.unify(axes[other], new.axes[other])
    return [tuple(axes)]


def _placed(axis: Axis, new: Axis, start: int, stop: int) -> Axis:
    """An axis of which some positions are overwritten by another."""
    size = terms.length(axis)
    pieces = [terms.part_of(axis, *ends) for ends in ((0, start), (start, stop), (stop, size)) if ends[0] < ends[1]]
    if None in pieces:
        terms.freeze([new], "it is written into the middle of an axis")
        return stay([axis], "its middle is overwritten")[0]
    found = [part[0] for part in pieces if part is not None]
    found[1 if start else 0] = terms.unify(found[1 if start else 0], new)
    return tuple(segment for part in found for segment in part)


@rule("glu")
def _glu(call: Call) -> list[Axes]:
    """The first half of an axis times the sigmoid of the other."""
    dimension = call.dimension()
    half = call.shapes[0][dimension]
    halves = [Value(piece(call.source, dimension, start, start + half)) for start in (0, half)]
    return [broadcast(halves, call.shapes[0])]


@rule("cat concat concatenate")
def _cat(call: Call) -> list[Axes]:
    values = [value for value in call.values if value.shape != (0,)]
    dimension = call.dimension(of=values[0])
    axes = list(values[0].axes)
    for value in values[1:]:
        for other in range(len(axes)):
            if other != dimension:
                axes[other] = terms.unify(axes[other], value.axes[other])
    axes[dimension] = tuple(segment for value in values for segment in value.axes[dimension] if 0 not in value.shape)
    return [tuple(axes)]


@rule("stack")
def _stack(call: Call) -> list[Axes]:
    values = call.values
    axes = list(values[0].axes)
    for value in values[1:]:
        axes = [terms.unify(*pair) for pair in zip(axes, value.axes, strict=True)]
    axes.insert(int(call["dim"]) % (len(axes) + 1), ((),) * len(values))
    return [tuple(axes)]


@rule("index _unsafe_index")
def _index(call: Call) -> list[Axes]:
    """Rows taken by tensors of indices: these axes stay, the others are as they were."""
    source = call.source
    indices = list(call["indices"])
    used = [dimension for dimension, index in enumerate(indices) if index is not None]
    reason = "it is indexed by data"
    terms.freeze([source.axes[dimension] for dimension in used], reason)
    given = [index for index in indices if index is not None]
    kept = [axis for dimension, axis in enumerate(source.axes) if dimension not in used]
    count = len(call.shapes[0]) - len(kept)
    adjacent = used == list(range(used[0], used[-1] + 1))
    at = used[0] if adjacent else 0
    taken = broadcast(given, call.shapes[0][at : at + count])
    if any(terms.length(axis) != size for axis, size in zip(taken, call.shapes[0][at:], strict=False)):
        return unlike(call.values, call.shapes, reason)  # a mask
    return [(*kept[:at], *taken, *kept[at:])]


@rule("index_select embedding")
def _lookup(call: Call) -> list[Axes]:
    source = call.source
    dimension = call.dimension() if call.name == "index_select" else 0
    reason = "its rows are looked up by index"
    terms.freeze([source.axes[dimension]], reason)
    index = call.values[1]
    return [(*source.axes[:dimension], *index.axes, *source.axes[dimension + 1 :])]


@rule(
    "roll flip pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d rot90 "
    "tril triu diagonal unfold"
)
def _moved(call: Call) -> list[Axes]:
    source, reason = call.source, f"aten.{call.name} tells its positions apart"
    count = len(source.axes)
    dims = call.get("dims") or call.get("dim") or range(count)
    padding = call.get("pad") or call.get("padding")
    if padding is not None:
        dims = [count - 1 - i for i in range(len(padding) // 2) if padding[2 * i] or padding[2 * i + 1]]
    elif call.name in ("tril", "triu"):
        dims = [-2, -1]
    elif call.name in ("diagonal", "unfold", "rot90"):
        return unlike(call.values, call.shapes, reason)
    return [touch(source, dims, reason, call.shapes[0])]


@rule(
    "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d adaptive_max_pool1d adaptive_max_pool2d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d upsample_linear1d "
    "_upsample_nearest_exact2d max_pool1d_with_indices _adaptive_avg_pool3d"
)
def _pooled(call: Call) -> list[Axes]:
    source = call.source
    spatial = next(n for n in (1, 2, 3) if f"{n}d" in call.name)
    first = len(source.axes) - spatial
    axes = touch(source, range(first, first + spatial), "places are pooled or resampled", call.shapes[0])
    return [axes] * len(call.shapes)


@rule("channel_shuffle native_channel_shuffle")
def _channel_shuffle(call: Call) -> list[Axes]:
    """A reshape to groups times channels, transposed."""
    source, groups = call.source, call["groups"]
    count = source.shape[1] // groups
    parted = reshaped(source, (source.shape[0], groups, count, *source.shape[2:]))
    return [reshaped(Value((parted[0], parted[2], parted[1], *parted[3:])), call.shapes[0])]


@rule("pixel_shuffle")
def _pixel_shuffle(call: Call) -> list[Axes]:
    source, shape = call.source, call.shapes[0]
    factor = call["upscale_factor"] ** 2
    reason = "its units become places"
    parts = terms.regroup(terms.digits(source.axes[-3]), [source.shape[-3] // factor, factor])
    if parts is None:
        return [touch(source, [-3, -2, -1], reason, shape)]
    terms.freeze([parts[1], *source.axes[-2:]], reason)
    return [(*source.axes[:-3], parts[0], *(terms.fixed(size, reason) for size in shape[-2:]))]
