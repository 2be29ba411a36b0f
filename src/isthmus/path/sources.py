"""The ends of a scan as flat states of one layout, that of the model."""

from __future__ import annotations

import torch

from isthmus.errors import InputError
from isthmus.flat import FlatState, Layout
from isthmus.merging.sources import Source, read_state


def load_source(source: Source, layout: Layout, name: str, device: torch.device) -> FlatState:
    """``source`` as a flat state of its own with the given layout, that of the model.

    Args:
        source: a module, a state dict, a ``FlatState``, or the path of a safetensors file.
        layout: where each tensor lies. Tensors that are tied in it may be stored once per key in the source.
        name: what error messages call the source.
        device: where the state goes.

    Raises:
        InputError: the source does not have the model's tensors, or tied ones differ.
        FileError: the file is missing or not a safetensors file.
    """
    tensors, name = read_state(source, name)
    flat = FlatState.from_state_dict(tensors, name=name, device=device)
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
