"""Products that similarities of units are added up from."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus import _dispatch, _library
from isthmus.errors import InputError

from ._overlap import Placed, refuse_overlap
from ._validate import any_requires_grad, validate


def add_product(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    index: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    before: Tensor | None = None,
    backend: str = "auto",
) -> None:
    r"""Add the product of a and of b in another order to ``out``: out += Σ_r a[r]ᵀ b[index[r]].

    With ``rows`` and ``before`` add only what the product changes by where these rows of b change their places:
    out += Σ_{r ∈ rows} a[r]ᵀ (b[index[r]] − b[before[r]]).

    Products and sums are float32, on a GPU never in TensorFloat-32. There no gathered row is written to memory, and
    every run gives the same bits. On the CPU torch's product of matrices serves, "cpp" included; the result is the
    same for every number of threads.

    Args:
        out: what is added to, float32 of shape (units of a, units of b).
        a: float32 of shape (rows, others, units of a); a[r] is a matrix.
        b: float32 of shape (rows of b, others, units of b).
        index: for each row of a which row of b belongs to it, int64 on the CPU; None if b is in order.
        rows: the rows that change, int64 on the CPU.
        before: what ``index`` was before.
        backend: "auto", "reference", "cpp", which leaves the product to torch, or "triton"; a backend asked for by
            name never falls back to another.

    Raises:
        InputError: shapes, devices or dtypes do not fit each other, an index is not within b, ``out`` shares memory
            with a or b, or a gradient is asked for.
        BackendError: the backend is not available here.
    """
    tensors = {"out": out, "a": a, "b": b}
    for name, tensor in tensors.items():
        validate([[tensor]], (name,), None)
        if tensor.dtype != torch.float32:
            raise InputError(f"{name} has dtype {tensor.dtype}, expected torch.float32; convert it with float().")
        axes = 2 if name == "out" else 3
        if tensor.dim() != axes:
            raise InputError(f"{name} has shape {tuple(tensor.shape)}, expected {axes} axes.")
        if tensor.device != out.device:
            raise InputError(f"{name} is on {tensor.device}, expected {out.device} as out; move one of them.")
    expected = (a.shape[2], b.shape[2])
    if out.shape != expected:
        raise InputError(f"out has shape {tuple(out.shape)}, expected {expected}: the units of a and of b.")
    if a.shape[1] != b.shape[1] or (index is None and len(a) != len(b)):
        raise InputError(f"b has shape {tuple(b.shape)}, which does not fit a with {tuple(a.shape)}.")
    if (rows is None) != (before is None) or (index is None and rows is not None):
        raise InputError("rows, before and index belong together; give all three, or index alone, or none.")
    if index is not None:
        _check_index(index, "index", len(a), len(b))
    if rows is not None and before is not None:
        _check_index(rows, "rows", rows.numel(), len(a))
        _check_index(before, "before", len(a), len(b))
    if _library.is_needed(any_requires_grad(None, [list(tensors.values())], None)):
        raise InputError(
            "add_product records no gradient and cannot be traced, and an input requires a gradient or a transform is "
            "active. Call it under torch.no_grad(), outside torch.compile and torch.func."
        )
    refuse_overlap([Placed("out", 0, out)], [Placed("a", 1, a), Placed("b", 1, b)])
    _dispatch.add_product(out, a, b, index, rows=rows, before=before, backend=backend)


def _check_index(index: Tensor, name: str, length: int, below: int) -> None:
    if index.dtype != torch.int64 or index.device.type != "cpu" or index.shape != (length,):
        raise InputError(
            f"{name} has dtype {index.dtype} and shape {tuple(index.shape)} on {index.device}, expected torch.int64 of "
            f"shape ({length},) on the CPU."
        )
    if length and not 0 <= int(index.min()) <= int(index.max()) < below:
        raise InputError(f"{name} has entries outside of 0 to {below - 1}.")
