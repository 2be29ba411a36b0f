"""What a rule is: how the axes of an ATen operator's results follow from those of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from . import terms
from .terms import Axis

CONSTANT = "it meets a constant"


class Value(NamedTuple):
    """A traced tensor.

    Attributes:
        axes: what each dimension consists of.
        key: the state dict's key of a tensor that is a view of nothing but it; None for what is computed.
    """

    axes: tuple[Axis, ...]
    key: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dimensions."""
        return tuple(map(terms.length, self.axes))


class Call:
    """One operator call in the traced graph.

    Attributes:
        name: of the operator, without its overload.
        module: the path of the module whose forward makes the call.
        arguments: all arguments by their names in the operator's schema, tensors as ``Value``.
        shapes: of the results.
        hints: atoms that have a name by what an operator does with them: atom -> (module, name).
        pieces: axes that an operator cuts, and what it takes of them.
        read: what it takes of them and leaves out of its results: single positions.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: dict[str, Any],
        shapes: Sequence[tuple[int, ...]],
        hints: dict[terms.Atom, tuple[str, str]],
    ) -> None:
        self.name = name
        self.module = module
        self.arguments = arguments
        self.shapes = shapes
        self.hints = hints
        self.pieces: list[tuple[Axis, Axis]] = []
        self.read: list[Axis] = []

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str) -> Any:
        """An argument, or None where the operator has none of this name."""
        return self.arguments.get(name)

    @property
    def values(self) -> list[Value]:
        """All tensors among the arguments, in their order."""
        found: list[Value] = []
        for argument in self.arguments.values():
            found += [part for part in (argument if isinstance(argument, (list, tuple)) else ()) if is_value(part)]
            found += [argument] if is_value(argument) else []
        return found

    @property
    def source(self) -> Value:
        """The first tensor among the arguments."""
        return self.values[0]

    def dimension(self, name: str = "dim", *, of: Value | None = None) -> int:
        """An argument that is a dimension, counted from the front."""
        return int(self[name]) % max(1, len((of or self.source).axes))

    def hint(self, axes: Iterable[Axis], name: str) -> None:
        """Say what the atoms of some axes are called, if no earlier call has."""
        for atom in terms.leaves(axes):
            self.hints.setdefault(atom, (self.module, name))


def is_value(argument: object) -> bool:
    """Whether an argument of a call is a traced tensor."""
    return isinstance(argument, Value)


Rule = Callable[[Call], list[tuple[Axis, ...]]]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule of some operators, named in one string.

    A rule returns for each result of the operator its axes.
    """

    def register(function: Rule) -> Rule:
        for name in names.split():
            RULES[name] = function
        return function

    return register


def stay(axes: Iterable[Axis], reason: str) -> list[Axis]:
    """Freeze axes; as many new ones of the same lengths, for results that are moved or mixed along them."""
    axes = list(axes)
    terms.freeze(axes, reason)
    return [terms.fixed(terms.length(axis), reason) for axis in axes]


def touch(value: Value, dimensions: Iterable[int], reason: str, shape: Sequence[int]) -> tuple[Axis, ...]:
    """The axes of a result of the given shape whose positions along ``dimensions`` are not the argument's."""
    touched = {dimension % len(value.axes) for dimension in dimensions}
    terms.freeze([value.axes[dimension] for dimension in touched], reason)
    return tuple(
        terms.fixed(shape[dimension], reason) if dimension in touched else axis
        for dimension, axis in enumerate(value.axes)
    )


def unlike(values: Iterable[Value], shapes: Iterable[Sequence[int]], reason: str) -> list[tuple[Axis, ...]]:
    """Freeze all that a call touches: its arguments, and its results."""
    for value in values:
        terms.freeze(value.axes, reason)
    return [tuple(terms.fixed(size, reason) for size in shape) for shape in shapes]


def mix(value: Value, dimensions: Iterable[int]) -> None:
    """Positions along ``dimensions`` are mixed: for each of theirs, the other axes have one and the same order."""
    mixed = {dimension % len(value.axes) for dimension in dimensions} if value.axes else set()
    terms.restrict([axis for dimension, axis in enumerate(value.axes) if dimension not in mixed])


def broadcast(values: Sequence[Value], shape: Sequence[int]) -> tuple[Axis, ...]:
    """The axes of an element-wise result: those of its arguments, aligned at their ends and made one."""
    result: list[Axis] = []
    for back in range(len(shape), 0, -1):
        size = shape[-back]
        meeting = [value.axes[-back] for value in values if len(value.axes) >= back]
        meeting = [axis for axis in meeting if terms.length(axis) == size]
        axis = meeting[0] if meeting else terms.constant(size)
        for other in meeting[1:]:
            axis = terms.unify(axis, other)
        result.append(axis)
    return tuple(result)
