"""What can be said of every method: its options, defaults, meanings, sources and presets."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from .method import Method
from .registry import known_methods


@dataclass(frozen=True)
class OptionInfo:
    """What ``available`` says of an option.

    ``required`` options have no default; ``per`` is "key" for those that may differ from key to key, "model" for those
    that may also differ from model to model, else empty.
    """

    name: str
    required: bool
    default: Any
    meaning: str
    source: str
    per: str


@dataclass(frozen=True)
class MethodInfo:
    """What ``available`` says of a method; ``presets`` maps each preset to the options in which it differs."""

    name: str
    meaning: str
    source: str
    base: str
    models: tuple[int, int | None]
    options: tuple[OptionInfo, ...]
    presets: Mapping[str, Mapping[str, Any]]


def available() -> dict[str, MethodInfo]:
    """The methods by name: options with defaults, meaning and source, and presets."""
    return {name: _describe(cls) for name, cls in known_methods().items()}


def _describe(cls: type[Method]) -> MethodInfo:
    options = tuple(
        OptionInfo(
            name=item.name,
            required=item.default is MISSING,
            default=None if item.default is MISSING else item.default,
            meaning=item.metadata["meaning"],
            source=item.metadata["source"],
            per=item.metadata["per"],
        )
        for item in fields(cls)
    )
    return MethodInfo(cls.name, inspect.getdoc(cls) or "", cls.source, cls.base, cls.count, options, cls.presets)
