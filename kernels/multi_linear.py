"""Linear layers between two models, several of them at once: weights are interpolated on the way to the product.

One program makes one tile of the outputs of up to four layers. It reads each tile of both weights once and interpolates
it for each layer in registers; programs of further layers of the same tile run beside it and find the weights in the
cache. Products are summed in float32, or float64, over the inputs from the first to the last: the result depends on
nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .elementwise import interpolated
from .numbers import DTYPES, EXACT, INTERPRETED, computed_in, narrow, widen

_AT_ONCE = (4, 2, 1)  # how many layers one program may make


class _Tile(NamedTuple):
    """What one program works on at a time: as much as registers hold with the sums of four layers."""

    rows: int
    outputs: int
    inputs: int
    warps: int


_TILES = {8: _Tile(32, 32, 16, 4), 4: _Tile(64, 64, 16, 8), 2: _Tile(64, 64, 32, 8)}  # by the bytes of an element
_INTERPRETED = _Tile(64, 64, 128, 1)  # the interpreter's cost is by the operation


@triton.jit(
    do_not_specialize=["layers", "rows", "outputs", "has_bias"],
    do_not_specialize_on_alignment=["bias_a", "bias_b", "alphas"],
)
def _multi_linear(
    x, weight_a, weight_b, bias_a, bias_b, alphas, y, layers, rows, inputs, outputs, has_bias,
    dtype: tl.constexpr, compute: tl.constexpr, shared: tl.constexpr, wide: tl.constexpr,
    at_once: tl.constexpr, tile_rows: tl.constexpr, tile_outputs: tl.constexpr, tile_inputs: tl.constexpr,
):  # fmt: skip
    groups = tl.cdiv(layers, at_once)
    first = tl.program_id(0) % groups * at_once
    tile = tl.program_id(0) // groups
    tiles = tl.cdiv(outputs, tile_outputs)
    row = (tile // tiles).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    output = (tile % tiles).to(tl.int64) * tile_outputs + tl.arange(0, tile_outputs)
    of_row = tl.minimum(row, rows - 1) * inputs  # what lies beyond the last is read again and not written
    of_output = tl.minimum(output, outputs - 1) * inputs

    sums = ()
    places = ()
    of_layer = ()
    for k in tl.static_range(at_once):
        layer = tl.minimum(first + k, layers - 1)
        sums = sums + (tl.zeros((tile_rows, tile_outputs), compute),)
        places = places + (tl.load(alphas + layer),)
        of_layer = of_layer + (layer.to(tl.int64) * rows * inputs * (not shared),)
    for begin in range(0, inputs, tile_inputs):
        at = begin + tl.arange(0, tile_inputs)
        inside = (at < inputs)[None, :]
        a = widen(tl.load(weight_a + of_output[:, None] + at[None, :], mask=inside, other=0.0), compute)
        b = widen(tl.load(weight_b + of_output[:, None] + at[None, :], mask=inside, other=0.0), compute)
        added = ()
        for k in tl.static_range(at_once):
            if k == 0 or not shared:
                block = tl.load(x + of_layer[k] + of_row[:, None] + at[None, :], mask=inside, other=0.0)
                if wide:
                    block = widen(block, compute)
            weight = narrow(interpolated(a, b, places[k], compute), dtype)
            if wide:
                weight = widen(weight, compute)
            added = added + (tl.dot(block, weight.trans(), sums[k], input_precision="ieee", out_dtype=compute),)
        sums = added

    written = (row < rows)[:, None] & (output < outputs)[None, :]
    biased = (output < outputs) & (has_bias != 0)
    a = widen(tl.load(bias_a + output, mask=biased, other=0.0), compute)
    b = widen(tl.load(bias_b + output, mask=biased, other=0.0), compute)
    for k in tl.static_range(at_once):
        total = sums[k]
        if has_bias:
            bias = narrow(interpolated(a, b, places[k], compute), dtype)
            total = total + widen(bias, compute)[None, :]
        target = y + (first + k).to(tl.int64) * rows * outputs + row[:, None] * outputs + output[None, :]
        tl.store(target, narrow(total, dtype), mask=written & (first + k < layers))


def multi_linear(
    x: Tensor, weight_a: Tensor, weight_b: Tensor, biases: tuple[Tensor, Tensor] | None, alphas: Tensor, y: Tensor
) -> None:
    """Write y[k] = x W(α_k)ᵀ + bias(α_k), or with x[k] if x has three axes; y has elements.

    All tensors are contiguous, of one dtype, x and the weights at multiples of 16 bytes; ``alphas`` is float64.
    """
    layers, rows, outputs = y.shape
    at_once = _at_once(layers)
    tile = _INTERPRETED if INTERPRETED else _TILES[y.element_size()]
    programs = triton.cdiv(layers, at_once) * triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
    _multi_linear[(programs,)](
        x,
        weight_a,
        weight_b,
        *((weight_a, weight_b) if biases is None else biases),
        alphas,
        y,
        layers,
        rows,
        x.shape[-1],
        outputs,
        int(biases is not None),
        dtype=DTYPES[y.dtype],
        compute=computed_in(y.dtype),
        shared=x.dim() == 2,
        wide=INTERPRETED,  # it multiplies the bits of bfloat16, not the numbers
        at_once=at_once,
        tile_rows=tile.rows,
        tile_outputs=tile.outputs,
        tile_inputs=tile.inputs,
        num_warps=tile.warps,
        **EXACT,
    )


def _at_once(layers: int) -> int:
    """How many layers each program makes: what is made in vain, in the last ones, is at most a quarter."""
    return next(size for size in _AT_ONCE if 4 * (-layers % size) <= layers)
