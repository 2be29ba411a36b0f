"""Linear assignment by shortest augmenting paths, one row after another, in float64.

With a dual v for each column, w(i, j) = c(i, j) − v(j) says how near column j is to row i. Each row is first matched
with its nearest column if no earlier row is. Then a tree of alternating paths grows from each unmatched row in turn,
always from the nearest column, until that is an unmatched one; the duals of the columns gone through are lowered, and
the path is flipped. Of equally near columns an unmatched one comes first, then the one with the lower index; of equally
long ways to a column, the one through the row scanned first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Proofs(NamedTuple):
    """What pairings cost, and what none costs less than, for a stack of matrices; all float64."""

    objectives: np.ndarray  # (2, matrices): the costs, and the sums of the duals
    u: np.ndarray  # (matrices, rows): duals, u[i] + v[j] is no more than the cost of i with j
    v: np.ndarray  # (matrices, columns)


class Assignments(NamedTuple):
    """Which column each row of a stack of matrices is paired with."""

    columns: np.ndarray  # int64, (matrices, rows)
    proofs: Proofs | None
    fault: tuple[str, int, int, int] | None  # the first: "nan", "unbounded" (a cost of −∞) or "infeasible"; where it is


def assign(
    matrices: np.ndarray, *, maximize: bool, certificate: bool = True, starts: np.ndarray | None = None
) -> Assignments:
    """Pair each row of matrices of no more rows than columns with a column of its own at the least cost.

    Args:
        matrices: real, (matrices, rows, columns); +∞ forbids a pair, or −∞ where values are maximised.
        maximize: costs are the values negated.
        certificate: proofs are wanted.
        starts: (matrices, columns): duals of the columns of square matrices to begin with, instead of zeros.
    """
    count, rows, cols = matrices.shape
    costs = matrices.astype(np.float64) * (-1 if maximize else 1)
    columns = np.full((count, rows), -1)
    v = np.zeros((count, cols)) if starts is None else starts.astype(np.float64)
    for k, (cost, found, duals) in enumerate(zip(costs, columns, v, strict=True)):
        fault = _solve(cost, found, duals)
        if fault is not None:
            kind, row, column = fault
            return Assignments(columns, None, (kind, k, row, column))
    if not certificate:
        return Assignments(columns, None, None)
    u = (costs - v[:, None]).min(axis=2, initial=np.inf)
    paired = np.take_along_axis(costs, columns[..., None], axis=2)[..., 0]
    return Assignments(columns, Proofs(np.stack([paired.sum(1), u.sum(1) + v.sum(1)]), u, v), None)


def _solve(cost: np.ndarray, columns: np.ndarray, v: np.ndarray) -> tuple[str, int, int] | None:
    """Find the columns of the rows of one matrix and the duals of its columns; returns a fault and where it is."""
    invalid = np.argwhere(~(cost > -np.inf))
    if len(invalid):
        row, column = map(int, invalid[0])
        return "nan" if np.isnan(cost[row, column]) else "unbounded", row, column
    owner = np.full(len(v), -1)
    for i in range(len(cost)):
        j = int(np.argmin(cost[i] - v))
        if cost[i, j] < np.inf and owner[j] < 0:
            columns[i], owner[j] = j, i
    for i in range(len(cost)):
        if columns[i] < 0 and not _augment(i, cost, columns, owner, v):
            return "infeasible", i, -1
    return None


def _augment(root: int, cost: np.ndarray, columns: np.ndarray, owner: np.ndarray, v: np.ndarray) -> bool:
    """Match one more row; returns False where no column is left to it."""
    distance = np.full(len(v), np.inf)
    reached_from = np.full(len(v), -1)
    gone_through = np.zeros(len(v), bool)
    row, offset = root, 0.0
    while True:
        through_row = offset + (cost[row] - v)
        nearer = ~gone_through & (through_row < distance)
        distance[nearer], reached_from[nearer] = through_row[nearer], row
        reachable = np.where(gone_through, np.inf, distance)
        nearest = reachable.min()
        if nearest == np.inf:
            return False
        candidates = np.flatnonzero(reachable == nearest)
        unmatched = candidates[owner[candidates] < 0]
        if len(unmatched):
            sink = unmatched[0]
            break
        column = candidates[0]
        gone_through[column] = True
        row = owner[column]
        offset = nearest - (cost[row, column] - v[column])
    v[gone_through] -= nearest - distance[gone_through]
    column = sink
    while True:
        row = reached_from[column]
        following = columns[row]
        columns[row], owner[column] = column, row
        if row == root:
            return True
        column = following
