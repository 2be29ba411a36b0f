"""The best order of a group's units for given similarities; for heads, with the best order within each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus import ops
from isthmus.ops import Certificate

from .spec import Permutation, PermutationSpec


class Family(NamedTuple):
    """A group that lies within none, and the groups that lie within it: their orders are found together.

    Attributes:
        name: the group.
        children: the groups within it.
        free: which of all these may change their order.
        apart: children whose similarity leaves out the places that they share with others of the children.
    """

    name: str
    children: tuple[str, ...]
    free: frozenset[str]
    apart: frozenset[str]

    @property
    def members(self) -> tuple[str, ...]:
        """All groups of the family."""
        return (self.name, *self.children)


def families(spec: PermutationSpec, free: frozenset[str], *, at_once: bool = False) -> list[Family]:
    """The families of a spec of which a group is free.

    Where two children are factors of one product (the query heads of a key-value head, and the value columns, on the
    inputs of the output projection), the similarity of one depends on the order of the other. Such a family is listed
    once for each of these that is free, the others following their head; or once, those places left out (``at_once``).
    """
    found = []
    for group in spec.groups.values():
        if group.within is not None:
            continue
        children = tuple(other.name for other in spec.groups.values() if other.within == group.name)
        movable = free & {group.name, *children}
        together = frozenset(_together(spec, children))
        bearers = sorted(together & movable) or sorted(together)[:1]
        if not movable:
            continue
        if at_once or not bearers:
            found.append(Family(group.name, children, movable, together))
        else:
            found += [Family(group.name, children, movable - together | ({one} & movable), together - {one})
                      for one in bearers]  # fmt: skip
    return found


def _together(spec: PermutationSpec, children: Sequence[str]) -> set[str]:
    """Those of the children that are in one product with another of them."""
    met: set[str] = set()
    for axes in spec.axes.values():
        for axis in axes:
            for segment in axis:
                here = {factor.group for factor in segment if factor.group in children}
                met |= {name for name in here if name is not None and len(here) > 1}
    return met


class Best(NamedTuple):
    """The orders of a family's groups that are best for its similarities.

    Attributes:
        orders: group -> permutation.
        value: the similarity that they reach: the sum over all pairs of units, float64.
        bound: no orders reach more than this; ``value`` up to rounding.
        certificate: of the assignment of the outer group, to begin the next one with.
    """

    orders: dict[str, Tensor]
    value: float
    bound: float
    certificate: Certificate | None


def reached(family: Family, similarities: Mapping[str, Tensor], orders: Permutation) -> float:
    """The similarity that the orders of a family reach, in float64."""
    outer = orders[family.name]
    total = float(similarities[family.name].gather(1, outer[:, None]).sum(dtype=torch.float64))
    for child in family.children:
        inner = orders[child]
        size = inner.shape[1]
        columns = outer[:, None] * size + inner  # of all copies, old units by new ones
        total += float(similarities[child].gather(1, columns.view(-1, 1)).sum(dtype=torch.float64))
    return total


def best_orders(
    families: Sequence[Family],
    similarities: Mapping[str, Tensor],
    current: Permutation,
    certificates: Mapping[Family, Certificate | None] | None = None,
    *,
    backend: str = "auto",
) -> list[Best]:
    """The orders of the free groups of some families that reach the highest similarity, the others as in ``current``.

    Inside each pair of heads, the columns that are free are assigned to each other; what they reach then, with what
    heads have apart from their columns, is the similarity by which heads are assigned. That is exact, as the similarity
    of all is a sum over the pairs of heads. Columns that are not free stay with their head. The assignments of several
    families are found in parallel.

    Args:
        families: the families.
        similarities: group -> S, on the CPU.
        current: the orders so far.
        certificates: family -> that of an earlier call for a similar S.
        backend: as for ``isthmus.ops.linear_sum_assignment``.

    Raises:
        InputError: a similarity is NaN or infinite; the message names the group.
    """
    heads = [_Heads(family, similarities, current, backend) for family in families]
    free = [one for one in heads if one.family.name in one.family.free]
    solved = ops.linear_sum_assignment(
        [one.values for one in free],
        True,
        certificate=True,
        duals=[(certificates or {}).get(one.family) for one in free],
        names=[_called(one.family.name) for one in free],
        backend=backend,
    ) if free else []  # fmt: skip
    found = {one.family: (order, certificate) for one, (_, order, certificate) in zip(free, solved, strict=True)}
    return [one.best(*found.get(one.family, (current[one.family.name], None))) for one in heads]


class _Heads:
    """A family and what each of its outer units would be worth in the place of each other.

    Attributes:
        family: the groups.
        values: the worth of old outer units (columns) in the places of new ones (rows), their inner units at best.
    """

    def __init__(self, family: Family, similarities: Mapping[str, Tensor], current: Permutation, backend: str) -> None:
        self.family = family
        self.values = similarities[family.name]
        self._inner: dict[str, Tensor] = {}  # child -> for each new and each old head, the order of its columns
        outer = current[family.name]
        heads = len(outer)
        for child in family.children:
            size = current[child].shape[1]
            blocks = similarities[child].view(heads, size, heads, size).transpose(1, 2)
            if child in family.free:
                matrices = blocks.reshape(-1, size, size)
                names = [_called(child)] * len(matrices)
                _, orders = ops.linear_sum_assignment(matrices, True, names=names, backend=backend)
                self._inner[child] = orders.view(heads, heads, size)
            else:
                self._inner[child] = current[child][outer.argsort()].expand(heads, heads, size)
            worth = blocks.gather(3, self._inner[child][..., None]).sum((2, 3), dtype=torch.float64)
            self.values = self.values.double() + worth

    def best(self, order: Tensor, certificate: Certificate | None) -> Best:
        """What this order of the outer units comes to."""
        inner = {child: found[torch.arange(len(order)), order] for child, found in self._inner.items()}
        value = float(self.values.gather(1, order[:, None]).sum(dtype=torch.float64))
        bound = value if certificate is None else certificate.dual
        return Best({self.family.name: order} | inner, value, bound, certificate)


def _called(name: str) -> str:
    return f"the similarity of the units of {name!r}"
