"""The best order of a group's units for given similarities; for heads, with the best order within each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus.errors import InputError

from .spec import Permutation, PermutationSpec


class Family(NamedTuple):
    """A group that lies within none, and the groups that lie within it: their orders are found together.

    Attributes:
        name: the group.
        children: the groups within it.
        free: which of all these may change their order.
    """

    name: str
    children: tuple[str, ...]
    free: frozenset[str]

    @property
    def members(self) -> tuple[str, ...]:
        """All groups of the family."""
        return (self.name, *self.children)


def families(spec: PermutationSpec, free: frozenset[str]) -> list[Family]:
    """The families of a spec of which a group is free."""
    found = []
    for group in spec.groups.values():
        if group.within is None:
            children = tuple(other.name for other in spec.groups.values() if other.within == group.name)
            if free & {group.name, *children}:
                found.append(Family(group.name, children, free & {group.name, *children}))
    return found


class Best(NamedTuple):
    """The orders of a family's groups that are best for its similarities.

    Attributes:
        orders: group -> permutation.
        value: the similarity that they reach: the sum over all pairs of units, float64.
        bound: no orders reach more than this; ``value`` up to rounding.
        duals: of the assignment of the outer group, to start the next one from.
    """

    orders: dict[str, Tensor]
    value: float
    bound: float
    duals: tuple[Tensor, Tensor] | None


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
    family: Family,
    similarities: Mapping[str, Tensor],
    current: Permutation,
    duals: tuple[Tensor, Tensor] | None = None,
    *,
    backend: str = "auto",
) -> Best:
    """The orders of a family's free groups that reach the highest similarity, the others as in ``current``.

    Inside each pair of heads, the columns that are free are assigned to each other; what they reach then, with what
    heads have apart from their columns, is the similarity by which heads are assigned. That is exact, as the similarity
    of all is a sum over the pairs of heads. Columns that are not free stay with their head.

    Args:
        family: the groups.
        similarities: group -> S, on the CPU.
        current: the orders so far.
        duals: of an earlier call for a similar S.
        backend: as for ``isthmus.ops.linear_sum_assignment``.

    Raises:
        InputError: a similarity holds NaN or infinity.
    """
    for name in family.members:
        if not bool(similarities[name].isfinite().all()):
            raise InputError(
                f"the similarity of the units of {name!r} holds NaN or infinity; look for them in the weights of both "
                "models."
            )
    outer = current[family.name]
    if not family.children:
        order, value, bound, duals = _assign(similarities[family.name], duals, backend)
        return Best({family.name: order}, value, bound, duals)
    heads = len(outer)
    costs = similarities[family.name].double()
    inner: dict[str, Tensor] = {}  # child -> for each new and each old head, the order of its columns
    for child in family.children:
        size = current[child].shape[1]
        blocks = similarities[child].view(heads, size, heads, size).transpose(1, 2)
        if child in family.free:
            inner[child] = _assign_each(blocks.reshape(-1, size, size), backend).view(heads, heads, size)
        else:
            inner[child] = current[child][outer.argsort()].expand(heads, heads, size)
        costs = costs + blocks.gather(3, inner[child][..., None]).sum((2, 3), dtype=torch.float64)
    if family.name in family.free:
        order, value, bound, duals = _assign(costs, duals, backend)
    else:
        order, duals = outer, None
        value = bound = float(costs.gather(1, order[:, None]).sum())
    orders = {child: found[torch.arange(heads), order] for child, found in inner.items()}
    return Best({family.name: order} | orders, value, bound, duals)


def _assign(matrix: Tensor, duals: tuple[Tensor, Tensor] | None, backend: str) -> tuple[Tensor, float, float, None]:
    from scipy.optimize import linear_sum_assignment

    order = torch.from_numpy(linear_sum_assignment(matrix.numpy(), maximize=True)[1])
    value = float(matrix.gather(1, order[:, None]).sum(dtype=torch.float64))
    return order, value, value, None


def _assign_each(matrices: Tensor, backend: str) -> Tensor:
    from scipy.optimize import linear_sum_assignment

    return torch.stack([torch.from_numpy(linear_sum_assignment(m.numpy(), maximize=True)[1]) for m in matrices])
