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


class Assignment(NamedTuple):
    """Which column each row is paired with, what that costs, and what no pairing costs less than."""

    columns: np.ndarray  # int64; of each row
    u: np.ndarray  # duals of rows and columns: u[i] + v[j] is no more than the cost of i with j
    v: np.ndarray
    primal: float
    dual: float
    fault: tuple[str, int, int] | None  # "nan", "unbounded" (a cost of −∞) or "infeasible", with a row and a column


def assign(matrix: np.ndarray, *, maximize: bool, start: np.ndarray | None = None) -> Assignment:
    """Pair each row of a matrix, of no more rows than columns, with a column of its own at the least cost.

    Args:
        matrix: real, (rows, columns); +∞ forbids a pair, or −∞ where values are maximised.
        maximize: costs are the values negated.
        start: duals of the columns of a square matrix to begin with, instead of zeros.
    """
    cost = matrix.astype(np.float64) * (-1 if maximize else 1)
    rows, cols = cost.shape
    columns = np.full(rows, -1)
    owner = np.full(cols, -1)
    v = np.zeros(cols) if start is None else start.astype(np.float64)

    def failed(kind: str, row: int, column: int) -> Assignment:
        return Assignment(columns, np.zeros(0), np.zeros(0), 0.0, 0.0, (kind, row, column))

    invalid = np.argwhere(~(cost > -np.inf))
    if len(invalid):
        row, column = map(int, invalid[0])
        return failed("nan" if np.isnan(cost[row, column]) else "unbounded", row, column)
    for i in range(rows):
        j = int(np.argmin(cost[i] - v))
        if cost[i, j] < np.inf and owner[j] < 0:
            columns[i], owner[j] = j, i
    for i in range(rows):
        if columns[i] < 0 and not _augment(i, cost, columns, owner, v):
            return failed("infeasible", i, -1)
    u = (cost - v).min(axis=1, initial=np.inf)
    primal = float(cost[np.arange(rows), columns].sum())
    return Assignment(columns, u, v, primal, float(u.sum() + v.sum()), None)


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
