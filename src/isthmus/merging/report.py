"""What a merge did: the resolved choices, and for each entry what became of it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from isthmus import ops
from isthmus.flat import FlatState
from isthmus.methods import Consensus, Method

from .entries import Entries
from .rules import Counts, Rows
from .sources import Model


@dataclass(frozen=True)
class Norms:
    """Frobenius norms of one entry, in float64.

    Attributes:
        base: ‖θ₀‖, if there is a base.
        models: ‖θᵢ‖.
        task_vectors: ‖θᵢ − θ₀‖, if there is a base.
        merged: ‖θ‖ of the result.
    """

    base: float | None
    models: list[float]
    task_vectors: list[float] | None
    merged: float


@dataclass(frozen=True)
class EntryReport:
    """What became of one entry.

    Attributes:
        rule: "merged", "equal in all", "of the first model", "skipped" or "empty".
        aliases: other keys tied to this one.
        shape: of the tensor.
        dtypes: of the base if there is one, then of the models; without those that lack the entry.
        dtype: of the result.
        norms: of a merged entry.
        kept: for each model how many elements survived trimming, for methods that work by consensus.
        thresholds: for each model the least magnitude that survives, where each tensor is ranked by itself.
        positive: how many elements elected +.
        negative: how many elected −.
        cancelled: how many votes were zero although a term was not.
        conflicts: how many elements have survivors of both signs.
    """

    rule: str
    aliases: list[str]
    shape: list[int]
    dtypes: list[str]
    dtype: str
    norms: Norms | None = None
    kept: list[int] | None = None
    thresholds: list[float] | None = None
    positive: int | None = None
    negative: int | None = None
    cancelled: int | None = None
    conflicts: int | None = None


@dataclass(frozen=True)
class MergeReport:
    """What a merge did.

    Attributes:
        method: its name.
        preset: the preset that was asked for; "paper" if none was.
        options: all options of the method, as resolved from defaults, preset and arguments.
        models: what the models are called in messages; with the path for files.
        base: what the base is called, if there is one.
        backend: the backend that was used; methods that run in PyTorch on every backend do so on this one too.
        version: of isthmus.
        prefixes: model -> the prefix that was stripped from all its keys, where there was one.
        dtype_changes: key -> dtypes of base and models, and of the result, where they are not all the same.
        thresholds: for each model the least magnitude that survives, where whole models are ranked.
        entries: first alias of each tensor -> what became of it, in sorted order.
    """

    method: str
    preset: str
    options: dict[str, Any]
    models: list[str]
    base: str | None
    backend: str
    version: str
    prefixes: dict[str, str]
    dtype_changes: dict[str, list[str]]
    thresholds: list[float] | None
    entries: dict[str, EntryReport]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the report as a JSON file, atomically.

        Raises:
            FileError: the file could not be written.
        """
        from isthmus.io import write_json

        write_json(path, self.to_dict())


@dataclass(frozen=True)
class Spread:
    """How far tensors that should be alike lie apart.

    Attributes:
        mean_norm: ‖mean of the tensors‖.
        deviation_norm: ‖standard deviation of each element‖ (n − 1 in the denominator), 0 for one tensor.
    """

    mean_norm: float
    deviation_norm: float


def spread_of(states: Sequence[Mapping[str, Tensor]], keys: Iterable[str]) -> dict[str, Spread]:
    """The spread of each entry over several merges."""
    spread = {}
    for key in keys:
        tensors = [state[key] for state in states]
        wide = torch.complex128 if tensors[0].is_complex() else torch.float64
        mean = torch.zeros(tensors[0].shape, dtype=wide, device=tensors[0].device)
        for tensor in tensors:
            mean += tensor
        mean /= len(tensors)
        squares = math.fsum(norm**2 for tensor in tensors for norm in _norms([tensor], [mean]))
        spread[key] = Spread(_norms([mean])[0], math.sqrt(squares / max(1, len(tensors) - 1)))
    return spread


def input_norms(rows: Rows, base: Sequence[Tensor] | None) -> dict[str, Norms]:
    """Norms of the inputs, those of the result still unknown; taken before an input may be overwritten."""
    origins = [None] * len(rows.keys) if base is None else _norms(base)
    models = [_norms(model) for model in rows.models]
    deltas = None if base is None else [_norms(model, base) for model in rows.models]
    return {
        key: Norms(
            base=origins[row],
            models=[norms[row] for norms in models],
            task_vectors=None if deltas is None else [norms[row] for norms in deltas],
            merged=math.nan,
        )
        for row, key in enumerate(rows.keys)
    }


def _norms(tensors: Sequence[Tensor], base: Sequence[Tensor] | None = None) -> list[float]:
    """‖x‖ of each tensor, or ‖x − θ₀‖ where there is a base."""
    norms = [math.nan] * len(tensors)
    for places in ops.by_device(tensors):
        origin = None if base is None else [base[place] for place in places]
        dots = ops.gram([[tensors[place] for place in places]], base=origin)
        for place, square in zip(places, dots[:, 0, 0].tolist(), strict=True):
            norms[place] = math.sqrt(square)
    return norms


def make_report(
    *,
    method: Method,
    preset: str,
    backend: str,
    models: Sequence[Model],
    base: Model | None,
    lead: Model,
    entries: Entries,
    state: Mapping[str, Tensor],
    norms: Mapping[str, Norms],
    parts: Sequence[tuple[Rows, Counts | None]],
) -> MergeReport:
    """The report of a merge that has been done.

    Args:
        method: the method, with its options.
        preset: what was asked for.
        backend: what was used.
        models: the models.
        base: the base.
        lead: whose ties the result has.
        entries: what was to be done with each entry.
        state: first alias -> the result's tensor.
        norms: what ``input_norms`` found.
        parts: the rows of each call of the ops, and what it counted.
    """
    from isthmus import __version__

    options = method.options()
    if isinstance(method, Consensus):  # normalize= has the last word on others
        options |= {name: value for name, value in method.consensus_options().items() if name in options}
    sources = [model for model in (base, *models) if model is not None]
    aliases: dict[str, list[str]] = {key: [] for key in entries.rules}
    for key, first in entries.first.items():
        if key != first:
            aliases[first].append(key)
    counted = {key: found for rows, counts in parts if counts is not None for key, found in _counts(rows, counts)}
    merged = dict(zip(norms, _norms([state[key] for key in norms]), strict=True))
    reports, changes = {}, {}
    for key, rule in entries.rules.items():
        dtypes = [_name(model.tensors[key].dtype) for model in sources if key in model.tensors]
        dtype = _name(state[key].dtype)
        if set(dtypes) != {dtype}:
            changes[key] = [*dtypes, dtype]
        known = norms.get(key)
        reports[key] = EntryReport(
            rule=rule,
            aliases=aliases[key],
            shape=list(state[key].shape),
            dtypes=dtypes,
            dtype=dtype,
            norms=None if known is None else replace(known, merged=merged[key]),
            **counted.get(key, {}),
        )
    whole = [counts.thresholds for _, counts in parts if counts is not None and counts.thresholds is not None]
    return MergeReport(
        method=method.name,
        preset=preset,
        options={name: plain_option(value) for name, value in options.items()},
        models=[model.name for model in models],
        base=None if base is None else base.name,
        backend=backend,
        version=__version__,
        prefixes={model.name: model.prefix for model in (lead, *sources) if model.prefix},
        dtype_changes=changes,
        thresholds=whole[0].keep.value[0].tolist() if whole and whole[0].scope == "global" else None,
        entries=reports,
    )


def _counts(rows: Rows, counts: Counts) -> Iterable[tuple[str, dict[str, Any]]]:
    """For each row what a consensus counted in it."""
    names = [item.name for item in fields(EntryReport)]
    by_name = {name: values.tolist() for name, values in counts.stats._asdict().items() if name in names}
    if counts.thresholds is not None and counts.thresholds.scope == "tensor":
        by_name["thresholds"] = counts.thresholds.keep.value.tolist()
    for row, key in enumerate(rows.keys):
        yield key, {name: values[row] for name, values in by_name.items()}


def plain_option(value: Any) -> Any:
    """An option as JSON can hold it: big ones, such as a Fisher for each model, by their kind."""
    if isinstance(value, Tensor) and value.dim() > 1:
        return f"tensor of shape {tuple(value.shape)}"
    if hasattr(value, "tolist"):  # tensors, arrays and their numbers
        return value.tolist()
    if isinstance(value, FlatState):
        return "FlatState"
    if isinstance(value, Mapping):
        if any(isinstance(item, Tensor) and item.dim() > 1 for item in value.values()):
            return f"{len(value)} tensors"
        return {str(key): plain_option(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain_option(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
