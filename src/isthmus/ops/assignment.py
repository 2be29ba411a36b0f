"""Linear assignment: the pairing of rows with columns that costs least or is worth most."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isthmus import _dispatch
from isthmus.errors import InputError

Array = Tensor | np.ndarray


@dataclass(frozen=True, eq=False)
class Certificate:
    """Proof of how good an assignment is, from the duality of linear programs.

    Where costs are minimised, u[i] + v[j] ≤ c[i, j] for all pairs, so that no assignment costs less than ``dual``;
    where values are maximised, u[i] + v[j] ≥ c[i, j], and none is worth more. A rectangular matrix's unpaired rows or
    columns have duals of zero, and the other duals of that axis are no greater (no less, where values are maximised).

    Attributes:
        primal: the objective of the assignment, Σ c[i, j] over its pairs, in float64.
        dual: the bound, Σu + Σv.
        gap: how far the objective is from the bound: zero but for rounding.
        u: float64 duals of the rows.
        v: float64 duals of the columns.
    """

    primal: float
    dual: float
    gap: float
    u: Array
    v: Array


LARGEST_START = 2.0**16  # times the entries: beside larger duals, float64 would not keep what tells entries apart


def linear_sum_assignment(
    cost_matrix: Any,
    maximize: bool = False,
    *,
    certificate: bool = False,
    duals: Any = None,
    names: str | Sequence[str] | None = None,
    backend: str = "auto",
) -> Any:
    """Pair rows of a matrix with columns, each at most once and as many as there can be, at the least total cost.

    The result is an exact optimum of Σ c[i, j] over the pairs, with SciPy's arguments and results. Several problems are
    solved at once, in parallel, where they come as one array of shape (batch, rows, columns), or as a list of matrices
    of any shapes. The first optimum met is returned where there are several: it is the same on every backend,
    instruction set and number of threads, and where all entries are equal it pairs i with i.

    Numbers of 32 bits or fewer are read as they are and all others as float64; duals and sums are float64. A pair of
    cost +∞ is forbidden, or of value −∞ where values are maximised. No gradients are recorded.

    Source: Jonker and Volgenant, "A shortest augmenting path algorithm for dense and sparse linear assignment problems"
    (1987); Crouse, "On implementing 2D rectangular assignment algorithms" (2016).

    Args:
        cost_matrix: (rows, columns): a tensor of any strides, or what ``numpy.asarray`` takes; real numbers, integers
            or booleans. Or (batch, rows, columns); or a list of matrices that are tensors or arrays.
        maximize: maximise the total instead.
        certificate: also return a ``Certificate``.
        duals: a ``Certificate``, or a pair (u, v), of a similar problem to begin with, which saves time and may decide
            between several optima; for several problems a list of them, None for those that have none. Used where the
            matrix is square and its entries are not lost beside them; other problems begin afresh.
        names: what to call the matrix in errors, or each of several.
        backend: "auto", "reference", "cpp", "cuda" or "triton"; a backend asked for by name never falls back. Triton
            has no kernel for it: with "auto" and "triton" C++ solves it on the host, also for matrices on a GPU.

    Returns:
        ``(row_ind, col_ind)``, int64 and of length min(rows, columns), sorted by row: tensors on the matrix's device if
        it is a tensor, else NumPy arrays; with ``certificate``, ``(row_ind, col_ind, certificate)``. Of a batch, arrays
        of shape (batch, min(rows, columns)) and a list of certificates; of a list, a list of what each matrix gives.

    Raises:
        InputError: the input is no real matrix, holds NaN or the infinity that no pairing could leave aside, or has no
            pairing without forbidden pairs; or duals do not fit it.
        BackendError: the backend is not available here.
    """
    if isinstance(cost_matrix, list | tuple) and cost_matrix and all(map(_is_matrix, cost_matrix)):
        return [_only(result) for result in _solve(cost_matrix, maximize, certificate, duals, names, backend)]
    given = cost_matrix if isinstance(cost_matrix, Tensor) else np.asarray(cost_matrix)
    if given.ndim == 3:
        return _solve([given], maximize, certificate, duals, names, backend)[0]
    return _only(_solve([given], maximize, certificate, [duals], names, backend)[0])


def _is_matrix(value: object) -> bool:
    return isinstance(value, Tensor | np.ndarray) and value.ndim == 2


def _only(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a stack of one problem gives, without the axis of problems."""
    return tuple(each[0] for each in result)


class _Stack(NamedTuple):
    """Problems of one shape as the backends take them."""

    matrices: np.ndarray  # float32 or float64, (problems, rows, columns) in C-order, no more rows than columns
    starts: np.ndarray | None  # duals of the columns, of costs
    transposed: bool


class _Labels:
    """What each problem is called in errors."""

    def __init__(self, names: Sequence[str] | None, count: int) -> None:
        self._names, self._count = names, count

    def __getitem__(self, k: int) -> str:
        if self._names:
            return self._names[k]
        return "the matrix" if self._count == 1 else f"matrix {k}"


def _solve(
    given: Sequence[Array], maximize: bool, certificate: bool, duals: Any, names: Any, backend: str
) -> list[tuple[Any, ...]]:
    """What each stack of problems, or matrix, gives: arrays with an axis of problems, and a list of certificates."""
    offsets = list(itertools.accumulate((len(each) if each.ndim == 3 else 1 for each in given), initial=0))
    count = offsets.pop()
    names = [names] if isinstance(names, str) else names
    for name, entries in (("names", names), ("duals", duals)):
        if entries is not None and (isinstance(entries, Certificate) or len(entries) != count):
            raise InputError(f"{name} is no list of {count} entries, one for each matrix.")
    labels = _Labels(names, count)
    devices = {each.device for each in given if isinstance(each, Tensor)}
    if len(devices) > 1:
        raise InputError(f"the matrices are on {' and '.join(sorted(map(str, devices)))}; move them to one device.")
    stacks = [_prepare(each, k, duals, maximize, labels) for each, k in zip(given, offsets, strict=True)]
    found = _dispatch.assign(
        [(stack.matrices, stack.starts) for stack in stacks],
        maximize=bool(maximize),
        certificate=certificate,
        device=next(iter(devices), torch.device("cpu")),
        backend=backend,
    )
    results = []
    for each, first, stack, (columns, proofs, fault) in zip(given, offsets, stacks, found, strict=True):
        if fault is not None:
            kind, k, row, column = fault
            _refuse(kind, row, column, stack.transposed, maximize, labels[first + k])
        if stack.transposed:
            col_ind = columns.argsort(axis=1)
            row_ind = np.take_along_axis(columns, col_ind, axis=1)
        else:
            row_ind, col_ind = np.tile(np.arange(columns.shape[1]), (len(columns), 1)), columns
        result: tuple[Any, ...] = (_like(row_ind, each), _like(col_ind, each))
        if certificate:
            result += (_certificates(proofs, stack.transposed, maximize, each),)
        results.append(result)
    return results


def _prepare(given: Array, first: int, duals: Any, maximize: bool, labels: _Labels) -> _Stack:
    """Check a stack or matrix, whose problems are numbered from ``first``, and bring it into the backends' form."""
    values = _numbers(given, labels[first])
    if values.ndim == 2:
        values = values[None]
    if values.ndim != 3:
        raise InputError(
            f"{labels[first]} has {values.ndim} axes, expected two, rows and columns (or one array of three axes, or a "
            "list of matrices, for several problems)."
        )
    count, *shape = values.shape
    if max(shape) >= 1 << 31:
        raise InputError(f"{labels[first]} has shape {tuple(shape)}, expected fewer than 2³¹ rows and columns.")
    transposed = shape[0] > shape[1]
    starts = None
    for k in range(count) if duals is not None else ():
        if duals[first + k] is None:
            continue
        v = _column_duals(duals[first + k], tuple(shape), labels[first + k])
        if shape[0] == shape[1] > 0 and np.ptp(v) <= LARGEST_START * _magnitude(values[k]):
            starts = np.zeros((count, shape[1])) if starts is None else starts
            starts[k] = -v if maximize else v
    return _Stack(np.ascontiguousarray(values.transpose(0, 2, 1) if transposed else values), starts, transposed)


def _magnitude(matrix: np.ndarray) -> float:
    """The largest magnitude of a finite entry."""
    ends = np.array([matrix.min(), matrix.max()])
    if not np.isfinite(ends).all():
        ends = matrix[np.isfinite(matrix)]
    return float(np.abs(ends).max(initial=0.0))


def _column_duals(duals: Any, shape: tuple[int, ...], label: str) -> np.ndarray:
    """The duals of a matrix's columns, checked with those of the rows."""
    pair = (duals.u, duals.v) if isinstance(duals, Certificate) else tuple(duals)
    if len(pair) != 2:
        raise InputError(f"the duals of {label} are {len(pair)} arrays, expected a Certificate or a pair (u, v).")
    u, v = (_numbers(each, f"the duals of {label}") for each in pair)
    if u.shape + v.shape != shape or u.ndim != 1:
        raise InputError(
            f"the duals of {label} have shapes {u.shape} and {v.shape}, expected ({shape[0]},) and ({shape[1]},), one "
            "for each row and each column."
        )
    if not np.isfinite(v).all():
        raise InputError(f"the duals of {label} hold NaN or infinity, expected finite numbers.")
    return v


def _numbers(values: Any, label: str) -> np.ndarray:
    """Real numbers as float32 or float64: a tensor's or an array's memory itself where it holds such."""
    if isinstance(values, Tensor):
        tensor = values.detach()
        if tensor.layout != torch.strided or tensor.is_complex():
            came = tensor.dtype if tensor.layout == torch.strided else f"layout {tensor.layout}"
            raise InputError(f"{label} has {came}, expected a dense tensor of real numbers; convert it first.")
        is_single = tensor.is_floating_point() and tensor.itemsize <= 4
        dtype = torch.float32 if is_single else torch.float64
        return tensor.resolve_neg().to("cpu", dtype).numpy()
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise InputError(f"{label} has dtype {array.dtype}, expected real numbers; convert it first.")
    return array.astype(np.float32 if array.dtype.kind == "f" and array.itemsize <= 4 else np.float64, copy=False)


def _refuse(fault: str, row: int, column: int, transposed: bool, maximize: bool, label: str) -> None:
    """Raise what is wrong with a matrix."""
    where = f"row {column}, column {row}" if transposed else f"row {row}, column {column}"
    if fault == "nan":
        raise InputError(f"{label} is NaN at {where}, expected numbers. Look at what it was computed from.")
    forbidden, forced = ("-inf", "+inf") if maximize else ("+inf", "-inf")
    if fault == "unbounded":
        raise InputError(
            f"{label} is {forced} at {where}, which makes no finite total best. {forbidden} forbids a pair; use a "
            "large finite number to favour one."
        )
    axis = "column" if transposed else "row"
    raise InputError(
        f"{label} has no pairing without forbidden pairs ({forbidden}): not all of its {axis}s up to {axis} {row} "
        "can be paired. Allow more pairs."
    )


def _certificates(proofs: Any, transposed: bool, maximize: bool, given: Array) -> list[Certificate]:
    """Proofs of costs of what the backends were given, as those of the problems."""
    sign = -1 if maximize else 1
    u, v = (_like(sign * duals, given) for duals in ((proofs.v, proofs.u) if transposed else (proofs.u, proofs.v)))
    primals, duals = proofs.objectives.tolist()
    return [
        Certificate(sign * primal, sign * dual, primal - dual, *both)
        for primal, dual, *both in zip(primals, duals, u, v, strict=True)
    ]


def _like(array: np.ndarray, given: Any) -> Array:
    """An array as a tensor on the device of ``given`` if that is one."""
    return torch.from_numpy(array).to(given.device) if isinstance(given, Tensor) else array
