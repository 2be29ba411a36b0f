"""Rules of their own kind: linear, nearswap, sce, arcee_fusion, ram and ram_plus.

``linear`` and ``ram`` are forms of the consensus rule and run where it runs. The others run in plain PyTorch on every
backend, whose name is checked all the same, a piece of a tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from isthmus import _dispatch, reference, spherical
from isthmus.errors import InputError
from isthmus.reference import rules

from ._begin import Operand, begin, like_operand, per_tensor, plan_without_vote
from ._naming import called
from ._validate import column, models_of, per_model
from .consensus import consensus
from .elementwise import weighted_sum


def linear(
    tensors: Sequence[Operand],
    weights: float | Sequence[float] | Sequence[Sequence[float]] | Tensor = 1.0,
    *,
    normalize: bool = True,
    out: Operand | None = None,
    backend: str = "auto",
) -> Operand:
    """The weighted average of models, or their weighted sum.

    Normalised it is x₁ + Σ_{i≥2} ŵᵢ (xᵢ − x₁) with ŵᵢ = wᵢ / Σ w, so that a model averaged with itself is itself to the
    bit; entries that all models share stay, unless they are infinite: those become NaN. Raw it is ``weighted_sum``.

    Source: Wortsman et al., "Model soups", ICML 2022, arXiv 2203.05482.

    Args:
        tensors: for each model a tensor, or a list of tensors.
        weights: a number, one for each model, or for each model one for each tensor.
        normalize: divide the weights by their sum.
        out: where to write; each is disjoint from all inputs or is exactly one of its own.
        backend: "auto", "reference", "cpp", "cuda" or "triton"; a backend asked for by name never falls back.

    Raises:
        InputError: there is no model, weights to be normalised sum to zero, a weight is NaN or infinite, or shapes,
            devices or dtypes cannot be combined.
        BackendError: the backend is not available here.
    """
    columns, _, single = models_of(tensors, "linear")
    models: Any = [model[0] for model in columns] if single else columns
    target = cast("Any", out)
    numbers = weights.detach() if isinstance(weights, Tensor) else weights
    table = per_model(numbers, "weights", len(columns[0]), len(columns))
    if normalize:
        table = [spherical.normalised(row) for row in table]
    shares: Any = [[row[model] for row in table] for model in range(len(columns))]
    if isinstance(weights, Tensor) and weights.requires_grad:
        shares = weights.double().expand(len(columns)) if weights.dim() == 0 else weights.double()
        if normalize:
            shares = shares / shares.sum(0)
    if not normalize or len(columns) == 1:
        result = weighted_sum(models, shares, out=target, backend=backend)
    else:
        first, *others = models
        result = consensus(
            others,
            shares[1:],
            base=first,
            sparsify="none",
            majority_sign_method="none",
            merge_func="sum",
            out=out,
            backend=backend,
        )
    return cast("Operand", result)


def nearswap(
    a: Operand,
    b: Operand,
    t: float | Sequence[float] | Tensor,
    *,
    names: str | Sequence[str] | None = None,
    out: Operand | None = None,
    backend: str = "auto",
) -> Operand:
    """Go from ``a`` to ``b`` entry by entry, as far as t allows: entries that differ little are swapped.

    Computes a + w (b − a) with w = min(t / max(|b − a|, 1e-6), 1), and b itself where w = 1. Differences above 1e-6
    thus shrink by t, to no less than zero. NaN and infinity propagate.

    Source: alchemonaut, "QuartetAnemoi-70B" (the model card); mergekit's method of this name.

    Args:
        a: the tensor, or tensors, to start from.
        b: the tensor, or tensors, to go towards; shapes as in ``a``.
        t: the longest step, a number from 0 or one for each tensor.
        names: what to call each tensor in errors.
        out: where to write; each is disjoint from all inputs or is exactly one of its own.
        backend: "auto" or the name of a backend that is available; all run this rule in PyTorch.

    Raises:
        InputError: shapes, devices or dtypes cannot be combined or are complex, t is negative or not finite, or a
            gradient is asked for.
        BackendError: the backend is not available here.
    """
    columns = [column(a, "a"), column(b, "b")]
    ts = per_tensor(t, "t", len(columns[0]), low=0)
    return _row_by_row(
        "nearswap",
        columns,
        ["a", "b"],
        lambda row, tensors, dtype: rules.nearswap(tensors[0], tensors[1], ts[row], dtype=dtype),
        names=names,
        out=out,
        backend=backend,
        like=a,
        finite=False,
    )


def sce(
    tensors: Sequence[Operand],
    base: Operand,
    *,
    select_topk: float | Sequence[float] | Tensor = 1.0,
    floor: float = 0.0,
    names: str | Sequence[str] | None = None,
    out: Operand | None = None,
    backend: str = "auto",
) -> Operand:
    """SCE: select entries by their variance over the models, calculate weights, erase minority signs.

    Of the entries whose task vectors τ differ between models, int(k · their number) of largest population variance are
    selected, of equal ones those of lower index; with k = 1 all entries are. Weights are wᵢ = mean(τ̂ᵢ²) / Σⱼ mean(τ̂ⱼ²)
    with τ̂ᵢ = τᵢ where selected and 0 elsewhere. The result is θ₀ + Σ wᵢ τ̂ᵢ / Σ wᵢ over the models whose entry has the
    sign of Σ τ̂ᵢ (+ where that is 0), or θ₀ where there is none. Each tensor is merged by itself.

    Source: Wan et al., "FuseChat: Knowledge fusion of chat models", 2024, arXiv 2408.07990, the method SCE.

    Args:
        tensors: for each model a tensor, or a list of tensors.
        base: θ₀, a tensor or a list of them.
        select_topk: k, a number from 0 to 1 or one for each tensor.
        floor: where Σⱼ mean(τ̂ⱼ²) is no larger, all models weigh the same, and as a divisor Σ wᵢ is at least this.
            mergekit 0.1.5 has 1e-6 built in, which makes the weights of small task vectors equal.
        names: what to call each tensor in errors.
        out: where to write; each is disjoint from all inputs or is exactly one of its own.
        backend: "auto" or the name of a backend that is available; all run this rule in PyTorch.

    Raises:
        InputError: there is no model, an option is out of range, shapes, devices or dtypes cannot be combined or are
            complex, a number is NaN or infinite, or a gradient is asked for.
        BackendError: the backend is not available here.
    """
    if not 0 <= floor < 1:
        raise InputError(f"sce got floor={floor}, expected a number from 0, and below 1.")
    columns, labels = _on_base(tensors, base, "sce")
    fractions = per_tensor(select_topk, "select_topk", len(columns[0]), low=0, high=1)
    return _row_by_row(
        "sce",
        columns,
        labels,
        lambda row, tensors, dtype: rules.sce(tensors[1:], tensors[0], fractions[row], floor, dtype=dtype),
        names=names,
        out=out,
        backend=backend,
        like=tensors[0],
    )


def arcee_fusion(
    tensor: Operand,
    base: Operand,
    *,
    names: str | Sequence[str] | None = None,
    out: Operand | None = None,
    backend: str = "auto",
) -> Operand:
    """Take from one model the entries of outstanding importance, and the rest from the base.

    The importance of an entry is |θ − θ₀| · Σ p ln(p / q) over its row (last axis), p = softmax(θ) + 1e-8 and q =
    softmax(θ₀) + 1e-8 along it. Entries of at least median + 1.5 · (upper − lower quartile) of their tensor are taken
    to the bit; the k-th quartile of n values in order is the one of index ⌊k (n − 1) / 4⌋.

    Source: mergekit's method of this name. There the quartiles of tensors above 10⁶ entries are estimated from a random
    sample; here they are exact.

    Args:
        tensor: the tensor, or tensors, to take from.
        base: θ₀, a tensor or a list of them.
        names: what to call each tensor in errors.
        out: where to write; each is disjoint from all inputs or is exactly one of its own.
        backend: "auto" or the name of a backend that is available; all run this rule in PyTorch.

    Raises:
        InputError: shapes, devices or dtypes cannot be combined or are complex, a number is NaN or infinite, or a
            gradient is asked for.
        BackendError: the backend is not available here.
    """
    return _row_by_row(
        "arcee_fusion",
        [column(base, "base"), column(tensor, "tensor")],
        ["base", "tensor"],
        lambda row, tensors, dtype: rules.arcee_fusion(tensors[1], tensors[0], dtype=dtype),
        names=names,
        out=out,
        backend=backend,
        like=tensor,
    )


def ram(
    tensors: Sequence[Operand],
    base: Operand,
    *,
    epsilon: float = 1e-5,
    scaling_factor: float | Sequence[float] | Tensor = 1.0,
    names: str | Sequence[str] | None = None,
    out: Operand | None = None,
    backend: str = "auto",
) -> Operand:
    """RAM: add what one model alone changed, and average what several changed.

    Computes θ₀ + λ · (the mean of those τᵢ whose |τᵢ| > ε), entry by entry, and θ₀ where there is none.

    Source: "Reinforced Agent Merging", arXiv 2601.13572.

    Args:
        tensors: for each model a tensor, or a list of tensors.
        base: θ₀, a tensor or a list of them.
        epsilon: ε, the largest change that counts as none, from 0; rounded to the type computed in.
        scaling_factor: λ, a number or one for each tensor.
        names: what to call each tensor in errors.
        out: where to write; each is disjoint from all inputs or is exactly one of its own.
        backend: "auto", "reference", "cpp", "cuda" or "triton"; a backend asked for by name never falls back.

    Raises:
        InputError: there is no model, ε is negative, shapes, devices or dtypes cannot be combined or are complex, a
            number is NaN or infinite, or a gradient is asked for.
        BackendError: the backend is not available here.
    """
    if not epsilon >= 0:
        raise InputError(f"ram got epsilon={epsilon}, expected a number from 0.")
    columns, labels = _on_base(tensors, base, "ram")
    rows, models = len(columns[0]), len(columns) - 1
    scaling = per_tensor(scaling_factor, "scaling_factor", rows)
    targets, table, names = begin("ram", columns, labels, names=names, out=out, like=tensors[0])
    if not rows:
        return like_operand([], tensors[0])
    cuts = []
    for row, name in zip(zip(*columns, strict=True), names, strict=True):
        _refuse_unrankable("ram", row, labels, name)
        cuts.append(torch.tensor(epsilon, dtype=reference.compute_dtype(x.dtype for x in row)).double())
    keep = reference.Cuts(torch.stack(cuts)[:, None].expand(rows, models), torch.zeros(rows, models, dtype=torch.int64))
    plan = plan_without_vote([[1.0] * models] * rows, scaling=scaling, merge_func="mean", keep=keep)
    results, _ = _dispatch.consensus(columns, plan, out=targets, backend=backend, table=table)
    return like_operand(results, tensors[0])


def ram_plus(
    tensors: Sequence[Operand],
    base: Operand,
    *,
    r: float = 0.1,
    alpha: float = 0.2,
    epsilon: float = 1e-5,
    names: str | Sequence[str] | None = None,
    out: Operand | None = None,
    backend: str = "auto",
) -> Operand:
    """RAM+: as ``ram``, with what one model alone changed enlarged by how much else it shares.

    An entry of model i counts as changed if |τᵢ| > ε. Entries that model i alone changed are multiplied by 1 + r ·
    min(ρᵢ, α), ρᵢ the number of its other changed entries divided by the number of these; entries changed by several
    models are averaged over those. Each tensor is merged by itself.

    Source: "Reinforced Agent Merging", arXiv 2601.13572, in the tensor-local form of mergekit's ``ramplus_tl``.

    Args:
        tensors: for each model a tensor, or a list of tensors.
        base: θ₀, a tensor or a list of them.
        r: how much of the ratio is added to the factor, from 0.
        alpha: α, the largest ratio that counts, from 0.
        epsilon: ε, the largest change that counts as none, from 0.
        names: what to call each tensor in errors.
        out: where to write; each is disjoint from all inputs or is exactly one of its own.
        backend: "auto" or the name of a backend that is available; all run this rule in PyTorch.

    Raises:
        InputError: there is no model, an option is negative, shapes, devices or dtypes cannot be combined or are
            complex, a number is NaN or infinite, or a gradient is asked for.
        BackendError: the backend is not available here.
    """
    if not (r >= 0 and alpha >= 0 and epsilon >= 0):
        raise InputError(f"ram_plus got r={r}, alpha={alpha} and epsilon={epsilon}, expected none below 0.")
    columns, labels = _on_base(tensors, base, "ram_plus")
    return _row_by_row(
        "ram_plus",
        columns,
        labels,
        lambda row, tensors, dtype: rules.ram_plus(tensors[1:], tensors[0], r, alpha, epsilon, dtype=dtype),
        names=names,
        out=out,
        backend=backend,
        like=tensors[0],
    )


def _on_base(tensors: object, base: object, rule: str) -> tuple[list[list[Tensor]], list[str]]:
    """The columns of a rule, the base first, and their labels."""
    columns, labels, _ = models_of(tensors, rule)
    return [column(base, "base"), *columns], ["base", *labels]


def _row_by_row(
    rule: str,
    columns: list[list[Tensor]],
    labels: list[str],
    apply: Callable[[int, Sequence[Tensor], torch.dtype], Tensor],
    *,
    names: str | Sequence[str] | None,
    out: Tensor | Sequence[Tensor] | None,
    backend: str,
    like: Operand,
    finite: bool = True,
) -> Operand:
    """Validate, and apply a rule of ``isthmus.reference.rules`` to each row of tensors."""
    targets, _, names = begin(rule, columns, labels, names=names, out=out, like=like)
    rows = list(zip(*columns, strict=True))
    for tensors, name in zip(rows, names, strict=True):  # all of them before the first is written
        _dispatch.choose(backend, tensors[0].device)
        _refuse_unrankable(rule, tensors, labels, name, finite=finite)
    results = []
    for row, tensors in enumerate(rows):
        target = torch.empty_like(tensors[0]) if targets is None else targets[row]
        if target.numel():
            target.copy_(apply(row, tensors, target.dtype))
        results.append(target)
    return like_operand(results, like)


def _refuse_unrankable(
    rule: str, tensors: Sequence[Tensor], labels: Sequence[str], name: str, *, finite: bool = True
) -> None:
    """Check that entries have an order: that they are real, and if ``finite`` neither NaN nor infinite."""
    for tensor, label in zip(tensors, called(labels), strict=True):
        if tensor.is_complex():
            raise InputError(f"{rule} of {name}: {label} has dtype {tensor.dtype}, expected a real one.")
        if finite and tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            raise InputError(
                f"{rule} of {name}: {label} holds NaN or infinity; expected finite values, which can be ranked. "
                "Repair the tensor, or merge it by another method."
            )
