"""From names, presets and keywords to a method with its options."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from isthmus.errors import InputError

from .method import PAPER, Method
from .registry import known_methods
from .words import NEEDLESS_OPTIONS, OTHER_METHODS, OTHER_OPTIONS


def make(method: str | Method | type[Method], *, preset: str | None = None, **options: Any) -> Method:
    """The method that a name and keywords stand for.

    Args:
        method: a name of ``available()``, a class of this package, or a method with options of its own, which
            ``options`` then replace.
        preset: "paper" (the default: the method's publication and its authors' code), or a tool whose behaviour is
            wanted; each method lists its own.
        options: the method's options; they override the preset.

    Raises:
        InputError: the method, preset or option is unknown, with the nearest known name; an option without a default is
            missing.
    """
    if isinstance(method, Method):
        cls, chosen = _find(type(method)), method.options()
        if preset is not None:
            raise InputError(
                f"preset={preset!r} was given with a {type(method).__name__} whose options are set already. "
                f"Pass method={method.name!r} with the preset, or leave the preset out."
            )
    else:
        cls = _find(method)
        chosen = dict(_find_preset(cls, PAPER if preset is None else preset))
    _check_options(cls, options)
    if options.keys() & {"merge_func", "divisor"}:
        if options.get("normalize") is not None:
            raise InputError(
                f"{cls.name} got normalize= and {' and '.join(sorted(options.keys() & {'merge_func', 'divisor'}))}=, "
                "which say the same thing; leave normalize out."
            )
        chosen.pop("normalize", None)
    values = {**chosen, **options}
    missing = [item.name for item in fields(cls) if item.default is MISSING and item.name not in values]
    if missing:
        raise InputError(f"{cls.name} has no default for {' and '.join(missing)}; give {missing[0]}=.")
    return cls(**values)


def variable_options(method: Method) -> dict[str, str]:
    """The options that may differ: name -> from "key" to key, or from "model" to model too."""
    return {item.name: item.metadata["per"] for item in fields(method) if item.metadata["per"]}


def _find(method: object) -> type[Method]:
    known = known_methods()
    if isinstance(method, str) and method in known:
        return known[method]
    if isinstance(method, type) and issubclass(method, Method) and hasattr(method, "name"):
        return method
    hint = _near(method, known)
    if isinstance(method, str) and method in OTHER_METHODS:
        hint = f" What other tools call {method!r} is {OTHER_METHODS[method]} here."
    raise InputError(f"there is no merge method {method!r}.{hint} The methods are {', '.join(known)}.")


def _find_preset(cls: type[Method], preset: object) -> Mapping[str, Any]:
    if isinstance(preset, str) and preset in cls.presets:
        return cls.presets[preset]
    raise InputError(
        f"{cls.name} has no preset {preset!r}.{_near(preset, cls.presets)} Its presets are {', '.join(cls.presets)}."
    )


def _check_options(cls: type[Method], given: Iterable[str]) -> None:
    known = [item.name for item in fields(cls)]
    for name in given:
        if name in known:
            continue
        if name in NEEDLESS_OPTIONS:
            raise InputError(f"{cls.name} has no option {name!r}: {NEEDLESS_OPTIONS[name]}. Leave it out.")
        other = OTHER_OPTIONS.get(name)
        hint = f" What other tools call {name!r} is called {other} here." if other else _near(name, known)
        raise InputError(f"{cls.name} has no option {name!r}.{hint} Its options are {', '.join(known) or 'none'}.")


def _near(name: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.lower(), list(known), n=1) if isinstance(name, str) else []
    return f" Did you mean {close[0]!r}?" if close else ""
