r"""How similar the units of two models are, and how similar the models, under a permutation of one of them.

With b̃ for the second model in the order of the current permutation, the units i of a and j of b of a group have

.. math:: S_{ij} = \sum_t \langle a_t[i], \tilde b_t[j] \rangle,

where t runs over all places where the group occurs: each factor of a segment of an axis of a tensor, as the spec says.
There b̃ is in order on all other axes and factors, and as it came in the one that i and j count. So the sum of
S[i, perm[i]] over the units of a group is the part of ⟨a, b̃⟩ that its order decides, as long as the group occurs once
in each tensor. If it occurs on several axes of one, S is the gradient, with the order of the other axes fixed.

Running statistics do not enter, neither do integer and boolean tensors; tied tensors count once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus import ops
from isthmus.errors import InputError
from isthmus.flat import first_aliases

from .permutation import beside
from .spec import Axis, Permutation, PermutationSpec, Segment

Tensors = Mapping[str, tuple[Tensor, ...]]  # key -> the tensor of each model

DRIFT = 16  # a similarity is computed anew after so many updates, lest their rounding errors add up


def moving_tensors(spec: PermutationSpec, *models: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, ...]]:
    """The tensors that similarities are made of: what a group moves, without statistics, each once, complex as real.

    Tensors that are tied in one of the models count once if they are equal in the others, tied there or not.

    Raises:
        InputError: a tensor is complex in one model and real in another.
    """
    firsts = [first_aliases(model) for model in models]
    kept: dict[str, tuple[Tensor, ...]] = {}
    known: dict[tuple[int, str], list[str]] = {}  # a model and its first of tied tensors -> which of these are kept
    for key in sorted(spec.axes):
        each = tuple(model[key] for model in models)
        averaged = each[0].is_floating_point() or each[0].is_complex()
        if not averaged or key in spec.statistics or not groups_of(spec.axes[key]):
            continue
        if len({tensor.is_complex() for tensor in each}) > 1:
            raise InputError(f"{key!r} is complex in one model and real in another; give all models the same dtype.")
        ties = [(number, first[key]) for number, first in enumerate(firsts)]
        others = {other for tie in ties for other in known.get(tie, ())}
        if any(
            all(
                first[key] == first[other] or torch.equal(model[key], model[other].to(model[key].device))
                for first, model in zip(firsts, models, strict=True)
            )
            for other in sorted(others)
        ):
            continue
        kept[key] = each
        for tie in ties:
            known.setdefault(tie, []).append(key)
    return {key: tuple(_real(tensor).to(each[0].device) for tensor in each) for key, each in kept.items()}


def inner_products(
    spec: PermutationSpec, tensors: Tensors, permutations: Sequence[Permutation], *, backend: str = "auto"
) -> dict[str, Tensor]:
    """The Gram matrix of the models' tensors, each in its order: key -> float64 (models, models).

    One tensor at a time is permuted, so that the memory needed is that of the largest.
    """
    indices = [spec.indices(permutation) for permutation in permutations]
    return {
        key: ops.gram(
            [ordered(x, index[key], backend) for x, index in zip(each, indices, strict=True)], backend=backend
        )[0]
        for key, each in tensors.items()
    }


def ordered(tensor: Tensor, index: Sequence[Tensor | None], backend: str) -> Tensor:
    """A tensor with its axes in the order of the indices; itself if nothing moves."""
    if all(one is None for one in index):
        return tensor
    whole = [*index, *[None] * (tensor.dim() - len(index))]  # a complex tensor has one axis more
    return ops.permute(tensor, beside([tensor], [whole])[0], backend=backend)


@dataclass
class Term:
    """One place where a group occurs, arranged for products over everything else.

    Attributes:
        place: where it is.
        axes: what the rows consist of that other groups move, from outer to inner.
        a: the first model's tensor there, float32 of shape (rows, others, units): the others stay.
        b: the second model's.
        index: which rows of ``b`` the similarity has; None as long as it has none.
        kin: the orders of siblings that ``b`` has.
    """

    place: Place
    axes: tuple[Axis, ...]
    a: Tensor
    b: Tensor
    index: Tensor | None = None
    kin: dict[str, Tensor] = field(default_factory=dict)


class Similarity:
    """S of one group, which follows the permutation of the other groups.

    What no other group moves is multiplied once. Otherwise the rows that moved since the last time are: the cost is in
    proportion to them, and none where nothing changed. The units of a group within another are those of all its copies,
    and S is of shape (units, units) with units = size of the parent times size.

    Besides S (float32) it keeps each tensor of both models in float32 once for each axis that the group is on, in the
    order in which products read it.

    Args:
        spec: which axes move together.
        name: the group.
        pairs: the tensors of both models.
        shared: whether places count where the segment has other groups within the same one, which keep their order
            and stay with their head: else these places are left to the similarities of those groups.
        backend: as for ``isthmus.ops.add_product``.

    Attributes:
        name: the group.
        matrix: S, float32.
        weight: ‖a‖ ‖b‖ over the places of the group, which no sum of S over a permutation exceeds.
        version: counts the changes of ``matrix``.
    """

    def __init__(
        self, spec: PermutationSpec, name: str, pairs: Tensors, *, shared: bool = True, backend: str = "auto"
    ) -> None:
        self.name = name
        self.version = 0
        self._spec, self._pairs, self._backend = spec, pairs, backend
        found = [place for place in places(spec, name, pairs) if shared or not place.siblings(spec)]
        terms = [_term(spec, place, pairs) for place in found]
        fixed = [term for term in terms if not term.axes and not term.place.siblings(spec)]
        self._terms = [term for term in terms if term.axes or term.place.siblings(spec)]
        self._rows = PermutationSpec(spec.groups, {str(i): term.axes for i, term in enumerate(self._terms)})
        group = spec.groups[name]
        units = group.size * (spec.groups[group.within].size if group.within else 1)
        device = terms[0].a.device if terms else None
        self._constant = torch.zeros(units, units, device=device)
        for term in fixed:
            ops.add_product(self._constant, term.a, term.b, backend=backend)
        self.matrix = self._constant if not self._terms else torch.zeros_like(self._constant)
        self._updates = DRIFT
        self._weights = [(groups_of(term.axes), _squares(term.a), _squares(term.b)) for term in terms]
        self.weight = self.known_weight(set(spec.groups))

    def known_weight(self, known: set[str]) -> float:
        """The part of ``weight`` that the places have whose other groups are all ``known``."""
        parts = [squares for names, *squares in self._weights if names <= known]
        return math.sqrt(sum(a for a, _ in parts) * sum(b for _, b in parts))

    def update(self, permutation: Permutation) -> None:
        """Bring ``matrix`` up to date with the permutation of all other groups."""
        indices = self._indices(permutation)
        if not indices:
            self.version = max(self.version, 1)
            return
        for term in self._terms:
            self._follow(term, permutation)
        changed = [
            None if term.index is None else (term.index != index).nonzero().flatten()
            for term, index in zip(self._terms, indices, strict=True)
        ]
        rows = sum(term.b.shape[0] * term.b.shape[1] for term in self._terms)
        moved = sum(
            (term.b.shape[0] if change is None else len(change)) * term.b.shape[1]
            for term, change in zip(self._terms, changed, strict=True)
        )
        if moved == 0:
            return
        self.version += 1
        self._updates += 1
        if self._updates > DRIFT or 2 * moved > rows or any(change is None for change in changed):
            self._updates = 0
            self.matrix.copy_(self._constant)
            for term, index in zip(self._terms, indices, strict=True):
                _add_rows(self.matrix, term, index, backend=self._backend)
                term.index = index
            return
        for term, index, change in zip(self._terms, indices, changed, strict=True):
            if change is not None and len(change):
                _add_rows(self.matrix, term, index, change, backend=self._backend)
                term.index = index

    def among(self, permutation: Permutation, known: set[str]) -> Tensor:
        """S of the places alone whose other groups are all ``known``."""
        matrix = self._constant.clone()
        for term, index in zip(self._terms, self._indices(permutation), strict=True):
            if groups_of(term.axes) | term.place.siblings(self._spec) <= known:
                self._follow(term, permutation)
                _add_rows(matrix, term, index, backend=self._backend)
        return matrix

    def _follow(self, term: Term, permutation: Permutation) -> None:
        """Bring the units of b beside these, of siblings, into the order that they have in their old head."""
        siblings, parent = term.place.siblings(self._spec), self._spec.groups[self.name].within
        if not siblings or parent is None:
            return
        back = permutation[parent].argsort()
        kin = {name: permutation[name][back] for name in sorted(siblings)}
        if term.kin and all(torch.equal(term.kin[name], order) for name, order in kin.items()):
            return
        key, dimension, start, segment, _ = term.place
        (moved,) = PermutationSpec(self._spec.groups, {key: ((segment,),)}).indices(kin)[key]
        tensor = self._pairs[key][1]
        if moved is not None:
            index = torch.arange(tensor.shape[dimension])
            index[start : start + len(moved)] = start + moved
            tensor = tensor.index_select(dimension, index.to(tensor.device))
        term.b, term.kin, term.index = term.place.arranged(tensor, self._spec), kin, None

    def _indices(self, permutation: Permutation) -> list[Tensor]:
        """For each term, where each of its rows comes from."""
        found = self._rows.indices(permutation)
        return [_joined(found[str(i)], term.axes) for i, term in enumerate(self._terms)]


def _add_rows(matrix: Tensor, term: Term, index: Tensor, change: Tensor | None = None, *, backend: str) -> None:
    """Add the product of a term with b's rows in order; where ``change`` names rows, what they change the sum by."""
    before = None if change is None else term.index
    ops.add_product(matrix, term.a, term.b, index, rows=change, before=before, backend=backend)


class Place(NamedTuple):
    """Digits of one segment of an axis of a tensor that count the units of a group.

    Attributes:
        key: the tensor.
        dimension: the axis.
        start: where on it the segment begins.
        segment: what it consists of.
        units: which of its factors count the units: one, and before it the parent's if the group lies within another.
    """

    key: str
    dimension: int
    start: int
    segment: Segment
    units: tuple[int, ...]

    def siblings(self, spec: PermutationSpec) -> set[str]:
        """The other groups of the segment that lie within the same one as this."""
        names = [factor.group for factor in self.segment]
        parents = {spec.groups[name].within for digit, name in enumerate(names) if digit in self.units and name} - {
            None
        }
        beside = {name for digit, name in enumerate(names) if digit not in self.units and name is not None}
        return {name for name in beside if spec.groups[name].within in parents}

    def others(self, spec: PermutationSpec) -> tuple[list[int], list[int]]:
        """The other axes of the tensor that groups move, and the other factors of the segment that they move."""
        axes, siblings = spec.axes[self.key], self.siblings(spec)
        moving = [other for other in range(len(axes)) if other != self.dimension and groups_of(axes[other : other + 1])]
        beside = [
            digit
            for digit, (_, name) in enumerate(self.segment)
            if digit not in self.units and name is not None and name not in siblings
        ]
        return moving, beside

    def arranged(self, tensor: Tensor, spec: PermutationSpec) -> Tensor:
        """The tensor there as float32 of shape (rows that groups move, others that stay, units)."""
        moving, beside = self.others(spec)
        length = math.prod(factor.size for factor in self.segment)
        sizes = [factor.size for factor in self.segment]
        split: Tensor = tensor.narrow(self.dimension, self.start, length).unflatten(self.dimension, sizes)
        behind = len(self.segment) - 1
        front = [other if other < self.dimension else other + behind for other in moving]
        front += [self.dimension + digit for digit in beside]
        last = [self.dimension + digit for digit in self.units]
        middle = [other for other in range(split.dim()) if other not in front and other not in last]
        shape = [math.prod(split.shape[other] for other in others) for others in (front, middle, last)]
        if last + front + middle == list(range(split.dim())):  # torch is fast where a matrix is transposed
            return split.reshape(shape[2], shape[0] * shape[1]).t().float().contiguous().view(shape)
        return split.permute(front + middle + last).float().contiguous().view(shape)


def places(spec: PermutationSpec, name: str, keys: Iterable[str]) -> Iterator[Place]:
    """The places where a group occurs; of a group that others lie within, those without any of these."""
    group = spec.groups[name]
    children = {other.name for other in spec.groups.values() if other.within == name}
    for key in keys:
        for dimension, axis in enumerate(spec.axes[key]):
            start = 0
            for segment in axis:
                names = [factor.group for factor in segment]
                if name in names and not children & set(names):
                    units = [names.index(member) for member in (group.within, name) if member is not None]
                    yield Place(key, dimension, start, segment, tuple(units))
                start += math.prod(factor.size for factor in segment)


def _term(spec: PermutationSpec, place: Place, pairs: Tensors) -> Term:
    moving, beside = place.others(spec)
    rows = [spec.axes[place.key][other] for other in moving]
    if beside:
        rows.append((tuple(place.segment[digit] for digit in beside),))
    a, b = (place.arranged(tensor, spec) for tensor in pairs[place.key])
    return Term(place, tuple(rows), a, b)


def _joined(indices: tuple[Tensor | None, ...], axes: tuple[Axis, ...]) -> Tensor:
    """The indices of several axes as one of their product."""
    joined = torch.zeros(1, dtype=torch.int64)
    for index, axis in zip(indices, axes, strict=True):
        length = sum(math.prod(factor.size for factor in segment) for segment in axis)
        order = torch.arange(length) if index is None else index
        joined = (joined[:, None] * length + order).flatten()
    return joined


def groups_of(axes: tuple[Axis, ...]) -> set[str]:
    """The groups that move parts of these axes."""
    return {factor.group for axis in axes for segment in axis for factor in segment if factor.group is not None}


def _real(tensor: Tensor) -> Tensor:
    """A complex tensor as its real and imaginary parts, on a last axis that stays."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _squares(tensor: Tensor) -> float:
    return float(ops.gram([tensor]))
