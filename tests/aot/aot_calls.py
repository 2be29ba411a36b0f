"""The calls that users can make, as far as kernels tell them apart: dtypes, alignment, numbers of models, options."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus import ops

COUNT = 4099  # elements: two blocks of a GPU, the second with one that is not whole
REAL = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
USUAL = ("f32", "bf16")
MIXED = {"bf16 f32": (torch.bfloat16, torch.float32), "f32 bf16": (torch.float32, torch.bfloat16)}  # first, others
WIDTHS = (1, 2, 3, 4, 5, 8, 9, 16, 17)
OTHER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.complex64, torch.complex128)


class Call(NamedTuple):
    """One call.

    Attributes:
        label: the op and what is special, told by a test that fails.
        run: makes it.
        usual: among those that are compiled by the ordinary tests.
    """

    label: str
    run: Callable[[], object]
    usual: bool = False


def all_calls() -> Iterator[Call]:
    """Every call."""
    for family in (elementwise, consensus, selection, reductions, permutations, linear_layers, matching):
        yield from family()


def tensors(count: int, dtype: torch.dtype, *, aligned: bool = True, others: torch.dtype | None = None) -> list[Tensor]:
    """Ones; that are not aligned to 16 bytes begin one element later."""
    dtypes = [dtype, *[others or dtype] * (count - 1)]
    return [torch.ones(COUNT + 1, dtype=each)[0 if aligned else 1 :][:COUNT] for each in dtypes]


def elementwise() -> Iterator[Call]:
    """lerp and weighted_sum."""
    kinds = [(name, dtype, None, aligned) for (name, dtype), aligned in itertools.product(REAL.items(), (True, False))]
    kinds += [(name, first, others, True) for name, (first, others) in MIXED.items()]
    for name, dtype, others, aligned in kinds:
        label = f"{name}{'' if aligned else ', not aligned'}"
        usual = name in USUAL and aligned
        for rows, weights in ((1, 0.3), (2, 0.3), (2, [0.3, 0.4])):
            pair = tensors(2, dtype, aligned=aligned, others=others)
            a, b = ([x] * rows for x in pair)
            yield Call(f"lerp, {label}", lambda a=a, b=b, w=weights: ops.lerp(a, b, w, backend="triton"), usual)
        for width in WIDTHS:
            xs = tensors(width, dtype, aligned=aligned, others=others)
            yield Call(
                f"weighted_sum of {width}, {label}",
                lambda xs=xs: ops.weighted_sum(xs, [0.1] * len(xs), backend="triton"),
                usual,
            )


SPARSIFY = ("none", "magnitude", "outliers", "random", "magnitude_random")
VOTES = ("total", "frequency", "weighted_total", "none")
MERGES = (("mean", "count"), ("sum", "count"), ("mean", "weight"), ("max", "count"))
RESCALE = ("none", "inverse_density", "l1")


def consensus() -> Iterator[Call]:
    """All dtypes, numbers of models, kinds of trimming and scopes; the other options in turn, in ever other company."""
    votes, merges = itertools.cycle(VOTES), itertools.cycle(MERGES)
    zeros, rescales = (
        itertools.cycle(("majority", "positive", "zero", "negative", "majority")),
        itertools.cycle(RESCALE),
    )
    based, stats = (
        itertools.cycle((True, False, True, True, False, False, True)),
        itertools.cycle([False] * 10 + [True]),
    )
    kinds = [(name, dtype, None, True) for name, dtype in REAL.items()]
    kinds += [(name, dtype, None, False) for name, dtype in REAL.items()]
    kinds += [(name, first, others, True) for name, (first, others) in MIXED.items()]
    for (name, dtype, others, aligned), width, sparsify, scope in itertools.product(
        kinds, (1, 2, 3, 4, 7, 8, 9, 17), SPARSIFY, ("global", "tensor", "row")
    ):
        merge, divisor = next(merges)
        options = {
            "sparsify": sparsify,
            "scope": scope,
            "majority_sign_method": next(votes),
            "merge_func": merge,
            "divisor": divisor,
            "zero_sign": next(zeros),
            "rescale": "none" if sparsify == "none" else next(rescales),
            "stats": next(stats),
        }
        xs = tensors(width + 1, dtype, aligned=aligned, others=others)
        if next(based):
            options["base"] = xs[-1]
        yield Call(
            f"consensus of {width}, {name}{'' if aligned else ', not aligned'}, {sparsify}, {scope}",
            lambda xs=xs[:width], options=options: _merge(xs, options),
            name in USUAL
            and aligned
            and width in (4, 8)
            and scope == "global"
            and sparsify in ("none", "magnitude", "random"),
        )


_THRESHOLDS: dict[object, object] = {}


def _merge(xs: list[Tensor], options: dict[str, object]) -> None:
    sparsify = options["sparsify"]
    density = 1.0 if sparsify == "none" else 0.5
    options = dict(options)
    if sparsify in ("magnitude", "outliers"):
        gamma = 0.1 if sparsify == "outliers" else None
        key = (options["scope"], gamma, len(xs))
        if key not in _THRESHOLDS:
            one = [torch.arange(COUNT) / COUNT] * len(xs)
            _THRESHOLDS[key] = ops.thresholds(one, 0.5, scope=key[0], gamma=gamma, backend="reference")
        options["thresholds"] = _THRESHOLDS[key]
    ops.consensus(xs, [0.1] * len(xs), density, names="weight", backend="triton", **options)


def selection() -> Iterator[Call]:
    """Thresholds."""
    scopes, ties, gammas = ("global", "tensor", "row"), ("inclusive", "exact"), (None, 0.1)
    for name, dtype in REAL.items():
        for width, based, scope, tie, gamma in itertools.product((1, 2, 4, 9), (False, True), scopes, ties, gammas):
            xs = [torch.rand(COUNT).to(dtype).view(1, COUNT) for _ in range(width + based)]
            base = {"base": xs[-1]} if based else {}
            yield Call(
                f"thresholds of {width}, {name}, {scope}, {tie}{', base' if based else ''}",
                lambda xs=xs[:width], base=base, scope=scope, tie=tie, gamma=gamma: ops.thresholds(
                    xs, 0.2, scope=scope, ties=tie, gamma=gamma, backend="triton", **base
                ),
                name in USUAL and width == 4 and scope == "global" and tie == "inclusive" and gamma is None,
            )


def reductions() -> Iterator[Call]:
    """Dot products."""
    for name, dtype in REAL.items():
        for width, based in itertools.product(WIDTHS, (False, True)):
            xs = tensors(width + based, dtype)
            base = {"base": xs[-1]} if based else {}
            yield Call(
                f"gram of {width}, {name}{', base' if based else ''}",
                lambda xs=xs[:width], base=base: ops.gram(xs, backend="triton", **base),
                name in USUAL and width == 2 and not based,
            )


def permutations() -> Iterator[Call]:
    """permute and lerp_permuted, along the first axis, the last, and both; of one to four axes."""
    shapes = ((64,), (32, 64), (16, 12, 9), (16, 12, 3, 3), (8, 6, 5, 4))
    for dtype in (*REAL.values(), *OTHER_DTYPES):
        usual = dtype in (torch.float32, torch.bfloat16)
        for shape in shapes:
            for axes in {(0,), (len(shape) - 1,), (0, len(shape) - 1), tuple(range(len(shape)))}:
                index = [torch.randperm(n) if axis in axes else None for axis, n in enumerate(shape)]
                x = torch.ones(shape).to(dtype)
                common = usual and shape == (32, 64) and axes == (0,)
                for source in (x, x.transpose(0, -1).contiguous().transpose(0, -1)):
                    yield Call(
                        f"permute, {dtype}, {shape} along {axes}",
                        lambda source=source, index=index: ops.permute(source, index, backend="triton"),
                        common,
                    )
                if dtype in REAL.values():
                    yield Call(
                        f"lerp_permuted, {dtype}, {shape} along {axes}",
                        lambda x=x, index=index: ops.lerp_permuted(x, x + 1, 0.3, index, backend="triton"),
                        common,
                    )


def linear_layers() -> Iterator[Call]:
    """multi_linear."""
    for name, dtype in REAL.items():
        for shape, places, shared, bias in itertools.product(
            ((1, 16, 16), (32, 64, 48), (200, 384, 256), (33, 65, 17)), (1, 2, 3, 8, 64), (True, False), (True, False)
        ):
            n, inputs, outputs = shape
            x = torch.ones((n, inputs) if shared else (places, n, inputs), dtype=dtype)
            weight, offset = torch.ones(outputs, inputs, dtype=dtype), torch.ones(outputs, dtype=dtype)
            biases = {"bias_a": offset, "bias_b": offset} if bias else {}
            yield Call(
                f"multi_linear, {name}, {shape} at {places}{', shared' if shared else ''}{', bias' if bias else ''}",
                lambda x=x, weight=weight, places=places, biases=biases: ops.multi_linear(
                    x, weight, weight, [0.1] * places, backend="triton", **biases
                ),
                name in USUAL and shape == (200, 384, 256) and places == 8 and bias,
            )


def matching() -> Iterator[Call]:
    """Products of gathered rows."""
    for units, others in itertools.product((64, 100, 7), (1, 3)):
        a, b, out = torch.ones(40, others, units), torch.ones(40, others, units + 8), torch.zeros(units, units + 8)
        index, rows = torch.arange(40), torch.arange(5)
        for changes in ({}, {"index": index}, {"index": index, "rows": rows, "before": index}):
            yield Call(
                f"add_product, {units} units, {others} others, {', '.join(changes)}",
                lambda out=out, a=a, b=b, changes=changes: ops.add_product(out, a, b, backend="triton", **changes),
                units == 64 and others == 1 and len(changes) == 1,
            )
