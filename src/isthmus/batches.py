"""How data for a model come: batch by batch, and what of a batch are the model's inputs.

A batch is the inputs alone or a sequence that begins with them, and may go on with targets. Inputs are a tensor, the
model's one argument, or a mapping, its arguments by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .errors import InputError

Inputs = Tensor | Mapping[str, Any]


def inputs_of(batch: object) -> Inputs:
    """The inputs of a batch.

    Raises:
        InputError: it is neither a tensor, nor a mapping, nor a sequence that begins with one of these.
    """
    first = batch[0] if isinstance(batch, Sequence) and not isinstance(batch, str) and batch else batch
    if not isinstance(first, (Tensor, Mapping)):
        came = type(batch).__name__ + ("" if first is batch else f" whose first item is of type {type(first).__name__}")
        raise InputError(
            f"data has a batch of type {came}, expected a tensor of inputs, a mapping of the model's arguments, or a "
            "sequence that begins with one of these, such as (inputs, targets)."
        )
    return first


def with_targets(batch: object) -> tuple[Inputs, Any]:
    """The inputs and the targets of a batch.

    Raises:
        InputError: it is not a sequence of these; see ``inputs_of``.
    """
    inputs = inputs_of(batch)
    if not isinstance(batch, Sequence) or len(batch) < 2:
        raise InputError(
            f"data has a batch of type {type(batch).__name__} without targets, expected (inputs, targets)."
        )
    return inputs, batch[1]


def size_of(inputs: Inputs) -> int:
    """The number of examples: the length of the inputs, of a mapping that of its first tensor.

    Raises:
        InputError: there is no tensor of at least one dimension.
    """
    for tensor in (inputs,) if isinstance(inputs, Tensor) else inputs.values():
        if isinstance(tensor, Tensor) and tensor.dim():
            return len(tensor)
    raise InputError("data has a batch without a tensor whose first dimension counts the examples.")


def split(data: Tensor | Iterable[object], batch_size: int) -> Iterator[Inputs]:
    """The inputs of data, batch by batch; a tensor of shape (n, ...) in batches of this size.

    Raises:
        InputError: ``data`` is a mapping or looks like one batch, a batch is not what ``inputs_of`` expects, or
            ``batch_size`` is below 1.
    """
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}, expected at least 1.")
    if isinstance(data, Mapping):
        raise InputError("data is a mapping, expected a tensor or an iterable of batches; one batch goes in a list.")
    kinds = {(x.dtype, x.dim()) for x in data if isinstance(x, Tensor)} if isinstance(data, Sequence) else set()
    if len(kinds) > 1:
        raise InputError(
            "data holds tensors of different dtypes or dimensions: are they inputs and targets? One batch goes in a "
            "list: [(inputs, targets)]."
        )
    yield from data.split(batch_size) if isinstance(data, Tensor) else map(inputs_of, data)


def run(model: nn.Module, inputs: Inputs) -> Any:
    """What a model makes of the inputs of a batch."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
