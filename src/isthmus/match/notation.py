"""The notation of specs written by hand: what it means for the axes, and how large its groups are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from torch import Tensor

from isthmus.errors import InputError

from .spec import Axis, Factor, Notation, check_keys, length


def read(
    pairs: Iterable[tuple[str, Sequence[Notation]]], state: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> tuple[dict[str, tuple[Axis, ...]], dict[str, int]]:
    """The axes of each tensor, and the size of each group.

    Args:
        pairs: keys and their entries, as ``PermutationSpec.from_dict`` describes them.
        state: for the shapes.
        sizes: group -> its size, where it does not follow from the shapes.

    Raises:
        InputError: as ``PermutationSpec.from_dict`` says.
    """
    entries = _unique(pairs)
    check_keys(entries.keys(), state)
    parsed: dict[str, list[list[tuple[str | int, ...]] | None]] = {}
    for key, dimensions in entries.items():
        shape = tuple(state[key].shape)
        if isinstance(dimensions, str) or len(dimensions) != len(shape):
            raise InputError(
                f"the entry of {key!r} is {dimensions!r}, expected one item for each of its {len(shape)} "
                f"dimensions: it has shape {shape}."
            )
        parsed[key] = [None if entry is None else _segments(entry) for entry in dimensions]
    found = _sizes(parsed, state, sizes)
    axes = {
        key: tuple(
            _axis(segments, found, size, f"axis {dimension} of {key!r}")
            for dimension, (segments, size) in enumerate(zip(parsed[key], state[key].shape, strict=True))
        )
        for key in entries
    }
    return axes, found


def _unique(pairs: Iterable[tuple[str, Sequence[Notation]]]) -> dict[str, Sequence[Notation]]:
    entries: dict[str, Sequence[Notation]] = {}
    for key, dimensions in pairs:
        if key in entries:
            raise InputError(f"the spec has the key {key!r} twice.")
        entries[key] = dimensions
    return entries


def _segments(entry: Notation) -> list[tuple[str | int, ...]]:
    """An entry that is not None as a list of products."""
    parts = entry if isinstance(entry, list) else [entry]
    return [part if isinstance(part, tuple) else (cast("str | int", part),) for part in parts]


def _sizes(
    parsed: Mapping[str, Sequence[list[tuple[str | int, ...]] | None]],
    state: Mapping[str, Tensor],
    given: Mapping[str, int],
) -> dict[str, int]:
    """The size of every group, from the axes on which only one is unknown."""
    sizes: dict[str, int | None] = {}
    equations = []
    for key, dimensions in parsed.items():
        for segments, size in zip(dimensions, state[key].shape, strict=True):
            names = [part for segment in segments or [] for part in segment if isinstance(part, str)]
            sizes |= {name: given.get(name) for name in names if name not in sizes}
            if segments is not None:
                equations.append((segments, size))
    progress = True
    while progress:
        progress = False
        for segments, size in equations:
            unknown = {part for segment in segments for part in segment if isinstance(part, str) and not sizes[part]}
            if len(unknown) != 1:
                continue
            (name,) = unknown
            known = {**sizes, name: 1}
            per_unit = sum(_product(segment, known) for segment in segments if name in segment)
            rest = size - sum(_product(segment, known) for segment in segments if name not in segment)
            sizes[name] = max(rest // per_unit, 1)
            progress = True
    for name, found in sizes.items():
        if found is None:
            raise InputError(f"the size of the group {name!r} does not follow from the shapes; give it in sizes=.")
    return cast("dict[str, int]", sizes)


def _product(segment: tuple[str | int, ...], sizes: Mapping[str, int | None]) -> int:
    return math.prod(cast("int", sizes[part]) if isinstance(part, str) else part for part in segment)


def _axis(segments: list[tuple[str | int, ...]] | None, sizes: Mapping[str, int], size: int, where: str) -> Axis:
    if segments is None:
        return ((Factor(size, None),),)
    axis = tuple(
        tuple(Factor(sizes[part], part) if isinstance(part, str) else Factor(part, None) for part in segment)
        for segment in segments
    )
    if length(axis) != size:
        raise InputError(f"{where} has length {size}, but its entry {segments} is of length {length(axis)}.")
    return axis
