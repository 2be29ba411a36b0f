"""Merges along arcs: slerp, nuslerp, multislerp, karcher and model_stock.

Each reads its tensors twice and writes once: a first sweep takes their norms and dots in float64, in blocks of a fixed
order, so that float16 norms cannot overflow and no thread count or instruction set changes a bit; from these come the
coefficients (``isthmus.spherical``), and a second sweep writes Σ cᵢ xᵢ, or with a base θ₀ + Σ cᵢ (xᵢ − θ₀). A linear
interpolation is written as ``lerp`` writes it, and a coefficient of 1 beside zeros as a copy. A complex tensor counts
as the vector of its real and imaginary parts.

Norms and angles need finite values: NaN or infinity anywhere is an error that names the tensor. No gradients are
recorded; where an input requires one, call under ``torch.no_grad()`` or detach it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isthmus import _dispatch, spherical
from isthmus.errors import InputError
from isthmus.reference.reductions import add_in_order
from isthmus.spherical import Combination, Gram

from ._begin import Operand, begin, like_operand, per_tensor, plan_without_vote
from ._naming import called
from ._validate import column, models_of, per_model
from .selection import row_lengths

Weights = Sequence[float] | Sequence[Sequence[float]] | Tensor
_ROWS = 1 << 13  # written at once where rows are vectors: each is a tensor for a while


def gram(
    tensors: Sequence[Operand], *, base: Operand | None = None, row_wise: bool = False, backend: str = "auto"
) -> Tensor:
    """The dots of the models, or of their task vectors, with each other: Gᵢⱼ = Σ xᵢxⱼ for every tensor.

    The square roots of the diagonal are norms; Gᵢⱼ / √(Gᵢᵢ Gⱼⱼ) is a cosine. Products and sums are float64. NaN and
    infinity propagate. Of complex numbers the dot is that of their real and imaginary parts.

    Args:
        tensors: for each model a tensor, or a list of tensors.
        base: θ₀, a tensor or a list of them: xᵢ = θᵢ − θ₀ then, rounded to the type computed in.
        row_wise: take each row (last axis) as a vector of its own; tensors of one axis or none are one row.
        backend: "auto", "reference", "cpp", "cuda" or "triton"; a backend asked for by name never falls back.

    Returns:
        Float64 of shape (vectors, models, models) on the CPU: one matrix for each tensor, or for each row, in order.

    Raises:
        InputError: there is no model, shapes, devices or dtypes cannot be combined, or a gradient is asked for.
        BackendError: the backend is not available here.
    """
    columns, labels = _models("gram", tensors, base, least=1)
    _, table, _ = begin("gram", columns, labels, names=None, out=None, like=tensors[0])
    if not columns[0]:
        return torch.zeros(0, len(tensors), len(tensors), dtype=torch.float64)
    columns, lengths, table = _as_vectors(columns, row_wise, table)
    return _dispatch.gram(columns, based=base is not None, lengths=lengths, backend=backend, table=table)


def slerp(
    a: Operand,
    b: Operand,
    t: float | Sequence[float] | Tensor,
    *,
    whole: bool = False,
    names: str | Sequence[str] | None = None,
    out: Operand | None = None,
    backend: str = "auto",
) -> Operand:
    """Spherical linear interpolation between ``a`` (t = 0) and ``b`` (t = 1).

    Computes sin((1 − t) θ) / sin θ · a + sin(t θ) / sin θ · b with θ the angle between a and b, each tensor one vector.
    Where |cos θ| > 0.9995, opposite tensors included, and where one of the two is zero, the result is that of
    ``lerp``. At t = 0 and t = 1 it is a copy; t outside [0, 1] goes on along the same ellipse.

    Source: Shoemake, "Animating rotation with quaternion curves", SIGGRAPH 1985.

    Args:
        a: the tensor, or tensors, at t = 0.
        b: the tensor, or tensors, at t = 1; shapes as in ``a``.
        t: a finite number, or one for each tensor.
        whole: take one angle for all tensors together, as parts of one vector, instead of one for each.
        names: what to call each tensor in errors.
        out: where to write; each is disjoint from all inputs or is exactly one of its own.
        backend: "auto", "reference", "cpp", "cuda" or "triton"; a backend asked for by name never falls back.

    Raises:
        InputError: shapes, devices or dtypes cannot be combined, a number is NaN or infinite, or a gradient is asked
            for.
        BackendError: the backend is not available here.
    """
    columns = [column(a, "a"), column(b, "b")]
    ts = per_tensor(t, "t", len(columns[0]))
    return _merge(
        "slerp",
        columns,
        ["a", "b"],
        lambda gram, row, name: spherical.slerp(gram, ts[row]),
        whole=whole,
        names=names,
        out=out,
        backend=backend,
        like=a,
    )


def nuslerp(
    tensors: Sequence[Operand],
    weights: Weights,
    *,
    base: Operand | None = None,
    row_wise: bool = False,
    names: str | Sequence[str] | None = None,
    out: Operand | None = None,
    backend: str = "auto",
) -> Operand:
    """Spherical linear interpolation of two models by weights, or of their task vectors.

    Computes ``slerp`` at t = w₂ / (w₁ + w₂), linear only where |sin θ| <= 1e-8 or a vector is zero. With a base the
    vectors are τᵢ = θᵢ − θ₀ and the result is θ₀ plus their interpolation.

    Source: mergekit's method of this name.

    Args:
        tensors: for each of the two models a tensor, or a list of tensors.
        weights: one for each model, or for each model one for each tensor.
        base: θ₀, a tensor or a list of them.
        row_wise: take each row (last axis) as a vector of its own; tensors of one axis or none are one row.
        names: what to call each tensor in errors.
        out: where to write; each is disjoint from all inputs or is exactly one of its own.
        backend: "auto", "reference", "cpp", "cuda" or "triton"; a backend asked for by name never falls back.

    Raises:
        InputError: there are not two models, weights sum to zero, shapes, devices or dtypes cannot be combined, a
            number is NaN or infinite, or a gradient is asked for.
        BackendError: the backend is not available here.
    """
    columns, labels = _models("nuslerp", tensors, base, least=2, most=2)
    table = per_model(weights, "weights", len(columns[0]), len(tensors))
    return _merge(
        "nuslerp",
        columns,
        labels,
        lambda gram, row, name: spherical.nuslerp(gram, table[row]),
        based=base is not None,
        row_wise=row_wise,
        names=names,
        out=out,
        backend=backend,
        like=tensors[0],
    )


def multislerp(
    tensors: Sequence[Operand],
    weights: Weights | None = None,
    *,
    base: Operand | None = None,
    normalize: bool = True,
    epsilon: float = 1e-8,
    names: str | Sequence[str] | None = None,
    out: Operand | None = None,
    backend: str = "auto",
) -> Operand:
    """Barycentric interpolation of models on the sphere, or of their task vectors, each tensor one vector.

    Computes Σ wᵢ‖xᵢ‖ · m with m = Σ wᵢuᵢ / ‖Σ wᵢuᵢ‖ and uᵢ = xᵢ / (‖xᵢ‖ + ε). (The definition goes on from m by the
    exponential map of Σ wᵢ (uᵢ − (uᵢ·m) m), which is zero there.) A single model stays itself; zero vectors give zero,
    or the base; two that cancel are interpolated linearly.

    Source: Goddard, "Multi-SLERP" (the definition in mergekit).

    Args:
        tensors: for each model a tensor, or a list of tensors.
        weights: one for each model, or for each model one for each tensor; all equal if left out.
        base: θ₀, a tensor or a list of them: xᵢ = θᵢ − θ₀ then, and the result is added to θ₀.
        normalize: divide the weights by their sum.
        epsilon: ε, added to norms; a mean direction no longer than this, or than 6e-8 Σ|wᵢ| (as far as a cancelled sum
            of squares can tell), has cancelled.
        names: what to call each tensor in errors.
        out: where to write; each is disjoint from all inputs or is exactly one of its own.
        backend: "auto", "reference", "cpp", "cuda" or "triton"; a backend asked for by name never falls back.

    Raises:
        InputError: there is no model, weights to be normalised sum to zero, more than two directions cancel, shapes,
            devices or dtypes cannot be combined, a number is NaN or infinite, or a gradient is asked for.
        BackendError: the backend is not available here.
    """
    if not epsilon > 0:
        raise InputError(f"multislerp got epsilon={epsilon}, expected a positive number.")
    columns, labels = _models("multislerp", tensors, base, least=1)
    table = per_model(1.0 if weights is None else weights, "weights", len(columns[0]), len(tensors))
    return _merge(
        "multislerp",
        columns,
        labels,
        lambda gram, row, name: spherical.multislerp(gram, table[row], normalize=normalize, epsilon=epsilon, name=name),
        based=base is not None,
        names=names,
        out=out,
        backend=backend,
        like=tensors[0],
    )


def karcher(
    tensors: Sequence[Operand],
    weights: Weights | None = None,
    *,
    iterations: int = 10,
    tolerance: float = 1e-5,
    names: str | Sequence[str] | None = None,
    out: Operand | None = None,
    backend: str = "auto",
) -> Operand:
    """The Riemannian (Karcher) mean of the models' directions times the mean of their norms, each tensor one vector.

    The mean m minimises Σ wᵢ θᵢ², θᵢ the angle between m and model i. It is approached from the normalised weighted
    mean by steps along T = Σ wᵢ log_m(xᵢ / ‖xᵢ‖) until ‖T‖ < ``tolerance``. Zero tensors have no direction and count in
    the mean norm only; all zero, so is the result. Of two opposite tensors the first gives the direction.

    Source: Karcher, "Riemannian center of mass and mollifier smoothing", 1977.

    Args:
        tensors: for each model a tensor, or a list of tensors.
        weights: one for each model, or for each model one for each tensor, divided by their sum; all equal if left out.
        iterations: the most steps to take.
        tolerance: the length of step, in radians, at which to stop.
        names: what to call each tensor in errors.
        out: where to write; each is disjoint from all inputs or is exactly one of its own.
        backend: "auto", "reference", "cpp", "cuda" or "triton"; a backend asked for by name never falls back.

    Raises:
        InputError: there is no model, weights sum to zero, shapes, devices or dtypes cannot be combined, a number is
            NaN or infinite, or a gradient is asked for.
        BackendError: the backend is not available here.
    """
    if not tolerance > 0 or iterations < 0:
        raise InputError(
            f"karcher got iterations={iterations} and tolerance={tolerance}; expected 0 or more and a positive number."
        )
    columns, labels = _models("karcher", tensors, None, least=1)
    table = per_model(1.0 if weights is None else weights, "weights", len(columns[0]), len(tensors))
    return _merge(
        "karcher",
        columns,
        labels,
        lambda gram, row, name: spherical.karcher(gram, table[row], iterations=iterations, tolerance=tolerance),
        names=names,
        out=out,
        backend=backend,
        like=tensors[0],
    )


def model_stock(
    tensors: Sequence[Operand],
    base: Operand,
    *,
    filter_wise: bool = False,
    names: str | Sequence[str] | None = None,
    out: Operand | None = None,
    backend: str = "auto",
) -> Operand:
    """Model Stock: between the base and the mean of N models, as far as the angles between task vectors say.

    Computes θ₀ + t (mean − θ₀) with t = N c / (1 + (N − 1) c), c the mean cosine of all pairs of task vectors, those
    with a zero vector being 0. Where |1 + (N − 1) c| < 1e-6 the result is the base.

    Source: Jang et al., "Model Stock: All we need is just a few fine-tuned models", ECCV 2024, arXiv 2403.19522.

    Args:
        tensors: for each of two or more models a tensor, or a list of tensors.
        base: θ₀, a tensor or a list of them.
        filter_wise: find t for each row (last axis) alone; tensors of one axis or none are one row.
        names: what to call each tensor in errors.
        out: where to write; each is disjoint from all inputs or is exactly one of its own.
        backend: "auto", "reference", "cpp", "cuda" or "triton"; a backend asked for by name never falls back.

    Raises:
        InputError: there are fewer than two models, shapes, devices or dtypes cannot be combined, a number is NaN or
            infinite, or a gradient is asked for.
        BackendError: the backend is not available here.
    """
    columns, labels = _models("model_stock", tensors, base, least=2)
    return _merge(
        "model_stock",
        columns,
        labels,
        lambda gram, row, name: spherical.model_stock(gram),
        based=True,
        row_wise=filter_wise,
        names=names,
        out=out,
        backend=backend,
        like=tensors[0],
    )


def _models(
    rule: str, tensors: object, base: Any, *, least: int, most: int | None = None
) -> tuple[list[list[Tensor]], list[str]]:
    """The columns of a rule, the base first if there is one, and their labels."""
    columns, labels, _ = models_of(tensors, rule)
    if len(columns) < least or (most is not None and len(columns) > most):
        expected = f"exactly {least}" if least == most else f"at least {least}"
        raise InputError(f"{rule} got {len(columns)} models, expected {expected} besides a base.")
    if base is not None:
        columns, labels = [column(base, "base"), *columns], ["base", *labels]
    return columns, labels


def _merge(
    rule: str,
    columns: list[list[Tensor]],
    labels: list[str],
    combine: Callable[[Gram, int, str], Combination],
    *,
    names: str | Sequence[str] | None,
    out: Tensor | Sequence[Tensor] | None,
    backend: str,
    like: Operand,
    based: bool = False,
    row_wise: bool = False,
    whole: bool = False,
) -> Operand:
    """Validate, take the Gram matrices, ask ``combine`` for the coefficients of each vector, and write."""
    targets, table, names = begin(rule, columns, labels, names=names, out=out, like=like)
    if not columns[0]:
        return like_operand([], like)
    results = [torch.empty_like(tensor) for tensor in columns[0]] if targets is None else targets
    columns, lengths, table = _as_vectors(columns, row_wise, table)
    grams = _dispatch.gram(columns, based=based, lengths=lengths, backend=backend, table=table)
    vectors = [1] * len(names)
    if lengths is not None:
        vectors = [x.numel() // n for x, n in zip(columns[0], lengths, strict=True)]
    owners = [row for row, number in enumerate(vectors) for _ in range(number)]
    _refuse_nonfinite(rule, grams, labels, [names[row] for row in owners], based)
    if whole:
        total = add_in_order(grams.unbind(), torch.zeros_like(grams[0]))
        grams = total.expand_as(grams)
    combinations = [combine(gram, row, names[row]) for gram, row in zip(grams.tolist(), owners, strict=True)]
    _write(columns, based, combinations, [_real(x) for x in results], lengths, backend)
    return like_operand(results, like)


def _as_vectors(
    columns: list[list[Tensor]], row_wise: bool, table: Any
) -> tuple[list[list[Tensor]], list[int] | None, Any]:
    """The columns as real numbers, the length of their vectors if these are rows, and their table if it still holds."""
    lengths = None
    if row_wise:
        parts = [2 if tensor.is_complex() else 1 for tensor in columns[0]]
        lengths = [n * k for n, k in zip(row_lengths(columns[0]), parts, strict=True)]
    if any(tensor.is_complex() for tensor in columns[0]):
        columns, table = [[_real(tensor) for tensor in part] for part in columns], None
    return columns, lengths, table


def _refuse_nonfinite(rule: str, grams: Tensor, labels: Sequence[str], names: Sequence[str], based: bool) -> None:
    squares = grams.diagonal(dim1=1, dim2=2)
    bad = (~squares.isfinite()).nonzero()
    if len(bad):
        vector, model = bad[0].tolist()
        operand = called(labels)[model + based] + (" less the base" if based else "")
        raise InputError(
            f"{rule} of {names[vector]}: {operand} holds NaN or infinity, or its norm overflows float64; "
            "expected finite values, whose angles exist. Repair the tensor, or merge it by another method."
        )


def _real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, on the same memory where that is possible."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def _write(
    columns: list[list[Tensor]],
    based: bool,
    combinations: list[Combination],
    results: list[Tensor],
    lengths: list[int] | None,
    backend: str,
) -> None:
    """Write the combinations to ``results``: of whole tensors, or of their rows, some of a tensor at a time."""
    if lengths is None:
        return _write_vectors(columns, based, combinations, results, backend)
    first = 0
    for place, (target, length) in enumerate(zip(results, lengths, strict=True)):
        dense = target
        if not target.is_contiguous():
            dense = torch.empty_like(target, memory_format=torch.contiguous_format)
        parts = [column[place].reshape(-1, length).split(_ROWS) for column in columns]
        for out, *pieces in zip(dense.view(-1, length).split(_ROWS), *parts, strict=True):
            vectors = [list(piece.unbind()) for piece in pieces]
            _write_vectors(vectors, based, combinations[first : first + len(out)], list(out.unbind()), backend)
            first += len(out)
        if dense is not target:
            target.copy_(dense)


def _write_vectors(
    columns: list[list[Tensor]],
    based: bool,
    combinations: list[Combination],
    results: list[Tensor],
    backend: str,
) -> None:
    """Write the combinations to ``results``, those of one kind in one call."""
    copies: dict[int, int] = {}
    lines, sums = [], []
    for row, (coefficients, linear) in enumerate(combinations):
        source = _copied(coefficients, based)
        if source is not None:
            copies[row] = source
        elif linear and not based:
            lines.append(row)
        else:
            sums.append(row)
    if copies:
        sources = [columns[source][row] for row, source in copies.items()]
        out = [results[row] for row in copies]
        table = _dispatch.plain_table([sources, sources], out)
        _dispatch.lerp(sources, sources, [0.0], out=out, backend=backend, table=table)
    for rows in (lines, sums):
        if not rows:
            continue
        chosen, out = [[part[row] for row in rows] for part in columns], [results[row] for row in rows]
        weights = [combinations[row].coefficients for row in rows]
        table = _dispatch.plain_table(chosen, out)
        if rows is lines:
            ts = [t for _, t in weights]
            _dispatch.lerp(chosen[0], chosen[1], ts, out=out, backend=backend, table=table)
        elif based:
            _dispatch.consensus(chosen, plan_without_vote(weights), out=out, backend=backend, table=table)
        else:
            _dispatch.weighted_sum(chosen, weights, out=out, backend=backend, table=table)


def _copied(coefficients: Sequence[float], based: bool) -> int | None:
    """The column that a combination copies, if it is one: a coefficient of 1 beside zeros, or zeros on a base."""
    others = [k for k, c in enumerate(coefficients) if c != 0]
    if based and not others:
        return 0
    return others[0] + based if len(others) == 1 and coefficients[others[0]] == 1 else None
