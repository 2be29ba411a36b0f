"""Merging by consensus over tables, by the rule of ``isthmus.reference.consensus``.

Up to eight models are kept in registers; more are read twice, the second time from the cache. Everything but the
dtypes, the kind of trimming and the bucket that the number of models falls in is decided when a kernel runs: branches
that all elements take alike cost next to nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .numbers import DTYPES, EXACT, computed_in, narrow, pointer
from .numbers import TABLES as ROWS
from .table import Table
from .trimming import AT_RANDOM, BY_PIECE, BY_ROW, TABLES, Trimming, cut, entries, magnitude, pieces, survivor, tile_of

VOTES = {"none": 0, "total": 1, "frequency": 2, "weighted_total": 3}
MERGES = {"sum": 0, "mean": 1, "max": 2}
BUCKETS = (2, 4, 8)  # models that are kept in registers
BLOCK = 4096  # elements of one program, but in the interpreter
BY_TALLY = 2  # in the place of the sign that cancelled votes elect

_NONE, _FREQUENCY, _WEIGHTED = (tl.constexpr(VOTES[name]) for name in ("none", "frequency", "weighted_total"))
_MEAN, _MAX = (tl.constexpr(MERGES[name]) for name in ("mean", "max"))
_BY_TALLY = tl.constexpr(BY_TALLY)
_AT_ONCE = tl.constexpr(4)  # models whose loads are in flight together where they are not kept


class Rule(NamedTuple):
    """What is done to the rows of a table; tensors on its device.

    Attributes:
        based: whether the first input of each row is its base.
        vote: of ``VOTES``.
        merge: of ``MERGES``.
        by_weight: whether a mean divides by the sum of weights, else by their number.
        numbers: λ, the weights and the factors of survivors of each row: (rows, 1 + 2 models), in the type computed in.
    """

    based: bool
    vote: int
    merge: int
    by_weight: bool
    numbers: Tensor


class Counting(NamedTuple):
    """What launches count and find out about cancelled votes.

    Attributes:
        tally: int64 (lines,): positive votes less negative ones, of each line or in the first for all.
        by_line: whether each line has its own.
        cancelled: int32 (blocks,): which blocks of a table have cancelled votes.
        counts: int64 (lines, models + 4): survivors that are not 0, then positive, negative and cancelled votes and
            conflicts; or without lines if they are not wanted.
    """

    tally: Tensor
    by_line: bool
    cancelled: Tensor
    counts: Tensor


@triton.jit
def _elect(votes, rho, weight, vote):
    """Add one model's survivors to the vote."""
    term = rho
    if vote == _WEIGHTED:
        term = weight * rho
    elif vote == _FREQUENCY:  # NaN has no sign: it stays what it is
        term = tl.where(rho > 0, 1.0, tl.where(rho < 0, -1.0, rho)).to(rho.dtype)
    return votes + term


@triton.jit
def _with_sign(bits, sign, compute: tl.constexpr):
    return (bits ^ sign).to(compute, bitcast=True)


@triton.jit
def _fold(merged, divisor, agreed, sign, rho, weight, by_weight, vote, merge, compute: tl.constexpr):
    """Fold one model's survivors into the merge where they agree with the elected sign, or where they are not 0."""
    term = weight * rho
    voting = rho
    if vote == _WEIGHTED:
        voting = term
    agree = voting != 0
    if vote != _NONE:
        agree = _with_sign(voting.to(sign.dtype, bitcast=True), sign, compute) > 0
    if merge == _MAX:
        candidate = term
        if vote != _NONE:
            candidate = _with_sign(magnitude(term), sign, compute)
        merged = tl.where(agree & (magnitude(term) > magnitude(merged)), candidate, merged)
    else:
        merged = tl.where(agree, merged + term, merged)
    if merge == _MEAN:
        share = tl.where(by_weight != 0, weight, 1.0).to(compute)
        divisor = tl.where(agree, divisor + share, divisor)
    return merged, divisor, agreed | agree


@triton.jit
def _settled(base, merged, divisor, votes, vote, merge, cancels, scaling, compute: tl.constexpr):
    """Divide by the divisor, scale, and add to the base; ``cancels``: cancelled votes elect nothing."""
    if merge == _MEAN:
        divisor = tl.where(divisor == 0, 1.0, divisor).to(compute)
        merged = merged / divisor if compute == tl.float64 else tl.div_rn(merged, divisor)
    if (vote != _NONE) & cancels:
        merged = tl.where(votes == 0, 0.0, merged)
    result = tl.where(merged == 0, base, base + scaling * merged)  # nothing added: the base to the bit, -0 included
    if vote != _NONE:
        result = tl.where(votes != votes, votes, result)
    return result


@triton.jit
def _count(counts, condition):
    tl.atomic_add(counts, tl.sum(condition.to(tl.int32)).to(tl.int64), sem="relaxed")


@triton.jit
def _count_survivors(counts, up, down, rho):
    _count(counts, rho != 0)
    return up | (rho > 0), down | (rho < 0)


@triton.jit
def _model(places, numbers, cuts, line, k, models, based, dtype: tl.constexpr, aligned: tl.constexpr):
    """Where model k lies, its weight, its factor, and how it is trimmed; beyond the last the last, no survivors."""
    present = k < models
    k = tl.minimum(k, models - 1)
    weight, factor = tl.load(numbers + 1 + k), tl.load(numbers + 1 + models + k)
    low, at, high, until = cut(cuts, line, k, models, present)
    return pointer(places, based + k, dtype, aligned), weight, factor, low, at, high, until


@triton.jit
def _survivor(
    t, model, begin, mask, place, line, k, row, tables, models, kind: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    _, _, factor, low, at, high, until = model
    _, _, start, odds = row
    cuts, limits, factors, stride = tables
    last = tl.minimum(k, models - 1)
    return survivor(
        t, mask, factor, low, at, high, until, line, place, begin, start, cuts, limits, factors, odds + last * stride,
        last, models, k < models, kind, tile,
    )  # fmt: skip


@triton.jit
def _tile(
    begin, mask, addresses, numbers, counts, row, tables, rule, models,
    dtype: tl.constexpr, out: tl.constexpr, compute: tl.constexpr, aligned: tl.constexpr, tile: tl.constexpr,
    kind: tl.constexpr, bucket: tl.constexpr,
):  # fmt: skip
    """Merge the elements from ``begin``; gives positive votes less negative ones, and which votes cancelled.

    Weights and cuts of models are loaded where they are needed: those of eight would take half of all registers.
    """
    based, vote, merge, by_weight, negative, cancels, writes, counting = rule
    group, length, _, _ = row
    at = begin + tl.arange(0, tile)
    base = tl.zeros([tile], compute)
    if based:
        base = entries(pointer(addresses, 0, dtype, aligned), at, mask, compute)
    line, place = at, at
    if kind == BY_PIECE:
        line, place = pieces(begin, length, tile)
        line += group
    votes, merged, divisor = tl.zeros([tile], compute), tl.zeros([tile], compute), tl.zeros([tile], compute)
    nothing = tl.zeros([tile], tl.int1)
    agreed, up, down = nothing, nothing, nothing
    survivors = ()
    if bucket > 0:
        xs = ()
        for k in tl.static_range(bucket):
            source = pointer(addresses, based + tl.minimum(k, models - 1), dtype, aligned)
            xs = xs + (entries(source, at, mask, compute),)
        for k in tl.static_range(bucket):
            model = _model(addresses, numbers, tables[0], group, k, models, based, dtype, aligned)
            rho = _survivor(xs[k] - base, model, begin, mask, place, line, k, row, tables, models, kind, tile)
            survivors = survivors + (rho,)
            if vote != _NONE:
                votes = _elect(votes, rho, model[1], vote)
    else:
        if vote != _NONE:
            for first in range(0, models, _AT_ONCE):
                for step in tl.static_range(_AT_ONCE):
                    k = first + step
                    model = _model(addresses, numbers, tables[0], group, k, models, based, dtype, aligned)
                    t = entries(model[0], at, mask, compute) - base
                    rho = _survivor(t, model, begin, mask, place, line, k, row, tables, models, kind, tile)
                    votes = _elect(votes, rho, model[1], vote)
    bits = votes.to(magnitude(votes).dtype, bitcast=True)
    zero = tl.where(negative, 1, 0).to(bits.dtype) << (compute.primitive_bitwidth - 1)
    sign = tl.where(votes == 0, zero, bits ^ magnitude(votes))
    if vote == _NONE:
        sign = bits * 0
    if bucket > 0:
        for k in tl.static_range(bucket):
            last = tl.minimum(k, models - 1)
            weight = tl.load(numbers + 1 + last)
            merged, divisor, agreed = _fold(
                merged, divisor, agreed, sign, survivors[k], weight, by_weight, vote, merge, compute
            )
            if counting:
                up, down = _count_survivors(counts + last, up, down, survivors[k])
    else:
        for first in range(0, models, _AT_ONCE):
            for step in tl.static_range(_AT_ONCE):
                k = first + step
                model = _model(addresses, numbers, tables[0], group, k, models, based, dtype, aligned)
                t = entries(model[0], at, mask, compute) - base
                rho = _survivor(t, model, begin, mask, place, line, k, row, tables, models, kind, tile)
                merged, divisor, agreed = _fold(
                    merged, divisor, agreed, sign, rho, model[1], by_weight, vote, merge, compute
                )
                if counting:
                    up, down = _count_survivors(counts + tl.minimum(k, models - 1), up, down, rho)
    positive, opposed, cancelled = nothing, nothing, nothing
    if vote != _NONE:  # both signs were among cancelled votes: whichever was elected, one of them agreed
        positive, opposed, cancelled = votes > 0, votes < 0, (votes == 0) & agreed
    if counting:
        _count(counts + models, positive)
        _count(counts + models + 1, opposed)
        _count(counts + models + 2, cancelled)
        _count(counts + models + 3, up & down)
    if writes:
        result = _settled(base, merged, divisor, votes, vote, merge, cancels, tl.load(numbers), compute)
        tl.store(pointer(addresses, based + models, out, aligned) + at, narrow(result, out), mask=mask)
    return positive.to(tl.int32) - opposed.to(tl.int32), cancelled.to(tl.int32)


@triton.jit(
    do_not_specialize=[
        "odds_stride", "by_line", "counting", "models", "based", "vote", "merge", "by_weight", "zero_sign", "writes",
        "tallies", "revises",
    ],
    do_not_specialize_on_alignment=[*ROWS, *TABLES, "numbers", "tally", "cancelled", "counts"],
)  # fmt: skip
def _consensus(
    addresses, numel, first_block, row_of_block, cuts, places, limits, factors, odds_stride, numbers, tally, by_line,
    cancelled, counts, counting, models, based, vote, merge, by_weight, zero_sign, writes, tallies, revises,
    dtype: tl.constexpr, out: tl.constexpr, compute: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr,
    tile: tl.constexpr, kind: tl.constexpr, bucket: tl.constexpr,
):  # fmt: skip
    here = tl.program_id(0)
    at = tl.load(row_of_block + here).to(tl.int64)
    group, length, start = tl.load(places + 5 * at), tl.load(places + 5 * at + 1), tl.load(places + 5 * at + 2)
    line, odds = tl.load(places + 5 * at + 3), tl.load(places + 5 * at + 4)
    votes = tally + line * by_line
    sum_of_votes = tl.load(votes)
    # What was written holds where no vote cancelled, or where cancelled votes are positive.
    if (revises != 0) & ((tl.load(cancelled + here) == 0) | (sum_of_votes > 0)):
        return
    begin = (here - tl.load(first_block + at)) * block
    end = tl.minimum(begin + block, tl.load(numel + at))
    addresses += at * (based + models + 1)
    numbers += at * (1 + 2 * models)
    counts += line * (models + 4)
    negative = (zero_sign < 0) | ((zero_sign == _BY_TALLY) & (sum_of_votes <= 0))
    row = (group, length, start, odds)
    tables = (cuts, limits, factors, odds_stride.to(tl.int64))
    rule = (based, vote, merge, by_weight, negative, zero_sign == 0, writes, counting)
    balance, disputed = tl.zeros([tile], tl.int32), tl.zeros([tile], tl.int32)
    for first in range(begin, end, tile):
        if first + tile <= end:
            more, cancel = _tile(
                first, None, addresses, numbers, counts, row, tables, rule, models, dtype, out, compute, aligned,
                tile, kind, bucket,
            )  # fmt: skip
        else:
            more, cancel = _tile(
                first, first + tl.arange(0, tile) < end, addresses, numbers, counts, row, tables, rule, models,
                dtype, out, compute, aligned, tile, kind, bucket,
            )  # fmt: skip
        balance += more
        disputed |= cancel
    if tallies:
        tl.store(cancelled + here, tl.max(disputed))
        tl.atomic_add(votes, tl.sum(balance).to(tl.int64), sem="relaxed")


def consensus(
    table: Table,
    trimming: Trimming,
    rule: Rule,
    counting: Counting,
    *,
    zero_sign: int,
    writes: bool = True,
    tallies: bool = False,
    revises: bool = False,
) -> None:
    """Merge the rows of a table.

    Args:
        table: the base, if the rule has one, then the models.
        trimming: what survives.
        rule: how survivors are merged.
        counting: what is counted.
        zero_sign: what cancelled votes elect: 1, -1, 0 for nothing, or ``BY_TALLY``: the sign of the tally, -1 if it
            is 0.
        writes: write the outputs.
        tallies: add to the tally, and note which blocks have cancelled votes.
        revises: only blocks that were noted, and only where the tally is not positive.
    """
    models = table.width - rule.based
    held = table.aligned and table.dtype == table.out_dtype and trimming.kind in (BY_ROW.value, AT_RANDOM.value)
    bucket = next((size for size in BUCKETS if models <= size), 0) if held else 0
    _consensus[(table.blocks,)](
        table.addresses,
        table.numel,
        table.first_block,
        table.row_of_block,
        trimming.cuts,
        trimming.places,
        trimming.limits,
        trimming.factors,
        trimming.limits.shape[-1],
        rule.numbers,
        counting.tally,
        int(counting.by_line),
        counting.cancelled,
        counting.counts,
        int(len(counting.counts) > 0),
        models,
        int(rule.based),
        rule.vote,
        rule.merge,
        int(rule.by_weight),
        zero_sign,
        int(writes),
        int(tallies),
        int(revises),
        dtype=DTYPES[table.dtype],
        out=DTYPES[table.out_dtype],
        compute=computed_in(table.dtype),
        aligned=bucket > 0,
        block=table.block,
        tile=tile_of(table),
        kind=trimming.kind,
        bucket=bucket,
        **EXACT,
    )
