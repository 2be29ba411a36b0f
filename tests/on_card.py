"""Kernels of a GPU under tests whose tensors are on the CPU: memory goes there and comes back around every launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class OnCard:
    """The ops of a backend, for tensors of the CPU.

    Whole storages are moved, so that tensors lie there as they do here: with the same strides, the same distance from
    16 bytes, and sharing memory with each other where they do. What is given by position is moved, and written back;
    keywords are plans and numbers, which ops take on the CPU. Tensors that are on a GPU stay as they are.

    Args:
        module: the ops on kernels, which take tensors on ``device``.
        device: where they run.
    """

    INTERPRETED = ON_HOST = True  # tensors of the CPU are taken

    def __init__(self, module: Any, device: torch.device | str) -> None:
        self._module, self._device = module, device

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return self._moving(value) if callable(value) else value

    def _moving(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            there: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

            def move(tensor: Tensor) -> Tensor:
                if tensor.device.type != "cpu":
                    return tensor
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in there:
                    moved = torch.UntypedStorage(storage.nbytes(), device=self._device)
                    there[storage.data_ptr()] = storage, moved.copy_(storage)
                _, moved = there[storage.data_ptr()]
                twin = torch.empty(0, dtype=tensor.dtype, device=self._device)
                twin.set_(moved, tensor.storage_offset(), tensor.shape, tensor.stride())
                twin = twin.conj() if tensor.is_conj() else twin
                return torch._neg_view(twin) if tensor.is_neg() else twin

            result = function(*_mapped(move, arguments), **keywords)
            for storage, moved in there.values():
                storage.copy_(moved)
            return _mapped(Tensor.cpu, result) if there else result

        return call


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The value with its tensors changed, in lists and tuples too; plans stay as they are."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(change, each) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(_mapped(change, each) for each in value)
    return value
