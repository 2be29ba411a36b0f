"""Merging by consensus: trim each task vector, elect a sign per entry, combine those that agree, add to the base."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .elementwise import narrow
from .random import random_words
from .reductions import add_in_order, block_sums
from .selection import Cuts, task_vector


class Random(NamedTuple):
    """Which entries survive by chance.

    Attributes:
        keys: int64 (rows, models, 4), as ``random_keys`` makes them.
        density: p, float64 (rows, models). An entry survives if its 32 random bits are below ⌊p 2³²⌋.
        epsilon: float64 (rows, models), or ``None``. If given, p of an entry is (density - ε) + (2ε · rank) / (L - 1),
            rank its place in ascending order of |τ| within its piece of L entries, from 0; of equal ones the later has
            the lower rank. In a piece of one entry p is the density.
        inverse: survivors are multiplied by 1/p.
        starts: for each row the index of its first element in the tensor that it is a part of.
    """

    keys: Tensor
    density: Tensor
    epsilon: Tensor | None
    inverse: bool
    starts: list[int]


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that ``consensus`` needs to know besides the tensors; tables are on the CPU.

    Attributes:
        based: the first column is the base, else task vectors are given and deltas are the result.
        weights: w, float64 (rows, models).
        scaling: λ, float64 (rows,).
        vote: "none", "total", "frequency" or "weighted_total".
        zero_sign: "majority", "positive", "negative" or "zero": what a vote that cancels elects.
        tally_rows: the majority is that of the row, else that of all rows.
        merge_func: "mean", "sum" or "max".
        divisor: "count" or "weight".
        rescale: r, float64 (rows, models), or ``None``; not together with ``random.inverse``.
        keep: the top sets that survive, per row, or per piece where ``lengths`` is given; ``None``: all entries.
        drop: the top sets of those that do not, or ``None``.
        lengths: the length of the pieces that each row is ranked in.
        random: which entries survive by chance, or ``None``.
    """

    based: bool
    weights: Tensor
    scaling: Tensor
    vote: str
    zero_sign: str
    tally_rows: bool
    merge_func: str
    divisor: str
    rescale: Tensor | None
    keep: Cuts | None
    drop: Cuts | None
    lengths: list[int] | None
    random: Random | None


class Stats(NamedTuple):
    """What happened, counted in entries.

    Attributes:
        kept: survivors of trimming, int64 (rows, models).
        positive: entries whose vote was positive, int64 (rows,).
        negative: entries whose vote was negative.
        cancelled: entries whose vote was zero although a term of it was not.
        conflicts: entries with surviving terms of both signs.
    """

    kept: Tensor
    positive: Tensor
    negative: Tensor
    cancelled: Tensor
    conflicts: Tensor


class _Vote(NamedTuple):
    """The vote over one row; masks over its entries."""

    terms: list[Tensor]  # of each model
    invalid: Tensor  # NaN
    positive: Tensor
    negative: Tensor
    cancelled: Tensor


def consensus(
    columns: Sequence[list[Tensor]], plan: Plan, *, dtypes: Sequence[torch.dtype] | None = None, stats: bool = False
) -> tuple[list[Tensor], Stats | None]:
    """The merge b + λ (Σ wᵢ ρᵢ) / D over the surviving entries that agree; see ``isthmus.ops.consensus``.

    Args:
        columns: the base first, if the plan has one, then the models; each a list of the same number of tensors.
            Complex tensors are taken as pairs of real numbers.
        plan: the rule; gradients flow to the tensors and to its weights and scaling, its masks and signs held fixed.
        dtypes: of the results; by default those of the first column.
        stats: count, too.
    """
    rows = [[_real(tensor) for tensor in row] for row in zip(*columns, strict=True)]
    offsets = _piece_offsets(rows, plan)
    tally = torch.zeros(len(rows), dtype=torch.int64)
    if plan.vote != "none" and plan.zero_sign == "majority":
        for index, row in enumerate(rows):
            vote = _vote(plan, index, *_survivors(plan, index, offsets[index], row))
            tally[index] = vote.positive.sum() - vote.negative.sum()
        if not plan.tally_rows:
            tally = tally.sum().expand(len(rows))
    results, counts = [], []
    for index, row in enumerate(rows):
        scaled, kept = _survivors(plan, index, offsets[index], row)
        vote = _vote(plan, index, scaled, kept)
        merged, empty = _combine(plan, index, scaled, kept, vote, majority=int(tally[index]))
        change = plan.scaling[index].to(merged) * merged
        if plan.based:
            base = row[0].reshape(-1).to(merged.dtype)
            whole = torch.where(empty, base, base + change)
        else:
            whole = torch.where(empty, 0.0, change)
        first = columns[0][index]
        dtype = first.dtype if dtypes is None else dtypes[index]
        result = narrow(whole, dtype.to_real()).view(row[0].shape)
        results.append(torch.view_as_complex(result) if dtype.is_complex else result)
        if stats:
            counts.append(_count(kept, vote))
    return results, _stats(counts, plan.weights.shape[1]) if stats else None


def l1(columns: Sequence[list[Tensor]], plan: Plan) -> Tensor:
    """Σ|τ| over all entries and over the survivors: float64 (rows, models, 2), in the order of ``reductions``."""
    rows = [[_real(tensor) for tensor in row] for row in zip(*columns, strict=True)]
    offsets = _piece_offsets(rows, plan)
    sums = torch.zeros(*plan.weights.shape, 2, dtype=torch.float64)
    for index, row in enumerate(rows):
        for model in range(plan.weights.shape[1]):
            tau = task_vector(row, plan.based, model)
            magnitude = tau.abs().double()
            kept = _kept(plan, index, model, offsets[index], tau)
            both = torch.stack([magnitude, torch.where(kept, magnitude, 0.0)])
            sums[index, model] = add_in_order(block_sums(both).unbind(1), both.new_zeros(2)).cpu()
    return sums


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _piece_offsets(rows: Sequence[Sequence[Tensor]], plan: Plan) -> list[int]:
    """For each row the place of its first cut."""
    if plan.lengths is None:
        return list(range(len(rows)))
    offsets = [0]
    for row, length in zip(rows, plan.lengths, strict=True):
        offsets.append(offsets[-1] + row[0].numel() // length)
    return offsets[:-1]


def _survivors(plan: Plan, index: int, offset: int, row: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """ρᵢ of each model, and the mask of those entries that survive."""
    scaled, kept = [], []
    for model in range(plan.weights.shape[1]):
        tau = task_vector(row, plan.based, model)
        kept.append(_kept(plan, index, model, offset, tau))
        if plan.rescale is not None:
            tau = plan.rescale[index, model].to(tau) * tau
        elif plan.random is not None and plan.random.inverse:
            p = _density(plan, plan.random, index, model, tau)
            tau = torch.where(p > 0, 1 / p, 1.0).to(tau.dtype) * tau
        scaled.append(tau)
    return scaled, kept


def _kept(plan: Plan, index: int, model: int, offset: int, tau: Tensor) -> Tensor:
    """The entries of one task vector that survive trimming."""
    kept = torch.ones_like(tau, dtype=torch.bool)
    if plan.keep is not None:
        kept &= _in_top_set(plan, plan.keep, index, model, offset, tau)
    if plan.drop is not None:
        kept &= ~_in_top_set(plan, plan.drop, index, model, offset, tau)
    if plan.random is not None:
        key = plan.random.keys[index, model].tolist()
        words = random_words(key, plan.random.starts[index], tau.numel(), tau.device)
        kept &= words < (_density(plan, plan.random, index, model, tau) * 2.0**32).floor().to(torch.int64)
    return kept


def _in_top_set(plan: Plan, cuts: Cuts, index: int, model: int, offset: int, tau: Tensor) -> Tensor:
    magnitude = tau.detach().abs().double()
    pieces = magnitude.view(1, -1) if plan.lengths is None else magnitude.view(-1, plan.lengths[index])
    here = slice(offset, offset + pieces.shape[0])
    value = cuts.value[here, model, None].to(tau.device)
    before = cuts.index[here, model, None].to(tau.device)
    position = torch.arange(pieces.shape[1], device=tau.device)
    return ((pieces > value) | ((pieces == value) & (position < before))).view(-1)


def _density(plan: Plan, random: Random, index: int, model: int, tau: Tensor) -> Tensor:
    """The p of the entries, float64: one for all, or one for each where it depends on the rank."""
    density = random.density[index, model].to(tau.device)
    if random.epsilon is None or plan.lengths is None or plan.lengths[index] == 1:
        return density
    length = plan.lengths[index]
    epsilon = random.epsilon[index, model].to(tau.device)
    # Reversed, a stable sort puts the later of equal ones first.
    order = tau.detach().abs().view(-1, length).flip(1).argsort(dim=1, stable=True)
    rank = order.argsort(dim=1).flip(1).double().view(-1)
    return (density - epsilon) + (2 * epsilon * rank) / (length - 1)


def _vote(plan: Plan, index: int, scaled: list[Tensor], kept: list[Tensor]) -> _Vote:
    """The sign of the sum of the vote terms, a left fold over the survivors; of no survivors it is zero."""
    if plan.vote == "weighted_total":
        terms = [plan.weights[index, model].to(rho) * rho for model, rho in enumerate(scaled)]
    elif plan.vote == "frequency":
        terms = [torch.where(rho.isnan(), rho, rho.sign()) for rho in scaled]
    else:
        terms = scaled
    terms = [term.detach() for term in terms]
    none = torch.zeros_like(kept[0])
    if plan.vote == "none":
        return _Vote(terms, none, none, none, none)
    total, _ = _fold(terms, kept)
    contested = functools.reduce(operator.or_, (mask & (term != 0) for term, mask in zip(terms, kept, strict=True)))
    return _Vote(terms, total.isnan(), total > 0, total < 0, (total == 0) & contested)


def _fold(terms: Sequence[Tensor], masks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The left fold of the masked terms from the first of them, 0 where there is none; and the mask of any."""
    total, seen = torch.zeros_like(terms[0]), torch.zeros_like(masks[0])
    for term, mask in zip(terms, masks, strict=True):
        total = torch.where(mask, torch.where(seen, total + term, term), total)
        seen = seen | mask
    return total, seen


def _combine(
    plan: Plan, index: int, scaled: list[Tensor], kept: list[Tensor], vote: _Vote, *, majority: int
) -> tuple[Tensor, Tensor]:
    """The merged task vector of one row, and the mask of the entries to which no model contributes."""
    weights = [plan.weights[index, model].to(rho) for model, rho in enumerate(scaled)]
    products = [w * rho for w, rho in zip(weights, scaled, strict=True)]
    if plan.vote == "none":
        agrees = [mask & (rho != 0) for mask, rho in zip(kept, scaled, strict=True)]
    else:
        positive, negative = vote.positive, vote.negative
        if plan.zero_sign == "positive" or (plan.zero_sign == "majority" and majority > 0):
            positive = positive | vote.cancelled
        elif plan.zero_sign != "zero":
            negative = negative | vote.cancelled
        agrees = [
            mask & ((positive & (term > 0)) | (negative & (term < 0)))
            for mask, term in zip(kept, vote.terms, strict=True)
        ]
    any_agrees = functools.reduce(operator.or_, agrees)
    if plan.merge_func == "max":
        merged = _largest(products, agrees)
        if plan.vote != "none":
            merged = torch.where(negative, -merged.abs(), merged.abs())
    else:
        merged, _ = _fold(products, agrees)
        if plan.merge_func == "mean":
            if plan.divisor == "count":
                divisor = functools.reduce(torch.add, (agree.to(merged.dtype) for agree in agrees))
            else:
                divisor, _ = _fold([w.expand_as(merged) for w in weights], agrees)
            merged = merged / torch.where(divisor == 0, 1.0, divisor)
    return torch.where(vote.invalid, torch.nan, merged), ~(any_agrees | vote.invalid)


def _largest(products: list[Tensor], agrees: list[Tensor]) -> Tensor:
    """The term of largest magnitude among those that agree, the first of equals; NaN if one is."""
    best, seen = torch.zeros_like(products[0]), torch.zeros_like(agrees[0])
    for term, agree in zip(products, agrees, strict=True):
        better = agree & (~seen | (term.abs() > best.abs()) | term.isnan())
        best, seen = torch.where(better, term, best), seen | agree
    return best


def _count(kept: list[Tensor], vote: _Vote) -> list[int]:
    up = functools.reduce(operator.or_, (mask & (term > 0) for mask, term in zip(kept, vote.terms, strict=True)))
    down = functools.reduce(operator.or_, (mask & (term < 0) for mask, term in zip(kept, vote.terms, strict=True)))
    masks = [*kept, vote.positive, vote.negative, vote.cancelled, up & down]
    return [int(mask.sum()) for mask in masks]


def _stats(counts: list[list[int]], models: int) -> Stats:
    table = torch.tensor(counts, dtype=torch.int64).view(-1, models + 4)
    return Stats(table[:, :models], *table[:, models:].unbind(1))
