"""Exact selection on a GPU, without a wait for the host but one read of the results.

Groups of up to ``SORTED`` elements are sorted, many at a time. For each rank of a larger group, or of a whole model, a
sample gives a bracket that almost surely holds its magnitude. A sweep counts what lies above and at the ends of the
bracket, and what lies inside by range. Most often each range is one magnitude, and the answer is known; else the range
that holds the rank, or what lies outside of a bracket that missed, is the next bracket. So many sweeps are launched as
would be needed at worst; one with nothing to do ends at once. Where only some of the magnitudes that equal the answer
are in the set, one more sweep counts these by segment.

Results depend neither on the sample nor on the order in which counts are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus._operands import real
from isthmus.kernels import select as launch
from isthmus.kernels.table import Table, make, to_device
from isthmus.reference import NO_INDEX, Cuts, Groups, Selected, compute_dtype

Column = list[Tensor]

SORTED = 1 << 14  # elements of the largest group that is sorted
FEWEST = 1 << 13  # elements of the smallest group that is sampled
RUN = 8  # elements sampled at one place: neighbours cost nothing
LARGEST_SAMPLE = 1 << 20  # of one model
MARGIN = 6  # standard deviations of a sampled rank
AT_ONCE = 1 << 20  # magnitudes sorted, ranges of all histograms, and counts of segments, at a time: under 32 MB each
MOST_BINS = 1 << 17  # ranges of a bracket


class Pieces(NamedTuple):
    """Tensors or parts of them, as tables by dtype.

    Attributes:
        tables: each with, for all pieces, their rows in the table or -1; and the pieces of its rows. On the device.
        length: int64 (pieces,), of each, on the host.
        segment: the elements of a segment.
    """

    tables: list[tuple[Table, Tensor, Tensor]]
    length: Tensor
    segment: int


class Call(NamedTuple):
    """A call of ``select``, with ranks as int64 (ranks, models, groups), like all results.

    Attributes:
        rows: for each row the tensors of all columns, of one dtype.
        based: whether the first of them is the base.
        key: int32 or int64, the type of magnitudes.
        spare: how many of their last bits are always zero.
        exact: whether of equal magnitudes only some are in a set.
        ranks: what is looked for.
        n: int64 (groups,), how many elements a group has.
        results: int64 (4, ranks, models, groups), on the device: magnitude, index, how many are above and equal.
        nonfinite: int64 (1,), on the device: the least row * models + model where there are such.
    """

    rows: list[list[Tensor]]
    based: bool
    key: torch.dtype
    spare: int
    exact: bool
    ranks: Tensor
    n: Tensor
    results: Tensor
    nonfinite: Tensor

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.results.device

    @property
    def models(self) -> int:
        """How many models there are."""
        return self.ranks.shape[1]

    @property
    def ranked(self) -> Tensor:
        """Which of the ranks need a look at the data."""
        return (self.ranks > 0) & (self.ranks < self.n)


def select(columns: Sequence[Column], *, based: bool, groups: Groups, ranks: Tensor, exact: bool) -> Selected:
    """``isthmus.reference.select`` on the device of the columns; ranks and cuts are on the CPU."""
    rows = [_uniform([real(tensor).contiguous() for tensor in row]) for row in zip(*columns, strict=True)]
    row, begin, n = _groups(rows, groups)
    dtypes = {tensors[0].dtype for tensors in rows}
    device = rows[0][0].device
    call = Call(
        rows=rows,
        based=based,
        key=torch.int64 if torch.float64 in dtypes else torch.int32,
        spare=0 if based else min({torch.bfloat16: 16, torch.float16: 13}.get(dtype, 0) for dtype in dtypes),
        exact=exact,
        ranks=ranks.permute(2, 1, 0).contiguous(),
        n=n,
        results=torch.zeros((4, *ranks.permute(2, 1, 0).shape), dtype=torch.int64, device=device),
        nonfinite=torch.full((1,), NO_INDEX, device=device),
    )
    ranked = call.ranked
    if ranked.any():
        needed = ranked.any(0).any(0)
        small = needed & (n <= SORTED) & (not groups.whole)
        if small.any():
            _sort(call, small.nonzero()[:, 0], row, begin)
        if (needed & ~small).any():
            _search(call, (needed & ~small).nonzero()[:, 0], row, begin, groups.whole)
    found = torch.cat([call.results.view(-1), call.nonfinite]).cpu()
    nonfinite = None if found[-1] == NO_INDEX else divmod(int(found[-1]), call.models)
    everything = (call.ranks >= n) & (call.ranks != 0)
    value, index, above, equal = found[:-1].view(call.results.shape)
    value = torch.where(ranked, _values(value, call.key), torch.where(everything, 0.0, torch.inf))
    index = torch.where(ranked, index, torch.where(everything, NO_INDEX, 0))
    above = torch.where(ranked, above, 0)
    equal = torch.where(ranked, equal, torch.where(everything, n, 0))
    cuts = [Cuts(*(part.t().contiguous() for part in pair)) for pair in zip(value, index, strict=True)]
    above, equal = (part.permute(2, 1, 0).contiguous() for part in (above, equal))
    return Selected(cuts, above, equal, nonfinite)


def _uniform(row: list[Tensor]) -> list[Tensor]:
    """The tensors of a row, widened to what they are computed in where they are of several dtypes."""
    dtypes = {tensor.dtype for tensor in row}
    return row if len(dtypes) == 1 else [tensor.to(compute_dtype(dtypes)) for tensor in row]


def _groups(rows: list[list[Tensor]], groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
    """Of each group the row, where it begins there, and how many elements it has."""
    numel = torch.tensor([row[0].numel() for row in rows])
    if groups.whole:
        return torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), numel.sum()[None]
    if groups.lengths is None:
        return torch.arange(len(rows)), torch.zeros_like(numel), numel
    length = torch.tensor(groups.lengths)
    count = torch.where(numel > 0, numel // length, 0)
    row = torch.arange(len(rows)).repeat_interleave(count)
    place = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
    return row, place * length[row], length[row]


def _values(keys: Tensor, key: torch.dtype) -> Tensor:
    """The magnitudes, float64, whose bits these are."""
    return keys.view(torch.float64) if key == torch.int64 else keys.to(torch.int32).view(torch.float32).double()


def _pieces(call: Call, row: Tensor, begin: Tensor, length: Tensor) -> Pieces:
    """Tables of parts of rows, each of at least one element."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for piece, at in enumerate(row.tolist()):
        by_dtype.setdefault(call.rows[at][0].dtype, []).append(piece)
    places, begins, lengths = row.tolist(), begin.tolist(), length.tolist()
    segment = launch.segment_of(max(lengths))
    tables = []
    for dtype, pieces in by_dtype.items():
        row_of_piece = torch.full_like(row, -1)
        row_of_piece[pieces] = torch.arange(len(pieces))
        inputs = [[x.data_ptr() + begins[p] * x.element_size() for x in call.rows[places[p]]] for p in pieces]
        table = make(
            [[*addresses, addresses[0]] for addresses in inputs],  # nothing is written
            [lengths[p] for p in pieces],
            dtype=dtype,
            out_dtype=dtype,
            block=segment,
            device=call.device,
            keep_alive=[x for tensors in call.rows for x in tensors],
        )
        tables.append((table, to_device(row_of_piece, call.device), to_device(torch.tensor(pieces), call.device)))
    return Pieces(tables, length, segment)


def _take(call: Call, pieces: Pieces, runs: tuple[Tensor, Tensor, Tensor], run: int, models: range) -> Tensor:
    """The magnitudes of runs of elements, (models, runs, run); see ``kernels.select.take``."""
    keys = torch.empty((len(models), len(runs[0]), run), dtype=call.key, device=call.device)
    for table, row_of_piece, _ in pieces.tables:
        launch.take(table, row_of_piece, runs, call.based, models[0], keys)
    return keys


def _at_once(size: int, groups: Tensor, models: int) -> Iterator[tuple[Tensor, range]]:
    """Groups and models of which ``size`` elements each may be sorted at a time."""
    models_at_once = min(models, max(1, AT_ONCE // size))
    for part in groups.split(max(1, AT_ONCE // (size * models_at_once))):
        for first in range(0, models, models_at_once):
            yield part, range(first, min(first + models_at_once, models))


def _ceil_power(x: Tensor) -> Tensor:
    """The least powers of two that are at least x."""
    return 1 << (x.double().log2().ceil().long())


def _sort(call: Call, groups: Tensor, row: Tensor, begin: Tensor) -> None:
    """Select within small groups, those of alike lengths together."""
    used = torch.unique(row[groups])
    pieces = _pieces(
        call, used, torch.zeros_like(used), torch.tensor([call.rows[at][0].numel() for at in used.tolist()])
    )
    size = _ceil_power(call.n[groups])
    for run in torch.unique(size).tolist():
        for part, models in _at_once(run, groups[size == run], call.models):
            runs = [torch.searchsorted(used, row[part]), begin[part], call.n[part], row[part], part]
            piece, start, length, code, at = to_device(torch.stack(runs), call.device)
            keys = _take(call, pieces, (piece, start, length), run, models)
            ordered = keys.sort(dim=-1, descending=True).values
            ranks = call.ranks[:, models[0] : models[-1] + 1, part]
            asked = to_device((ranks > 0) & (ranks < call.n[part]), call.device).any(0)
            model = torch.arange(models[0], models[-1] + 1, device=call.device)
            bad = torch.where(
                asked & (ordered[..., 0] >= launch.INFINITY[call.key]), code * call.models + model[:, None], NO_INDEX
            )
            torch.minimum(call.nonfinite, bad.min(), out=call.nonfinite)
            for q, k in enumerate(to_device(torch.minimum(ranks, call.n[part]).clamp(min=1), call.device)):
                cut = ordered.gather(-1, k[..., None] - 1)
                same = keys == cut
                above, equal = (keys > cut).sum(-1), same.sum(-1)
                index = torch.full_like(above, NO_INDEX)
                if call.exact:
                    last = (same.cumsum(-1) < (k - above)[..., None]).sum(-1) + 1
                    index = torch.where(above + equal > k, last, NO_INDEX)
                to = call.results[:, q, models[0] : models[-1] + 1]
                to.index_copy_(2, at, torch.stack([cut[..., 0].long(), index, above, equal]))


class Searches(NamedTuple):
    """Searches for ranks of large groups, in the order of groups, models and ranks; on the host.

    Attributes:
        group: int64 (searches,), of each, among the large groups.
        model: its model.
        rank: the place of its rank among all of the call.
        k: its rank.
    """

    group: Tensor
    model: Tensor
    rank: Tensor
    k: Tensor

    def where(self, chosen: Tensor | slice) -> Searches:
        """Some of them."""
        return Searches(*(part[chosen] for part in self))


class Layout(NamedTuple):
    """How the pieces of large groups lie one after the other, on the host and (``on_device``) on the device.

    Attributes:
        group: int64 (pieces,), of each piece among the large groups.
        row: of each piece, in the call.
        start: how many elements of other pieces are before each.
        segment: the first segment of each, counted through all.
        group_start: how many elements are before each large group.
        group_segment: the first segment of each large group, and how many segments there are.
    """

    group: Tensor
    row: Tensor
    start: Tensor
    segment: Tensor
    group_start: Tensor
    group_segment: Tensor

    def on_device(self, device: torch.device) -> Layout:
        """The same on a device."""
        sizes = [len(part) for part in self]
        return Layout(*to_device(torch.cat(self), device).split(sizes))


def _layout(groups: int, group: Tensor, row: Tensor, pieces: Pieces) -> Layout:
    length = pieces.length
    segments = -(-length // pieces.segment)
    of_group = torch.zeros(2, groups + 1, dtype=torch.int64)
    of_group[:, 1:].index_add_(1, group, torch.stack([length, segments]))
    group_start, group_segment = of_group.cumsum(1)
    return Layout(group, row, length.cumsum(0) - length, segments.cumsum(0) - segments, group_start[:-1], group_segment)


def _search(call: Call, groups: Tensor, row: Tensor, begin: Tensor, whole: bool) -> None:
    """Select within large groups."""
    if whole:
        numel = torch.tensor([tensors[0].numel() for tensors in call.rows])
        of_piece = numel.nonzero()[:, 0]
        pieces = _pieces(call, of_piece, torch.zeros_like(of_piece), numel[of_piece])
        host = _layout(1, torch.zeros_like(of_piece), of_piece, pieces)
    else:
        pieces = _pieces(call, row[groups], begin[groups], call.n[groups])
        host = _layout(len(groups), torch.arange(len(groups)), row[groups], pieces)
    layout = host.on_device(call.device)
    group, model, rank = call.ranked[:, :, groups].permute(2, 1, 0).nonzero().unbind(1)
    searches = Searches(group, model, rank, call.ranks[rank, model, groups[group]])
    ends = _brackets(call, pieces, layout, searches, call.n[groups])
    segments = host.group_segment.diff()[group]
    first = 0
    while first < len(group):
        # At least 512 ranges for each, and no more counts than may be.
        fits = int((segments[first:].cumsum(0) <= AT_ONCE).sum())
        batch = slice(first, first + min(max(1, fits), AT_ONCE >> 9))
        part = searches.where(batch)
        to = part.rank, part.model, groups[part.group]
        found = _Sweeps(call, pieces, host, layout, part, ends[:, batch]).find()
        call.results[(slice(None), *(to_device(index, call.device) for index in to))] = found
        first = batch.stop


def _brackets(call: Call, pieces: Pieces, layout: Layout, searches: Searches, n: Tensor) -> Tensor:
    """The low and the high end, int64 (2, searches), of where each magnitude lies in all likelihood."""
    ends = torch.zeros((2, len(searches.k)), dtype=torch.int64, device=call.device)
    ends[1] = infinity = launch.INFINITY[call.key]
    # A sample of m leaves about n / sqrt(m) magnitudes in a bracket. This m keeps the time for both small.
    sample = _ceil_power(0.4 * n**0.75).clamp(max=LARGEST_SAMPLE)
    for m in torch.unique(sample[n >= FEWEST]).tolist():
        for part, models in _at_once(m, ((sample == m) & (n >= FEWEST)).nonzero()[:, 0], call.models):
            here = torch.isin(searches.group, part) & (searches.model >= models[0]) & (searches.model <= models[-1])
            here = here.nonzero()[:, 0]
            if len(here) == 0:
                continue
            runs = _sampled(layout, to_device(part, call.device), to_device(n[part], call.device), m // RUN)
            keys = _take(call, pieces, runs, RUN, models).view(len(models), len(part), m)
            ordered = keys.sort(dim=-1, descending=True).values.clamp_(max=infinity).view(-1)
            some = searches.where(here)
            p = some.k / n[some.group]
            spread = MARGIN * (p * (1 - p) * m).sqrt() + 1
            high, low = p * m - spread, p * m + spread
            line = ((some.model - models[0]) * len(part) + torch.searchsorted(part, some.group)) * m
            reached = torch.stack([low < m, high >= 0])
            at = line + torch.stack([low.long().clamp(max=m - 1), high.long().clamp(min=0)])
            reached, at = to_device(reached, call.device), to_device(at, call.device)
            here = to_device(here, call.device)
            ends[:, here] = torch.where(reached, ordered[at].long(), ends[:, here])
    return ends


def _sampled(layout: Layout, groups: Tensor, n: Tensor, runs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Runs of elements of groups, one at random in each of as many equal parts: their pieces, begins and lengths."""
    i = torch.arange(runs, device=n.device)
    bits = i * 0x1E3779B97F4A7C15  # scrambled by multiplications and shifts; int64 wraps around
    for factor in (0x3F58476D1CE4E5B9, 0x14D049BB133111EB):
        bits = (bits ^ ((bits >> 29) & 0x7FFFFFFFF)) * factor
    stride = (n // runs)[:, None]
    place = i * stride + ((bits >> 33) & 0x7FFFFFFF) % stride
    place = (place + layout.group_start[groups][:, None]).view(-1)
    piece = torch.searchsorted(layout.start, place, right=True) - 1
    return piece, (place - layout.start[piece]) // RUN * RUN, torch.full_like(piece, RUN)


class _Sweeps:
    """The sweeps for some searches, and what follows from their counts."""

    def __init__(
        self, call: Call, pieces: Pieces, host: Layout, layout: Layout, searches: Searches, ends: Tensor
    ) -> None:
        count = len(searches.k)
        device = call.device
        models = call.models
        segments = host.group_segment.diff()[searches.group]
        after = segments.cumsum(0)
        first_search = torch.zeros(len(host.group_start) * models + 1, dtype=torch.int64)
        first_search[1:] = torch.bincount(searches.group * models + searches.model, minlength=len(first_search) - 1)
        counts_at = after - segments - host.group_segment[searches.group]
        upload = [searches.k, searches.model, after - segments, after, counts_at, first_search.cumsum(0)]
        self._k, self._model, self._from, self._until, counts_at, self._first_search = to_device(
            torch.cat(upload), device
        ).split([len(part) for part in upload])
        self._call, self._pieces, self._layout = call, pieces, layout
        bits = (63 if call.key == torch.int64 else 31) - call.spare
        self._bins_log = min(MOST_BINS, AT_ONCE // count).bit_length() - 1
        self._sweeps = 1 + -(-bits // self._bins_log)  # the first may miss
        # The low and the high end, the shift, whether it is open, and where to count.
        self._state = torch.zeros((5, count), dtype=torch.int64, device=device)
        self._state[:2], self._state[3], self._state[4] = ends, 1, counts_at
        self._low, self._high, self._shift, self._open, _ = self._state
        self._counts = torch.zeros((3, int(after[-1])), dtype=torch.int32, device=device)
        self._histogram = torch.empty((count, 1 << self._bins_log), dtype=torch.int64, device=device)
        self._answer = torch.zeros((3, count), dtype=torch.int64, device=device)  # magnitude, above, equal

    def find(self) -> Tensor:
        """The magnitude, the index, how many are above and equal: int64 (4, searches), on the device."""
        for _ in range(self._sweeps):
            # Ranges that are as fine as so many allow; of a width below 2^e.
            exponent = torch.frexp((self._high - self._low).double()).exponent
            self._shift.copy_((exponent - self._bins_log).clamp(min=self._call.spare))
            self._sweep()
            self._settle()
        value, above, equal = self._answer
        index = self._index(value, self._k - above, equal) if self._call.exact else torch.full_like(value, NO_INDEX)
        return torch.stack([value, index, above, equal])

    def _sweep(self) -> None:
        call, layout = self._call, self._layout
        self._histogram.zero_()
        for table, _, pieces in self._pieces.tables:
            launch.sweep(
                table,
                torch.stack([layout.group[pieces], layout.segment[pieces], layout.row[pieces]], dim=1),
                call.based,
                self._first_search,
                self._state,
                self._open.sum(),
                self._counts,
                self._histogram,
                call.nonfinite,
                call.key,
            )

    def _counted(self) -> Tensor:
        """How many were counted before each segment, int64 (3, counts + 1)."""
        total = self._counts.new_zeros((3, self._counts.shape[1] + 1), dtype=torch.int64)
        torch.cumsum(self._counts, 1, out=total[:, 1:])
        return total

    def _settle(self) -> None:
        """Conclude from what a sweep found; a search that is not done has a better bracket afterwards."""
        counted = self._counted()
        above, at_high, at_low = counted[:, self._until] - counted[:, self._from]
        at_low = torch.where(self._low == self._high, 0, at_low)
        through = self._histogram.cumsum(1)
        inside = through[:, -1]
        left = self._k - above - at_high  # of those inside, from the largest
        last = len(through[0]) - 1
        place = torch.searchsorted(through, (inside - left)[:, None], right=True).clamp_(max=last)
        within, until = self._histogram.gather(1, place)[:, 0], through.gather(1, place)[:, 0]
        low = self._low + (place[:, 0] << self._shift)
        high = torch.minimum(self._high, low + (torch.ones_like(low) << self._shift) - 1)

        is_open = self._open != 0
        beyond = is_open & (self._k <= above)
        on_high = is_open & ~beyond & (left <= 0)
        among = is_open & (left > 0) & (left <= inside)
        on_low = is_open & (left > inside) & (left <= inside + at_low)
        below = is_open & (left > inside + at_low)
        fine = among & (self._shift == self._call.spare)
        for found, *answer in (
            (on_high, self._high, above, at_high),
            (fine, low, above + at_high + inside - until, within),
            (on_low, self._low, above + at_high + inside, at_low),
        ):
            self._answer.copy_(torch.where(found, torch.stack(answer), self._answer))
        self._open.copy_(beyond | below | (among & ~fine))
        infinity = launch.INFINITY[self._call.key]
        ends = torch.where(among, torch.stack([low, high]), self._state[:2])
        ends[0] = torch.where(beyond, self._high, torch.where(below, 0, ends[0]))
        ends[1] = torch.where(below, self._low, torch.where(beyond, infinity, ends[1]))
        self._state[:2] = ends

    def _index(self, value: Tensor, left: Tensor, equal: Tensor) -> Tensor:
        """Where the ``left``-th of the magnitudes that equal the answer lies, plus 1, if not all of them are wanted."""
        wanted = equal > left
        self._low.copy_(value)
        self._high.copy_(value)
        self._shift.zero_()
        self._open.copy_(wanted)
        self._sweep()
        counted = self._counted()[1]
        # Searches that want nothing lead anywhere within range.
        count = torch.searchsorted(counted[1:], counted[self._from] + left)
        count = torch.minimum(torch.maximum(count, self._from), self._until - 1)
        segment = count - self._state[4]
        piece = (torch.searchsorted(self._layout.segment, segment, right=True) - 1).clamp(min=0)
        begin = (segment - self._layout.segment[piece]) * self._pieces.segment
        place = torch.zeros_like(value)
        for table, row_of_piece, _ in self._pieces.tables:
            launch.locate(
                table,
                row_of_piece,
                self._call.based,
                piece,
                begin,
                self._model,
                self._open,
                _values(value, self._call.key),
                left - (counted[count] - counted[self._from]),
                place,
            )
        before = self._layout.start[piece] - self._layout.group_start[self._layout.group[piece]]
        return torch.where(wanted, before + place, NO_INDEX)
