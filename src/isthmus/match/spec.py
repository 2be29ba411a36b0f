"""Permutation specs: which axes of which tensors move together when hidden units change their order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isthmus.errors import InputError, warn
from isthmus.flat import first_aliases, tied_keys

Permutation = Mapping[str, Tensor]
Notation = str | int | None | tuple[str | int, ...] | list[str | int | tuple[str | int, ...]]

STATISTICS = ("running_mean", "running_var")  # ends of keys that move with their channels and say nothing of weights


@dataclass(frozen=True)
class Group:
    """Units that change their order together, wherever they occur.

    A permutation of the group is an int64 tensor of shape (size,): the new unit i is the old unit ``perm[i]``. Within
    another group, every unit of that parent has a permutation of its own: shape (size of the parent, size), the rows
    in the parent's new order. The columns of attention heads are such a group within the group of the heads.

    Attributes:
        name: what specs and permutations call it.
        size: the number of units.
        within: the group whose every unit holds a copy of this one; None for most.
    """

    name: str
    size: int
    within: str | None = None


class Factor(NamedTuple):
    """One digit of a position on an axis: ``size`` values, which a group permutes or which stay (None)."""

    size: int
    group: str | None


Segment = tuple[Factor, ...]  # positions in mixed radix, from the outer digit to the inner one
Axis = tuple[Segment, ...]  # one segment after the other


class PermutationSpec:
    """The groups of a model, and what each axis of each tensor consists of.

    An axis is a concatenation of segments, and a segment a product of factors. The 64 output channels of a convolution
    are one segment of one factor. The input of the linear layer behind a flattened feature map has one segment of two
    factors, channels and places. Where feature maps are concatenated, the axis has one segment for each.

    Specs are data: they hold for every state dict with these keys and shapes. Keys are canonical, without the prefixes
    ``module.`` and ``_orig_mod.``.

    Attributes:
        groups: name -> group.
        axes: key -> for each dimension of the tensor its axis. Tensors without dimensions may be left out.
        statistics: keys that move with their channels, but whose values do not enter similarities.
        frozen: (key, dimension) -> why the axis, or a part of it, stays as it is.
        ties: sets of keys that are one tensor in the model. A state dict may lack all but one of them, as files do.
    """

    def __init__(
        self,
        groups: Mapping[str, Group],
        axes: Mapping[str, tuple[Axis, ...]],
        *,
        statistics: Iterable[str] = (),
        frozen: Mapping[tuple[str, int], str] | None = None,
        ties: Iterable[Iterable[str]] = (),
    ) -> None:
        self.groups = dict(groups)
        self.axes = dict(axes)
        self.statistics = frozenset(statistics)
        self.frozen = dict(frozen or {})
        self.ties = tuple(map(frozenset, ties))
        for group in self.groups.values():
            self._check_group(group)
        for key, tensor_axes in self.axes.items():
            for dimension, axis in enumerate(tensor_axes):
                for segment in axis:
                    self._check_segment(segment, f"axis {dimension} of {key!r}")

    def _check_group(self, group: Group) -> None:
        parent = self.groups.get(group.within or "")
        if group.within is not None and (parent is None or parent.within is not None):
            what = "is not in the spec" if parent is None else f"is itself within {parent.within!r}"
            raise InputError(
                f"the group {group.name!r} is within {group.within!r}, which {what}; a group lies within one that "
                "lies within none."
            )

    def _check_segment(self, segment: Segment, where: str) -> None:
        before: set[str] = set()
        for size, name in segment:
            if name is None:
                continue
            group = self.groups.get(name)
            if group is None:
                raise InputError(f"{where} has the group {name!r}, which the spec does not define.")
            if group.size != size:
                raise InputError(
                    f"{where} has {size} units of the group {name!r}, which has {group.size} elsewhere; "
                    "units of one group are equally many on all axes."
                )
            if group.within is not None and group.within not in before:
                raise InputError(
                    f"{where} has the group {name!r} without {group.within!r}, which it is within, in front of it."
                )
            if name in before:
                raise InputError(f"{where} has the group {name!r} twice in one product.")
            before.add(name)

    @classmethod
    def from_dict(
        cls,
        axes: Mapping[str, Sequence[Notation]] | Iterable[tuple[str, Sequence[Notation]]],
        state: Mapping[str, Tensor],
        *,
        within: Mapping[str, str] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> PermutationSpec:
        """A spec written by hand: key -> what moves each dimension.

        A dimension is ``None`` (stays), the name of a group, a tuple (a product, from outer to inner: ``("c", 49)``
        are the places of flattened channels), or a list (a concatenation: ``["c1", "c2"]``). Numbers are sizes of what
        stays.

        Args:
            axes: key -> one entry for each dimension; pairs, too. Every tensor with dimensions must be there.
            state: a state dict of the model, for the shapes and for what is tied.
            within: group -> the group that it is within; see ``Group``.
            sizes: group -> number of units, where it does not follow from the shapes: in ``("heads", "columns")``
                only the product does.

        Raises:
            InputError: a key is there twice, is missing, or is not in ``state``; an entry does not fit the shape of
                its tensor; or the size of a group does not follow from the shapes.
        """
        from .notation import read

        within = dict(within or {})
        made, found = read(axes.items() if isinstance(axes, Mapping) else axes, state, sizes or {})
        groups = {name: Group(name, size, within.get(name)) for name, size in found.items()}
        if unknown := within.keys() - groups.keys():
            raise InputError(f"within= names the group {min(unknown)!r}, which is on no axis.")
        statistics = [key for key in made if key.rpartition(".")[2] in STATISTICS]
        return cls(groups, made, statistics=statistics, ties=tied_keys(first_aliases(state)))

    @classmethod
    def from_model(
        cls, model: nn.Module, example_inputs: object, *, outputs: Callable[[Any], object] | None = None
    ) -> PermutationSpec:
        """The spec of a model, found by tracing its forward pass and verified on the model.

        Every axis of the state dict is followed through the operators of the graph that ``torch.export`` makes: sums
        and products make axes one, reshapes divide them, concatenations and slices cut them. What an operator tells
        apart by position, or touches without a rule of ours, stays: ``frozen`` and the printed spec say why. All
        groups are then permuted at random in a float64 copy with generic weights; a group that changes its outputs
        is left out with a warning.

        Attention heads move whole, with their query heads where those share keys and values. Query and key columns of
        a head move together, unless rotary embeddings tell them apart; value and output columns move together.

        Args:
            model: neither it, its modes, nor the random states are changed.
            example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments of its forward
                pass. Sizes that are no parameter's (length, image) may be small, but at least 2 and different from
                each other: what holds at one place only cannot be told from what holds at all. The spec of a forward
                pass that depends on them is theirs; ``verify`` with other inputs shows whether it holds for these.
            outputs: takes what counts out of what the forward pass returns, e.g. ``lambda returned:
                returned.logits``; all else may change its order. None counts every tensor.

        Raises:
            InputError: ``model`` is no module, cannot be copied, or ``torch.export`` cannot trace it.
        """
        from .trace import trace, written
        from .verify import changing_groups

        if not isinstance(model, nn.Module):
            raise InputError(
                f"model is a {type(model).__name__}, expected a torch.nn.Module, whose forward pass can be traced. For "
                "a state dict, a spec can be written by hand: PermutationSpec.from_dict."
            )
        spec = written(trace(model, example_inputs, outputs))
        changing = changing_groups(spec, model, example_inputs, outputs)
        if changing:
            warn(
                f"permuting {', '.join(map(repr, changing))} changes the outputs of {type(model).__name__} although "
                "its trace says that it should not; these groups stay as they are."
            )
        return spec.without(changing, "permuting it changed the outputs when it was verified")

    def without(self, names: Iterable[str], reason: str) -> PermutationSpec:
        """The spec whose groups of these names, and those within them, stay as they are for the reason given."""
        gone = set(names)
        gone |= {group.name for group in self.groups.values() if group.within in gone}
        frozen = dict(self.frozen)
        axes = {}
        for key, tensor_axes in self.axes.items():
            for dimension, axis in enumerate(tensor_axes):
                if any(factor.group in gone for segment in axis for factor in segment):
                    before = f"{frozen[key, dimension]}; " if (key, dimension) in frozen else ""
                    frozen[key, dimension] = before + reason
            axes[key] = tuple(
                tuple(tuple(Factor(size, None if name in gone else name) for size, name in segment) for segment in axis)
                for axis in tensor_axes
            )
        groups = {name: group for name, group in self.groups.items() if name not in gone}
        return PermutationSpec(groups, axes, statistics=self.statistics, frozen=frozen, ties=self.ties)

    def verify(
        self, model: nn.Module, example_inputs: object, *, outputs: Callable[[Any], object] | None = None
    ) -> None:
        """Check that every group leaves the model's function as it is, as ``from_model`` does, on any inputs.

        Raises:
            InputError: permuting a group changes the outputs, or the model does not have the tensors of the spec.
        """
        from .verify import changing_groups

        if changing := changing_groups(self, model, example_inputs, outputs):
            raise InputError(
                f"permuting {', '.join(map(repr, changing))} changes the outputs of {type(model).__name__}; some of "
                "their axes are missing in the spec or do not belong to them."
            )

    def check(self, state: Mapping[str, Tensor], *, name: str = "the state dict") -> None:
        """Check that ``state``, whose keys are canonical, has the tensors that the spec is about.

        Raises:
            InputError: a key is missing or unexpected, or a shape differs; ``name`` is what the message calls it.
        """
        check_keys(self.axes.keys(), state, name)
        for key, axes in self.axes.items():
            expected, shape = tuple(map(length, axes)), tuple(state[key].shape)
            if shape != expected:
                raise InputError(f"{key!r} of {name} has shape {shape}, but {expected} in the permutation spec.")

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a permutation of a group: of its units, in each unit of the group that it is within."""
        group = self.groups[name]
        return (group.size,) if group.within is None else (self.groups[group.within].size, group.size)

    def indices(self, permutation: Permutation) -> dict[str, tuple[Tensor | None, ...]]:
        """Where each position of each axis comes from.

        Args:
            permutation: group -> its permutation; groups that are left out stay.

        Returns:
            key -> for each dimension an int64 tensor of its length, or None where nothing moves: the permuted tensor
            is ``t[indices[0]][:, indices[1]]...``. Axes that consist of the same share one tensor.

        Raises:
            InputError: a group is unknown, or a tensor does not have its shape. That each unit is there once is not
                checked here.
        """
        for name, order in permutation.items():
            if name not in self.groups or tuple(order.shape) != self.shape(name):
                expected = f"shape {self.shape(name)}" if name in self.groups else f"one of {', '.join(self.groups)}"
                raise InputError(f"the permutation of {name!r} has shape {tuple(order.shape)}, expected {expected}.")
        known: dict[Axis, Tensor | None] = {}
        for axes in self.axes.values():
            for axis in axes:
                if axis not in known:
                    known[axis] = _index(axis, permutation, self.groups)
        return {key: tuple(known[axis] for axis in axes) for key, axes in self.axes.items()}

    def __str__(self) -> str:
        """A table of the groups and where they occur, then what stays and why."""
        places: dict[str, list[str]] = {name: [] for name in self.groups}
        for key, axes in self.axes.items():
            for dimension, axis in enumerate(axes):
                for name in dict.fromkeys(factor.group for segment in axis for factor in segment if factor.group):
                    places[name].append(f"{key}[{dimension}]")
        rows = [
            (group.name, f"{group.size}" + (f" in each {group.within}" if group.within else ""), _shortened(found))
            for group, found in zip(self.groups.values(), places.values(), strict=True)
        ]
        widths = [max(len(row[column]) for row in [("group", "units"), *rows]) for column in (0, 1)]
        lines = [f"{name:{widths[0]}}  {units:{widths[1]}}  {where}" for name, units, where in rows]
        lines.insert(0, f"{'group':{widths[0]}}  {'units':{widths[1]}}  axes")
        why: dict[str, list[str]] = {}
        for (key, dimension), reason in self.frozen.items():
            why.setdefault(reason, []).append(f"{key}[{dimension}]")
        lines += [f"stays: {_shortened(found)}: {reason}" for reason, found in why.items()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"PermutationSpec({len(self.groups)} groups, {len(self.axes)} tensors)"


def _shortened(places: list[str], shown: int = 4) -> str:
    return ", ".join(places[:shown]) + (f" and {len(places) - shown} more" if len(places) > shown else "")


def length(axis: Axis) -> int:
    """The number of positions of an axis."""
    return sum(math.prod(factor.size for factor in segment) for segment in axis)


def check_keys(keys: Iterable[str], state: Mapping[str, Tensor], name: str = "the state dict") -> None:
    """Check that a spec has exactly the keys of a state dict, where those of 0-dimensional tensors may be missing."""
    expected = set(keys)
    missing = sorted(key for key in state if key not in expected and state[key].dim() > 0)
    unexpected = sorted(expected - state.keys())
    if missing or unexpected:
        key = (unexpected + missing)[0]
        what = f"{name} lacks {key!r} of the spec" if unexpected else f"the permutation spec lacks {key!r} of {name}"
        raise InputError(f"{what} ({len(missing)} keys missing in the spec, {len(unexpected)} in {name}).")


def _index(axis: Axis, permutation: Permutation, groups: Mapping[str, Group]) -> Tensor | None:
    """Where each position of an axis comes from; None if it stays."""
    if not any(factor.group in permutation for segment in axis for factor in segment):
        return None
    parts, start = [], 0
    for segment in axis:
        shape = [factor.size for factor in segment]
        index = torch.zeros(shape, dtype=torch.int64)
        for digit, (size, name) in enumerate(segment):
            within = groups[name].within if name is not None else None
            order = torch.arange(size) if name is None or name not in permutation else permutation[name].cpu()
            spread = [1] * len(shape)
            spread[digit] = size
            if order.dim() == 2:
                spread[next(i for i, factor in enumerate(segment) if factor.group == within)] = len(order)
            index = index + order.view(spread) * math.prod(shape[digit + 1 :])
        parts.append(index.flatten() + start)
        start += index.numel()
    return torch.cat(parts)
