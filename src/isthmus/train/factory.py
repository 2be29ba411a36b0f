"""Factories by name, or from a user's own module."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from isthmus.errors import InputError


def call_factory(
    name: str, known: Mapping[str, Callable[..., Any]], kind: str, *arguments: object, **options: object
) -> Any:
    """What the factory called ``name`` makes of the arguments and options.

    Args:
        name: one of ``known``, or ``package.module:factory`` of the user's own.
        known: our own factories by name.
        kind: what error messages call the thing made, such as "model".
        arguments: what every factory of this kind is given.
        options: options of this factory.

    Raises:
        InputError: there is no such factory, or it does not take these options.
    """
    factory = _find(name, known, kind)
    signature = inspect.signature(factory)
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        raise InputError(
            f"the {kind} {name!r} does not take the options {sorted(options)} ({error}); it takes {signature}."
        ) from error
    return factory(*arguments, **options)


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` with the known name that is most like ``name``, or a full stop if none is like it."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else "."


def _find(name: str, known: Mapping[str, Callable[..., Any]], kind: str) -> Callable[..., Any]:
    if name in known:
        return known[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise InputError(
            f"there is no {kind} {name!r}{nearest(name, known)} Known are {', '.join(sorted(known))}; "
            "or name your own as 'package.module:factory'."
        )
    try:
        factory: Callable[..., Any] = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"the {kind} {name!r} could not be imported: {error}. Check the name and sys.path.") from error
    if not callable(factory):
        raise InputError(f"the {kind} {name!r} is a {type(factory).__name__}, expected a callable.")
    return factory
