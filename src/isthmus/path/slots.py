"""Weight buffers: flat states, each bound to a model of its own, that points are written into and evaluated in."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import nn

from isthmus.flat import Binding, FlatState, canonical_keys

from .device import Mark
from .graphs import Pass
from .shared import SharedLayers


@dataclass(eq=False)
class Slot:
    """A model and the flat state whose views its tensors are.

    Attributes:
        free: when the weights of its last point are no longer used.
        passes: split -> the pass over its data, and the first layers that it combines.
        proven: whether the model is known to compute what the one of the scan does.
    """

    model: nn.Module
    state: FlatState
    binding: Binding
    free: Mark
    passes: dict[str, tuple[SharedLayers | None, Pass]] = field(default_factory=dict)
    proven: bool = True

    @property
    def writes(self) -> int:
        """A number that grows whenever Python writes into a parameter in place."""
        return sum(parameter._version for parameter in self.model.parameters())


def copied(slot: Slot) -> Slot:
    """A slot with a copy of the model, whose parameters and persistent buffers exist once, in a state of their own."""
    state = slot.state.clone()
    tensors = slot.model.state_dict(keep_vars=True)
    canonical = canonical_keys(tensors)
    memo: dict[int, object] = {}
    for key, tensor in tensors.items():
        view = state[canonical[key]]
        is_parameter = isinstance(tensor, nn.Parameter)
        memo.setdefault(id(tensor), nn.Parameter(view, tensor.requires_grad) if is_parameter else view)
    with torch.inference_mode(False):
        model = copy.deepcopy(slot.model, memo)
    return Slot(model, state, state.bind(model), slot.free, proven=False)
