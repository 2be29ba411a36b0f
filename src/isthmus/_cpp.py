"""The ops on the compiled extension for the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import _native, reference
from ._operands import laid_out, real

SHARED_ELEMENTS = 1 << 20  # of outputs that may share one allocation: a view kept by the user keeps no more alive

Column = list[Tensor]
Indices = Sequence[Tensor | None]  # of one tensor, one for each dimension
Rule = Callable[[Any, Any], None]  # of the extension and a table


def plain_table(columns: Sequence[Column], out: Column | None) -> Any:
    """The compiled extension's table of the rows if it vouches that they are valid, else ``None``.

    It does for plain CPU tensors in C-order, one shape a row, with outputs that are disjoint from all inputs or are
    exactly one of their own row.
    """
    module, _ = _native.load_cpu()
    return None if module is None else module.plain_table(columns, out)


def plain_sources(tensors: Column, indices: object, out: Column | None, *, same_dtype: bool) -> Any:
    """The compiled extension's view of permuted tensors if it vouches that they are valid, else ``None``.

    It does for plain CPU tensors in C-order, lists of indices in range, and outputs that are disjoint from all of them
    and, where ``same_dtype``, of the tensors' dtypes.
    """
    module, _ = _native.load_cpu()
    return None if module is None else module.plain_sources(tensors, indices, out, same_dtype)


def lerp(a: Column, b: Column, weights: list[float], *, out: Column | None, table: Any) -> Column:
    """The interpolations of all rows."""
    return _run(
        [a, b], out, table, lambda module, rows: module.lerp(rows, weights, torch.get_num_threads()), c_order=False
    )


def weighted_sum(columns: Sequence[Column], weights: list[float], *, out: Column | None, table: Any) -> Column:
    """The weighted sums of all rows; weights row after row, or one list for all."""
    return _run(
        columns,
        out,
        table,
        lambda module, rows: module.weighted_sum(rows, weights, torch.get_num_threads()),
        c_order=False,
    )


def permute(tensors: Column, indices: Sequence[Indices], results: Column, *, sources: Any) -> None:
    """Write permuted tensors to results that have no gaps."""
    sources = sources or _sources(tensors, indices, results)
    sources.outputs = [result.data_ptr() for result in results]
    _native.cpu().permute(sources, torch.get_num_threads())


def lerp_permuted(
    a: Column, b: Column, outputs: Column, weights: list[float], indices: Sequence[Indices], *, table: Any, sources: Any
) -> None:
    """Write interpolations with permuted tensors; ``table`` and ``sources`` are both given or neither."""
    module = _native.cpu()
    late: list[tuple[Tensor, Tensor]] = []
    values = [real(tensor) for tensor in b]
    if table is None:
        table, results, late = _strided_table(module, [a], outputs, c_order=False)
        by_axis = [(*index, None) if tensor.is_complex() else index for tensor, index in zip(b, indices, strict=True)]
        sources = _sources(values, by_axis, results)
    else:
        table.set_outputs(outputs)
    dtypes = [_dtype_codes(module)[tensor.dtype] for tensor in values]
    module.lerp_permuted(table, sources, dtypes, weights, torch.get_num_threads())
    for target, result in late:
        target.copy_(result)


def _sources(tensors: Column, indices: Sequence[Indices], results: Column) -> Any:
    """The extension's view of permuted tensors of any strides, to be written to ``results``, which have no gaps."""
    sources = []
    for tensor, index, result in zip(tensors, indices, results, strict=True):
        axes = range(tensor.dim())
        order = axes if result.is_contiguous() else sorted(axes, key=result.stride, reverse=True)
        shape, strides = [tensor.shape[d] for d in order], [tensor.stride(d) for d in order]
        addresses = [0 if x is None else x.data_ptr() for x in (index[d] for d in order)]
        sources.append((tensor.data_ptr(), tensor.element_size(), shape, strides, addresses))
    return _native.cpu().Sources(sources)


def select(
    columns: Sequence[Column], *, based: bool, groups: reference.Groups, ranks: Tensor, exact: bool, table: Any
) -> reference.Selected:
    """The cuts at which the largest magnitudes of each task vector end."""
    module = _native.cpu()
    values, counts, nonfinite = module.select(
        table or _input_table(module, columns),
        based,
        groups.whole,
        groups.lengths,
        ranks.numpy(),
        exact,
        torch.get_num_threads(),
    )
    index, above, equal = torch.from_numpy(counts).unbind()
    pairs = zip(torch.from_numpy(values).unbind(2), index.unbind(2), strict=True)
    return reference.Selected([reference.Cuts(*pair) for pair in pairs], above, equal, nonfinite)


def consensus(
    columns: Sequence[Column], plan: reference.Plan, *, out: Column | None, stats: bool, table: Any
) -> tuple[Column, reference.Stats | None]:
    """The merges of all rows, and counts if they are asked for."""
    counted: list[Any] = []
    outputs = _run(
        columns,
        out,
        table,
        lambda module, rows: counted.append(
            module.consensus(rows, _plan(module, plan), stats, torch.get_num_threads())
        ),
        c_order=True,
    )
    return outputs, reference.Stats(*map(torch.from_numpy, counted[0])) if stats else None


def l1(columns: Sequence[Column], plan: reference.Plan, *, table: Any) -> Tensor:
    """Σ|τ| of each row and model, before and after trimming."""
    module = _native.cpu()
    table = table or _input_table(module, columns)
    return torch.from_numpy(module.l1(table, _plan(module, plan), torch.get_num_threads()))


def gram(columns: Sequence[Column], *, based: bool, lengths: list[int] | None, table: Any) -> Tensor:
    """The dot products of the models of each row."""
    module = _native.cpu()
    table = table or _input_table(module, columns)
    return torch.from_numpy(module.gram(table, based, lengths, torch.get_num_threads()))


def assign(
    stacks: Sequence[tuple[np.ndarray, np.ndarray | None]], *, maximize: bool, certificate: bool
) -> list[reference.Assignments]:
    """Optimal assignments for stacks of matrices."""
    found = _native.cpu().assign(stacks, maximize, certificate, torch.get_num_threads())
    return [
        reference.Assignments(
            columns,
            None if proofs is None else reference.Proofs(*proofs),
            None if fault is None else (fault[0].name, *fault[1:]),
        )
        for columns, proofs, fault in found
    ]


def _plan(module: Any, plan: reference.Plan) -> Any:
    """The compiled extension's plan."""
    by_weight = plan.merge_func == "mean" and plan.divisor == "weight"
    made = module.Plan(
        based=plan.based,
        vote=getattr(module.Vote, plan.vote),
        zero_sign=getattr(module.ZeroSign, plan.zero_sign),
        tally_rows=plan.tally_rows,
        merge=getattr(module.MergeFunc, plan.merge_func),
        weights=plan.weights.numpy(),
        divisors=plan.weights.numpy() if by_weight else None,
        scaling=plan.scaling.numpy(),
        rescale=_numpy(plan.rescale),
        keep=(None, None) if plan.keep is None else (plan.keep.value.numpy(), plan.keep.index.numpy()),
        drop=(None, None) if plan.drop is None else (plan.drop.value.numpy(), plan.drop.index.numpy()),
        lengths=plan.lengths,
    )
    if plan.random is not None:
        random = plan.random
        made.draw(random.keys.numpy(), random.density.numpy(), _numpy(random.epsilon), random.starts, random.inverse)
    return made


def _numpy(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.numpy()


def _run(columns: Sequence[Column], out: Column | None, table: Any, rule: Rule, *, c_order: bool) -> Column:
    """Run a rule of the extension on ``table``, or on one made of tensors of any strides; returns the outputs."""
    module = _native.cpu()
    if table is not None:
        outputs = _empty_like(columns[0]) if out is None else out
        if out is None:
            table.set_outputs(outputs)
        rule(module, table)
        return outputs
    outputs = [torch.empty_like(tensor) for tensor in columns[0]] if out is None else out
    table, _, late = _strided_table(module, columns, outputs, c_order=c_order)
    rule(module, table)
    for target, result in late:
        target.copy_(result)
    return outputs


def _input_table(module: Any, columns: Sequence[Column]) -> Any:
    """A table for rules that write no tensors, in C-order; the first column stands in for the outputs."""
    contiguous = [[real(tensor).contiguous() for tensor in column] for column in columns]
    return _strided_table(module, contiguous, contiguous[0], c_order=True)[0]


def _strided_table(
    module: Any, columns: Sequence[Column], outputs: Column, *, c_order: bool
) -> tuple[Any, Column, list[tuple[Tensor, Tensor]]]:
    """A table of tensors of any strides, the tensors that it writes, and which are to be copied where afterwards."""
    inputs, results, late = laid_out(columns, outputs, c_order=c_order)
    codes = _dtype_codes(module)
    table = module.Table(
        [result.numel() for result in results],
        [[(x.data_ptr(), codes[x.dtype]) for x in (*row, result)] for row, result in zip(inputs, results, strict=True)],
    )
    table.keep_alive = [tensor for row in inputs for tensor in row] + results
    return table, results, late


@functools.cache
def _dtype_codes(module: Any) -> dict[torch.dtype, Any]:
    codes = module.Dtype
    return {
        torch.float64: codes.f64,
        torch.float32: codes.f32,
        torch.bfloat16: codes.bf16,
        torch.float16: codes.f16,
    }


def _empty_like(tensors: Column) -> Column:
    """Uninitialised tensors like these plain ones; small ones of one shape share an allocation: it saves time."""
    if len(tensors) == 1:
        return [torch.empty_like(tensors[0])]
    outputs = list(tensors)
    for places in _native.cpu().alike(tensors):
        first = tensors[places[0]]
        if len(places) * first.numel() <= SHARED_ELEMENTS:
            group = first.new_empty((len(places), *first.shape)).unbind()
        else:
            group = tuple(torch.empty_like(first) for _ in places)
        for place, output in zip(places, group, strict=True):
            outputs[place] = output
    return outputs
