# ruff: noqa: RUF009 (option() is dataclasses.field() with metadata)
"""What a merge method is: its options, each with a meaning and a source, and their kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType
from typing import Any, ClassVar, SupportsFloat, SupportsIndex

from isthmus.errors import InputError

PAPER = "paper"  # the preset that is meant when none is named
PerKey = float | Sequence[Any] | Mapping[str, Any]
# The annotation of an option -> the types of its values, and what an error calls them. Others are checked where used.
KINDS: dict[object, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "True or False"),
    "bool | None": ((bool, NoneType), "True, False or None"),
    "int": ((SupportsIndex,), "an integer"),
    "float": ((SupportsFloat,), "a number"),
    "str": ((str,), "a string"),
}

MERGEKIT = "mergekit 0.1.5"
PEFT = "PEFT 0.21"
FUSIONBENCH = "FusionBench 0.2.33"


def option(default: Any = MISSING, *, meaning: str, source: str = "", per: str = "") -> Any:
    """A field of a method: its default (required without one), what it means and where it comes from.

    ``per`` says whether it may differ from "key" to key, or also from "model" to model.
    """
    return field(default=default, metadata={"meaning": meaning, "source": source, "per": per})


@dataclass(frozen=True, kw_only=True)
class Method:
    """A merge method and its options.

    Attributes:
        name: what ``merge(method=...)`` calls it.
        source: where it was published.
        base: whether the base model is "required"; "optional" (given one, the method works on task vectors); "deltas"
            (without one, the models are task vectors already and so is the result); or "unused" (it still gives the
            output's dtypes, key order, ties and the entries that are not merged).
        count: the least and the largest number of models, base aside; ``None`` is no limit.
        presets: preset -> the options in which that tool differs from the defaults.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    base: ClassVar[str] = "unused"
    count: ClassVar[tuple[int, int | None]] = (1, None)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {PAPER: {}, "mergekit": {}}

    def __post_init__(self) -> None:
        for item in fields(self):
            types, expected = KINDS.get(item.type, ((object,), ""))
            value = getattr(self, item.name)
            if not isinstance(value, types):
                raise InputError(f"{self.name} has {item.name}={value!r}, expected {expected}.")

    def options(self) -> dict[str, Any]:
        """The options by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Weighted(Method):
    """A method that weights its models."""

    weights: PerKey | None = option(None, meaning="wᵢ; by default all models weigh the same", per="model")
