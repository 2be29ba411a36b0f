"""Leave a model and the random generators as they were found, also after an error or an interrupt."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from isthmus.norms import preserved_modes


@contextmanager
def preserved_random_states() -> Iterator[None]:
    """Give Python, numpy and torch (CPU and, where initialised, every GPU) their global random states back."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)


@contextmanager
def preserved_model(module: nn.Module) -> Iterator[None]:
    """Give ``module`` back, at the end of the block, all that ``FlatState.bind`` does not.

    These are the modes of its submodules, which parameters require gradients, the gradients themselves (absent within
    the block), the buffers that are not part of the state dict, and which tensor is registered as which buffer.
    """
    parameters = [(parameter, parameter.requires_grad, parameter.grad) for parameter in module.parameters()]
    buffers = [(owner, name, buffer) for owner in module.modules() for name, buffer in owner._buffers.items()]
    transient = [
        (owner._buffers[name], owner._buffers[name].clone())  # type: ignore[union-attr]
        for owner in module.modules()
        for name in owner._non_persistent_buffers_set
        if owner._buffers[name] is not None
    ]
    for parameter, _, _ in parameters:
        parameter.grad = None
    try:
        with preserved_modes(module):
            yield
    finally:
        for owner, name, buffer in buffers:
            owner._buffers[name] = buffer
        with torch.no_grad():
            for buffer, value in transient:
                buffer.copy_(value)  # type: ignore[union-attr]
        for parameter, requires_grad, gradient in parameters:
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient


@contextmanager
def preserved_buffers(module: nn.Module) -> Iterator[None]:
    """Give every submodule its buffers back at the end of the block: the same tensors with the same values."""
    saved = [
        (owner._buffers, name, buffer, None if buffer is None else (_version(buffer), buffer.clone()))
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
    ]
    try:
        yield
    finally:
        for buffers, name, buffer, state in saved:
            buffers[name] = buffer
            if buffer is not None and state is not None and state[0] != _version(buffer):
                with torch.no_grad():
                    buffer.copy_(state[1])


def _version(tensor: torch.Tensor) -> object:
    """Equal for two calls only if the tensor was not written into between them."""
    return object() if tensor.is_inference() else tensor._version
