"""Permutations of a spec's groups: made, checked, inverted, composed.

A permutation maps group names to int64 tensors, as ``Group`` says: the new unit i is the old unit ``perm[i]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from isthmus.errors import InputError

from .report import Matching
from .spec import Permutation, PermutationSpec


def identity_permutation(spec: PermutationSpec) -> dict[str, Tensor]:
    """The permutation that leaves every group as it is."""
    return {name: torch.arange(group.size).expand(spec.shape(name)).clone() for name, group in spec.groups.items()}


def random_permutation(spec: PermutationSpec, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """A permutation drawn uniformly, from ``generator`` or torch's global one."""
    return {
        name: torch.rand(spec.shape(name), generator=generator, dtype=torch.float64).argsort(-1) for name in spec.groups
    }


def invert(spec: PermutationSpec, permutation: Permutation | Matching) -> dict[str, Tensor]:
    """The permutation that undoes this one; groups that are left out stay.

    Raises:
        InputError: as for ``check_permutation``.
    """
    permutation = check_permutation(spec, permutation)
    inverse = {name: order.argsort(-1) for name, order in permutation.items()}
    return {name: _in_order(spec, name, order, inverse) for name, order in inverse.items()}


def compose(spec: PermutationSpec, first: Permutation | Matching, second: Permutation | Matching) -> dict[str, Tensor]:
    """The permutation that is ``first`` and then ``second``; groups that are left out stay.

    Raises:
        InputError: as for ``check_permutation``.
    """
    first, second = check_permutation(spec, first), check_permutation(spec, second)
    return {name: _in_order(spec, name, order, second).gather(-1, second[name]) for name, order in first.items()}


def check_spec(spec: PermutationSpec) -> None:
    """Check that a spec is one.

    Raises:
        InputError: it is not, as where arguments changed places.
    """
    if not isinstance(spec, PermutationSpec):
        raise InputError(f"the spec is a {type(spec).__name__}, expected a PermutationSpec; it is the first argument.")


def check_permutation(spec: PermutationSpec, permutation: Permutation | Matching) -> dict[str, Tensor]:
    """A copy of the permutation with an entry for each group, those that were left out as the identity.

    Raises:
        InputError: the spec or the permutation is neither, a group is unknown, or a tensor is no permutation: an int64
            tensor of the group's shape, each unit once in every row.
    """
    check_spec(spec)
    if isinstance(permutation, Matching):
        permutation = permutation.permutation
    if not isinstance(permutation, Mapping):
        raise InputError(
            f"the permutation is a {type(permutation).__name__}, expected a mapping, group -> int64 tensor, or a "
            "Matching; the permutation comes before the model."
        )
    complete = identity_permutation(spec)
    for name, order in permutation.items():
        if name not in complete:
            raise InputError(f"the permutation has the group {name!r}, which the spec does not define.")
        expected = complete[name]
        what = f"the permutation of {name!r}"
        if not isinstance(order, Tensor) or order.dtype != torch.int64 or order.shape != expected.shape:
            came = f"{order.dtype} of shape {tuple(order.shape)}" if isinstance(order, Tensor) else type(order).__name__
            raise InputError(f"{what} is {came}, expected an int64 tensor of shape {tuple(expected.shape)}.")
        order = order.to("cpu", copy=True)
        if not torch.equal(order.sort(-1).values, expected):
            raise InputError(f"{what} does not have each of 0 to {expected.shape[-1] - 1} exactly once.")
        complete[name] = order
    return complete


def units_that_stay(spec: PermutationSpec, permutation: Permutation) -> dict[str, int]:
    """How many units of each group stay; of one within another, those of heads that stay."""
    stay = {name: order == torch.arange(order.shape[-1]) for name, order in permutation.items()}
    for name, group in spec.groups.items():
        if group.within is not None:
            stay[name] = stay[name] & stay[group.within][:, None]
    return {name: int(units.sum()) for name, units in stay.items()}


def beside(
    tensors: Iterable[Tensor], indices: Iterable[Sequence[Tensor | None] | None]
) -> list[list[Tensor | None] | None]:
    """The indices of tensors, as ``PermutationSpec.indices`` has them, where the tensors are: each moved once."""
    moved: dict[tuple[int, torch.device], Tensor] = {}  # the indices outlive the call, so their ids stay theirs
    found: list[list[Tensor | None] | None] = []
    for tensor, index in zip(tensors, indices, strict=True):
        for one in index or ():
            if one is not None and (id(one), tensor.device) not in moved:
                moved[id(one), tensor.device] = one.to(tensor.device)
        places = [None if one is None else moved[id(one), tensor.device] for one in index or ()]
        found.append(None if index is None else places)
    return found


def _in_order(spec: PermutationSpec, name: str, order: Tensor, parents: Permutation) -> Tensor:
    """The rows of a group that lies within another, in the order that its parent has in ``parents``."""
    within = spec.groups[name].within
    return order if within is None else order[parents[within]]
