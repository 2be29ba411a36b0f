"""Linear assignment: the pairing of rows with columns that costs least or is worth most."""

from __future__ import annotations

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
            matrix is square; a rectangular problem begins afresh.
        names: what to call the matrix in errors, or each of several.
        backend: "auto", "reference", "cpp", "cuda" or "triton"; a backend asked for by name never falls back.

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
        return _solve(cost_matrix, maximize, certificate, duals, names, backend)
    given = cost_matrix if isinstance(cost_matrix, Tensor) else np.asarray(cost_matrix)
    if given.ndim != 3:
        return _solve([given], maximize, certificate, [duals], names, backend)[0]
    results = _solve(list(given), maximize, certificate, duals, names, backend)
    if not results:
        row_ind, col_ind = (_like(np.empty((0, min(given.shape[1:])), np.int64), given) for _ in range(2))
    elif isinstance(given, Tensor):
        row_ind, col_ind = (torch.stack([result[k] for result in results]) for k in range(2))
    else:
        row_ind, col_ind = (np.stack([result[k] for result in results]) for k in range(2))
    return (row_ind, col_ind, [result[2] for result in results]) if certificate else (row_ind, col_ind)


def _is_matrix(value: object) -> bool:
    return isinstance(value, Tensor | np.ndarray) and value.ndim == 2


class _Matrix(NamedTuple):
    """One problem as the backends take it."""

    values: np.ndarray  # float32 or float64, in C-order, no more rows than columns
    transposed: bool
    start: np.ndarray | None  # duals of the columns, of costs


def _solve(
    matrices: Sequence[Any], maximize: bool, certificate: bool, duals: Any, names: Any, backend: str
) -> list[tuple[Any, ...]]:
    """What each matrix gives."""
    labels = [names] if isinstance(names, str) else names
    if labels is None:
        labels = ["the matrix"] if len(matrices) == 1 else [f"matrix {k}" for k in range(len(matrices))]
    if duals is None:
        duals = [None] * len(matrices)
    for name, entries in (("names", labels), ("duals", duals)):
        if isinstance(entries, Certificate) or len(entries) != len(matrices):
            raise InputError(f"{name} is no list of {len(matrices)} entries, one for each matrix.")
    devices = {each.device for each in matrices if isinstance(each, Tensor)}
    if len(devices) > 1:
        raise InputError(f"the matrices are on {' and '.join(sorted(map(str, devices)))}; move them to one device.")
    problems = [
        _prepare(matrix, pair, maximize, label) for matrix, pair, label in zip(matrices, duals, labels, strict=True)
    ]
    found = _dispatch.assign(
        [problem.values for problem in problems],
        [problem.start for problem in problems],
        maximize=bool(maximize),
        certificate=certificate,
        device=next(iter(devices), torch.device("cpu")),
        backend=backend,
    )
    results = []
    for matrix, problem, assignment, label in zip(matrices, problems, found, labels, strict=True):
        if assignment.fault is not None:
            _refuse(*assignment.fault, problem, maximize, label)
        row_ind, col_ind = np.arange(len(assignment.columns)), assignment.columns
        u, v = assignment.u, assignment.v
        if problem.transposed:
            col_ind = np.argsort(assignment.columns)
            row_ind = assignment.columns[col_ind]
            u, v = v, u
        result: tuple[Any, ...] = (_like(row_ind, matrix), _like(col_ind, matrix))
        if certificate:
            sign = -1 if maximize else 1
            objectives = (sign * assignment.primal, sign * assignment.dual, assignment.primal - assignment.dual)
            result += (Certificate(*objectives, _like(sign * u, matrix), _like(sign * v, matrix)),)
        results.append(result)
    return results


def _prepare(matrix: Any, duals: Any, maximize: bool, label: str) -> _Matrix:
    """Check one matrix and its duals, and bring them into the form that the backends take."""
    values = _numbers(matrix, label)
    if values.ndim != 2:
        raise InputError(
            f"{label} has {values.ndim} axes, expected two, rows and columns (or one array of three axes, or a list of "
            "matrices, for several problems)."
        )
    if max(values.shape) >= 1 << 31:
        raise InputError(f"{label} has shape {values.shape}, expected fewer than 2³¹ rows and columns.")
    transposed = values.shape[0] > values.shape[1]
    start = None
    if duals is not None:
        pair = (duals.u, duals.v) if isinstance(duals, Certificate) else tuple(duals)
        if len(pair) != 2:
            raise InputError(f"the duals of {label} are {len(pair)} arrays, expected a Certificate or a pair (u, v).")
        u, v = (_numbers(each, f"the duals of {label}").astype(np.float64) for each in pair)
        if u.shape + v.shape != values.shape or u.ndim != 1:
            raise InputError(
                f"the duals of {label} have shapes {u.shape} and {v.shape}, expected ({values.shape[0]},) and "
                f"({values.shape[1]},), one for each row and each column."
            )
        if not np.isfinite(v).all():
            raise InputError(f"the duals of {label} hold NaN or infinity, expected finite numbers.")
        if values.shape[0] == values.shape[1]:
            start = -v if maximize else v
    return _Matrix(np.ascontiguousarray(values.T if transposed else values), transposed, start)


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


def _refuse(fault: str, row: int, column: int, problem: _Matrix, maximize: bool, label: str) -> None:
    """Raise what is wrong with a matrix."""
    where = f"row {column}, column {row}" if problem.transposed else f"row {row}, column {column}"
    if fault == "nan":
        raise InputError(f"{label} is NaN at {where}, expected numbers. Look at what it was computed from.")
    forbidden, forced = ("-inf", "+inf") if maximize else ("+inf", "-inf")
    if fault == "unbounded":
        raise InputError(
            f"{label} is {forced} at {where}, which makes no finite total best. {forbidden} forbids a pair; use a "
            "large finite number to favour one."
        )
    axis = "column" if problem.transposed else "row"
    raise InputError(
        f"{label} has no pairing without forbidden pairs ({forbidden}): not all of its {axis}s up to {axis} {row} "
        "can be paired. Allow more pairs."
    )


def _like(array: np.ndarray, given: Any) -> Array:
    """An array as a tensor on the device of ``given`` if that is one."""
    return torch.from_numpy(array).to(given.device) if isinstance(given, Tensor) else array
