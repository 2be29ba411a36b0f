"""The public functions over tensors: validate once, then dispatch.

Every function takes one tensor per operand, or a list of tensors per operand: then it is applied to the first of each
list, to the second of each, and so on, in one call. Results have the same structure.

Tensors are float64, float32, bfloat16, float16 or complex, on any device, of any strides; those combined with each
other have equal shapes, with no broadcasting. Dtypes may be mixed: float16 and bfloat16 are widened to float32, the
rest is promoted as torch does, and the result is rounded once, to the dtype of ``out`` or of the first operand. Inputs
are never modified, and results share no memory with them, except that ``out`` may be exactly one input. Results of one
call on lists of small tensors may share one allocation with each other.

Gradients flow to tensors, factors and weights, twice if need be; under ``torch.compile`` pass factors and weights as
tensors. All functions are safe to call from several threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from . import _dispatch, _library
from ._dispatch import choose as choose_backend
from .errors import InputError

__all__ = ["DTYPES", "choose_backend", "lerp", "weighted_sum"]

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex128,
    torch.complex64,
    torch.complex32,
)


@overload
def lerp(
    a: Tensor, b: Tensor, weight: float | Tensor, *, out: Tensor | None = None, backend: str = "auto"
) -> Tensor: ...
@overload
def lerp(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    weight: float | Tensor,
    *,
    out: Sequence[Tensor] | None = None,
    backend: str = "auto",
) -> list[Tensor]: ...
def lerp(
    a: Tensor | Sequence[Tensor],
    b: Tensor | Sequence[Tensor],
    weight: float | Tensor,
    *,
    out: Tensor | Sequence[Tensor] | None = None,
    backend: str = "auto",
) -> Tensor | list[Tensor]:
    """Linear interpolation between ``a`` (weight 0) and ``b`` (weight 1).

    Computes a + w (b - a) for w < ½ and b - (1 - w)(b - a) otherwise, each operation rounded, so that the result is
    exact at both ends: at w = 0 and w = 1 it is a copy. Weights outside [0, 1] extrapolate. Every backend, instruction
    set and thread count gives the same bits, up to the payload of NaNs.

    Args:
        a: the tensor, or tensors, at weight 0.
        b: the tensor, or tensors, at weight 1; shapes as in ``a``.
        weight: w, a float or a tensor of one element; rounded once from float64 to the type computed in.
        out: where to write; each is disjoint from all inputs or is exactly one of its own.
        backend: "auto", "reference", "cpp", "cuda" or "triton"; a backend asked for by name never falls back.

    Raises:
        InputError: shapes, devices or dtypes cannot be combined, the weight is NaN or infinite, or ``out`` overlaps an
            input.
        BackendError: the backend is not available here.
    """
    columns = [_column(a, "a"), _column(b, "b")]
    targets = None if out is None else _column(out, "out")
    table = _validate(columns, ("a", "b"), targets)
    requires_grad = _requires_grad(weight, columns, table)
    if _library.is_needed(requires_grad):
        _refuse_gradient_of_out(requires_grad, targets)
        w = _weight_tensor(weight)
        results = [
            _library.lerp(x, y, w, out=None if targets is None else targets[i], backend=backend)
            for i, (x, y) in enumerate(zip(*columns, strict=True))
        ]
    else:
        results = _dispatch.lerp(columns[0], columns[1], _weight(weight), out=targets, backend=backend, table=table)
    return results[0] if isinstance(a, Tensor) else results


@overload
def weighted_sum(
    tensors: Sequence[Tensor],
    weights: Sequence[float] | Tensor,
    *,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor: ...
@overload
def weighted_sum(
    tensors: Sequence[Sequence[Tensor]],
    weights: Sequence[float] | Tensor,
    *,
    out: Sequence[Tensor] | None = None,
    backend: str = "auto",
) -> list[Tensor]: ...
def weighted_sum(
    tensors: Sequence[Tensor] | Sequence[Sequence[Tensor]],
    weights: Sequence[float] | Tensor,
    *,
    out: Tensor | Sequence[Tensor] | None = None,
    backend: str = "auto",
) -> Tensor | list[Tensor]:
    """The weighted sum w₁x₁ + w₂x₂ + ... of one or more models.

    The sum is a left fold in the order given, from its first term, each operation rounded. Weights are used as they
    are: to average, let them sum to one. Every backend, instruction set and thread count gives the same bits, up to the
    payload of NaNs.

    Args:
        tensors: one tensor per model, or one list of tensors per model.
        weights: one finite float per model, or a 1-D tensor of them; each rounded once from float64 to the type
            computed in.
        out: where to write; each is disjoint from all inputs or is exactly one of its own.
        backend: "auto", "reference", "cpp", "cuda" or "triton"; a backend asked for by name never falls back.

    Raises:
        InputError: there is no tensor, the numbers of tensors and weights differ, shapes, devices or dtypes cannot be
            combined, a weight is NaN or infinite, or ``out`` overlaps an input.
        BackendError: the backend is not available here.
    """
    models = list(tensors)
    if not models:
        raise InputError("weighted_sum got no tensors; give at least one.")
    single = isinstance(models[0], Tensor)
    names = [f"tensors[{k}]" for k in range(len(models))]
    columns = [_column(model, name) for model, name in zip(models, names, strict=True)]
    count = len(weights) if not isinstance(weights, Tensor) else weights.numel() if weights.dim() == 1 else -1
    if count != len(columns):
        came = f"a tensor of shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else f"{count} weights"
        raise InputError(f"weighted_sum got {len(columns)} tensors and {came}; give one weight for each, in order.")
    targets = None if out is None else _column(out, "out")
    table = _validate(columns, names, targets)
    requires_grad = _requires_grad(weights, columns, table)
    if _library.is_needed(requires_grad):
        _refuse_gradient_of_out(requires_grad, targets)
        w = weights if isinstance(weights, Tensor) else torch.tensor([_weight(w) for w in weights], dtype=torch.float64)
        results = [
            _library.weighted_sum(row, w, out=None if targets is None else targets[i], backend=backend)
            for i, row in enumerate(zip(*columns, strict=True))
        ]
    else:
        values = weights.tolist() if isinstance(weights, Tensor) else weights
        results = _dispatch.weighted_sum(
            columns, [_weight(w) for w in values], out=targets, backend=backend, table=table
        )
    return results[0] if single else results


def _column(operand: object, name: str) -> list[Tensor]:
    """An operand as a list of tensors."""
    if type(operand) is list:  # the common case, asked first: small merges feel every check
        return operand
    if isinstance(operand, Tensor):
        return [operand]
    if isinstance(operand, Sequence) and not isinstance(operand, str):
        return list(operand)
    raise InputError(
        f"{name} is a {type(operand).__name__}, expected a tensor or a list of tensors. "
        "For a state dict pass list(state.values())."
    )


def _weight(weight: float | Tensor) -> float:
    """A factor as a finite Python float."""
    if isinstance(weight, Tensor):
        _check_one_element(weight)
        weight = weight.item()
    if torch.compiler.is_compiling():  # a number without a value yet
        return weight
    value = float(weight)
    if not math.isfinite(value):
        raise InputError(f"the weight is {value}, expected a finite number.")
    return value


def _weight_tensor(weight: float | Tensor) -> Tensor:
    """A factor as a tensor of one element; a tensor's value is read where it is used."""
    if isinstance(weight, Tensor):
        _check_one_element(weight)
        return weight
    return torch.tensor(_weight(weight), dtype=torch.float64)


def _check_one_element(weight: Tensor) -> None:
    if weight.numel() != 1:
        raise InputError(f"weight is a tensor of shape {tuple(weight.shape)}, expected one element.")


def _validate(columns: Sequence[list[Tensor]], names: Sequence[str], out: list[Tensor] | None) -> Any:
    """Check that rows of tensors can be combined, and that outputs alias at most one input of their own row.

    Returns the compiled extension's table of the tensors if it has vouched for them already, which is the quick way.
    """
    compiling = torch.compiler.is_compiling()
    table = None if compiling else _dispatch.plain_table(columns, out)
    if table is not None:
        return table
    everything = list(columns) if out is None else [*columns, out]
    labels = list(names) if out is None else [*names, "out"]
    for column, label in zip(everything, labels, strict=True):
        if len(column) != len(columns[0]):
            raise InputError(
                f"{label} has {len(column)} tensors and {labels[0]} has {len(columns[0])}; give equally long lists."
            )
    for index, row in enumerate(zip(*everything, strict=True)):
        _validate_row(row, [f"{label}[{index}]" if len(columns[0]) > 1 else label for label in labels])
    if out is not None and not compiling:
        _refuse_overlap(columns, names, out)
    return None


def _validate_row(row: Sequence[Tensor], labels: Sequence[str]) -> None:
    """Check the kind, dtype, shape and device of the tensors that are combined with each other."""
    first = row[0]
    for tensor, label in zip(row, labels, strict=True):
        if not isinstance(tensor, Tensor):
            raise InputError(f"{label} is a {type(tensor).__name__}, expected a tensor.")
        if type(tensor) not in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling():
            raise InputError(
                f"{label} is a {type(tensor).__name__}, a tensor subclass, expected a plain tensor. "
                "Convert it first (a DTensor with full_tensor())."
            )
        if tensor.layout != torch.strided:
            raise InputError(
                f"{label} has layout {tensor.layout}, expected a dense tensor; convert it with to_dense()."
            )
        if tensor.dtype not in DTYPES:
            raise InputError(
                f"{label} has dtype {tensor.dtype}, expected one of {', '.join(map(str, DTYPES))}. "
                "Convert it first; integers and booleans are never averaged."
            )
        if tensor.is_complex() != first.is_complex():
            raise InputError(
                f"{label} has dtype {tensor.dtype} and {labels[0]} {first.dtype}; mix no real and complex."
            )
        if tensor.shape != first.shape:
            raise InputError(
                f"{label} has shape {tuple(tensor.shape)}, expected {tuple(first.shape)} as {labels[0]}; "
                "shapes are not broadcast."
            )
        if tensor.device != first.device:
            raise InputError(
                f"{label} is on {tensor.device}, expected {first.device} as {labels[0]}; move one of them."
            )


def _refuse_overlap(columns: Sequence[list[Tensor]], names: Sequence[str], out: list[Tensor]) -> None:
    """Check that each output is disjoint from all inputs and outputs, or is exactly an input of its own row."""
    for index, target in enumerate(out):
        if target.is_conj() or target.is_neg():
            raise InputError(
                f"out[{index}] is a lazily conjugated or negated view; pass a tensor with memory of its own."
            )
    spans = [(*_span(tensor), index, "out", tensor) for index, tensor in enumerate(out)]
    for name, column in zip(names, columns, strict=True):
        spans += [(*_span(tensor), index, name, tensor) for index, tensor in enumerate(column)]
    spans.sort(key=lambda span: span[:2])
    open_spans: list[tuple[int, int, int, str, Tensor]] = []
    for span in spans:
        start, stop, index, name, tensor = span
        open_spans = [other for other in open_spans if other[1] > start]
        for _, _, other_index, other_name, other in open_spans if start < stop else ():
            same = index == other_index and name != other_name and _is_same(tensor, other)
            if "out" in (name, other_name) and not same:
                first, second = sorted([f"{name}[{index}]", f"{other_name}[{other_index}]"], reverse=True)
                raise InputError(
                    f"{first} and {second} overlap in memory; an output must be disjoint from every input, "
                    "or be exactly one input of its own place."
                )
        open_spans.append(span)


def _span(tensor: Tensor) -> tuple[int, int]:
    """First address of a tensor and the one after its last, an upper bound of the memory it covers."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _is_same(x: Tensor, y: Tensor) -> bool:
    return (x.data_ptr(), x.dtype, x.shape, x.stride()) == (y.data_ptr(), y.dtype, y.shape, y.stride())


def _requires_grad(factor: object, columns: Sequence[list[Tensor]], table: Any) -> bool:
    """Whether a gradient is asked for, of the factor or weights or of any tensor; ``table`` knows it of its own."""
    if isinstance(factor, Tensor) and factor.requires_grad:
        return True
    if table is not None:
        return bool(table.requires_grad)
    return any(tensor.requires_grad for column in columns for tensor in column)


def _refuse_gradient_of_out(requires_grad: bool, out: list[Tensor] | None) -> None:
    if out is not None and requires_grad and torch.is_grad_enabled():
        raise InputError(
            "out= cannot be used where a gradient is recorded: an input requires one. "
            "Leave out= away, or call under torch.no_grad()."
        )
