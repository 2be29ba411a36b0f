"""Rules that run in plain PyTorch on every backend: nearswap, sce, arcee_fusion and ram_plus.

Each takes real tensors of one shape, computes in ``compute_dtype`` and works through them in pieces, so that beside the
result it holds at most one tensor of keys. Sums are taken in the order of ``reductions``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .elementwise import compute_dtype, narrow, scalar
from .reductions import BLOCK, add_in_order, block_sums

_CHUNK = 256 * BLOCK  # elements worked on at once

NEAR = 1e-6  # nearswap: differences count as at least this
SMOOTHING = 1e-8  # arcee_fusion: added to both distributions


def nearswap(a: Tensor, b: Tensor, t: float, *, dtype: torch.dtype) -> Tensor:
    """The step from a to b, of t at most; see ``isthmus.ops.nearswap``."""

    def piece(a: Tensor, b: Tensor) -> Tensor:
        difference = b - a
        weight = scalar(t, a) / difference.abs().clamp(min=NEAR)
        return torch.where(weight >= 1, b, a + weight * difference)

    return _in_pieces(piece, [a, b], dtype)


def sce(tensors: Sequence[Tensor], base: Tensor, select_topk: float, floor: float, *, dtype: torch.dtype) -> Tensor:
    """Select by variance, weigh by energy, erase minority signs, average; see ``isthmus.ops.sce``."""
    row = [base, *tensors]
    select = _all if select_topk == 1 else _largest(_variances(row), select_topk)
    weights = _energies(row, select)
    total = sum(weights)
    weights = [w / total for w in weights] if total > floor else [1 / len(tensors)] * len(tensors)

    result = torch.empty(base.numel(), dtype=dtype, device=base.device)
    for start, b, taus in _task_vectors(row):
        selected = select(start, b)
        positive = add_in_order(taus[1:], taus[0].clone()) >= 0
        change, share = torch.zeros_like(b), torch.zeros_like(b)
        for w, tau in zip(weights, taus, strict=True):
            agrees = selected & torch.where(positive, tau > 0, tau < 0)
            change += torch.where(agrees, scalar(w, b) * tau, 0.0)
            share += torch.where(agrees, scalar(w, b), 0.0)
        merged = torch.where(share > 0, b + change / share.clamp(min=floor), b)
        result[start : start + len(b)] = narrow(merged, dtype)
    return result.view(base.shape)


def arcee_fusion(tensor: Tensor, base: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Entries of outstanding importance from ``tensor``, others from ``base``; see ``isthmus.ops.arcee_fusion``."""
    importance = _importance(tensor, base)
    low, middle, high = (_kth_smallest(importance, k * (len(importance) - 1) // 4 + 1) for k in (1, 2, 3))
    threshold = middle + 1.5 * (high - low)
    kept = (importance.double() >= threshold).view(base.shape)
    compute = compute_dtype((tensor.dtype, base.dtype))
    return narrow(torch.where(kept, tensor.to(compute), base.to(compute)), dtype)


def ram_plus(
    tensors: Sequence[Tensor], base: Tensor, r: float, alpha: float, epsilon: float, *, dtype: torch.dtype
) -> Tensor:
    """Add what one model alone changed, enlarged, and average what several changed; see ``isthmus.ops.ram_plus``."""
    row = [base, *tensors]
    alone, shared = [0] * len(tensors), [0] * len(tensors)
    for _, _, taus in _task_vectors(row):
        changed = [tau.abs() > epsilon for tau in taus]
        count = torch.stack(changed).sum(0)
        for k, mask in enumerate(changed):
            alone[k] += int((mask & (count == 1)).sum())
            shared[k] += int((mask & (count > 1)).sum())
    factors = [1 + r * min(s / a if a else alpha * (s > 0), alpha) for a, s in zip(alone, shared, strict=True)]

    result = torch.empty(base.numel(), dtype=dtype, device=base.device)
    for start, b, taus in _task_vectors(row):
        changed = [tau.abs() > epsilon for tau in taus]
        count = torch.stack(changed).sum(0)
        change = torch.zeros_like(b)
        for factor, tau, mask in zip(factors, taus, changed, strict=True):
            change += torch.where(mask, torch.where(count == 1, scalar(factor, b) * tau, tau), 0.0)
        merged = torch.where(count > 0, b + change / count.clamp(min=1), b)
        result[start : start + len(b)] = narrow(merged, dtype)
    return result.view(base.shape)


Select = Callable[[int, Tensor], Tensor]  # of a piece and its start: the mask of the selected entries


def _in_pieces(rule: Callable[..., Tensor], tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Apply an element-wise rule."""
    result = torch.empty(tensors[0].numel(), dtype=dtype, device=tensors[0].device)
    for start, parts in _pieces(tensors):
        result[start : start + len(parts[0])] = narrow(rule(*parts), dtype)
    return result.view(tensors[0].shape)


def _pieces(tensors: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """Pieces of the tensors in C-order and the compute dtype, with the index of their first element."""
    compute = compute_dtype(tensor.dtype for tensor in tensors)
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    for start in range(0, len(flat[0]), _CHUNK):
        yield start, [tensor[start : start + _CHUNK].to(compute) for tensor in flat]


def _task_vectors(row: Sequence[Tensor]) -> Iterator[tuple[int, Tensor, list[Tensor]]]:
    """For each piece its start, the base's part and the task vectors."""
    for start, (base, *parts) in _pieces(row):
        yield start, base, [part - base for part in parts]


def _all(start: int, like: Tensor) -> Tensor:
    return torch.ones_like(like, dtype=torch.bool)


def _none(start: int, like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool)


def _variances(row: Sequence[Tensor]) -> Tensor:
    """The population variance of every entry over the models, exactly 0 where they agree."""
    result = torch.empty(row[0].numel(), dtype=compute_dtype(tensor.dtype for tensor in row), device=row[0].device)
    count = torch.tensor(len(row) - 1, dtype=torch.float64)
    for start, _, taus in _task_vectors(row):
        shifted = [tau.double() - taus[0].double() for tau in taus]
        mean = add_in_order(shifted, torch.zeros_like(shifted[0])) / count
        squares = [(x - mean).square() for x in shifted]
        result[start : start + len(mean)] = add_in_order(squares, torch.zeros_like(mean)) / count
    return result


def _largest(keys: Tensor, fraction: float) -> Select:
    """The int(fraction · non-zeros) largest keys; of equal ones those of lower index."""
    count = int(fraction * int(torch.count_nonzero(keys)))
    if count == 0:
        return _none
    value = _kth_smallest(keys, len(keys) - count + 1)
    equal = (keys == value).nonzero().view(-1)
    last = int(equal[count - int((keys > value).sum()) - 1])

    def select(start: int, like: Tensor) -> Tensor:
        piece = keys[start : start + len(like)]
        index = torch.arange(start, start + len(like), device=keys.device)
        return (piece > value) | ((piece == value) & (index <= last))

    return select


def _kth_smallest(keys: Tensor, k: int) -> float:
    return float(keys.kthvalue(k).values)


def _energies(row: Sequence[Tensor], select: Select) -> list[float]:
    """The mean square of each task vector, with the entries that are not selected as 0."""
    totals = torch.zeros(len(row) - 1, dtype=torch.float64, device=row[0].device)
    for start, base, taus in _task_vectors(row):
        selected = select(start, base)
        squares = torch.stack([torch.where(selected, tau.double().square(), 0.0) for tau in taus])
        totals = add_in_order(block_sums(squares).unbind(1), totals)
    return (totals / max(1, row[0].numel())).tolist()


def _importance(tensor: Tensor, base: Tensor) -> Tensor:
    """|τ| times the divergence KL(p ‖ q) of its row, p and q the softmax of tensor and base along the last axis.

    The divergence is a small sum of terms of both signs. It is taken in the compute dtype all the same, as the rule's
    authors do: more digits would move the cut and take other entries than theirs.
    """
    compute = compute_dtype((tensor.dtype, base.dtype))
    length = base.shape[-1] if base.dim() else 1
    rows, base_rows = (x.detach().reshape(-1, length) for x in (tensor, base))
    result = torch.empty(rows.shape, dtype=compute, device=base.device)
    step = max(1, _CHUNK // length)
    for top in range(0, len(rows), step):
        x, y = (part[top : top + step].to(compute) for part in (rows, base_rows))
        p, q = (torch.softmax(part, dim=-1) + SMOOTHING for part in (x, y))
        divergence = (p * (p / q).log()).sum(-1, keepdim=True)
        result[top : top + step] = (x - y).abs() * divergence
    return result.view(-1)
