"""What each merge method asks of the ops, for whole models or for some of their tensors."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from isthmus import methods, ops
from isthmus.errors import InputError
from isthmus.spherical import normalised

from .fisher import fisher_average
from .per_key import per_key, per_model
from .regmean import regmean

PerModel = list[Any]  # for each model a number, or a list of one for each row


@dataclass(frozen=True, eq=False)
class Rows:
    """Tensors that are merged row by row, and where the results go.

    Attributes:
        keys: the canonical key of each row, sorted.
        models: for each model a tensor per row.
        base: the base's tensors, if the method looks at a base.
        out: where to write.
        per_model: option -> one number per model, or per model one per row.
        per_row: option -> one number per row.
        known: all keys of the models, merged or not.
        backend: as for the ops.
    """

    keys: list[str]
    models: list[list[Tensor]]
    base: list[Tensor] | None
    out: list[Tensor]
    per_model: dict[str, PerModel]
    per_row: dict[str, list[float]]
    known: Collection[str]
    backend: str

    def part(self, places: Sequence[int]) -> Rows:
        """The rows at these places."""

        def some(items: list[Any]) -> list[Any]:
            return [items[place] for place in places]

        return replace(
            self,
            keys=some(self.keys),
            models=[some(model) for model in self.models],
            base=None if self.base is None else some(self.base),
            out=some(self.out),
            per_model={
                name: [some(item) if isinstance(item, list) else item for item in items]
                for name, items in self.per_model.items()
            },
            per_row={name: some(items) for name, items in self.per_row.items()},
        )

    @property
    def origin(self) -> list[Tensor]:
        """The base's tensors, for a method that requires a base."""
        return cast("list[Tensor]", self.base)

    def models_by_key(self) -> list[dict[str, Tensor]]:
        """Each model's tensors by key."""
        return [dict(zip(self.keys, model, strict=True)) for model in self.models]

    def out_by_key(self) -> dict[str, Tensor]:
        """Where to write each key."""
        return dict(zip(self.keys, self.out, strict=True))

    def weights_by_key(self) -> dict[str, list[float]]:
        """The weight of each model, by key."""
        return {key: self.weights_of(row) for row, key in enumerate(self.keys)}

    def weights_of(self, row: int) -> list[float]:
        """The weight of each model in a row."""
        return [weight[row] if isinstance(weight, list) else weight for weight in self.per_model["weights"]]


@dataclass(frozen=True, eq=False)
class Counts:
    """What a consensus counted: how models were trimmed, what survived and what was elected, in the rows of a call."""

    thresholds: ops.Thresholds | None
    stats: ops.Stats


def numbers(
    method: methods.Method, keys: Sequence[str], count: int
) -> tuple[dict[str, PerModel], dict[str, list[float]]]:
    """The options of a method that may differ between models and keys, as numbers: those per model, those per row.

    Raises:
        InputError: a value is not a number, a pattern or a key has no match, or weights that the method divides by
            their sum have none.
    """
    by_model: dict[str, PerModel] = {}
    by_row = {}
    for name, per in methods.variable_options(method).items():
        value = getattr(method, name)
        if per == "model":
            by_model[name] = per_model(1.0 if value is None else value, name, keys, count)
        else:
            by_row[name] = per_key(value, name, keys)
    always = isinstance(method, methods.Nuslerp | methods.Karcher)
    if always or (isinstance(method, methods.Linear | methods.Multislerp | methods.Summed) and method.normalize):
        for row, key in enumerate(keys):
            try:
                normalised([weight[row] if isinstance(weight, list) else weight for weight in by_model["weights"]])
            except InputError as error:
                raise InputError(f"{method.name} of {key!r}: {error}") from None
    return by_model, by_row


def is_divisible(method: methods.Method) -> bool:
    """Whether a merge in parts gives the same result, since no number is taken over all rows."""
    scope = getattr(method, "scope", "global")  # of a vote where nothing is ranked
    if isinstance(method, methods.Fisher) or (isinstance(method, methods.Ranked | methods.Slerp) and scope == "global"):
        return False
    return not (isinstance(method, methods.Voted) and method.zero_sign == "majority" and scope == "global")


@functools.singledispatch
def apply(method: methods.Method, rows: Rows, counting: bool) -> Counts | None:
    """Merge ``rows`` into ``rows.out``.

    Args:
        method: the method and its options.
        rows: the tensors, with the numbers that ``numbers`` found.
        counting: whether to count what survives and what is elected, where the method knows that.

    Raises:
        InputError: the tensors cannot be merged as asked.
    """
    raise NotImplementedError(type(method).__name__)


@apply.register
def _(method: methods.Linear, rows: Rows, counting: bool) -> None:
    weights = rows.per_model["weights"]
    ops.linear(rows.models, weights, normalize=method.normalize, out=rows.out, backend=rows.backend)


@apply.register
def _(method: methods.Passthrough, rows: Rows, counting: bool) -> None:
    ops.weighted_sum(rows.models, [rows.per_row["scaling_factor"]], out=rows.out, backend=rows.backend)


@apply.register
def _(method: methods.Slerp, rows: Rows, counting: bool) -> None:
    a, b = rows.models
    whole = _scope(method, "tensor", "global") == "global"
    ops.slerp(a, b, rows.per_row["t"], whole=whole, names=rows.keys, out=rows.out, backend=rows.backend)


@apply.register
def _(method: methods.Nuslerp, rows: Rows, counting: bool) -> None:
    ops.nuslerp(
        rows.models,
        rows.per_model["weights"],
        base=rows.base,
        row_wise=_scope(method, "tensor", "row") == "row",
        names=rows.keys,
        out=rows.out,
        backend=rows.backend,
    )


@apply.register
def _(method: methods.Multislerp, rows: Rows, counting: bool) -> None:
    ops.multislerp(
        rows.models,
        rows.per_model["weights"],
        base=rows.base,
        normalize=method.normalize,
        epsilon=method.epsilon,
        names=rows.keys,
        out=rows.out,
        backend=rows.backend,
    )


@apply.register
def _(method: methods.Karcher, rows: Rows, counting: bool) -> None:
    ops.karcher(
        rows.models,
        rows.per_model["weights"],
        iterations=method.iterations,
        tolerance=method.tolerance,
        names=rows.keys,
        out=rows.out,
        backend=rows.backend,
    )


@apply.register
def _(method: methods.ModelStock, rows: Rows, counting: bool) -> None:
    ops.model_stock(
        rows.models,
        rows.origin,
        filter_wise=_scope(method, "tensor", "row") == "row",
        names=rows.keys,
        out=rows.out,
        backend=rows.backend,
    )


@apply.register
def _(method: methods.Consensus, rows: Rows, counting: bool) -> Counts | None:
    thresholds = None
    if counting and isinstance(method, methods.Ranked):
        thresholds = find_thresholds(method, rows, [rows.per_model["density"]])[0]
    return consensus(method, rows, thresholds, counting)


def find_thresholds(method: methods.Ranked, rows: Rows, densities: Sequence[PerModel]) -> list[ops.Thresholds]:
    """What trims the models at each of ``densities``, found in one sweep; all other options are the method's."""
    return ops.thresholds(
        rows.models,
        densities=densities,
        gamma=rows.per_model.get("gamma"),
        base=rows.base,
        scope=method.scope,
        ties=method.ties,
        min_kept=method.min_kept,
        names=rows.keys,
        backend=rows.backend,
    )


def consensus(
    method: methods.Consensus, rows: Rows, thresholds: ops.Thresholds | None = None, counting: bool = False
) -> Counts | None:
    """Merge ``rows`` into ``rows.out``, trimmed by ``thresholds`` if there are any; ``counting`` as for ``apply``."""
    options = method.consensus_options()
    weights = rows.per_model["weights"]
    if isinstance(method, methods.Summed) and method.normalize:
        weights = _normalised(rows)
    given: dict[str, Any] = {name: value for name, value in rows.per_model.items() if name != "weights"}
    result = ops.consensus(
        rows.models,
        weights,
        base=rows.base,
        names=rows.keys,
        thresholds=thresholds,
        out=rows.out,
        backend=rows.backend,
        stats=counting,
        scaling_factor=rows.per_row["scaling_factor"],
        **given,
        **options,
    )
    return Counts(thresholds, result[1]) if counting else None


@apply.register
def _(method: methods.Nearswap, rows: Rows, counting: bool) -> None:
    a, b = rows.models
    ops.nearswap(a, b, rows.per_row["t"], names=rows.keys, out=rows.out, backend=rows.backend)


@apply.register
def _(method: methods.Sce, rows: Rows, counting: bool) -> None:
    ops.sce(
        rows.models,
        rows.origin,
        select_topk=rows.per_row["select_topk"],
        floor=method.floor,
        names=rows.keys,
        out=rows.out,
        backend=rows.backend,
    )


@apply.register
def _(method: methods.ArceeFusion, rows: Rows, counting: bool) -> None:
    ops.arcee_fusion(rows.models[0], rows.origin, names=rows.keys, out=rows.out, backend=rows.backend)


@apply.register
def _(method: methods.Ram, rows: Rows, counting: bool) -> None:
    ops.ram(
        rows.models,
        rows.origin,
        epsilon=method.epsilon,
        scaling_factor=rows.per_row["scaling_factor"],
        names=rows.keys,
        out=rows.out,
        backend=rows.backend,
    )


@apply.register
def _(method: methods.RamPlus, rows: Rows, counting: bool) -> None:
    options = method.options()
    ops.ram_plus(rows.models, rows.origin, names=rows.keys, out=rows.out, backend=rows.backend, **options)


@apply.register
def _(method: methods.Fisher, rows: Rows, counting: bool) -> None:
    written = fisher_average(
        rows.models_by_key(),
        method.fishers,
        rows.weights_by_key(),
        rows.out_by_key(),
        epsilon=method.epsilon,
        normalize_fishers=method.normalize_fishers,
        keys=rows.known,
    )
    _average_others(rows, written)


@apply.register
def _(method: methods.RegMean, rows: Rows, counting: bool) -> None:
    written = regmean(
        rows.models_by_key(),
        method.grams,
        rows.weights_by_key(),
        rows.out_by_key(),
        off_diagonal=method.off_diagonal,
        keys=rows.known,
    )
    _average_others(rows, written)


@apply.register
def _(method: methods.Registered, rows: Rows, counting: bool) -> None:
    for row, (key, target) in enumerate(zip(rows.keys, rows.out, strict=True)):
        base = None if rows.base is None else rows.base[row]
        tensors = [model[row] for model in rows.models]
        result = method.function(tensors, base, rows.weights_of(row), **method.own_options())
        if not isinstance(result, Tensor) or result.shape != target.shape:
            came = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise InputError(
                f"the method {method.name!r} returned {came} for {key!r}, expected a tensor of shape "
                f"{tuple(target.shape)}."
            )
        if result.is_complex() and not target.is_complex():
            raise InputError(
                f"the method {method.name!r} returned {result.dtype} for {key!r}, which is {target.dtype}, expected "
                "real numbers."
            )
        assign(target, result)


@torch.no_grad()
def assign(target: Tensor, value: Tensor) -> None:
    """Copy ``value``, rounded once: ``copy_`` would round float64 to 16 bits twice."""
    narrows = value.dtype != target.dtype and value.is_complex() == target.is_complex()
    if narrows and {value.dtype, target.dtype} <= set(ops.DTYPES):
        ops.weighted_sum([value.to(target.device)], [1.0], out=target)
    else:
        target.copy_(value)


def _average_others(rows: Rows, written: Collection[str]) -> None:
    """Average the rows that a method of its own has not written."""
    others = rows.part([row for row, key in enumerate(rows.keys) if key not in written])
    for places in ops.by_device(others.out):
        part = others.part(places)
        ops.linear(part.models, part.per_model["weights"], out=part.out, backend=part.backend)


def _normalised(rows: Rows) -> PerModel:
    """The weights divided by their sum over the models, in each row."""
    weights = rows.per_model["weights"]
    if not any(isinstance(weight, list) for weight in weights):
        return normalised(rows.weights_of(0))
    shares = [normalised(rows.weights_of(row)) for row in range(len(rows.keys))]
    return [list(column) for column in zip(*shares, strict=True)]


def _scope(method: Any, *allowed: str) -> str:
    scope: str = method.scope
    if scope not in allowed:
        raise InputError(f"{method.name} has scope={scope!r}, expected {' or '.join(map(repr, allowed))}.")
    return scope
