"""Merging by consensus: task arithmetic, TIES, DARE, DELLA, breadcrumbs and what lies between them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from isthmus import _dispatch, _library
from isthmus.errors import InputError
from isthmus.reference import Cuts, Groups, Plan, Random, Stats, random_keys

from ._validate import any_requires_grad, column, models_of, option, per_model, refuse_gradient_of_out, validate
from .selection import SCOPES, TIES, Thresholds, check_min_kept, find, ranked, refuse_complex, row_lengths, row_names

SPARSIFY = ("magnitude", "none", "random", "magnitude_random", "outliers")
RESCALE = ("none", "inverse_density", "l1")
MAJORITY_SIGN_METHODS = ("total", "frequency", "weighted_total", "none")
ZERO_SIGNS = ("majority", "positive", "negative", "zero")
MERGE_FUNCS = ("mean", "sum", "max")
DIVISORS = ("count", "weight")
_TINY = 1e-7  # of L1 norms: below it a tensor is not rescaled
_SEEDS = 1 << 64


class Options(TypedDict, total=False):
    """The keywords of ``consensus`` but ``stats``."""

    base: Tensor | Sequence[Tensor] | None
    names: str | Sequence[str] | None
    thresholds: Thresholds | None
    starts: int | Sequence[int] | None
    out: Tensor | Sequence[Tensor] | None
    backend: str
    scope: str
    sparsify: str
    ties: str
    min_kept: int
    rescale: str
    majority_sign_method: str
    zero_sign: str
    merge_func: str
    divisor: str
    scaling_factor: Any
    gamma: Any
    epsilon: Any
    seed: int


@overload
def consensus(
    tensors: Iterable[Tensor],
    weights: Any = None,
    density: Any = 1.0,
    *,
    stats: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def consensus(
    tensors: Iterable[Sequence[Tensor]],
    weights: Any = None,
    density: Any = 1.0,
    *,
    stats: Literal[False] = False,
    **options: Unpack[Options],
) -> list[Tensor]: ...
@overload
def consensus(
    tensors: Iterable[Tensor],
    weights: Any = None,
    density: Any = 1.0,
    *,
    stats: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Stats]: ...
@overload
def consensus(
    tensors: Iterable[Sequence[Tensor]],
    weights: Any = None,
    density: Any = 1.0,
    *,
    stats: Literal[True],
    **options: Unpack[Options],
) -> tuple[list[Tensor], Stats]: ...
@overload
def consensus(
    tensors: Iterable[Tensor] | Iterable[Sequence[Tensor]],
    weights: Any = None,
    density: Any = 1.0,
    *,
    stats: bool,
    **options: Unpack[Options],
) -> Any: ...
def consensus(
    tensors: Iterable[Tensor] | Iterable[Sequence[Tensor]],
    weights: Any = None,
    density: Any = 1.0,
    *,
    base: Tensor | Sequence[Tensor] | None = None,
    names: str | Sequence[str] | None = None,
    thresholds: Thresholds | None = None,
    starts: int | Sequence[int] | None = None,
    out: Tensor | Sequence[Tensor] | None = None,
    backend: str = "auto",
    scope: str = "global",
    sparsify: str = "magnitude",
    ties: str = "inclusive",
    min_kept: int = 0,
    rescale: str = "none",
    majority_sign_method: str = "total",
    zero_sign: str = "majority",
    merge_func: str = "mean",
    divisor: str = "count",
    scaling_factor: Any = 1.0,
    gamma: Any = 0.01,
    epsilon: Any = 0.15,
    seed: int = 0,
    stats: bool = False,
) -> Any:
    """Merge models entry by entry, over those that survive trimming and agree on a sign.

    With the base b, models xᵢ, task vectors τᵢ = xᵢ - b (or xᵢ itself without a base), weights wᵢ and factors rᵢ::

        out = b + λ · (Σ_{i ∈ A} wᵢ (rᵢ τᵢ)) / D

    1. *Trim*: ``sparsify`` says which entries of each τᵢ survive: the largest |τ| ("magnitude", TIES: Yadav et al.
       2023, arXiv 2306.01708), all ("none"), each with probability p ("random", DARE: Yu et al. 2023, arXiv
       2311.03099), each with a probability that grows from p - ε to p + ε with the rank of |τ| in its row
       ("magnitude_random", DELLA: Deep et al. 2024, arXiv 2406.11617), or the largest but the int(γ n) very largest
       ("outliers", breadcrumbs: Davari and Belilovsky 2023, arXiv 2312.06795). See ``thresholds`` for ``scope``,
       ``ties`` and ``min_kept``.
    2. *Rescale*: r is 1, 1/p ("inverse_density"; the entry's own p for "magnitude_random"), or Σ|τ| before trimming
       over Σ|τ| after it ("l1", per tensor in float64; 1 where either is below 1e-7).
    3. *Elect*: the sign of Σ rᵢτᵢ over the survivors ("total"), of Σ sign τᵢ ("frequency") or of Σ wᵢrᵢτᵢ
       ("weighted_total"); "none" elects nothing. Where a vote cancels, ``zero_sign`` elects the sign of the sum of all
       other elected signs, of which 0 counts as negative ("majority"; over all tensors of the call with scope "global",
       else over the tensor), "positive", "negative", or nothing ("zero"). A: the survivors whose term of the vote has
       the elected sign; without a vote those that are not 0.
    4. *Merge*: "mean" divides the sum by the number of models in A ("count") or by their Σ wᵢ ("weight"; 1 if that is
       0); "sum" does not divide; "max" takes the largest |wᵢ rᵢ τᵢ| with the elected sign (without a vote, with its
       own).

    Where A is empty, or what is merged is 0, the result is the base, to the bit (0 without one). Sums are left folds in
    the order of the models; every operation rounds once, in the type that the dtypes of base and models promote to, at
    least float32; scalars are rounded to it once from float64. Every backend, instruction set and thread count gives
    the same bits, up to the payload of NaNs; but on a GPU "l1" adds in another order, so that r may differ in the last
    bits of float64, and with it results, above all those in float64. NaN and infinity propagate, except that no
    magnitude can be ranked among them: NaN survives every cut, given or found, by which anything at all may survive,
    and is dropped with outliers where there are any.

    Gradients flow to tensors, base, weights and scaling factor; what survives, the elected signs and r are held fixed.

    Args:
        tensors: one tensor per model, or one list of tensors per model. Complex ones, taken as pairs of real numbers,
            only without trimming and without a vote.
        weights: w, a number for all models, one per model, or per model a list of one per tensor; by default 1. The
            host reads them to plan the merge, as it does λ: for tensors on a GPU it waits.
        density: p, from 0 (the base, to the bit) to 1 (nothing is dropped), like ``weights``; with scope "global" and
            trimming by magnitude not per tensor.
        base: what the models are differences to; ``None`` if the tensors are task vectors: then so is the result.
        names: the tensors' canonical names, which random masks depend on; errors mention them.
        thresholds: what ``thresholds`` found, to trim by instead of ``density``, ``scope``, ``ties``, ``min_kept`` and
            ``gamma``. What "inverse_density" divides by is still ``density``.
        starts: for tensors that are shards: the index, in C-order, of the first entry of each in the tensor that it is
            a part of; for ``thresholds`` of scope "global" in the whole model. A "majority" and "l1" sums are those of
            the shards alone.
        out: where to write; each is disjoint from all inputs or is exactly one of its own.
        backend: "auto", "reference", "cpp", "cuda" or "triton"; a backend asked for by name never falls back.
        scope: "global", "tensor" or "row".
        sparsify: "magnitude", "none", "random", "magnitude_random" or "outliers".
        ties: "inclusive" or "exact".
        min_kept: at least so many entries survive where p > 0.
        rescale: "none", "inverse_density" or "l1".
        majority_sign_method: "total", "frequency", "weighted_total" or "none".
        zero_sign: "majority", "positive", "negative" or "zero".
        merge_func: "mean", "sum" or "max".
        divisor: "count" or "weight".
        scaling_factor: λ, a number, or a list of one per tensor.
        gamma: γ, like ``density``.
        epsilon: ε, like ``weights``.
        seed: of the random masks, from 0 to 2⁶⁴ - 1. A mask depends on it, on the model's position, on the tensor's
            name and on the entry's index, and on nothing else.
        stats: return a pair: the result, and ``Stats`` with counts of what survived and was elected.

    Returns:
        A tensor, or a list of tensors, with the dtype of ``out``, of the base, or of the first model.

    Raises:
        InputError: an option is unknown, a number is out of range, a task vector that must be ranked is not finite,
            tensors cannot be combined, or ``out`` overlaps an input.
        BackendError: the backend is not available here.

    Warns:
        IsthmusWarning: inclusive ties keep over 1 % more than asked for.
    """
    columns, labels, single = models_of(tensors, "consensus")
    models, based = len(columns), base is not None
    if base is not None:
        columns, labels = [column(base, "base"), *columns], ["base", *labels]
    for name, value, known in (
        ("scope", scope, SCOPES),
        ("sparsify", sparsify, SPARSIFY),
        ("ties", ties, TIES),
        ("rescale", rescale, RESCALE),
        ("majority_sign_method", majority_sign_method, MAJORITY_SIGN_METHODS),
        ("zero_sign", zero_sign, ZERO_SIGNS),
        ("merge_func", merge_func, MERGE_FUNCS),
        ("divisor", divisor, DIVISORS),
    ):
        option(name, value, known)
    check_min_kept(min_kept)
    targets = None if out is None else column(out, "out")
    table = validate(columns, labels, targets)
    rows = len(columns[0])
    given_names = row_names(names, rows)
    given_starts = _starts(starts, rows)
    densities = per_model(density, "density", rows, models, low=0, high=1)
    trims = thresholds is not None or any(p < 1 for row in densities for p in row)
    if trims and sparsify == "none":
        raise InputError(
            "density= and thresholds= have no meaning with sparsify='none'; leave them away, or choose "
            f"{', '.join(repr(value) for value in SPARSIFY if value != 'none')}."
        )
    if trims or majority_sign_method != "none":
        refuse_complex(columns[0], given_names)

    keep, drop, lengths, random = None, None, None, None
    if sparsify in ("magnitude", "outliers"):
        if thresholds is None and given_starts is not None:
            raise InputError("starts= places shards in a whole; pass the thresholds= of the whole with it.")
        if thresholds is None and trims and rows:
            outliers = per_model(gamma, "gamma", rows, models, low=0, high=1) if sparsify == "outliers" else None
            thresholds = find(
                columns,
                based=based,
                scope=scope,
                ties=ties,
                densities=[densities],
                gamma=outliers,
                min_kept=min_kept,
                names=given_names,
                backend=backend,
                table=table,
            )[0]
        if thresholds is not None:
            scope, lengths = thresholds.scope, thresholds.lengths
            keep, drop = _cuts(thresholds, columns[0], models, given_starts)
    elif sparsify != "none":
        if thresholds is not None:
            raise InputError(f"thresholds= trims by magnitude and sparsify={sparsify!r} by chance; leave one away.")
        if given_names is None:
            raise InputError("random masks depend on the tensors' names; pass names=, one for each tensor of a model.")
        if not (hasattr(seed, "__index__") and 0 <= seed < _SEEDS):
            raise InputError(f"seed is {seed!r}, expected an integer from 0 to 2**64 - 1.")
        if trims and rows:
            epsilons = None
            if sparsify == "magnitude_random":
                epsilons = _epsilons(per_model(epsilon, "epsilon", rows, models, low=0, high=1), densities, given_names)
                lengths = row_lengths(columns[0])
                _refuse_unranked(columns, based, densities, given_names, backend, table)
            probabilities = torch.tensor(densities, dtype=torch.float64)
            traced = _library.is_needed(False)
            random = Random(
                _library.seeded_keys(probabilities, seed, given_names)
                if traced
                else random_keys(seed, given_names, models),
                probabilities,
                epsilons,
                rescale == "inverse_density",
                given_starts or [0] * rows,
            )
    factors = None
    if rescale == "inverse_density" and keep is not None:
        factors = torch.tensor([[1 / p if p else 1.0 for p in row] for row in densities], dtype=torch.float64)
    plan = Plan(
        based=based,
        weights=_weights(weights, rows, models),
        scaling=_scaling(scaling_factor, rows),
        vote=majority_sign_method,
        zero_sign=zero_sign,
        tally_rows=scope != "global",
        merge_func=merge_func,
        divisor=divisor,
        rescale=factors,
        keep=keep,
        drop=drop,
        lengths=lengths,
        random=random,
    )
    if rescale == "l1" and (keep is not None or random is not None):
        fixed = dataclasses.replace(plan, weights=plan.weights.detach(), scaling=plan.scaling.detach())
        if _library.is_needed(False):
            sums = _library.l1(columns, fixed, backend=backend)
        else:
            sums = _dispatch.l1(columns, fixed, backend=backend, table=table)
        before, after = sums.unbind(-1)
        tiny = (before < _TINY) | (after < _TINY)
        plan = dataclasses.replace(plan, rescale=torch.where(tiny, 1.0, before / after))
    if not rows:
        nothing = torch.zeros(0, dtype=torch.int64)
        return ([], Stats(nothing.view(0, models), nothing, nothing, nothing, nothing)) if stats else []
    requires_grad = any_requires_grad(weights, columns, table) or any_requires_grad(scaling_factor, [], None)
    if _library.is_needed(requires_grad):
        refuse_gradient_of_out(requires_grad, targets)
        results, counts = _library.consensus(columns, plan, out=targets, backend=backend, stats=stats)
    else:
        results, counts = _dispatch.consensus(columns, plan, out=targets, backend=backend, stats=stats, table=table)
    result = results[0] if single else results
    return (result, counts) if stats else result


def _starts(starts: int | Sequence[int] | None, rows: int) -> list[int] | None:
    """Where shards start, as one index for each row."""
    if starts is None:
        return None
    given = [starts] if isinstance(starts, int) else list(starts)
    if len(given) != rows or any(start < 0 for start in given):
        raise InputError(f"starts is {starts}, expected an index of at least 0 for each of {rows} tensors.")
    return given


def _cuts(
    thresholds: Thresholds, tensors: Sequence[Tensor], models: int, starts: list[int] | None
) -> tuple[Cuts, Cuts | None]:
    """The cuts of each row, or of each of its pieces, with indices counted from the row's or the piece's start."""
    keep, drop = thresholds.keep, thresholds.drop
    groups, width = keep.value.shape
    rows = len(tensors)
    expected = {"global": 1, "tensor": rows, "row": groups}[thresholds.scope]
    if thresholds.lengths is not None:
        lengths = row_lengths(tensors)
        expected = sum(x.numel() // length for x, length in zip(tensors, lengths, strict=True))
        expected = expected if lengths == thresholds.lengths else -1
    if width != models or groups != expected:
        raise InputError(
            f"thresholds= is for {width} models and {groups} groups (scope {thresholds.scope!r}), and these "
            f"{models} models of {rows} tensors do not fit. Pass those found for the same models and tensors."
        )
    if thresholds.scope == "row" or (starts is None and (thresholds.scope == "tensor" or rows == 1)):
        return keep, drop
    if starts is None:
        starts = list(itertools.accumulate((x.numel() for x in tensors[:-1]), initial=0))
    offsets = torch.tensor(starts, dtype=torch.int64)[:, None]

    def shift(cuts: Cuts) -> Cuts:
        return Cuts(cuts.value.expand(rows, models).contiguous(), (cuts.index - offsets).clamp(min=0))

    return shift(keep), None if drop is None else shift(drop)


def _epsilons(epsilon: list[list[float]], densities: list[list[float]], names: list[str]) -> Tensor:
    """Half of the range of probabilities, 0 where everything is kept or dropped."""
    for name, ps, spreads in zip(names, densities, epsilon, strict=True):
        for p, spread in zip(ps, spreads, strict=True):
            largest = p - spread + 2 * spread * (1 + 2**-51)  # no less than what rounding makes of it in any row
            if 0 < p < 1 and not (p - spread > 0 and largest < 1):
                raise InputError(
                    f"density {p} with epsilon {spread} of {name!r} makes probabilities that leave (0, 1); "
                    f"choose epsilon below {min(p, 1 - p)}."
                )
    table = [
        [spread if 0 < p < 1 else 0.0 for p, spread in zip(*pair, strict=True)]
        for pair in zip(densities, epsilon, strict=True)
    ]
    return torch.tensor(table, dtype=torch.float64)


def _refuse_unranked(
    columns: list[list[Tensor]], based: bool, densities: list[list[float]], names: list[str], backend: str, table: Any
) -> None:
    """Check that the task vectors whose rows are ranked are finite."""
    ranks = torch.tensor([[[int(0 < p < 1)] for p in row] for row in densities])
    ranked(columns, based, Groups(False, None), ranks, False, names=names, backend=backend, table=table)


def _weights(weights: Any, rows: int, models: int) -> Tensor:
    """Weights as float64 (rows, models); gradients flow to a tensor."""
    if weights is None:
        return torch.ones(rows, models, dtype=torch.float64)
    if not isinstance(weights, Tensor):
        return torch.tensor(per_model(weights, "weights", rows, models), dtype=torch.float64).view(rows, models)
    if weights.dim() > 2 or weights.shape not in ((), (models,), (models, rows)):
        raise InputError(
            f"weights is a tensor of shape {tuple(weights.shape)}, expected one number, ({models},), one for each "
            f"model, or ({models}, {rows}), one for each model and tensor."
        )
    return _wide(weights.t() if weights.dim() == 2 else weights, "weights").expand(rows, models)


def _scaling(factor: Any, rows: int) -> Tensor:
    """Scaling factors as float64 (rows,); gradients flow to a tensor."""
    if isinstance(factor, Tensor):
        if factor.numel() not in (1, rows) or factor.dim() > 1:
            raise InputError(
                f"scaling_factor is a tensor of shape {tuple(factor.shape)}, expected one number, or {rows}, one for "
                "each tensor."
            )
        return _wide(factor, "scaling_factor").expand(rows)
    table = per_model(factor, "scaling_factor", 1, rows)
    return torch.tensor(table[0], dtype=torch.float64)


def _wide(table: Tensor, name: str) -> Tensor:
    """A tensor of numbers as float64 on the CPU."""
    if not torch.compiler.is_compiling() and not table.isfinite().all():
        raise InputError(f"{name} is {table.tolist()}, expected finite numbers.")
    return table.to(device="cpu", dtype=torch.float64)
