"""Options that are given per model, per key by pattern, or both, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from isthmus.errors import InputError

from .entries import check_pattern

# What error messages expect of an option
PER_MODEL = "a number, one per model, or either by pattern of keys"
PER_KEY = "a number, or numbers by pattern of keys"


def per_model(value: Any, name: str, keys: Sequence[str], count: int) -> list[Any]:
    """An option that every model has, such as its weight: one number per model, or per model one per key.

    Args:
        value: a number for all; a list of one per model; patterns of keys with either of them; or a list of one per
            model that has patterns with numbers among its items.
        name: of the option, for error messages.
        keys: the keys that are merged.
        count: the number of models.

    Raises:
        InputError: there is not one number per model, a pattern matches nothing, or a key matches no pattern.
    """
    if _is_patterned(value):
        rows = [_model_numbers(item, name, count) for item in _match(value, name, keys)]
        return [[row[model] for row in rows] for model in range(count)]
    if isinstance(value, Sequence) and any(_is_patterned(item) for item in value):
        _check_count(value, name, count)
        return [
            per_key(item, name, keys) if _is_patterned(item) else [_number(item, name)] * len(keys) for item in value
        ]
    return _model_numbers(value, name, count)


def per_key(value: Any, name: str, keys: Sequence[str]) -> list[float]:
    """An option that models share, such as t: one number per key, from a number for all or from patterns.

    Raises:
        InputError: a pattern matches nothing, or a key matches no pattern.
    """
    if _is_patterned(value):
        return [_number(item, name, PER_KEY) for item in _match(value, name, keys)]
    return [_number(value, name, PER_KEY)] * len(keys)


def _listed(value: Any) -> Any:
    """A tensor or an array as numbers or lists of them."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_patterned(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(isinstance(pair, Sequence) and len(pair) == 2 and isinstance(pair[0], str) for pair in value)
    )


def _match(value: Any, name: str, keys: Sequence[str]) -> list[Any]:
    """The value of the first pattern that matches, for each key."""
    pairs = list(value.items()) if isinstance(value, Mapping) else [tuple(pair) for pair in value]
    for pattern, _ in pairs:
        check_pattern(pattern, name, keys, "that is merged")
    matched = []
    for key in keys:
        found = [item for pattern, item in pairs if fnmatchcase(key, pattern)]
        if not found:
            raise InputError(
                f"no pattern of {name} matches the key {key!r}; give the remaining keys a value under the pattern '*'."
            )
        matched.append(found[0])
    return matched


def _model_numbers(value: Any, name: str, count: int) -> list[float]:
    value = _listed(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        _check_count(value, name, count)
        return [_number(item, name) for item in value]
    return [_number(value, name)] * count


def _check_count(value: Sequence[Any], name: str, count: int) -> None:
    if len(value) != count:
        raise InputError(f"{name} has {len(value)} values and there are {count} models; give one for each, in order.")


def _number(value: Any, name: str, expected: str = PER_MODEL) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name} has the value {value!r}, expected {expected}.") from None
