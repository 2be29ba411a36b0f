"""Models from wherever they are, as tensors by canonical key or as flat states."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isthmus.errors import InputError
from isthmus.flat import FlatState, Layout, canonical_keys, plain_tensor, with_tied

Source = nn.Module | Mapping[str, Tensor] | FlatState | str | os.PathLike[str]


class Model(NamedTuple):
    """A model's own tensors, without gradients and without copies.

    Attributes:
        name: what error messages call it.
        tensors: canonical key -> tensor, in the order of the source.
        prefix: what was stripped from every key.
        others: canonical key -> what is not a tensor, such as a module's extra state.
        order: all canonical keys, in the order of the source.
    """

    name: str
    tensors: dict[str, Tensor]
    prefix: str
    others: dict[str, object]
    order: list[str]


def read_state(source: Source, name: str) -> tuple[Mapping[str, Tensor], str]:
    """The entries of a source under its own keys, and its name with the file's path if it is one.

    Files are mapped into memory: tensors of a file are read when they are first used.

    Raises:
        InputError: the source is none of the kinds that are known.
        FileError: the file is missing or not a safetensors file.
    """
    if isinstance(source, FlatState):
        return source.to_state_dict(), name
    if isinstance(source, nn.Module):
        return source.state_dict(keep_vars=True), name
    if isinstance(source, Mapping):
        return source, name
    if isinstance(source, (str, os.PathLike)):
        from isthmus.io import load_state

        return load_state(source), f"{name} ({os.fspath(source)})"
    raise InputError(
        f"{name} is a {type(source).__name__}, expected a module, a state dict, a FlatState or the path of a file."
    )


def read_model(source: Source, name: str, *, others: bool = False) -> Model:
    """The entries of a source by canonical key.

    Args:
        source: a module, a state dict, a ``FlatState``, or the path of a safetensors file.
        name: what error messages call it.
        others: whether entries may be something else than tensors.

    Raises:
        InputError: the source is none of these, a key is not a string, a tensor is not plain and dense (a DTensor, for
            instance), or an entry is none and may not be.
        FileError: the file is missing or not a safetensors file.
    """
    state, name = read_state(source, name)
    for key in state:
        if not isinstance(key, str):
            raise InputError(f"{name} has the key {key!r}, a {type(key).__name__}, expected names of tensors.")
    canonical = canonical_keys(state)
    odd = {key: value for key, value in state.items() if others and not isinstance(value, Tensor)}
    tensors = {canonical[key]: plain_tensor(value, key, name) for key, value in state.items() if key not in odd}
    first = next(iter(canonical), "")
    prefix = first.removesuffix(canonical.get(first, ""))
    return Model(name, tensors, prefix, {canonical[key]: value for key, value in odd.items()}, list(canonical.values()))


def load_source(source: Source, layout: Layout, name: str, device: torch.device) -> FlatState:
    """``source`` as a flat state of its own with the given layout, that of the model.

    Args:
        source: a module, a state dict, a ``FlatState``, or the path of a safetensors file.
        layout: where each tensor lies. Tensors that are tied in it may be stored once per key in the source, or under
            one of their keys alone.
        name: what error messages call the source.
        device: where the state goes.

    Raises:
        InputError: the source does not have the model's tensors, or tied ones differ.
        FileError: the file is missing or not a safetensors file.
    """
    tensors, name = read_state(source, name)
    flat = FlatState.from_state_dict(tensors, name=name, device=device)
    complete = with_tied(flat.to_state_dict(), layout.ties)
    if len(complete) > len(flat):
        flat = FlatState.from_state_dict(complete, name=name)
    if _untied(flat.layout) == _untied(layout):
        flat = _tied(flat, layout, name)
    layout.check(flat.layout, name=name, expected="the model")
    return flat


def _untied(layout: Layout) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {key: (entry.dtype, entry.shape) for key, entry in layout.entries.items()}


def _tied(flat: FlatState, layout: Layout, name: str) -> FlatState:
    """``flat`` in ``layout``, which has the same tensors: files store tensors that the model ties once per key."""
    if flat.layout == layout:
        return flat
    tied = FlatState.zeros(layout, device=flat.device)
    for key in layout.entries:
        tied[key].copy_(flat[key])
    for key in layout.entries:
        if not torch.equal(tied[key], flat[key]):
            raise InputError(
                f"{key!r} is tied to another tensor in the model, but {name} has different values for them."
            )
    return tied
