"""How the rules begin that record no gradients: their checks, their numbers, and the plan of those without a vote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from isthmus import _library
from isthmus.errors import InputError
from isthmus.reference import Cuts, Plan

from ._validate import any_requires_grad, column, per_model, validate
from .selection import row_names

Operand = TypeVar("Operand", Tensor, Sequence[Tensor])  # of one call: every model a tensor, or every model a list


class Begun(NamedTuple):
    """What a valid call begins with."""

    targets: list[Tensor] | None  # where to write, if the caller said so
    table: Any  # the compiled extension's table of the tensors, if it has one
    names: list[str]  # what errors call each tensor


def begin(
    rule: str,
    columns: list[list[Tensor]],
    labels: Sequence[str],
    *,
    names: str | Sequence[str] | None,
    out: Tensor | Sequence[Tensor] | None,
    like: Operand,
) -> Begun:
    """Validate the tensors, their names and ``out``, and refuse to lose a gradient; ``like`` is one of the operands."""
    targets = None if out is None else column(out, "out")
    table = validate(columns, labels, targets)
    if _library.is_needed(any_requires_grad(None, columns, table)):
        raise InputError(
            f"{rule} records no gradient and cannot be traced, and an input requires a gradient or a transform is "
            "active. Call it under torch.no_grad(), outside torch.compile and torch.func."
        )
    count = len(columns[0])
    given = row_names(names, count)
    if given is None:
        given = ["the tensor"] if isinstance(like, Tensor) else [f"tensor {row}" for row in range(count)]
    return Begun(targets, table, given)


def like_operand(results: list[Tensor], like: Operand) -> Operand:
    """The results as a tensor or a list, whichever ``like`` is."""
    result: Any = results[0] if isinstance(like, Tensor) else results
    return cast("Operand", result)


def per_tensor(
    value: float | Sequence[float] | Tensor, name: str, rows: int, *, low: float = -math.inf, high: float = math.inf
) -> list[float]:
    """A number, or one for each tensor, as one for each."""
    single = isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0
    entries: Any = [value] if single else value
    return [row[0] for row in per_model(entries, name, rows, 1, low=low, high=high)]


def plan_without_vote(
    weights: list[list[float]],
    *,
    scaling: list[float] | None = None,
    merge_func: str = "sum",
    keep: Cuts | None = None,
) -> Plan:
    """The plan of θ₀ + λ Σ wᵢ τᵢ, weights given for each row and model, or of a mean instead of the sum."""
    return Plan(
        based=True,
        weights=torch.tensor(weights, dtype=torch.float64),
        scaling=torch.tensor([1.0] * len(weights) if scaling is None else scaling, dtype=torch.float64),
        vote="none",
        zero_sign="zero",
        tally_rows=False,
        merge_func=merge_func,
        divisor="count",
        rescale=None,
        keep=keep,
        drop=None,
        lengths=None,
        random=None,
    )
