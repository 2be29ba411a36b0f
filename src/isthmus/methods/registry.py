"""The methods by name: those of isthmus, and one's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, make_dataclass
from typing import Any, ClassVar

from isthmus.errors import InputError

from . import consensus, rules
from .method import PAPER, Method, Weighted, option


@dataclass(frozen=True, kw_only=True)
class Registered(Weighted):
    """A method added by ``register_method``: a function of one tensor of each model."""

    base = "optional"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {PAPER: {}}
    function: ClassVar[Callable[..., Any]]

    def own_options(self) -> dict[str, Any]:
        """The options that the function takes besides tensors, base and weights."""
        return {name: value for name, value in self.options().items() if name != "weights"}


_BUILT_IN: dict[str, type[Method]] = {
    cls.name: cls
    for cls in (
        rules.Linear,
        rules.Slerp,
        rules.Nuslerp,
        rules.Multislerp,
        rules.Karcher,
        rules.ModelStock,
        consensus.TaskArithmetic,
        consensus.Ties,
        consensus.MagnitudePrune,
        consensus.Dare,
        consensus.DareTies,
        consensus.Della,
        consensus.DellaLinear,
        consensus.Breadcrumbs,
        consensus.BreadcrumbsTies,
        rules.Nearswap,
        rules.Sce,
        rules.ArceeFusion,
        rules.Ram,
        rules.RamPlus,
        rules.Passthrough,
        rules.Fisher,
        rules.RegMean,
    )
}
_registered: dict[str, type[Registered]] = {}


def known_methods() -> dict[str, type[Method]]:
    """All methods by name; one's own may stand in the place of others."""
    return {**_BUILT_IN, **_registered}


def register_method(name: str, *, replace: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add one's own merge method; a decorator.

    The function is called once for each tensor, ``f(tensors, base, weights, **options) -> tensor``: ``tensors`` is one
    tensor of each model, ``base`` the base's or ``None``, ``weights`` one float per model (1 by default), and further
    parameters of the function are the method's options. It must not modify what it gets; the result has the shape of
    the tensors and is converted to the output's dtype.

    Args:
        name: what ``merge(method=...)`` calls it.
        replace: allow a name that is taken.

    Raises:
        InputError: the name is taken, or the function's parameters are not as above.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        known = _registered.get(name)
        again = known is not None and _place(known.function) == _place(function)  # a cell of a notebook run again
        if not replace and not again and (name in _BUILT_IN or known is not None):
            kind = "a method of isthmus" if name in _BUILT_IN else "a registered method"
            raise InputError(
                f"{name!r} is {kind} already. Choose another name, or pass replace=True to put yours in its place."
            )
        parameters = list(inspect.signature(function).parameters.values())
        variable = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if len(parameters) < 3 or variable:
            raise InputError(
                f"the method {name!r} needs a function f(tensors, base, weights, further options by name), "
                f"and got {function.__qualname__}{inspect.signature(function)}."
            )
        own = [
            (p.name, Any, option(MISSING if p.default is p.empty else p.default, meaning=f"of {_place(function)}"))
            for p in parameters[3:]
        ]
        summary = inspect.getdoc(function) or f"{_place(function)}, registered."
        _registered[name] = make_dataclass(
            "".join(part.title() for part in name.split("_")),
            own,
            bases=(Registered,),
            namespace={
                "name": name,
                "source": _place(function),
                "function": staticmethod(function),
                "__doc__": summary,
            },
            frozen=True,
            kw_only=True,
        )
        return function

    return register


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
