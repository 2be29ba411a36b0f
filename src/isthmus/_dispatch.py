"""The only place that chooses a backend, and that hands memory to one.

Arguments are valid here (``isthmus.ops`` checks them): rows of tensors that have one shape and one device, weights that
are Python floats, outputs that are disjoint from the inputs or are exactly one of them.
"""

from __future__ import annotations

import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import _cpp, _native, _versions, reference
from ._cpp import plain_sources, plain_table
from ._operands import real
from .errors import BackendError, InputError, IsthmusWarning

BACKENDS = ("auto", "reference", "cpp", "cuda", "triton")
FORCED = os.environ.get("ISTHMUS_BACKEND", "auto")  # what "auto" means in this process

__all__ = [
    "BACKENDS",
    "FORCED",
    "Row",
    "add_product",
    "assign",
    "choose",
    "consensus",
    "describe",
    "gram",
    "l1",
    "lerp",
    "lerp_permuted",
    "multi_linear",
    "permute",
    "permute_adjoint",
    "plain_sources",
    "plain_table",
    "select",
    "weighted_sum",
]

Column = list[Tensor]
Indices = Sequence[Tensor | None]  # of one tensor, one for each dimension


def choose(backend: str, device: torch.device) -> str:
    """The backend, one of ``BACKENDS`` but "auto", that serves a call.

    Raises:
        InputError: no backend has this name.
        BackendError: the backend was asked for by name and cannot serve this device here.
    """
    asked = FORCED if backend == "auto" else backend
    if asked not in BACKENDS:
        where = "ISTHMUS_BACKEND" if backend == "auto" else "backend"
        raise InputError(f"{where}={asked!r} is not a backend; the backends are {', '.join(BACKENDS)}.")
    if asked == "auto" and device.type == "cuda":
        return "triton" if _triton_or_warn() else "reference"
    if asked == "auto":
        return "cpp" if device.type == "cpu" and _cpp_or_warn() else "reference"
    if asked == "triton":
        interpreted = _native.triton().INTERPRETED
        if device.type != ("cpu" if interpreted else "cuda"):
            raise BackendError(
                f"backend 'triton' takes tensors on a GPU and these are on {device}. Move them with .cuda(), or use "
                "backend='cpp' on the CPU."
                if not interpreted
                else f"backend 'triton' runs in Triton's interpreter (TRITON_INTERPRET is set), which takes tensors on "
                f"the CPU, and these are on {device}. Unset it, or move them with .cpu()."
            )
    if asked == "cuda":
        wanted = "cpu" if _native.cuda().ON_HOST else "cuda"
        if device.type != wanted:
            raise BackendError(
                f"backend 'cuda' takes tensors on a GPU and these are on {device}. Move them with .cuda(), or use "
                "backend='cpp' on the CPU."
            )
    if asked == "cpp":
        _native.cpu()
        if device.type != "cpu":
            raise BackendError(
                f"backend 'cpp' takes tensors on the CPU and these are on {device}. "
                "Move them with .cpu(), or use backend='triton'."
            )
    return asked


@functools.cache
def _cpp_or_warn() -> bool:
    module, reason = _native.load_cpu()
    if module is None:
        if os.environ.get("ISTHMUS_ISA"):
            _native.cpu()  # a forced instruction set never falls back: this raises
        warnings.warn(
            f"isthmus runs on its slower reference backend: {reason}. {_native.REBUILD}.", IsthmusWarning, stacklevel=2
        )
    return module is not None


@functools.cache
def _triton_or_warn() -> bool:
    module, reason = _native.load_triton()
    if module is None:
        warnings.warn(
            f"isthmus runs on its slower reference backend on this GPU: {reason}. {_native.GET_TRITON}.",
            IsthmusWarning,
            stacklevel=2,
        )
    return module is not None and not module.INTERPRETED


class Row(NamedTuple):
    """One line of the table that ``isthmus info`` prints."""

    name: str
    available: bool
    chosen: bool
    reason: str


def describe() -> list[Row]:
    """The backends and CPU instruction sets: which are built, which are chosen, and why not the others."""
    module, reason = _native.load_cpu()
    forced = f"ISTHMUS_BACKEND={FORCED}" if FORCED != "auto" else ""
    default = ("cpp" if module else "reference") if FORCED == "auto" else FORCED
    threads = f", {torch.get_num_threads()} threads" if module and module.has_openmp() else ", single-threaded"
    rows = [
        Row("reference", True, default == "reference", forced or "plain PyTorch, every device"),
        Row("cpp", module is not None, default == "cpp", reason + (threads if module else "")),
        _cuda_row(forced),
        _triton_row(forced),
    ]
    if module:
        for name, supported in module.instruction_sets():
            used = name == module.instruction_set()
            why = "in use" if used else "supported; force it with ISTHMUS_ISA" if supported else "not on this processor"
            rows.append(Row(f"cpp {name}", supported, used, why))
    return rows


def _cards() -> list[str]:
    return sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})


def _cuda_row(forced: str) -> Row:
    module, reason = _native.load_cuda()
    if module is None or not _cards():
        return Row("cuda", False, False, reason if module is None else f"{reason}, but there is no CUDA device here")
    chosen = FORCED == "cuda"
    return Row("cuda", True, chosen, forced if chosen else f"{reason}; choose it with backend='cuda'")


def _triton_row(forced: str) -> Row:
    module, reason = _native.load_triton()
    cards = _cards()
    if module is None or not (cards or module.INTERPRETED):
        return Row("triton", False, False, reason if module is None else f"{reason}, but there is no GPU here")
    where = "the CPU" if module.INTERPRETED else ", ".join(cards)
    chosen = FORCED == "triton" or (FORCED == "auto" and not module.INTERPRETED)
    return Row("triton", True, chosen, forced or f"{reason}, for tensors on {where}")


def lerp(
    a: Column, b: Column, weights: list[float] | Tensor, *, out: Column | None, backend: str, table: Any = None
) -> Column:
    """``isthmus.ops.lerp`` for every row, with one weight for all rows or one for each, 1-D if a tensor.

    ``table`` is what ``plain_table`` made of the same tensors.
    """
    per_row = len(weights) > 1
    values = _listed(weights)
    return _run(
        [a, b],
        out,
        backend,
        table,
        reference=lambda row, tensors, dtype: reference.lerp(
            tensors[0], tensors[1], values()[row if per_row else 0], dtype=dtype
        ),
        cpp=lambda: _cpp.lerp(a, b, values(), out=out, table=table),
        gpu=lambda module, outputs: module.lerp(a, b, outputs, torch.as_tensor(weights, dtype=torch.float64)),
    )


def weighted_sum(
    columns: Sequence[Column],
    weights: list[float] | list[list[float]] | Tensor,
    *,
    out: Column | None,
    backend: str,
    table: Any = None,
) -> Column:
    """``isthmus.ops.weighted_sum`` for every row, with one list of weights for all rows or one for each.

    ``table`` is what ``plain_table`` made of the same tensors.
    """
    per_row = weights.dim() == 2 if isinstance(weights, Tensor) else isinstance(weights[0], list)
    values = _listed(weights)
    return _run(
        columns,
        out,
        backend,
        table,
        reference=lambda row, tensors, dtype: reference.weighted_sum(
            tensors, values()[row] if per_row else values(), dtype=dtype
        ),
        cpp=lambda: _cpp.weighted_sum(
            columns, list(itertools.chain.from_iterable(values())) if per_row else values(), out=out, table=table
        ),
        gpu=lambda module, outputs: module.weighted_sum(
            columns, outputs, torch.as_tensor(weights, dtype=torch.float64).view(-1, len(columns))
        ),
    )


def _listed(weights: list[Any] | Tensor) -> Callable[[], list[Any]]:
    """The weights as Python numbers when they are asked for: those on a GPU make the host wait."""
    return functools.cache(weights.tolist) if isinstance(weights, Tensor) else lambda: weights


def multi_linear(
    x: Tensor,
    weight_a: Tensor,
    weight_b: Tensor,
    alphas: list[float] | Tensor,
    *,
    bias_a: Tensor | None,
    bias_b: Tensor | None,
    backend: str,
) -> Tensor:
    """``isthmus.ops.multi_linear``.

    Raises:
        BackendError: "cpp" was asked for by name: it leaves products of matrices to torch.
    """
    asked = FORCED if backend == "auto" else backend
    if asked == "cpp":
        raise BackendError(
            "backend 'cpp' has no multi_linear: on the CPU torch's product of matrices serves. Use backend='auto'."
        )
    x, weight_a, weight_b = x.detach(), weight_a.detach(), weight_b.detach()
    bias_a, bias_b = (None if bias is None else bias.detach() for bias in (bias_a, bias_b))
    chosen = _choice([[x]], backend, None, not_cuda="multi_linear")
    if chosen == "triton":
        biases = None if bias_a is None or bias_b is None else (bias_a, bias_b)
        places = torch.as_tensor(alphas, dtype=torch.float64)
        with _gpu(chosen, x.device) as module:
            return module.multi_linear(x, weight_a, weight_b, biases, places)  # type: ignore[no-any-return]
    values = alphas.tolist() if isinstance(alphas, Tensor) else alphas
    return reference.multi_linear(x, weight_a, weight_b, values, bias_a=bias_a, bias_b=bias_b)


def add_product(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    index: Tensor | None,
    *,
    rows: Tensor | None,
    before: Tensor | None,
    backend: str,
) -> None:
    """``isthmus.ops.add_product``; "cpp" leaves products of matrices to torch."""
    with torch.no_grad():
        chosen = _choice([[out]], backend, None, not_cuda="add_product")
        if chosen == "triton":
            with _gpu(chosen, out.device) as module:
                module.add_product(out, a, b, index, rows, before)
        else:
            reference.add_product(out, a, b, index, rows=rows, before=before)


def permute(
    tensors: Column, indices: Sequence[Indices], *, out: Column | None, backend: str, sources: Any = None
) -> Column:
    """``isthmus.ops.permute`` for every tensor, with an entry for each of its dimensions.

    ``sources`` is what ``plain_sources`` made of the same tensors.

    Raises:
        InputError: an index has an entry that is not within its axis.
    """
    if not tensors:
        return []
    if sources is None:
        indices = _within_range(tensors, indices)
    outputs = [torch.empty_like(tensor) for tensor in tensors] if out is None else out
    chosen = _choice([tensors], backend, sources, not_cuda="permute")
    if chosen == "reference":
        results = [reference.permute(tensor.detach(), index) for tensor, index in zip(tensors, indices, strict=True)]
    else:
        results = outputs if out is None or sources is not None else [_dense(target) for target in out]
        plain = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
        if chosen == "triton":
            with _gpu(chosen, tensors[0].device) as module:
                module.permute(plain, indices, results)
        else:
            _cpp.permute(plain, indices, results, sources=sources)
    for target, result in zip(outputs, results, strict=True):
        if target is not result:
            target.copy_(result)
    if out is not None:
        _versions.wrote(out)
    return outputs


def permute_adjoint(gradient: Tensor, indices: Indices, *, backend: str) -> Tensor:
    """The gradient of ``permute``: by the inverses of its indices where each is a permutation, else added up.

    The latter is left to torch on every backend: repeated entries are for few calls worth a kernel of their own.
    """
    inverses = [None if index is None else _inverse(index) for index in indices]
    left_out = [(inverse < 0).any() for inverse in inverses if inverse is not None]
    if not left_out or not torch.stack(left_out).any():  # all at once: on a GPU, the host waits
        return permute([gradient], [inverses], out=None, backend=backend)[0]
    return torch.empty_like(gradient).copy_(reference.permute_adjoint(gradient, indices))


def lerp_permuted(
    a: Column,
    b: Column,
    weights: list[float],
    indices: Sequence[Indices],
    *,
    out: Column | None,
    backend: str,
    table: Any = None,
    sources: Any = None,
) -> Column:
    """``isthmus.ops.lerp_permuted`` for every row, with one weight for all rows or one for each.

    ``table`` and ``sources`` are what ``plain_table`` and ``plain_sources`` made of the same tensors.

    Raises:
        InputError: an index has an entry that is not within its axis.
    """
    chosen = _choice([a], backend, table, not_cuda="lerp_permuted")
    if chosen == "reference":
        permuted = permute(b, indices, out=None, backend="reference") if b else []
        return lerp(a, permuted, weights, out=out, backend="reference")
    outputs = [torch.empty_like(tensor) for tensor in a] if out is None else out
    if table is None or sources is None:
        table = sources = None
        indices = _within_range(b, indices)
    if chosen == "triton":
        with _gpu(chosen, a[0].device) as module:
            module.lerp_permuted(a, b, outputs, torch.as_tensor(weights, dtype=torch.float64), indices)
    else:
        _cpp.lerp_permuted(a, b, outputs, weights, indices, table=table, sources=sources)
    if out is not None:
        _versions.wrote(out)
    return outputs


def _within_range(tensors: Column, indices: Sequence[Indices]) -> list[Indices]:
    """The indices in contiguous memory; refuses entries that are not within their axes."""
    indices = [[None if index is None else index.contiguous() for index in entry] for entry in indices]
    given = [index for entry in indices for index in entry if index is not None]
    module, _ = _native.load_cpu()
    if module is not None and tensors[0].device.type == "cpu":
        bad = module.first_out_of_range([(index.data_ptr(), len(index)) for index in given])
    else:
        bad = _first_out_of_range(given)
    if bad is not None:
        places = [(row, axis) for row, entry in enumerate(indices) for axis, x in enumerate(entry) if x is not None]
        (row, axis), index = places[bad], given[bad]
        outside = index[(index < 0) | (index >= len(index))][0].item()
        which = f"tensor {row}" if len(tensors) > 1 else "the tensor"
        raise InputError(
            f"the index of {which} along axis {axis} has the entry {outside}, expected 0 to {len(index) - 1}."
        )
    return indices


def _first_out_of_range(indices: list[Tensor]) -> int | None:
    """Which index is the first with an entry that is not within its axis; the host waits once for each device."""
    found: list[int] = []
    for device in {index.device for index in indices}:
        places = [i for i, index in enumerate(indices) if index.device == device]
        sizes = torch.tensor([len(indices[i]) for i in places])
        total = int(sizes.sum())
        on_device = sizes.to(device)
        limits = on_device.repeat_interleave(on_device, output_size=total)
        entries = torch.cat([indices[i] for i in places])
        outside = (entries < 0) | (entries >= limits)
        first = int(torch.where(outside, torch.arange(total, device=device), total).amin()) if total else 0
        if first < total:
            found.append(places[int((sizes.cumsum(0) <= first).sum())])
    return min(found, default=None)


def _inverse(index: Tensor) -> Tensor:
    """The inverse of an index that is a permutation; of another, -1 stands where nothing leads."""
    inverse = torch.full_like(index, -1)
    inverse[index] = torch.arange(len(index), device=index.device)
    return inverse


def _dense(target: Tensor) -> Tensor:
    """The tensor to write in place of an output: itself if it has no gaps."""
    return target if target.stride() == torch.empty_like(target).stride() else target.new_empty(target.shape)


def select(
    columns: Sequence[Column],
    *,
    based: bool,
    groups: reference.Groups,
    ranks: Tensor,
    exact: bool,
    backend: str,
    table: Any = None,
) -> reference.Selected:
    """The cuts at which the largest magnitudes of each task vector end; see ``isthmus.reference.select``."""
    chosen = _choice(columns, backend, table)
    options: dict[str, Any] = {"based": based, "groups": groups, "ranks": ranks, "exact": exact}
    if chosen == "cpp":
        return _cpp.select(columns, **options, table=table)
    if chosen != "reference":
        with _gpu(chosen, columns[0][0].device) as module:
            return module.select(columns, **options)  # type: ignore[no-any-return]
    return reference.select(columns, **options)


def consensus(
    columns: Sequence[Column],
    plan: reference.Plan,
    *,
    out: Column | None,
    backend: str,
    stats: bool = False,
    table: Any = None,
) -> tuple[Column, reference.Stats | None]:
    """``isthmus.ops.consensus`` for every row; ``columns`` begins with the base where the plan has one."""
    if not columns[0]:
        return [], None
    chosen = _choice(columns, backend, table)
    if chosen == "cpp":
        outputs, counts = _cpp.consensus(columns, plan, out=out, stats=stats, table=table)
    elif chosen != "reference":
        outputs = [torch.empty_like(tensor) for tensor in columns[0]] if out is None else out
        with _gpu(chosen, columns[0][0].device) as module:
            counts = module.consensus(columns, outputs, plan, stats=stats)
    else:
        dtypes = None if out is None else [target.dtype for target in out]
        results, counts = reference.consensus(columns, plan, dtypes=dtypes, stats=stats)
        outputs = results if out is None else out
        for target, result in zip(outputs, results, strict=True):
            if target is not result:
                target.copy_(result)
    if out is not None:
        _versions.wrote(out)
    return outputs, counts


def l1(columns: Sequence[Column], plan: reference.Plan, *, backend: str, table: Any = None) -> Tensor:
    """Σ|τ| of each row and model, before and after trimming: float64 (rows, models, 2)."""
    chosen = _choice(columns, backend, table, not_cuda="rescale='l1'")
    if chosen == "cpp":
        return _cpp.l1(columns, plan, table=table)
    if chosen == "triton":
        with _gpu(chosen, columns[0][0].device) as module:
            return module.l1(columns, plan)  # type: ignore[no-any-return]
    return reference.l1(columns, plan)


def gram(
    columns: Sequence[Column], *, based: bool, lengths: list[int] | None = None, backend: str, table: Any = None
) -> Tensor:
    """The dot products of the models of each row: float64 (rows, models, models)."""
    chosen = _choice(columns, backend, table, not_cuda="gram, which norms and angles are taken from")
    if chosen == "cpp":
        return _cpp.gram(columns, based=based, lengths=lengths, table=table)
    if chosen == "triton":
        with _gpu(chosen, columns[0][0].device) as module:
            return module.gram(columns, based=based, lengths=lengths)  # type: ignore[no-any-return]
    return reference.gram(columns, based=based, lengths=lengths)


def assign(
    stacks: Sequence[tuple[np.ndarray, np.ndarray | None]],
    *,
    maximize: bool,
    certificate: bool,
    device: torch.device,
    backend: str,
) -> list[reference.Assignments]:
    """Optimal assignments for stacks of matrices, each with duals of the columns to start from or None.

    A stack is float32 or float64, (matrices, rows, columns) in C-order, with no more rows than columns. Proofs are
    found only if a certificate is wanted. ``device`` is where the matrices came from.
    """
    chosen = choose(backend, device)
    if chosen == "triton" or backend == FORCED == "auto":  # the matrices are on the host
        chosen = "cpp" if _cpp_or_warn() else "reference"
    if chosen == "reference":
        return [
            reference.assign(matrices, maximize=maximize, certificate=certificate, starts=starts)
            for matrices, starts in stacks
        ]
    if chosen == "cuda":
        return [_assign_cuda(*stack, maximize=maximize, certificate=certificate, device=device) for stack in stacks]
    return _cpp.assign(stacks, maximize=maximize, certificate=certificate)


def _assign_cuda(
    matrices: np.ndarray, starts: np.ndarray | None, *, maximize: bool, certificate: bool, device: torch.device
) -> reference.Assignments:
    """A stack solved on the device, or on the host where that is faster or there is nothing to solve."""
    if matrices.size > 0:
        with _gpu("cuda", device) as module:
            found: reference.Assignments | None = module.assign(
                torch.from_numpy(matrices).to(device),
                None if starts is None else torch.from_numpy(starts).to(device),
                maximize=maximize,
                certificate=certificate,
            )
        if found is not None:
            return found
    return _cpp.assign([(matrices, starts)], maximize=maximize, certificate=certificate)[0]


def _choice(columns: Sequence[Column], backend: str, table: Any, *, not_cuda: str | None = None) -> str:
    """The backend that serves a call on these tensors; one without tensors is left to the reference.

    ``not_cuda`` is what errors call an op that has no kernel in CUDA C++.
    """
    if not columns[0]:
        return "reference"
    # A table is made for the CPU alone, by the extension that "auto" takes there.
    automatic = table is not None and backend == FORCED == "auto"
    chosen = "cpp" if automatic else choose(backend, columns[0][0].device)
    if chosen == "cuda" and not_cuda is not None:
        raise BackendError(f"backend 'cuda' has no kernel for {not_cuda}. Use backend='triton'.")
    return chosen


@contextmanager
def _gpu(chosen: str, device: torch.device) -> Iterator[Any]:
    """The ops of a backend for GPUs; ``device``, where the tensors are, is the current one: kernels run there."""
    module = _native.cuda() if chosen == "cuda" else _native.triton()
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield module


def _run(
    columns: Sequence[Column],
    out: Column | None,
    backend: str,
    table: Any,
    *,
    reference: Callable[[int, Sequence[Tensor], torch.dtype], Tensor],
    cpp: Callable[[], Column],
    gpu: Callable[[Any, Column], None],
) -> Column:
    """Apply a rule to every row on the chosen backend; the result has the dtype of ``out`` or of the first column."""
    chosen = _choice(columns, backend, table)
    if chosen == "cpp":
        outputs = cpp()
    else:
        outputs = [torch.empty_like(tensor) for tensor in columns[0]] if out is None else out
        if chosen == "reference":
            _run_reference(columns, outputs, reference)
        else:
            with _gpu(chosen, outputs[0].device) as module:
                gpu(module, outputs)
    if out is not None:
        _versions.wrote(out)
    return outputs


def _run_reference(
    columns: Sequence[Column], outputs: Column, reference: Callable[[int, Sequence[Tensor], torch.dtype], Tensor]
) -> None:
    """Run a rule of ``isthmus.reference`` row by row."""
    for row, (target, *tensors) in enumerate(zip(outputs, *columns, strict=True)):
        result = real(target)
        result.copy_(reference(row, [real(tensor) for tensor in tensors], result.dtype))
