"""Products of matrices over gathered rows, as similarities of units are added up from."""

from __future__ import annotations

from torch import Tensor

_CHUNK = 512  # rows of a product: up to so many, one thread and several sum in the same order


def add_product(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    index: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    before: Tensor | None = None,
) -> None:
    """Add Σ_r a[r]ᵀ b[index[r]], or what it changes by in ``rows``; see ``isthmus.ops.add_product``.

    On the CPU the result is the same for every number of threads.
    """
    if index is None:
        _add(out, a, b)
        return
    step = max(1, _CHUNK // max(1, a.shape[1]))
    for start in range(0, len(index) if rows is None else len(rows), step):
        if rows is None or before is None:
            _add(out, a[start : start + step], b.index_select(0, index[start : start + step].to(b.device)))
            continue
        these = rows[start : start + step]
        change = b.index_select(0, index[these].to(b.device))
        change -= b.index_select(0, before[these].to(b.device))
        _add(out, a.index_select(0, these.to(a.device)), change)


def _add(out: Tensor, a: Tensor, b: Tensor) -> None:
    for x, y in zip(a.flatten(0, 1).split(_CHUNK), b.flatten(0, 1).split(_CHUNK), strict=True):
        out.addmm_(x.T, y)
