"""State dicts as safetensors files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus._optional import optional
from isthmus.errors import FileError, InputError

from .atomic import atomic_write


def load_state(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file onto the CPU.

    Raises:
        FileError: the file is missing, unreadable, truncated or not a safetensors file.
    """
    with _open(path) as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (a safetensors file is not a mapping)


def load_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read the metadata of a safetensors file, without its tensors.

    Raises:
        FileError: the file is missing, unreadable, truncated or not a safetensors file.
    """
    with _open(path) as file:
        return file.metadata() or {}


def save_state(
    path: str | os.PathLike[str], state: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a state dict as a safetensors file: whole, or not at all.

    Args:
        path: the file; its folder must exist. An existing file is replaced.
        state: key -> tensor, on any device, of any strides. Tied tensors are written once for each of their keys, since
            the format knows no ties.
        metadata: free text by key, kept in the header.

    Raises:
        InputError: a tensor is of a kind or dtype that the format cannot hold.
        FileError: the file could not be written.
    """
    safetensors = optional("safetensors.torch", extra="lab", purpose="writing safetensors files")
    for key, tensor in state.items():
        if tensor.layout != torch.strided:
            raise InputError(f"{key!r} is a tensor of layout {tensor.layout}, expected a dense one: use to_dense().")
    tensors = _without_ties({key: tensor.detach().cpu().contiguous() for key, tensor in state.items()})
    with atomic_write(path) as temporary:
        try:
            safetensors.save_file(tensors, temporary, {"format": "pt", **(metadata or {})})
        except (KeyError, ValueError, TypeError) as error:
            raise InputError(f"a tensor cannot be written to {path} as safetensors: {error}") from error
        except _safetensor_error() as error:
            raise FileError(f"could not write {path}: {error}. Check that the disk has room.") from error


def _open(path: str | os.PathLike[str]) -> Any:
    """Open a safetensors file, or raise a ``FileError`` that says what is wrong with it."""
    safetensors = optional("safetensors", extra="lab", purpose="reading safetensors files")
    if not Path(path).is_file():
        raise FileError(f"there is no file {path}, expected a safetensors file. Check the path.")
    try:
        return safetensors.safe_open(path, framework="pt")
    except (OSError, _safetensor_error()) as error:
        raise FileError(
            f"{path} is not a whole safetensors file ({error}). It may be truncated or of another format; "
            "copy or write it again."
        ) from error


def _safetensor_error() -> type[Exception]:
    error: type[Exception] = optional("safetensors", extra="lab", purpose="safetensors files").SafetensorError
    return error


def _without_ties(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` with copies in place of those that overlap the memory of one before."""
    ends: dict[int, int] = {}  # storage -> where the last kept tensor ends
    separate = dict(tensors)
    for key in sorted(tensors, key=lambda key: tensors[key].data_ptr()):
        tensor = tensors[key]
        storage = tensor.untyped_storage().data_ptr()
        if tensor.data_ptr() < ends.get(storage, 0):
            separate[key] = tensor.clone()
        else:
            ends[storage] = tensor.data_ptr() + tensor.nbytes
    return separate
