"""What decides the values of a scan, in few words: digests of tensors, names of functions.

A checkpoint keeps them, so that a scan never goes on with the points of another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from isthmus.flat import FlatState

from .evaluate import Evaluator


def state_digest(state: FlatState) -> str:
    """SHA-256 of a state's keys, shapes, dtypes and bits."""
    digest = hashlib.sha256()
    for key, entry in sorted(state.layout.entries.items()):
        digest.update(f"{key} {entry.dtype} {tuple(entry.shape)} {entry.offset}\n".encode())
    for _, buffer in sorted(state.buffers.items(), key=lambda item: str(item[0])):
        digest.update(_bytes(buffer))
    return digest.hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's shape, dtype and bits."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(_bytes(tensor))
    return digest.hexdigest()


def evaluation(evaluate: Evaluator | Callable[..., object]) -> dict[str, Any]:
    """What is measured on one split: data, metrics and autocast; of a function, its name and code."""
    if not isinstance(evaluate, Evaluator):
        return {"function": _called(evaluate)}
    return {
        "inputs": tensor_digest(evaluate.inputs),
        "targets": tensor_digest(evaluate.targets),
        "metrics": {name: _called(metric) for name, metric in evaluate.metrics.items()},
        "unpack": None if evaluate._unpack is None else _called(evaluate._unpack),
        "autocast": None if evaluate.dtype is None else str(evaluate.dtype).removeprefix("torch."),
    }


def _called(function: Callable[..., object]) -> dict[str, Any]:
    """The qualified name of a function, or of the class of a callable object, a digest of its code, fixed arguments.

    What else a function reads, such as variables of the function around it, is not seen.
    """
    if isinstance(function, partial):
        return _called(function.func) | {"arguments": f"{function.args} {function.keywords}"}
    named = function if hasattr(function, "__qualname__") else type(function)
    code = getattr(function, "__code__", None)
    return {
        "name": f"{named.__module__}.{named.__qualname__}",
        "code": None if code is None else hashlib.sha256(_text(code).encode()).hexdigest(),
    }


def _text(code: CodeType) -> str:
    """The instructions of a function, and the constants and names that they use."""
    constants = [_text(item) if isinstance(item, CodeType) else repr(item) for item in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
