"""Whole models in another order of their units."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn

from isthmus import ops
from isthmus.errors import InputError
from isthmus.flat import FlatState, first_aliases
from isthmus.merging.sources import Source, read_model

from .inputs import read_for
from .permutation import beside, check_permutation
from .report import Matching
from .spec import Permutation, PermutationSpec


@overload
def apply_permutation(
    spec: PermutationSpec, permutation: Permutation | Matching, model: nn.Module, *, backend: str = "auto"
) -> nn.Module: ...
@overload
def apply_permutation(
    spec: PermutationSpec,
    permutation: Permutation | Matching,
    model: Mapping[str, Tensor] | str | os.PathLike[str],
    *,
    backend: str = "auto",
) -> dict[str, Tensor]: ...
@overload
def apply_permutation(
    spec: PermutationSpec, permutation: Permutation | Matching, model: FlatState, *, backend: str = "auto"
) -> FlatState: ...
def apply_permutation(
    spec: PermutationSpec, permutation: Permutation | Matching, model: Source, *, backend: str = "auto"
) -> nn.Module | dict[str, Tensor] | FlatState:
    """A model with the units of every group in a new order: the same function in other weights.

    Every tensor is read and written once (``isthmus.ops.permute``). Tied tensors stay tied.

    Args:
        spec: which axes move together.
        permutation: group -> int64 permutation, or the ``Matching`` that has it; groups that are left out stay.
        model: a module, a state dict, a ``FlatState`` or the path of a safetensors file. It is not modified.
        backend: as for ``isthmus.ops.permute``.

    Returns:
        A copy of the module, or a state dict with the keys of the source, or a ``FlatState``.

    Raises:
        InputError: the model does not have the tensors of the spec, or the permutation does not fit it.
    """
    permutation = check_permutation(spec, permutation)
    indices = spec.indices(permutation)
    read = read_for(spec, model, "the model")
    own = {key: read.tensors[key] for key in read.order if key in read.tensors}
    aliases = first_aliases(own)
    for key, first in aliases.items():
        if spec.axes.get(key) != spec.axes.get(first):
            raise InputError(f"{key!r} and {first!r} are one tensor, but the spec has different axes for them.")
    firsts = [key for key in own if aliases[key] == key]
    sources = [own[key] for key in firsts]
    places = beside(sources, [indices.get(key) for key in firsts])
    if isinstance(model, FlatState):
        result = FlatState.zeros(model.layout, device=model.device)
        ops.permute(sources, places, out=[result[key] for key in firsts], backend=backend)
        return result
    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for here in ops.by_device(sources):
            moved = ops.permute([sources[place] for place in here], [places[place] for place in here], backend=backend)
            tensors.update(zip([firsts[place] for place in here], moved, strict=True))
    if isinstance(model, nn.Module):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for key, tensor in read_model(twin, "the copy").tensors.items():
                if aliases[key] == key:
                    tensor.copy_(tensors[key])
        return twin
    moved_or_other: dict[str, Any] = {key: tensors[first] for key, first in aliases.items()} | read.others
    return {f"{read.prefix}{key}": moved_or_other[key] for key in read.order}
