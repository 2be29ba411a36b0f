"""Consensus and the sums of what survives on Triton kernels: from plans to tables of what is done to each row."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus._operands import Rows, laid_out
from isthmus.kernels import consensus as kernels
from isthmus.kernels import reductions
from isthmus.kernels.consensus import BY_TALLY, MERGES, VOTES, Counting, Rule
from isthmus.kernels.table import Table, to_device
from isthmus.kernels.trimming import AT_RANDOM, BY_PIECE, BY_RANK, BY_ROW, Trimming, block_of
from isthmus.reference import Cuts, Plan, Random, Stats, compute_dtype

from . import tables
from .tables import Column

_RANKED = 1 << 22  # entries of all models whose ranks are in memory together
_NEVER = 1 << 62  # beyond every place of a row
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


class Batch(NamedTuple):
    """Rows of one dtype, or parts of rows, and what survives of them.

    Attributes:
        table: of the rows that have elements.
        trimming: what survives, and what it is multiplied by where that depends on the entry.
        rows: their places in the call; one may occur several times.
    """

    table: Table
    trimming: Trimming
    rows: list[int]


class _Span(NamedTuple):
    """Whole pieces of a row."""

    row: int
    begin: int
    end: int


def consensus(columns: Sequence[Column], outputs: Column, plan: Plan, *, stats: bool) -> Stats | None:
    """Write the merges; the host waits for nothing but the counts, if they are wanted."""
    rows = laid_out(columns, outputs, c_order=True)
    lines, models = plan.weights.shape
    device = outputs[0].device
    block = block_of(max(result.numel() for result in rows.results), kernels.BLOCK)
    tally = torch.zeros(lines, dtype=torch.int64, device=device)
    counts = torch.zeros(lines if stats else 0, models + 4, dtype=torch.int64, device=device)
    uncounted = counts[:0]

    def sweep() -> Iterator[tuple[Batch, Rule, Counting]]:
        for batch in _batches(rows, plan, block=block):
            cancelled = torch.empty(batch.table.blocks, dtype=torch.int32, device=device)
            yield batch, _rule(batch, plan), Counting(tally, plan.tally_rows, cancelled, counts)

    def launch(batch: Batch, rule: Rule, counting: Counting, **options: int) -> None:
        kernels.consensus(batch.table, batch.trimming, rule, counting, **options)

    if plan.vote == "none" or plan.zero_sign != "majority":
        for each in sweep():
            launch(*each, zero_sign=tables.SIGNS.get(plan.zero_sign, 0))
    elif _is_ranked(plan) or tables.in_place(rows):
        for each in sweep():  # the majority is counted first
            launch(*each, zero_sign=1, writes=False, tallies=True)
        for batch, rule, counting in sweep():
            launch(batch, rule, counting._replace(counts=uncounted), zero_sign=BY_TALLY)
    else:
        launched = list(sweep())
        for each in launched:  # as if cancelled votes were positive
            launch(*each, zero_sign=1, tallies=True)
        for batch, rule, counting in launched:
            launch(batch, rule, counting._replace(counts=uncounted), zero_sign=BY_TALLY, revises=True)
    for target, result in rows.late:
        target.copy_(result)
    if not stats:
        return None
    found = counts.cpu()
    return Stats(found[:, :models], *found[:, models:].unbind(1))


def l1(columns: Sequence[Column], plan: Plan) -> Tensor:
    """Σ|τ| over all entries and over the survivors: float64 (rows, models, 2) on the CPU."""
    rows = _inputs(columns)
    unscaled = dataclasses.replace(plan, rescale=None, random=plan.random and plan.random._replace(inverse=False))
    block = block_of(max(result.numel() for result in rows.results), reductions.BLOCK)
    sums = torch.zeros(*plan.weights.shape, 2, dtype=torch.float64)
    found = [
        (batch.rows, reductions.l1(batch.table, batch.trimming, based=plan.based))
        for batch in _batches(rows, unscaled, block=block)
    ]
    for places, parts in found:
        sums.index_add_(0, torch.tensor(places), parts.cpu())  # on the CPU in order
    return sums


def gram(columns: Sequence[Column], *, based: bool, lengths: Sequence[int] | None) -> Tensor:
    """The dots of the models of each row, or of each of its pieces: float64 (vectors, models, models) on the CPU."""
    rows = _inputs(columns)
    models = len(columns) - based
    sizes = [result.numel() for result in rows.results]
    vectors = [1] * len(sizes)
    if lengths is not None:
        vectors = [size // length for size, length in zip(sizes, lengths, strict=True)]
    lengths = sizes if lengths is None else lengths
    result = torch.zeros(sum(vectors), models, models, dtype=torch.float64)
    offsets = [0, *itertools.accumulate(vectors)]
    for part in tables.parts(rows.inputs, rows.results, block=block_of(max(sizes), reductions.BLOCK)):
        dots = reductions.gram(
            part.table, [sizes[row] for row in part.rows], [lengths[row] for row in part.rows], based=based
        ).cpu()
        for row, of_row in zip(part.rows, dots.split([vectors[row] for row in part.rows]), strict=True):
            result[offsets[row] : offsets[row + 1]] = of_row
    return result.tril() + result.tril(-1).transpose(1, 2)


def _inputs(columns: Sequence[Column]) -> Rows:
    """The rows of a call that writes no tensors; the first column stands in for the outputs."""
    contiguous = [[tensor.contiguous() for tensor in column] for column in columns]
    return laid_out(contiguous, contiguous[0], c_order=True)


def _batches(rows: Rows, plan: Plan, *, block: int) -> Iterator[Batch]:
    """The rows by dtype; where survivors depend on ranks, so many pieces at a time that these take bounded memory."""
    random, lines = plan.random, list(range(len(rows.results)))
    if random is None:
        groups, kind = _groups(rows.results, plan), BY_ROW if plan.lengths is None else BY_PIECE
        pieces = plan.lengths or [0] * len(lines)
        for part in tables.parts(rows.inputs, rows.results, block=block):
            places = [[groups[row], pieces[row], 0, row, 0] for row in part.rows]
            cuts = _intervals(plan, compute_dtype([part.table.dtype]))
            yield Batch(part.table, _trimming(part.table, kind.value, cuts, places), part.rows)
    elif random.epsilon is None:
        for part in tables.parts(rows.inputs, rows.results, block=block):
            places = [[row, 0, random.starts[row], row, 0] for row in part.rows]
            yield Batch(part.table, _trimming(part.table, AT_RANDOM.value, _chances(random), places), part.rows)
    else:
        lengths = plan.lengths or []
        for spans in _spans(rows.results, lengths, _RANKED // plan.weights.shape[1]):
            inputs = [[x.view(-1)[span.begin : span.end] for x in rows.inputs[span.row]] for span in spans]
            results = [rows.results[span.row].view(-1)[span.begin : span.end] for span in spans]
            for part in tables.parts(inputs, results, block=block):
                given = [spans[place] for place in part.rows]
                odds = _odds([inputs[place] for place in part.rows], given, plan, random, random.epsilon, lengths)
                first = itertools.accumulate((span.end - span.begin for span in given[:-1]), initial=0)
                places = [
                    [span.row, 0, random.starts[span.row] + span.begin, span.row, at]
                    for span, at in zip(given, first, strict=True)
                ]
                trimming = _trimming(part.table, BY_RANK.value, _chances(random), places, odds)
                yield Batch(part.table, trimming, [span.row for span in given])


def _trimming(
    table: Table, kind: int, cuts: Tensor, places: list[list[int]], odds: tuple[Tensor, Tensor] | None = None
) -> Trimming:
    """How the rows of a table are trimmed, on its device."""
    count = cuts.numel()
    on_device = to_device(torch.cat([cuts.reshape(-1), torch.tensor(places, dtype=torch.int64).view(-1)]), table.device)
    if odds is None:
        compute = compute_dtype([table.dtype])
        odds = on_device.new_empty(0, 0, dtype=torch.int32), on_device.new_empty(0, 0, dtype=compute)
    return Trimming(kind, on_device[:count].view(cuts.shape), on_device[count:].view(-1, 5), *odds)


def _rule(batch: Batch, plan: Plan) -> Rule:
    """How the survivors of a batch are merged."""
    numbers = torch.cat([plan.scaling[:, None], plan.weights, _factors(plan)], dim=1)[batch.rows]
    return Rule(
        plan.based,
        VOTES[plan.vote],
        MERGES[plan.merge_func],
        plan.divisor == "weight",
        to_device(numbers.to(compute_dtype([batch.table.dtype])), batch.table.device),
    )


def _factors(plan: Plan) -> Tensor:
    """What survivors are multiplied by, float64 (rows, models), where that is the same for all of a row."""
    if plan.rescale is not None:
        return plan.rescale
    if plan.random is not None and plan.random.inverse:
        return torch.where(plan.random.density > 0, 1 / plan.random.density, 1.0)
    return torch.ones_like(plan.weights)


def _groups(results: Sequence[Tensor], plan: Plan) -> list[int]:
    """For each row the place of its first cut."""
    if plan.keep is None:
        return [0] * len(results)
    return tables.first_groups([result.numel() for result in results], plan.lengths)


def _intervals(plan: Plan, compute: torch.dtype) -> Tensor:
    """Which magnitudes survive, as ``isthmus.kernels.trimming`` has it: int64 (groups, models, 4)."""
    everything = torch.tensor([0, _NEVER, torch.iinfo(_INTEGERS[compute]).max, _NEVER])  # NaN, too
    if plan.keep is None:
        return everything.repeat(1, plan.weights.shape[1], 1)
    intervals = everything.repeat(*plan.keep.value.shape, 1)
    intervals[..., 0], intervals[..., 1] = _ceiling(plan.keep, compute)
    if plan.drop is not None:
        high, until = _ceiling(plan.drop, compute)
        drops = torch.stack([high - 1, until], dim=-1)
        intervals[..., 2:] = torch.where(_is_empty(plan.drop)[..., None], intervals[..., 2:], drops)
    intervals[_is_empty(plan.keep)] = torch.tensor([1, _NEVER, 0, _NEVER])
    return intervals


def _is_empty(cuts: Cuts) -> Tensor:
    """Whether not even NaN is in a top set."""
    return (cuts.value == torch.inf) & (cuts.index <= 0)


def _ceiling(cuts: Cuts, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    """The bits of the smallest number that is not below a cut, and from where on those equal to the cut are outside."""
    nearest = cuts.value.to(compute)
    bits = nearest.view(_INTEGERS[compute]).to(torch.int64) + (nearest.double() < cuts.value)
    return bits, torch.where(nearest.double() == cuts.value, cuts.index, _NEVER)


def _chances(random: Random) -> Tensor:
    """Which words survive, as ``isthmus.kernels.trimming`` has it: int64 (rows, models, 4)."""
    k0, k1, c2, c3 = random.keys.unbind(-1)
    limit = (random.density * 2.0**32).floor().to(torch.int64)
    return torch.stack([k0 | k1 << 32, c2 | c3 << 32, limit, torch.zeros_like(limit)], dim=-1)


def _spans(results: Sequence[Tensor], lengths: Sequence[int], most: int) -> Iterator[list[_Span]]:
    """Pieces that are ranked together."""
    spans: list[_Span] = []
    entries = 0
    for row, (result, length) in enumerate(zip(results, lengths, strict=True)):
        step = max(1, most // length) * length
        for begin in range(0, result.numel(), step):
            spans.append(_Span(row, begin, min(begin + step, result.numel())))
            entries += spans[-1].end - begin
            if entries >= most:
                yield spans
                spans, entries = [], 0
    if spans:
        yield spans


def _odds(
    inputs: Sequence[Sequence[Tensor]],
    spans: Sequence[_Span],
    plan: Plan,
    random: Random,
    epsilons: Tensor,
    lengths: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """The limits that the words of survivors are below, by the rank of entries, and their factors: (models, entries).

    Those of models of which all or none survives are undefined.
    """
    models, factors = plan.weights.shape[1], _factors(plan)
    compute, device = compute_dtype(x.dtype for x in inputs[0]), inputs[0][0].device
    entries = sum(span.end - span.begin for span in spans)
    limits = torch.empty(models, entries, dtype=torch.int32, device=device)
    multiples = torch.empty(models, entries, dtype=compute, device=device)
    first = 0
    for row, (which, begin, end) in zip(inputs, spans, strict=True):
        length, last = lengths[which], first + end - begin
        rank = torch.arange(length, dtype=torch.float64, device=device)
        for model in range(models):
            density, epsilon = random.density[which, model].item(), epsilons[which, model].item()
            if not 0 < density < 1:
                continue
            x = row[plan.based + model].to(compute)
            size = (x - row[0].to(compute) if plan.based else x).abs().view(-1, length)
            # Reversed, a stable sort puts the later of equal ones first.
            order = length - 1 - size.flip(1).argsort(dim=1, stable=True)
            p = torch.full_like(rank, density)
            if length > 1:
                p = (density - epsilon) + (2 * epsilon * rank) / torch.full_like(rank, length - 1)
            limit = (p * 2.0**32).floor().to(torch.int64).to(torch.int32)
            factor = (1 / p if random.inverse else torch.full_like(p, factors[which, model].item())).to(compute)
            limits[model, first:last].view(-1, length).scatter_(1, order, limit.expand_as(order))
            multiples[model, first:last].view(-1, length).scatter_(1, order, factor.expand_as(order))
        first = last
    return limits, multiples


def _is_ranked(plan: Plan) -> bool:
    return plan.random is not None and plan.random.epsilon is not None
