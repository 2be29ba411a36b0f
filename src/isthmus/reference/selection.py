"""Which magnitudes are the largest: exact cuts, by rank, of one or of many tensors ranked together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .elementwise import compute_dtype

NO_INDEX = torch.iinfo(torch.int64).max  # a cut's index beyond every element: all equal ones are above the cut


class Cuts(NamedTuple):
    """The lower ends of top sets, one per group and model: |τ| > value, and of those equal to it the first ones.

    NaN, which no cut is made of, stands above infinity.

    Attributes:
        value: float64 (groups, models), on the CPU. Infinity: the set is empty; 0 with index ``NO_INDEX``: everything.
        index: int64 (groups, models). An element with |τ| = value belongs if its index, counted from the start of its
            group, is below; ``NO_INDEX`` takes all of them.
    """

    value: Tensor
    index: Tensor  # type: ignore[assignment]  # tuples have a method of this name


class Groups(NamedTuple):
    """What is ranked together.

    Attributes:
        whole: all rows are one group, in their order.
        lengths: else the length of the pieces that each row is cut into, each a group; ``None``: a group is a row.
    """

    whole: bool
    lengths: list[int] | None


class Selected(NamedTuple):
    """The cuts for the ranks that were asked for.

    Attributes:
        cuts: one per rank.
        above: int64 (groups, models, ranks): how many have |τ| > value.
        equal: int64 (groups, models, ranks): how many have |τ| = value. For a rank of 0 both are 0; for a rank of at
            least the number of elements n they are 0 and n, whatever the data.
        nonfinite: the first (row, model) of which a task vector that had to be ranked is not finite; the rest is then
            undefined.
    """

    cuts: list[Cuts]
    above: Tensor
    equal: Tensor
    nonfinite: tuple[int, int] | None


def select(columns: Sequence[list[Tensor]], *, based: bool, groups: Groups, ranks: Tensor, exact: bool) -> Selected:
    """The k-th largest magnitudes of task vectors and where the k largest end.

    Args:
        columns: the base first, if ``based``, then the models; each a list of the same number of real tensors.
        based: task vectors are differences to the base, else they are the tensors themselves.
        groups: what is ranked together.
        ranks: k, int64 (groups, models, number of ranks). 0 gives the empty set, a k of at least the number of elements
            everything; for neither are the data looked at.
        exact: exactly k elements are in the set, of equal ones those of the lowest index in C-order; else all that
            equal the k-th largest.
    """
    models = len(columns) - based
    value = torch.full(ranks.shape, torch.inf, dtype=torch.float64)
    index = torch.zeros(ranks.shape, dtype=torch.int64)
    above, equal = torch.zeros_like(index), torch.zeros_like(index)
    bad: list[tuple[int, int]] = []
    for model in range(models):
        for first, rows, magnitude in _blocks(columns, based, model, groups):
            block = slice(first, first + magnitude.shape[0])
            n = magnitude.shape[1]
            k = ranks[block, model]
            value[block, model] = torch.where(k >= n, 0.0, torch.inf).where(k != 0, torch.inf)
            index[block, model] = torch.where((k >= n) & (k != 0), NO_INDEX, 0)
            equal[block, model] = torch.where((k >= n) & (k != 0), n, 0)
            ranked = (k > 0) & (k < n)
            if not ranked.any():
                continue
            finite = magnitude.isfinite()
            if not finite.all():
                bad += [(row, model) for row, part in rows if not part.isfinite().all()]
                continue
            ordered = magnitude.sort(dim=-1, descending=True).values
            for q in range(ranks.shape[2]):
                at = (k[:, q].clamp(1, n) - 1).to(magnitude.device)
                cut = ordered.gather(1, at[:, None])
                many, same = (magnitude > cut).sum(1), magnitude == cut
                place = torch.full_like(many, NO_INDEX)
                if exact:  # up to and with the (k - many)-th of the equal ones, unless that is the last
                    last = (same.cumsum(1) < (at + 1 - many)[:, None]).sum(1) + 1
                    place = torch.where(many + same.sum(1) > at + 1, last, NO_INDEX)
                where = ranked[:, q]
                found = (cut[:, 0], place, many, same.sum(1))
                for target, source in zip((value, index, above, equal), found, strict=True):
                    target[block, model, q] = torch.where(where, source.cpu(), target[block, model, q])
    cuts = [Cuts(value[..., q], index[..., q]) for q in range(ranks.shape[2])]
    return Selected(cuts, above, equal, min(bad) if bad else None)


def _blocks(
    columns: Sequence[list[Tensor]], based: bool, model: int, groups: Groups
) -> Iterator[tuple[int, list[tuple[int, Tensor]], Tensor]]:
    """The magnitudes of groups of one length: their first group, the rows they come from, float64 (groups, length)."""
    parts = []
    first = 0
    for row, tensors in enumerate(zip(*columns, strict=True)):
        part = task_vector(tensors, based, model).detach().abs().double()
        if groups.whole:
            parts.append((row, part))
            continue
        length = part.numel() if groups.lengths is None else groups.lengths[row]
        count = 1 if groups.lengths is None else part.numel() // length
        yield first, [(row, part)], part.view(count, length)
        first += count
    if parts:
        yield 0, parts, torch.cat([part.to(parts[0][1].device) for _, part in parts])[None]


def task_vector(row: Sequence[Tensor], based: bool, model: int) -> Tensor:
    """τ = x - b of one model, or x itself, in C-order and in the type that the whole row is combined in."""
    compute = compute_dtype(tensor.dtype for tensor in row)
    x = row[model + based].reshape(-1).to(compute)
    return x - row[0].reshape(-1).to(compute) if based else x
