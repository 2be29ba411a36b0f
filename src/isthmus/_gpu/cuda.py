"""The ops on CUDA C++ kernels. Importing this module loads the extension isthmus._cuda."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isthmus import _cuda, reference
from isthmus._operands import laid_out, real
from isthmus.errors import BackendError
from isthmus.kernels.table import Table, to_device
from isthmus.reference.selection import task_vector

from . import tables
from .tables import Column, Part

ARCHITECTURES: list[str] = _cuda.architectures()
BLOCK = 1 << 13  # elements that one block of threads works on at a time
LARGE = 512  # rows of a lone assignment problem from which on more than its shortcut is left to the host

_DTYPES = {
    torch.float64: _cuda.Dtype.f64,
    torch.float32: _cuda.Dtype.f32,
    torch.bfloat16: _cuda.Dtype.bf16,
    torch.float16: _cuda.Dtype.f16,
}
_FAULTS = ("", "nan", "unbounded", "infeasible")
_NO_INDEX = torch.iinfo(torch.int64).max

ON_HOST = ARCHITECTURES == ["host"]  # as tests compile it: the bodies of kernels for the CPU
device_count = _cuda.device_count


def lerp(a: Column, b: Column, outputs: Column, weights: Tensor) -> None:
    """Write the interpolations, with one float64 weight for all rows or one for each, on any device."""

    def launch(part: Part) -> None:
        w = part.of_rows(weights)
        _cuda.lerp(_rows(part.table), w.data_ptr(), len(w) > 1, _queue(part.table.device))

    tables.run([a, b], outputs, launch, block=BLOCK)


def weighted_sum(columns: Sequence[Column], outputs: Column, weights: Tensor) -> None:
    """Write the sums; float64 weights of shape (1 or rows, models), on any device."""

    def launch(part: Part) -> None:
        w = part.of_rows(weights)
        _cuda.weighted_sum(_rows(part.table), w.data_ptr(), len(w) > 1, _queue(part.table.device))

    tables.run(columns, outputs, launch, block=BLOCK)


def consensus(
    columns: Sequence[Column], outputs: Column, plan: reference.Plan, *, stats: bool
) -> reference.Stats | None:
    """Write the merges; with ``stats`` count, too, and wait for the device.

    A majority of signs that turns out negative is put right by a second sweep on the device, over the accesses that the
    first one marked, or over everything where outputs are also inputs and the first one wrote nothing.

    Raises:
        BackendError: survivors depend on the rank of their magnitude.
    """
    if plan.random is not None and plan.random.epsilon is not None:
        raise BackendError("backend 'cuda' has no kernel for sparsify='magnitude_random'. Use backend='triton'.")
    rows = laid_out(columns, outputs, c_order=True)
    device = outputs[0].device
    in_place = tables.in_place(rows)
    majority = plan.vote != "none" and plan.zero_sign == "majority"
    sign = tables.SIGNS.get(plan.zero_sign, 1)
    first_group = torch.tensor(tables.first_groups([result.numel() for result in rows.results], plan.lengths))
    merges = [_Merge(part, plan, first_group, stats) for part in tables.parts(rows.inputs, rows.results, block=BLOCK)]
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for merge in merges:
        if not majority:
            merge.sweep(zero=sign, counting=True)
            continue
        merge.tally = torch.zeros(len(merge.part.rows), dtype=torch.int64, device=device) if plan.tally_rows else total
        if not in_place:
            merge.marks = torch.zeros(_cuda.mark_words(merge.rows), dtype=torch.int32, device=device)
        merge.sweep(
            write=not in_place, by_row=plan.tally_rows, count=_address(merge.tally), mark=_address(merge.marks),
            counting=True,
        )  # fmt: skip
    for merge in merges if majority else ():
        merge.sweep(by_row=plan.tally_rows, decide=_address(merge.tally), marked=_address(merge.marks))
    for target, result in rows.late:
        target.copy_(result)
    return _stats(merges, len(outputs), plan.weights.shape[1]) if stats else None


class _Merge:
    """The merge of one part of a call: its rows and plan as the extension takes them, and what is counted."""

    def __init__(self, part: Part, plan: reference.Plan, first_group: Tensor, stats: bool) -> None:
        device = part.table.device
        random = plan.random
        by_weight = plan.merge_func == "mean" and plan.divisor == "weight"
        self.part = part
        self.rows = _rows(part.table)
        self.tally: Tensor | None = None
        self.marks: Tensor | None = None
        self.kept = torch.zeros(len(part.rows), plan.weights.shape[1], dtype=torch.int64, device=device)
        self.counts = torch.zeros(len(part.rows), 4, dtype=torch.int64, device=device)
        self._stats = stats
        self._arrays: list[Tensor] = []

        def of_rows(values: Tensor | Sequence[int] | None) -> int:
            if values is None:
                return 0
            lines = torch.as_tensor(values)[torch.tensor(part.rows)]
            self._arrays.append(to_device(lines.contiguous(), device))
            return self._arrays[-1].data_ptr()

        def cuts(of: reference.Cuts | None) -> tuple[int, int]:
            if of is None:
                return 0, 0
            self._arrays += [to_device(of.value.contiguous(), device), to_device(of.index.contiguous(), device)]
            return self._arrays[-2].data_ptr(), self._arrays[-1].data_ptr()

        self._plan = _cuda.Plan(
            based=plan.based,
            vote=getattr(_cuda.Vote, plan.vote),
            merge=getattr(_cuda.MergeFunc, plan.merge_func),
            weights=of_rows(plan.weights),
            divisors=of_rows(plan.weights) if by_weight else 0,
            scaling=of_rows(plan.scaling),
            rescale=of_rows(plan.rescale),
            keep=cuts(plan.keep),
            drop=cuts(plan.drop),
            lengths=of_rows(plan.lengths),
            first_group=of_rows(first_group),
            keys=of_rows(None if random is None else random.keys),
            density=of_rows(None if random is None else random.density),
            starts=of_rows(None if random is None else random.starts),
            inverse=random is not None and random.inverse,
        )

    def sweep(self, *, counting: bool = False, **options: Any) -> None:
        """Launch one sweep; ``counting`` the one that statistics are taken of."""
        if counting and self._stats:
            options |= {"kept": self.kept.data_ptr(), "counts": self.counts.data_ptr()}
        _cuda.consensus(self.rows, self._plan, _cuda.Sweep(**options), _queue(self.part.table.device))


def _stats(merges: Sequence[_Merge], rows: int, models: int) -> reference.Stats:
    kept = torch.zeros(rows, models, dtype=torch.int64)
    counts = torch.zeros(rows, 4, dtype=torch.int64)
    for merge in merges:
        kept[merge.part.rows], counts[merge.part.rows] = merge.kept.cpu(), merge.counts.cpu()
    return reference.Stats(kept, *counts.unbind(1))


def select(
    columns: Sequence[Column], *, based: bool, groups: reference.Groups, ranks: Tensor, exact: bool
) -> reference.Selected:
    """The cuts at which the largest magnitudes of each task vector end; waits for the device only to read them."""
    rows = [[real(tensor).contiguous() for tensor in row] for row in zip(*columns, strict=True)]
    parts = tables.parts(rows, [row[0] for row in rows], block=BLOCK)
    if groups.whole and len(parts) > 1:  # rows of several dtypes are ranked together as what is computed of them
        models = range(len(columns) - based)
        tasks = [[task_vector(row, based, model) for model in models] for row in rows]
        widest = torch.float64 if any(x.dtype == torch.float64 for row in tasks for x in row) else torch.float32
        rows, based = [[x.to(widest) for x in row] for row in tasks], False
        parts = tables.parts(rows, [row[0] for row in rows], block=BLOCK)
    some = ranks > 0
    value = torch.where(some, 0.0, torch.inf).double()
    index = torch.where(some, _NO_INDEX, 0)
    above, equal = torch.zeros_like(index), torch.zeros_like(index)
    bad: list[tuple[int, int]] = []
    starts = tables.first_groups([row[0].numel() for row in rows], groups.lengths)
    for part in parts:
        numel = [rows[row][0].numel() for row in part.rows]
        lengths = None if groups.lengths is None or groups.whole else [groups.lengths[row] for row in part.rows]
        if groups.whole:
            of_part = torch.zeros(1, dtype=torch.int64)
        else:
            counts = [1] * len(numel) if lengths is None else [n // x for n, x in zip(numel, lengths, strict=True)]
            firsts = [starts[row] for row in part.rows]
            of_part = torch.cat([torch.arange(a, a + n) for a, n in zip(firsts, counts, strict=True)])
        found, nonfinite = _select_part(part.table, numel, lengths, based, groups.whole, ranks[of_part], exact)
        for target, source in zip((value, index, above, equal), found, strict=True):
            target[of_part] = source.cpu()
        place = int(nonfinite)
        if place != _NO_INDEX:
            models_of = ranks.shape[1]
            bad.append((part.rows[place // models_of], place % models_of))
    cuts = [reference.Cuts(value[..., q], index[..., q]) for q in range(ranks.shape[2])]
    return reference.Selected(cuts, above, equal, min(bad) if bad else None)


def _select_part(
    table: Table, numel: list[int], lengths: list[int] | None, based: bool, whole: bool, ranks: Tensor, exact: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Values, indices and counts of one table's groups, and the place of the first that is not finite."""
    device = table.device
    groups, models, count = ranks.shape
    blocks = [-(-n // table.block) for n in numel]
    first_block = [0, *itertools.accumulate(blocks)][:-1]
    first_group = tables.first_groups(numel, lengths)
    if whole:
        large = [(0, 0, sum(blocks), sum(numel), 0)]
    else:
        alone = [lengths is None or lengths[r] == n for r, n in enumerate(numel)]
        rows = [r for r, n in enumerate(numel) if alone[r] and n > _cuda.most_small]
        before = [0, *itertools.accumulate(blocks[r] for r in rows)]
        large = [
            (first_group[r], first_block[r], blocks[r], numel[r], skip) for r, skip in zip(rows, before, strict=False)
        ]
    row_starts = torch.tensor([0, *itertools.accumulate(numel)][:-1], dtype=torch.int64)
    lists = [torch.tensor(x, dtype=torch.int64).reshape(-1) for x in (first_group, large, lengths or [])]
    flat = [lists[0], row_starts, ranks.reshape(-1), *lists[1:]]
    parts = to_device(torch.cat(flat), device).split([len(x) for x in flat])
    value = torch.empty(ranks.shape, dtype=torch.float64, device=device)
    index, above, equal = (torch.empty(ranks.shape, dtype=torch.int64, device=device) for _ in range(3))
    nonfinite = torch.full((1,), _NO_INDEX, dtype=torch.int64, device=device)
    ranking = _cuda.Ranking(
        based=based,
        whole=whole,
        exact=exact,
        models=models,
        groups=groups,
        ranks=count,
        lengths=0 if lengths is None else parts[4].data_ptr(),
        first_group=parts[0].data_ptr(),
        row_starts=parts[1].data_ptr(),
        k=parts[2].data_ptr(),
        large=large,
        large_on_device=parts[3].data_ptr(),
        result=[x.data_ptr() for x in (value, index, above, equal, nonfinite)],
    )
    rows_of = _rows(table)
    workspace = torch.empty(_cuda.select_workspace(rows_of, ranking), dtype=torch.uint8, device=device)
    _cuda.select(rows_of, ranking, workspace.data_ptr(), _queue(device))
    return (value, index, above, equal), nonfinite


def assign(
    matrices: Tensor, starts: Tensor | None, *, maximize: bool, certificate: bool
) -> reference.Assignments | None:
    """Optimal assignments of a stack of matrices, with duals of the columns to start from or None.

    A lone problem of many rows keeps one block of threads busy and the rest of the device idle: of it the device tries
    the shortcut, each row with its nearest column, alone. Where these are not distinct, the answer is None and the
    problem is better solved on the host.

    Args:
        matrices: float32 or float64, (matrices, rows, columns) in C-order, with no more rows than columns.
        starts: float64 (matrices, columns), of square matrices.
        maximize: costs are the values negated.
        certificate: proofs are wanted.
    """
    device = matrices.device
    count, rows, cols = matrices.shape
    columns = torch.empty(count, rows, dtype=torch.int64, device=device)
    u = torch.empty(count, rows, dtype=torch.float64, device=device) if certificate else None
    v = torch.empty(count, cols, dtype=torch.float64, device=device)
    objectives = torch.empty(2, count, dtype=torch.float64, device=device)
    faults = torch.empty(count, 3, dtype=torch.int64, device=device)
    stack = _cuda.Stack(
        problems=count,
        rows=rows,
        cols=cols,
        matrices=matrices.data_ptr(),
        dtype=_DTYPES[matrices.dtype],
        maximize=maximize,
        starts=_address(starts),
        columns=columns.data_ptr(),
        u=_address(u),
        v=v.data_ptr(),
        primal=objectives[0].data_ptr(),
        dual=objectives[1].data_ptr(),
        faults=faults.data_ptr(),
    )
    workspace = torch.empty(_cuda.assign_workspace(stack), dtype=torch.uint8, device=device)
    if count == 1 and rows >= LARGE:
        solved = torch.empty(count, dtype=torch.int32, device=device)
        _cuda.assign_nearest(stack, solved.data_ptr(), workspace.data_ptr(), _queue(device))
        if not solved.item() and not faults[0, 0].item():
            return None
    else:
        _cuda.assign(stack, workspace.data_ptr(), _queue(device))
    proofs = None
    if u is not None:
        proofs = reference.Proofs(*(x.cpu().numpy() for x in (objectives, u, v)))
    fault = None
    for k, (kind, row, column) in enumerate(faults.tolist()):
        if kind != 0:
            fault = _FAULTS[kind], k, row, column
            break
    return reference.Assignments(columns.cpu().numpy(), proofs, fault)


def _rows(table: Table) -> Any:
    """The extension's view of a table."""
    return _cuda.Rows(
        addresses=table.addresses.data_ptr(),
        numel=table.numel.data_ptr(),
        first_block=table.first_block.data_ptr(),
        row_of_block=table.row_of_block.data_ptr(),
        rows=table.rows,
        blocks=table.blocks,
        block=table.block,
        width=table.width,
        dtype=_DTYPES[table.dtype],
        out_dtype=_DTYPES[table.out_dtype],
    )


def _queue(device: torch.device) -> tuple[int, int]:
    """Torch's current stream of a device; on the host, where tests run the bodies of kernels, there is none."""
    if device.type != "cuda":
        return 0, 0
    stream = torch.cuda.current_stream(device)
    return stream.device_index, stream.cuda_stream


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
