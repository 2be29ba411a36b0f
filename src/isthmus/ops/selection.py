"""Which entries of task vectors are the largest: the thresholds by which they are trimmed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from isthmus import _dispatch, _library
from isthmus.errors import InputError, warn
from isthmus.reference import Cuts, Groups, Selected

from ._naming import called, own_labels
from ._validate import column, models_of, option, per_model, validate

SCOPES = ("global", "tensor", "row")
TIES = ("inclusive", "exact")
_EXCESS = 1.01  # a warning says so where ties at thresholds keep more than this times what was asked for


@dataclass(frozen=True, eq=False)
class Thresholds:
    """Which entries survive trimming by magnitude: those in the top set ``keep`` that are not in the top set ``drop``.

    An entry is in a top set if |τ| > value, or if |τ| = value and its index, in C-order from the start of what is
    ranked together, is below ``index``.

    Attributes:
        keep: value, float64, and index, int64, both of shape (groups, models). Groups are the whole model ("global"),
            tensors ("tensor") or rows ("row").
        drop: likewise for outliers; ``None`` if there are none.
        scope: what is ranked together.
        lengths: for each tensor the length of its rows, if the scope is "row".
        kept: how many entries survive, int64 (groups, models).
    """

    keep: Cuts
    drop: Cuts | None
    scope: str
    lengths: list[int] | None
    kept: Tensor


@overload
def thresholds(
    tensors: Sequence[Tensor] | Sequence[Sequence[Tensor]],
    density: Any,
    *,
    densities: None = None,
    base: Tensor | Sequence[Tensor] | None = None,
    scope: str = "global",
    ties: str = "inclusive",
    gamma: Any = None,
    min_kept: int = 0,
    names: str | Sequence[str] | None = None,
    backend: str = "auto",
) -> Thresholds: ...
@overload
def thresholds(
    tensors: Sequence[Tensor] | Sequence[Sequence[Tensor]],
    density: None = None,
    *,
    densities: Sequence[Any],
    base: Tensor | Sequence[Tensor] | None = None,
    scope: str = "global",
    ties: str = "inclusive",
    gamma: Any = None,
    min_kept: int = 0,
    names: str | Sequence[str] | None = None,
    backend: str = "auto",
) -> list[Thresholds]: ...
def thresholds(
    tensors: Sequence[Tensor] | Sequence[Sequence[Tensor]],
    density: Any = None,
    *,
    densities: Sequence[Any] | None = None,
    base: Tensor | Sequence[Tensor] | None = None,
    scope: str = "global",
    ties: str = "inclusive",
    gamma: Any = None,
    min_kept: int = 0,
    names: str | Sequence[str] | None = None,
    backend: str = "auto",
) -> Thresholds | list[Thresholds]:
    """Find which entries of each task vector τ are its largest, exactly and without sorting.

    Of n entries that are ranked together the k = max(int(p n), min_kept) of largest |τ| survive. With
    ``ties="inclusive"`` all survive that are not below the (n - k)-th smallest, which is at least one more (Yadav et
    al., "TIES-Merging", 2023, as in its code); with "exact" those k, of equal ones the first in C-order. Density 1
    keeps and 0 drops everything, without a look at the data.

    With ``gamma`` the int(γ n) largest are dropped first, or as many as leave the k, and the k next survive (Davari and
    Belilovsky, "Model Breadcrumbs", 2024). Of entries equal to the largest that may survive, "inclusive" keeps all.

    Args:
        tensors: one tensor per model, or one list of tensors per model; real.
        density: p, a number from 0 to 1, one per model, or per model a list of one per tensor (not with scope
            "global").
        densities: instead, several of them: then a list of results comes back, from one sweep over the data.
        base: what to subtract from each model; ``None`` if the tensors are task vectors already.
        scope: what is ranked together: "global" (all tensors of a model), "tensor" or "row" (along the last axis; a
            tensor of fewer than two axes is one row).
        ties: "inclusive" or "exact".
        gamma: γ, like ``density``; ``None`` drops no outliers.
        min_kept: at least so many survive where p > 0.
        names: what errors call the tensors.
        backend: "auto", "reference", "cpp", "cuda" or "triton"; a backend asked for by name never falls back.

    Raises:
        InputError: a density is outside [0, 1], a task vector has NaN or infinite entries, or tensors cannot be
            combined.
        BackendError: the backend is not available here.

    Warns:
        IsthmusWarning: inclusive ties keep over 1 % more than asked for.
    """
    columns, labels, _ = models_of(tensors, "thresholds")
    if base is not None:
        columns, labels = [column(base, "base"), *columns], ["base", *labels]
    option("scope", scope, SCOPES)
    option("ties", ties, TIES)
    check_min_kept(min_kept)
    table = validate(columns, labels, None)
    if not columns[0]:
        raise InputError("thresholds got empty lists; give at least one tensor for each model.")
    if (density is None) == (densities is None):
        raise InputError("give either density= or densities=.")
    rows, models = len(columns[0]), len(columns) - (base is not None)
    found = find(
        columns,
        based=base is not None,
        scope=scope,
        ties=ties,
        densities=[
            per_model(p, "density", rows, models, low=0, high=1)
            for p in ([density] if densities is None else densities)
        ],
        gamma=None if gamma is None else per_model(gamma, "gamma", rows, models, low=0, high=1),
        min_kept=min_kept,
        names=row_names(names, rows),
        backend=backend,
        table=table,
    )
    return found[0] if densities is None else found


def find(
    columns: list[list[Tensor]],
    *,
    based: bool,
    scope: str,
    ties: str,
    densities: list[list[list[float]]],
    gamma: list[list[float]] | None,
    min_kept: int,
    names: list[str] | None,
    backend: str,
    table: Any,
) -> list[Thresholds]:
    """The thresholds for each of ``densities``, from validated arguments; see ``thresholds``."""
    refuse_complex(columns[0], names)
    models = len(columns) - based
    lengths = row_lengths(columns[0]) if scope == "row" else None
    sizes = [(x.numel(), 1) for x in columns[0]]  # of the groups of each row: their length and number
    if scope == "global":
        for what, tables in (("density", densities), ("gamma", [gamma] if gamma is not None else [])):
            if any(row != each[0] for each in tables for row in each):
                raise InputError(
                    f"{what} differs from tensor to tensor, but with scope='global' all tensors of a model are "
                    "ranked together. Give one number per model, or choose scope='tensor' or 'row'."
                )
        sizes = [(sum(n for n, _ in sizes), 1)]
    elif lengths is not None:
        sizes = [(length, n // length) for length, (n, _) in zip(lengths, sizes, strict=True)]
    exact = ties == "exact"
    step = 1 if gamma is None else 2  # ranks for each density
    ranks: list[list[list[int]]] = []  # of each group and model: for each density one to keep, and one to drop
    for row, (n, count) in enumerate(sizes):
        entry = []
        for model in range(models):
            outliers = 0.0 if gamma is None else gamma[row][model]
            pairs = [_ranks(density[row][model], outliers, n, min_kept, exact) for density in densities]
            entry.append([rank for pair in pairs for rank in pair[:step]])
        ranks += [entry] * count
    wanted = torch.tensor(ranks, dtype=torch.int64).view(len(ranks), models, step * len(densities))
    selected = ranked(
        columns, based, Groups(scope == "global", lengths), wanted, exact, names=names, backend=backend, table=table
    )
    results = []
    for place in range(0, wanted.shape[2], step):
        keep, drop = selected.cuts[place], None
        kept = asked = wanted[..., place]
        if not exact:
            kept = selected.above[..., place] + selected.equal[..., place]
        if gamma is not None:
            value, index = selected.cuts[place + 1]
            if exact:
                kept = asked = kept - wanted[..., place + 1]
            else:  # entries equal to the largest that may survive do survive
                index = torch.zeros_like(index)
                kept = kept - selected.above[..., place + 1]
                asked = asked - (wanted[..., place + 1] - 1).clamp(min=0)
            drop = Cuts(value, index)
        if not exact and not _library.is_needed(False):
            _warn_of_excess(keep.value, kept, asked)
        results.append(Thresholds(keep, drop, scope, lengths, kept))
    return results


def check_min_kept(min_kept: Any) -> None:
    """Check that ``min_kept`` is a count."""
    if not (hasattr(min_kept, "__index__") and min_kept >= 0):
        raise InputError(f"min_kept is {min_kept!r}, expected an integer of at least 0.")


def _ranks(p: float, gamma: float, n: int, min_kept: int, exact: bool) -> tuple[int, int]:
    """How many of the largest of n to look among, and which of the largest not to keep; see ``thresholds``."""
    if p in (0, 1):
        return (n if p else 0), 0
    kept = max(min_kept, int(p * n) if exact else int(p * n) + 1)
    if exact:
        dropped = max(0, min(int(gamma * n), n - kept))
        return min(dropped + kept, n), dropped
    dropped = max(0, min(int(gamma * n), n - max(kept, 2)))
    return min(dropped + kept, n), dropped + 1 if dropped else 0


def _warn_of_excess(value: Tensor, kept: Tensor, asked: Tensor) -> None:
    """Say so if ties at the thresholds keep many more entries than asked for; zeros do not matter."""
    if torch.equal(kept, asked):
        return
    counted = torch.where(value == 0, asked, kept).sum(0).tolist()
    for model, (many, few) in enumerate(zip(counted, asked.sum(0).tolist(), strict=True)):
        if many > _EXCESS * few:
            name = called(own_labels(len(counted)))[model]
            warn(
                f"entries equal to the threshold make {many} entries of {name} survive where {few} were asked for. "
                "Choose ties='exact' to keep just as many as asked for."
            )
            return


def row_lengths(tensors: Sequence[Tensor]) -> list[int]:
    """The length of the rows of each tensor: its last axis, or all of it below two axes."""
    return [max(1, x.shape[-1] if x.dim() > 1 else x.numel()) for x in tensors]


def row_names(names: str | Sequence[str] | None, rows: int) -> list[str] | None:
    """The names of the tensors as a list, of the right length."""
    if names is None:
        return None
    given = [names] if isinstance(names, str) else list(names)
    if len(given) != rows:
        raise InputError(f"names has {len(given)} entries, expected {rows}, one for each tensor of a model.")
    return given


def refuse_complex(tensors: Sequence[Tensor], names: list[str] | None) -> None:
    """Check that no tensor is complex: its entries have no order and no sign."""
    for row, tensor in enumerate(tensors):
        if tensor.is_complex():
            raise InputError(
                f"{label(names, row)} is complex ({tensor.dtype}); magnitudes are ranked and signs elected of real "
                "tensors only. Use sparsify='none' with majority_sign_method='none', or torch.view_as_real."
            )


def ranked(
    columns: list[list[Tensor]],
    based: bool,
    groups: Groups,
    ranks: Tensor,
    exact: bool,
    *,
    names: list[str] | None,
    backend: str,
    table: Any,
) -> Selected:
    """The cuts of the given ranks; refuses task vectors with NaN or infinite entries."""
    if _library.is_needed(False):
        return _library.select(columns, based=based, groups=groups, ranks=ranks, exact=exact, backend=backend)
    selected = _dispatch.select(
        columns, based=based, groups=groups, ranks=ranks, exact=exact, backend=backend, table=table
    )
    if selected.nonfinite is not None:
        row, model = selected.nonfinite
        name = called(own_labels(len(columns) - based))[model]
        raise InputError(
            f"{'the task vector of ' if based else ''}{name} has NaN or infinite entries in {label(names, row)}, so "
            "its magnitudes cannot be ranked. Repair the model, or merge without trimming (density 1)."
        )
    return selected


def label(names: list[str] | None, row: int) -> str:
    """What an error calls the tensor of a row."""
    return f"tensor {row}" if names is None else repr(names[row])
