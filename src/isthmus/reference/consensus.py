"""Merging by consensus: trim each task vector, elect a sign per entry, combine those that agree, add to the base."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
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
        kept: entries that survive trimming and are not zero, int64 (rows, models).
        positive: entries whose vote was positive, int64 (rows,).
        negative: entries whose vote was negative.
        cancelled: entries whose vote was zero although a term of it was not.
        conflicts: entries that survive with both signs.
    """

    kept: Tensor
    positive: Tensor
    negative: Tensor
    cancelled: Tensor
    conflicts: Tensor


class _Row(NamedTuple):
    """The merge of one row; flat tensors over its entries, and lists of one for each model."""

    shape: torch.Size
    base: Tensor  # 0 where there is none
    scaled: list[Tensor]  # ρᵢ
    factors: list[Tensor]  # rᵢ
    kept: list[Tensor]  # the masks of the survivors
    vote: _Vote
    agrees: list[Tensor]  # the masks of those that are merged
    slope: list[Tensor]  # the derivative of the numerator in the terms that are merged
    divisor: Tensor
    merged: Tensor


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
    results, counts = [], []
    for index, row in enumerate(_rows(columns, plan)):
        change = plan.scaling[index].to(row.merged) * row.merged
        nothing = row.merged == 0  # adding it changes nothing, not even the sign of a zero
        base = torch.zeros_like(change) if row.base is None else row.base
        whole = torch.where(nothing, base, base + change)
        dtype = columns[0][index].dtype if dtypes is None else dtypes[index]
        result = narrow(whole, dtype.to_real()).view(row.shape)
        results.append(torch.view_as_complex(result) if dtype.is_complex else result)
        if stats:
            counts.append(_count(row))
    return results, _stats(counts, plan.weights.shape[1]) if stats else None


def consensus_gradient(
    columns: Sequence[list[Tensor]], plan: Plan, gradients: Sequence[Tensor]
) -> tuple[list[list[Tensor]], Tensor, Tensor]:
    """The gradients in the tensors, weights and scaling, of the results' gradients; masks and signs held fixed.

    With cᵢ = ∂m/∂tᵢ of the merged task vector m in the terms tᵢ = wᵢρᵢ: ∂/∂xᵢ = λ cᵢ wᵢ rᵢ, ∂/∂b = 1 - Σ ∂/∂xᵢ,
    ∂/∂wᵢ = Σ λ (cᵢ ρᵢ - m/D [if D = Σ w]) and ∂/∂λ = Σ m. Gradients flow through this function too.
    """
    to_columns: list[list[Tensor]] = [[] for _ in columns]
    to_weights, to_scaling = [], []
    for index, row in enumerate(_rows(columns, plan)):
        to_base = _real(gradients[index]).reshape(-1).to(row.merged)
        to_scaling.append((to_base * row.merged).double().sum())
        gradient = plan.scaling[index].to(row.merged) * to_base
        for model, (rho, agree) in enumerate(zip(row.scaled, row.agrees, strict=True)):
            term = torch.where(agree, gradient * row.slope[model] / row.divisor, 0.0)
            weight = term * rho
            if plan.merge_func == "mean" and plan.divisor == "weight":
                weight = weight - torch.where(agree, gradient * row.merged / row.divisor, 0.0)
            to_weights.append(torch.where(agree, weight, 0.0).double().sum())
            x = term * plan.weights[index, model].to(term) * row.factors[model]
            to_columns[model + plan.based].append(_like(x, columns[model + plan.based][index]))
            to_base = to_base - x
        if plan.based:
            to_columns[0].append(_like(to_base, columns[0][index]))
    weights, scaling = torch.stack(to_weights).cpu(), torch.stack(to_scaling).cpu()
    return to_columns, weights.view(plan.weights.shape), scaling


def l1(columns: Sequence[list[Tensor]], plan: Plan) -> Tensor:
    """Σ|τ| over all entries and over the survivors: float64 (rows, models, 2), in the order of ``reductions``."""
    rows = [[_real(tensor) for tensor in row] for row in zip(*columns, strict=True)]
    offsets = _piece_offsets(rows, plan)
    sums = torch.zeros(*plan.weights.shape, 2, dtype=torch.float64)
    for index, row in enumerate(rows):
        for model in range(plan.weights.shape[1]):
            tau = task_vector(row, plan.based, model).detach()
            magnitude = tau.abs().double()
            kept = _kept(plan, index, model, offsets[index], tau)
            both = torch.stack([magnitude, torch.where(kept, magnitude, 0.0)])
            sums[index, model] = add_in_order(block_sums(both).unbind(1), both.new_zeros(2)).cpu()
    return sums


def _rows(columns: Sequence[list[Tensor]], plan: Plan) -> Iterator[_Row]:
    """The merge of each row; where the majority counts all rows, after a tally of all of them."""
    rows = [[_real(tensor) for tensor in row] for row in zip(*columns, strict=True)]
    offsets = _piece_offsets(rows, plan)
    tally = torch.zeros(len(rows), dtype=torch.int64)
    if plan.vote != "none" and plan.zero_sign == "majority":
        for index, row in enumerate(rows):
            scaled, _, kept = _survivors(plan, index, offsets[index], row)
            vote = _vote(plan, index, scaled, kept)
            tally[index] = vote.positive.sum() - vote.negative.sum()
        if not plan.tally_rows:
            tally = tally.sum().expand(len(rows))
    for index, row in enumerate(rows):
        scaled, factors, kept = _survivors(plan, index, offsets[index], row)
        vote = _vote(plan, index, scaled, kept)
        weights = [plan.weights[index, model].to(rho) for model, rho in enumerate(scaled)]
        terms = [w * rho for w, rho in zip(weights, scaled, strict=True)]
        agrees, negative = _agreeing(plan, scaled, kept, vote, majority=int(tally[index]))
        slope = [torch.ones_like(term) for term in terms]
        divisor = torch.ones_like(terms[0])
        if plan.merge_func == "max":
            agrees = _largest(terms, agrees)
            if plan.vote != "none":
                slope = [torch.where(negative, -term.sign(), term.sign()) for term in terms]
                terms = [torch.where(negative, -term.abs(), term.abs()) for term in terms]
        elif plan.merge_func == "mean":
            shares = [w.expand_as(term) for w, term in zip(weights, terms, strict=True)]
            total, _ = _fold(slope if plan.divisor == "count" else shares, agrees)
            divisor = torch.where(total == 0, 1.0, total)
        numerator, _ = _fold(terms, agrees)
        merged = torch.where(vote.invalid, torch.nan, numerator / divisor)
        base = row[0].reshape(-1).to(merged.dtype) if plan.based else torch.zeros_like(merged)
        yield _Row(row[0].shape, base, scaled, factors, kept, vote, agrees, slope, divisor, merged)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _like(x: Tensor, tensor: Tensor) -> Tensor:
    """Flat real numbers with the shape and dtype of a tensor."""
    shaped = x.view(_real(tensor).shape)
    return (torch.view_as_complex(shaped) if tensor.is_complex() else shaped).to(tensor.dtype)


def _piece_offsets(rows: Sequence[Sequence[Tensor]], plan: Plan) -> list[int]:
    """For each row the place of its first cut."""
    if plan.lengths is None:
        return list(range(len(rows)))
    offsets = [0]
    for row, length in zip(rows, plan.lengths, strict=True):
        offsets.append(offsets[-1] + row[0].numel() // length)
    return offsets[:-1]


def _survivors(
    plan: Plan, index: int, offset: int, row: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """ρᵢ and rᵢ of each model, and the mask of those entries that survive."""
    scaled, factors, kept = [], [], []
    for model in range(plan.weights.shape[1]):
        tau = task_vector(row, plan.based, model)
        kept.append(_kept(plan, index, model, offset, tau))
        factor = torch.ones((), dtype=tau.dtype, device=tau.device)
        if plan.rescale is not None:
            factor = plan.rescale[index, model].to(tau)
        elif plan.random is not None and plan.random.inverse:
            p = _density(plan, plan.random, index, model, tau)
            factor = torch.where(p > 0, 1 / p, 1.0).to(tau.dtype)
        scaled.append(factor * tau)
        factors.append(factor)
    return scaled, factors, kept


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
    first = torch.arange(pieces.shape[1], device=tau.device) < before
    # NaN stands above infinity: it is in every set that is not empty, so that it propagates.
    invalid = pieces.isnan() & ((value < torch.inf) | first)
    return ((pieces > value) | ((pieces == value) & first) | invalid).view(-1)


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
    return (density - epsilon) + (2 * epsilon * rank) / torch.full_like(epsilon, length - 1)


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


def _agreeing(
    plan: Plan, scaled: list[Tensor], kept: list[Tensor], vote: _Vote, *, majority: int
) -> tuple[list[Tensor], Tensor]:
    """The masks of the survivors that are merged, and the mask of the entries whose elected sign is negative."""
    positive, negative = vote.positive, vote.negative
    if plan.vote == "none":
        return [mask & (rho != 0) for mask, rho in zip(kept, scaled, strict=True)], negative
    if plan.zero_sign == "positive" or (plan.zero_sign == "majority" and majority > 0):
        positive = positive | vote.cancelled
    elif plan.zero_sign != "zero":
        negative = negative | vote.cancelled
    agrees = [
        mask & ((positive & (term > 0)) | (negative & (term < 0))) for mask, term in zip(kept, vote.terms, strict=True)
    ]
    return agrees, negative


def _largest(terms: list[Tensor], agrees: list[Tensor]) -> list[Tensor]:
    """Of the terms that agree the masks of the largest, the first of equals; of a NaN if there is one."""
    best, seen = torch.zeros_like(terms[0]), torch.zeros_like(agrees[0])
    chosen: list[Tensor] = []
    for term, agree in zip(terms, agrees, strict=True):
        better = agree & (~seen | (term.abs() > best.abs()) | term.isnan())
        chosen = [*(mask & ~better for mask in chosen), better]
        best, seen = torch.where(better, term, best), seen | agree
    return chosen


def _count(row: _Row) -> list[int]:
    up = functools.reduce(operator.or_, (mask & (rho > 0) for mask, rho in zip(row.kept, row.scaled, strict=True)))
    down = functools.reduce(operator.or_, (mask & (rho < 0) for mask, rho in zip(row.kept, row.scaled, strict=True)))
    kept = (mask & (rho != 0) for mask, rho in zip(row.kept, row.scaled, strict=True))
    return [int(mask.sum()) for mask in (*kept, row.vote.positive, row.vote.negative, row.vote.cancelled, up & down)]


def _stats(counts: list[list[int]], models: int) -> Stats:
    table = torch.tensor(counts, dtype=torch.int64).view(-1, models + 4)
    return Stats(table[:, :models], *table[:, models:].unbind(1))
