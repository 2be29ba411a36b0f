"""The checks that the ops share, each made once, at the public function."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from isthmus import _dispatch
from isthmus.errors import InputError

from ._naming import own_labels
from ._overlap import Placed, refuse_overlap

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex128,
    torch.complex64,
    torch.complex32,
)


def column(operand: object, name: str) -> list[Tensor]:
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


def factor(weight: float | Tensor, name: str = "the weight") -> float:
    """A factor as a finite Python float."""
    if isinstance(weight, Tensor):
        _check_one_element(weight)
        _refuse_to_lose_gradient(weight, name)
        weight = weight.item()
    if torch.compiler.is_compiling():  # a number without a value yet
        return weight
    value = float(weight)
    if not math.isfinite(value):
        raise InputError(f"{name} is {value}, expected a finite number.")
    return value


def stays_unread(weights: object, tensors: Sequence[Tensor]) -> TypeGuard[Tensor]:
    """Whether these are a tensor on a GPU, beside ``tensors``: its values are used there, unchecked by the host."""
    return isinstance(weights, Tensor) and weights.is_cuda and len(tensors) > 0 and tensors[0].is_cuda


def factor_tensor(weight: float | Tensor) -> Tensor:
    """A factor as a tensor of one element; a tensor's value is read where it is used."""
    if isinstance(weight, Tensor):
        _check_one_element(weight)
        return weight
    return torch.tensor(factor(weight), dtype=torch.float64)


def factors(weight: float | Tensor | Sequence[float], tensors: Sequence[Tensor]) -> list[float] | Tensor:
    """The one factor of all rows, or those of each, finite; or one axis of them on the GPU of ``tensors``, unread."""
    if stays_unread(weight, tensors):
        if weight.shape != (len(tensors),):
            _check_one_element(weight)
        return weight.reshape(-1)
    return [factor(w) for w in weight_of_each(weight, len(tensors))]


def weight_of_each(weight: float | Tensor | Sequence[float], rows: int) -> Sequence[float | Tensor]:
    """The one weight of all rows, or those of each."""
    if isinstance(weight, Tensor):
        if weight.dim() != 1 or weight.numel() == 1 or weight.numel() != rows:
            return [weight]
        return weight.unbind()
    if not isinstance(weight, Sequence):
        return [weight]
    if len(weight) != rows:
        raise InputError(f"weight has {len(weight)} entries and there are {rows} tensors; give one for each, or one.")
    return weight


def _check_one_element(weight: Tensor) -> None:
    if weight.numel() != 1:
        raise InputError(f"weight is a tensor of shape {tuple(weight.shape)}, expected one element.")


def _refuse_to_lose_gradient(value: Tensor, name: str) -> None:
    if value.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"{name} requires a gradient, which would be lost. Pass weights as one tensor (torch.stack) to a rule that "
            "records gradients; anything else with detach(), or under torch.no_grad()."
        )


def models_of(tensors: object, what: str) -> tuple[list[list[Tensor]], list[str], bool]:
    """The models' tensors, what errors call each model, and whether each is a single tensor."""
    iterable = isinstance(tensors, Iterable) and not (isinstance(tensors, Tensor) and tensors.dim() == 0)
    models = list(tensors) if iterable else []  # type: ignore[call-overload]
    if not models:
        raise InputError(f"{what} got no tensors; give a list of at least one, or of one list for each model.")
    names = own_labels(len(models))
    return (
        [column(model, name) for model, name in zip(models, names, strict=True)],
        names,
        isinstance(models[0], Tensor),
    )


def option(name: str, value: object, known: Sequence[str]) -> None:
    """Check that an option has one of its known values."""
    if value not in known:
        raise InputError(f"{name}={value!r} is not known; the values are {', '.join(map(repr, known))}.")


def per_model(
    value: Any, name: str, rows: int, models: int, *, low: float = -math.inf, high: float = math.inf
) -> list[list[float]]:
    """A number, one number per model, or per model one per tensor, as a finite number for each row and model."""
    value = _plain(value, name)
    if isinstance(value, int | float):
        return [[_number(value, name, low, high)] * models] * rows
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != models:
        sequence = isinstance(value, Sequence) and not isinstance(value, str)
        came = f"has {len(value)} entries" if sequence else f"is a {type(value).__name__}"
        raise InputError(f"{name} {came}, expected a number or a list of {models} entries, one for each model.")
    entries = [_plain(entry, name) for entry in value]
    if not any(isinstance(entry, Sequence) for entry in entries):
        return [[_number(entry, name, low, high) for entry in entries]] * rows
    lists = [list(entry) if isinstance(entry, Sequence) else [entry] * rows for entry in entries]
    for model, entry in enumerate(lists):
        if len(entry) != rows:
            raise InputError(f"{name}[{model}] has {len(entry)} entries, expected {rows}, one for each tensor.")
    return [[_number(entry, name, low, high) for entry in row] for row in zip(*lists, strict=True)]


def _plain(value: Any, name: str) -> Any:
    """A tensor or an array as lists of numbers."""
    if isinstance(value, Tensor):
        _refuse_to_lose_gradient(value, name)
    return value.tolist() if hasattr(value, "tolist") else value


def _number(value: Any, name: str, low: float, high: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InputError(f"{name} holds a {type(value).__name__}, expected numbers.") from None
    if not (low <= number <= high and math.isfinite(number)):
        expected = "a finite number" if high == math.inf == -low else f"a number from {low:g} to {high:g}"
        raise InputError(f"{name} is {number}, expected {expected}.")
    return number


def validate(
    columns: Sequence[list[Tensor]],
    names: Sequence[str],
    out: list[Tensor] | None,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> Any:
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
        _validate_row(row, [f"{label}[{index}]" if len(columns[0]) > 1 else label for label in labels], dtypes)
        first = columns[0][0]
        if row[0].device != first.device:
            raise InputError(
                f"{labels[0]}[{index}] is on {row[0].device} and {labels[0]}[0] on {first.device}, expected all "
                "tensors of a call on one device; move some of them, or make a call for each device."
            )
    if out is not None and not compiling:
        refuse_overlap(
            [Placed(f"out[{row}]", row, tensor) for row, tensor in enumerate(out)],
            [
                Placed(f"{name}[{row}]", row, tensor)
                for name, column in zip(names, columns, strict=True)
                for row, tensor in enumerate(column)
            ],
        )
    return None


def _validate_row(row: Sequence[Tensor], labels: Sequence[str], dtypes: Sequence[torch.dtype]) -> None:
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
        if tensor.dtype not in dtypes:
            why = "; integers and booleans are never averaged" if dtypes is DTYPES else ""
            raise InputError(
                f"{label} has dtype {tensor.dtype}, expected one of {', '.join(map(str, dtypes))}. "
                f"Convert it first{why}."
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


def by_device(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of tensors, those on one device together, as one call takes them."""
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(place)
    return list(places.values())


def any_requires_grad(factor: object, columns: Sequence[list[Tensor]], table: Any) -> bool:
    """Whether a gradient is asked for, of a factor or weight or of any tensor; ``table`` knows it of its own."""
    factors = factor if type(factor) is list else (factor,)
    if any(isinstance(each, Tensor) and each.requires_grad for each in factors):
        return True
    if table is not None:
        return bool(table.requires_grad)
    return any(tensor.requires_grad for column in columns for tensor in column)


def refuse_gradient_of_out(requires_grad: bool, out: list[Tensor] | None) -> None:
    if out is not None and requires_grad and torch.is_grad_enabled():
        raise InputError(
            "out= cannot be used where a gradient is recorded: an input requires one. "
            "Leave out= away, or call under torch.no_grad()."
        )
