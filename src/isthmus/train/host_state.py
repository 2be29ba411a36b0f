"""What a training step may change on the host, where recordings and stacks of models do not see it change."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn


@dataclass(frozen=True)
class _Held:
    """What one module holds: attributes, and parameters and buffers with the memory in which each lies."""

    module: nn.Module
    attributes: dict[str, Any]
    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, Tensor | None]
    memory: dict[str, Tensor] = field(repr=False)

    @classmethod
    def of(cls, module: nn.Module) -> _Held:
        parameters, buffers = dict(module._parameters), dict(module._buffers)
        tensors = {name: value for name, value in (parameters | buffers).items() if value is not None}
        memory = {name: value.detach() for name, value in tensors.items()}
        return cls(module, dict(vars(module)), parameters, buffers, memory)

    def change(self) -> str:
        present = self.module._parameters | self.module._buffers
        before = self.parameters | self.buffers
        for name in before.keys() | present.keys():
            new, memory = present.get(name), self.memory.get(name)
            moved = memory is not None and new is not None and new.data_ptr() != memory.data_ptr()
            if new is not before.get(name) or moved:
                return f"{name} of {type(self.module).__name__} became another tensor"
        for name, old in self.attributes.items():
            new = vars(self.module).get(name)
            if new is old:
                continue
            if isinstance(old, Tensor):
                return f"{name} of {type(self.module).__name__} became another tensor"
            if isinstance(old, (int, float, complex, str)) and (type(new) is not type(old) or new != old):
                return f"{name} of {type(self.module).__name__} changed from {old!r} to {new!r}"
        return ""

    def restore(self) -> None:
        attributes = vars(self.module)
        for name in attributes.keys() - self.attributes.keys():
            del attributes[name]
        attributes.update(self.attributes)
        for held, before in ((self.module._parameters, self.parameters), (self.module._buffers, self.buffers)):
            held.clear()
            held.update(before)  # type: ignore[arg-type]
            for name, value in before.items():
                if value is not None and value.data_ptr() != self.memory[name].data_ptr():
                    value.data = self.memory[name]


class HostState:
    """Which tensors, numbers and other objects the modules of models hold, and the random states of Python and NumPy.

    It is a note of references: values of tensors are not copied, and what is changed in place, such as a list, is
    neither found nor undone. The tensors live at least as long as the note.

    Args:
        models: as they are now.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._modules = [_Held.of(module) for model in models for module in model.modules()]
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)

    def change(self) -> str:
        """In words, one thing that is other than it was; empty if none is.

        These are parameters, buffers and tensors among the attributes that are others, or lie elsewhere; numbers and
        strings among the attributes; and the random states.
        """
        for held in self._modules:
            if change := held.change():
                return change
        if random.getstate() != self._python:
            return "random numbers were drawn from Python's random"
        if pickle.dumps(np.random.get_state(legacy=False)) != pickle.dumps(self._numpy):
            return "random numbers were drawn from NumPy"
        return ""

    def restore(self) -> None:
        """Put everything back."""
        for held in self._modules:
            held.restore()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
