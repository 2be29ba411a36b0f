"""A state dict as one contiguous buffer per dtype, with views of its tensors.

A model's tensors lie one after the other in the order of their sorted canonical keys, each in C-order and starting at a
multiple of 64 bytes; the elements between two tensors are zero. An element-wise merge of two models is then one pass
over each buffer, and a module whose parameters are views of the buffers sees the result at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from . import _versions
from .errors import InputError

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
PREFIXES = ("module.", "_orig_mod.")  # put before every key by DistributedDataParallel and by torch.compile


def canonical_keys(keys: Iterable[str]) -> dict[str, str]:
    """Map each key to its canonical form: ``module.`` and ``_orig_mod.`` stripped where all keys begin with them."""
    canonical = {key: key for key in keys}
    while canonical and (
        prefix := next((p for p in PREFIXES if all(key.startswith(p) for key in canonical.values())), None)
    ):
        canonical = {key: short.removeprefix(prefix) for key, short in canonical.items()}
    return canonical


class Entry(NamedTuple):
    """Where one tensor lies: ``numel`` elements from element ``offset`` of the buffer of its dtype."""

    dtype: torch.dtype
    shape: torch.Size
    offset: int
    numel: int


class Layout:
    """The canonical keys of a model, the place of each tensor, and which keys share one tensor.

    Two flat states can be combined buffer by buffer exactly if their layouts are equal.

    Attributes:
        entries: key -> place, in the order of the state dict; keys that are tied have the same place.
        sizes: dtype -> number of elements of its buffer.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Lay out ``tensors``, whose keys are canonical."""
        first_alias = first_aliases(tensors)
        self.sizes: dict[torch.dtype, int] = {}
        placed: dict[str, Entry] = {}
        for key in sorted(key for key, first in first_alias.items() if key == first):
            tensor = tensors[key]
            offset = self.sizes.get(tensor.dtype, 0)
            placed[key] = Entry(tensor.dtype, tensor.shape, offset, tensor.numel())
            step = max(1, ALIGNMENT // tensor.element_size())
            self.sizes[tensor.dtype] = offset + -(-tensor.numel() // step) * step
        self.entries = {key: placed[first_alias[key]] for key in tensors}
        self._first_aliases = first_alias
        self._identity = object()  # shared by layouts that were once found equal: merges compare them at every call

    @property
    def ties(self) -> list[frozenset[str]]:
        """The sets of keys that share one tensor."""
        return tied_keys(self._first_aliases)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        if self._identity is not other._identity and self.entries == other.entries:
            other._identity = self._identity
        return self._identity is other._identity

    def __hash__(self) -> int:
        return hash(frozenset(self.entries.items()))

    def check(self, other: Layout, *, name: str, expected: str) -> None:
        """Raise an ``InputError`` that lists how ``other``, called ``name``, differs from this layout."""
        if self == other:
            return
        problems = [f"{key!r} is missing" for key in self.entries.keys() - other.entries.keys()]
        problems += [f"{key!r} is unexpected" for key in other.entries.keys() - self.entries.keys()]
        for key in self.entries.keys() & other.entries.keys():
            mine, theirs = self.entries[key], other.entries[key]
            if mine.shape != theirs.shape:
                problems.append(f"{key!r} has shape {tuple(theirs.shape)}, expected {tuple(mine.shape)}")
            elif mine.dtype != theirs.dtype:
                problems.append(f"{key!r} has dtype {theirs.dtype}, expected {mine.dtype}")
        if not problems:
            problems = ["other tensors are tied to each other"]
        shown = "; ".join(sorted(problems)[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise InputError(
            f"{name} does not have the tensors of {expected}: {shown}. "
            "Both must come from one architecture with one dtype."
        )


class FlatState:
    """A state dict flattened into one contiguous, 64-byte aligned buffer per dtype.

    ``state[key]`` is the tensor of a key, a view of its buffer, made when first asked for. Writing to a view or to a
    buffer changes the state, and every module that is bound to it.

    Attributes:
        layout: where each tensor lies.
        buffers: dtype -> 1-D tensor, all on one device.
        averaged: the buffers of floating-point and complex dtypes, which merges average, in the order of the layout.
    """

    def __init__(self, layout: Layout, buffers: dict[torch.dtype, Tensor]) -> None:
        self.layout = layout
        self.buffers = buffers
        self.averaged = [buffer for dtype, buffer in buffers.items() if dtype.is_floating_point or dtype.is_complex]
        self._views: dict[str, Tensor] = {}

    @classmethod
    def zeros(cls, layout: Layout, *, device: torch.device | str | None = None) -> FlatState:
        """A state of zeros with the given layout."""
        with torch.inference_mode(False):
            buffers = {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in layout.sizes.items()}
        return cls(layout, buffers)

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, Tensor], *, name: str = "the state dict", device: torch.device | str | None = None
    ) -> FlatState:
        """Copy a state dict into flat buffers.

        Args:
            state: key -> tensor. Tensors of any shape, stride and dtype; tied tensors (same storage, offset, shape and
                strides) are stored once. Prefixes ``module.`` and ``_orig_mod.`` that all keys share are stripped.
            name: what error messages call the state dict.
            device: where the buffers go; by default where the first tensor is.

        Raises:
            InputError: an entry is not a plain dense tensor.
        """
        canonical = canonical_keys(state)
        tensors = {canonical[key]: plain_tensor(value, key, name) for key, value in state.items()}
        if device is None and tensors:
            device = next(iter(tensors.values())).device
        flat = cls.zeros(Layout(tensors), device=device)
        with torch.no_grad(), torch.inference_mode(False):
            for key, tensor in tensors.items():
                flat[key].copy_(tensor)
        return flat

    @classmethod
    def from_module(cls, module: torch.nn.Module, *, device: torch.device | str | None = None) -> FlatState:
        """Copy the parameters and persistent buffers of ``module``; see ``from_state_dict``."""
        return cls.from_state_dict(
            module.state_dict(keep_vars=True), name=f"the module {type(module).__name__}", device=device
        )

    def to_state_dict(self) -> dict[str, Tensor]:
        """The tensors by canonical key in the order of the source: views of the buffers, tied keys one tensor."""
        return {key: self[key] for key in self.layout.entries}

    def __getitem__(self, key: str) -> Tensor:
        view = self._views.get(key)
        if view is None:
            entry = self.layout.entries[key]
            tied = next(k for k, e in self.layout.entries.items() if e == entry and (e.numel or k == key))
            if tied != key:
                view = self[tied]
            else:
                with torch.inference_mode(False):
                    view = self.buffers[entry.dtype].narrow(0, entry.offset, entry.numel).view(entry.shape)
            self._views[key] = view
        return view

    def __contains__(self, key: object) -> bool:
        return key in self.layout.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.entries)

    def __len__(self) -> int:
        return len(self.layout.entries)

    @property
    def device(self) -> torch.device:
        """Where the buffers are; the CPU for a state without tensors."""
        return next((buffer.device for buffer in self.buffers.values()), torch.device("cpu"))

    def clone(self, *, device: torch.device | str | None = None) -> FlatState:
        """A copy with buffers of its own."""
        copy = FlatState.zeros(self.layout, device=self.device if device is None else device)
        copy.copy_(self)
        return copy

    def copy_(self, other: FlatState) -> None:
        """Overwrite this state with ``other``, which must have the same layout."""
        self.layout.check(other.layout, name="the source", expected="this flat state")
        with torch.no_grad():
            for dtype, buffer in self.buffers.items():
                buffer.copy_(other.buffers[dtype])
        _versions.wrote(list(self.buffers.values()))

    def bind(self, module: torch.nn.Module) -> Binding:
        """Make the parameters and persistent buffers of ``module`` views of this state.

        The module then computes with this state's values; its own tensors are kept aside and come back with
        ``Binding.undo()``, or at the end of a ``with`` block. Parameters keep their identity, so optimisers and hooks
        go on working.

        Raises:
            InputError: the module's keys, shapes, dtypes or device differ from this state's.
        """
        return Binding(self, module)


class Binding:
    """A module whose tensors are views of a flat state, until ``undo()`` or the end of the ``with`` block."""

    def __init__(self, flat: FlatState, module: torch.nn.Module) -> None:
        tensors = module.state_dict(keep_vars=True)
        canonical = canonical_keys(tensors)
        name = f"the module {type(module).__name__}"
        layout = Layout({canonical[key]: plain_tensor(value, key, name) for key, value in tensors.items()})
        flat.layout.check(layout, name=name, expected="the flat state")
        unique = {id(tensor): (canonical[key], tensor) for key, tensor in tensors.items()}
        self._flat, self._keys = flat, [key for key, _ in unique.values()]
        for key, tensor in unique.values():
            if tensor.device != flat.device:
                raise InputError(
                    f"{key!r} of {name} is on {tensor.device} and the flat state on {flat.device}; "
                    "move one of them before binding."
                )
        self._originals = [(tensor, tensor.data) for _, tensor in unique.values()]
        with torch.inference_mode(False):
            for key, tensor in unique.values():
                tensor.data = flat[key]
        self._bound = [(tensor.data_ptr(), tensor.dtype) for tensor, _ in self._originals]
        _versions.bind(tensor for tensor, _ in self._originals)

    def check(self) -> None:
        """Make sure that the module's tensors are still views of the state.

        Raises:
            InputError: a tensor's data was replaced, by ``tensor.data = ...``, ``module.half()`` or ``module.to(...)``.
        """
        if replaced := list(self._replaced()):
            raise InputError(
                f"the data of {replaced[0][0]!r} was replaced (by .data = ..., .half(), .to() or the like) while the "
                "module is bound to a flat state, so that it no longer has the state's values; change values in "
                "place, or work on a copy.deepcopy of the module."
            )

    def undo(self) -> None:
        """Give the module its own tensors back; a second call does nothing."""
        with torch.inference_mode(False):
            for key, tensor in self._replaced():
                tensor.data = self._flat[key]  # what was bound is unbound by its storage
        _versions.unbind(tensor for tensor, _ in self._originals)
        for tensor, data in self._originals:
            tensor.data = data
        self._originals = []

    def _replaced(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are no longer views of the state."""
        tensors = (tensor for tensor, _ in self._originals)  # none: already undone
        for key, tensor, bound in zip(self._keys, tensors, self._bound, strict=False):
            if (tensor.data_ptr(), tensor.dtype) != bound:
                yield key, tensor

    def __enter__(self) -> Binding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def first_aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each key to the first key (in sorted order) whose tensor is the same memory, seen the same way."""
    serial = itertools.count()
    seen: dict[object, str] = {}
    first: dict[str, str] = {}
    for key in sorted(tensors):
        tensor = tensors[key]
        identity: object = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() == 0:
            identity = next(serial)  # empty tensors have no memory to share
        first[key] = seen.setdefault(identity, key)
    return first


def tied_keys(first: Mapping[str, str]) -> list[frozenset[str]]:
    """The sets of keys that have one first alias; see ``first_aliases``."""
    sets: dict[str, set[str]] = {}
    for key, alias in first.items():
        sets.setdefault(alias, set()).add(key)
    return [frozenset(keys) for keys in sets.values() if len(keys) > 1]


def with_tied(tensors: Mapping[str, Tensor], ties: Iterable[frozenset[str]]) -> dict[str, Tensor]:
    """``tensors`` with the keys that they lack of what they have under another key; files leave such out."""
    complete = dict(tensors)
    for keys in ties:
        present = min((key for key in keys if key in tensors), default=None)
        if present is not None:
            complete |= {key: tensors[present] for key in sorted(keys) if key not in tensors}
    return complete


def plain_tensor(value: object, key: str, name: str) -> Tensor:
    """``value`` as a plain dense tensor without gradient, or an ``InputError`` that names its key."""
    if not isinstance(value, Tensor):
        raise InputError(
            f"{key!r} of {name} is a {type(value).__name__}, expected a tensor. Remove the entry before merging."
        )
    plain_type = type(value) in (Tensor, torch.nn.Parameter)  # isinstance holds for a DTensor that is a parameter
    if not plain_type or value.layout != torch.strided or value.is_quantized or value.is_meta:
        kind = type(value).__name__ if not plain_type else "meta" if value.is_meta else f"{value.layout}"
        raise InputError(
            f"{key!r} of {name} is a tensor of kind {kind}, expected a plain dense tensor with data. "
            "Convert it first (for a DTensor: full_tensor(); for a sparse tensor: to_dense())."
        )
    return value.detach()
