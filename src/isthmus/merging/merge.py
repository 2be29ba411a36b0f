"""Merge whole models: modules, state dicts and files in, a state dict or a module out."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from isthmus import methods, ops
from isthmus.errors import InputError
from isthmus.flat import FlatState

from .entries import COUNTED, MERGED, Entries, Patterns, find_entries
from .report import MergeReport, Spread, input_norms, make_report, spread_of
from .rules import Counts, Rows, apply, assign, is_divisible, numbers
from .sources import Model, Source, read_model

State = dict[str, Tensor]
Progress = Callable[[int, int], None]

PART = 2**24  # elements between two calls of progress, at least


@dataclass(frozen=True, eq=False)
class SeedMerges:
    """A merge repeated with several seeds of its random masks.

    Attributes:
        merged: seed -> the merged model.
        spread: key -> how far the merged tensors lie apart.
    """

    merged: dict[int, State]
    spread: dict[str, Spread]


@overload
def merge(
    models: Iterable[Source], *, return_report: Literal[False] = False, seeds: None = None, **options: Any
) -> State: ...
@overload
def merge(
    models: Iterable[Source], *, return_report: Literal[True], seeds: None = None, **options: Any
) -> tuple[State, MergeReport]: ...
@overload
def merge(
    models: Iterable[Source], *, return_report: Literal[False] = False, seeds: Iterable[int], **options: Any
) -> SeedMerges: ...
@overload
def merge(
    models: Iterable[Source], *, return_report: Literal[True], seeds: Iterable[int], **options: Any
) -> tuple[SeedMerges, dict[int, MergeReport]]: ...
def merge(
    models: Iterable[Source],
    *,
    base: Source | None = None,
    method: str | methods.Method | type[methods.Method] = "linear",
    preset: str | None = None,
    weights: Any = None,
    only: Patterns | None = None,
    skip: Patterns | None = None,
    dtype: torch.dtype | None = None,
    seeds: Iterable[int] | None = None,
    return_report: bool = False,
    progress: Progress | None = None,
    backend: str = "auto",
    **options: Any,
) -> Any:
    """Merge models into one.

    Keys are canonical: ``module.`` and ``_orig_mod.`` are stripped from a model whose keys all begin with them. Entries
    are ordered by sorted key, each in C-order, wherever an order matters. Floating-point and complex entries are
    merged, running statistics of normalisation layers too. Integer and boolean entries must be equal in all models;
    ``num_batches_tracked`` is the first model's. Tensors that are tied in the base, or without one in the first model,
    are merged once and stay tied. No gradient is recorded, and no input is modified.

    Args:
        models: modules, state dicts, ``FlatState``s or paths of safetensors files, in the order of ``weights``.
        base: the model that task vectors are measured from. Without one, methods that combine task vectors take the
            models for task vectors and return one; a module is never taken for that.
        method: a name of ``isthmus.methods.available()``, or a method such as ``isthmus.methods.Ties(density=0.3)``.
        preset: "paper" (the default), or the tool whose behaviour is wanted.
        weights: for methods that have weights: a number per model. Like other numbers they may differ from key to key,
            see ``isthmus.methods``; a tied tensor goes by its first key in sorted order.
        only: a pattern of canonical keys, as for ``fnmatch``, or several: nothing else is merged.
        skip: a pattern or several of what is not merged, and may be missing in some models, have other shapes or be no
            tensors, such as a module's extra state. Entries that are not merged are the base's, or without one the
            first model's.
        dtype: of the result's real floating-point entries, merged or not; by default those of the base, or without one
            of the first model. They are rounded once.
        seeds: for methods with random masks: merge once with each seed.
        return_report: also return what was done.
        progress: called with the number of tensors that are merged and of all. The merge then runs in parts, as far
            as the method allows.
        backend: as for ``isthmus.ops.lerp``.
        options: the method's options; they override the preset.

    Returns:
        The merged state dict, by canonical key, in the order and on the devices of the base, or without one of the
        first model; no storage is shared with an input. With ``seeds``, ``SeedMerges``. With ``return_report``, a pair:
        that, and a ``MergeReport``, or with ``seeds`` one for each seed.

    Raises:
        InputError: a method, preset or option is unknown; keys, shapes, dtypes or integer entries do not agree, with a
            list of all that do not; the method takes numbers over all tensors and they are on several devices; or the
            method cannot merge these values. Whatever can be is found before any work.
        FileError: a file is missing or not a safetensors file.
        BackendError: the backend is not available here.
    """
    if seeds is not None:
        seeds = _listed_seeds(seeds)
        if "seed" in options:
            raise InputError("seed= and seeds= were both given; leave seed out.")
        options["seed"] = seeds[0]
    task = _prepare(models, base, method, preset, weights, only, skip, dtype, backend, options)
    if seeds is None:
        merged, report = task.merge(progress, return_report)
        return (merged, report) if return_report else merged
    results = {}
    reports = {}
    for seed in seeds:
        seeded = replace(task, method=methods.make(task.method, seed=seed))
        results[seed], reports[seed] = seeded.merge(progress, return_report)
    repeated = SeedMerges(results, spread_of(list(results.values()), task.entries.merged))
    return (repeated, reports) if return_report else repeated


def merge_into(
    module: nn.Module,
    models: Iterable[Source],
    *,
    base: Source | None = None,
    method: str | methods.Method | type[methods.Method] = "linear",
    preset: str | None = None,
    weights: Any = None,
    only: Patterns | None = None,
    skip: Patterns | None = None,
    return_report: bool = False,
    progress: Progress | None = None,
    backend: str = "auto",
    **options: Any,
) -> MergeReport | None:
    """Merge models into a module's own parameters and buffers, in place.

    As ``merge``, except that the module's dtypes, devices and ties count, and that what is not merged stays as it is in
    the module. The module may be one of the models, or share tensors with them under the same keys. Its parameters stay
    the same objects, and their version counters rise, so that a backward pass through overwritten values is an error.

    Args:
        module: what is written to; it needs the tensors of the models.
        models: as for ``merge``; so are the other arguments.
        base: the model that task vectors are measured from.
        method: the method, or its name.
        preset: "paper" (the default), or the tool whose behaviour is wanted.
        weights: for methods that have weights.
        only: patterns of the keys that are merged.
        skip: patterns of keys that are not.
        return_report: return what was done.
        progress: called with the number of tensors that are merged and of all.
        backend: as for ``isthmus.ops.lerp``.
        options: the method's options.

    Raises:
        InputError: ``module`` is not a module, or as for ``merge``. What is found before any work leaves the module as
            it was; what only the work brings to light, such as a result of one's own method that has the wrong
            shape, or with ``progress`` a NaN where magnitudes are ranked, may leave some tensors merged.
        FileError: a file is missing or not a safetensors file.
        BackendError: the backend is not available here.
    """
    if not isinstance(module, nn.Module):
        raise InputError(
            f"merge_into got a {type(module).__name__} to write to, expected a module; merge returns a new state dict."
        )
    target = read_model(module, f"the module {type(module).__name__}", others=True)
    task = _prepare(models, base, method, preset, weights, only, skip, None, backend, options, target)
    task.refuse_overlap()
    report = task.run({key: target.tensors[key] for key in task.entries.rules}, progress, return_report)
    with torch.no_grad():
        for key, value in task.entries.copied.items():
            if task.entries.rules[key] == COUNTED:
                target.tensors[key].copy_(value)
    return report


@dataclass(frozen=True, eq=False)
class _Task:
    """A merge whose arguments have been checked."""

    method: methods.Method
    preset: str
    models: list[Model]
    base: Model | None
    lead: Model
    entries: Entries
    per_model: dict[str, Any]
    per_row: dict[str, list[float]]
    dtype: torch.dtype | None
    backend: str

    def merge(self, progress: Progress | None, reporting: bool) -> tuple[State, MergeReport | None]:
        """The merged model as new tensors, and the report if it is wanted."""
        state = {key: self._new(key, rule) for key, rule in self.entries.rules.items()}
        report = self.run(state, progress, reporting)
        merged: dict[str, Any] = {
            key: state[self.entries.first[key]] if key in self.entries.first else copy.deepcopy(self.lead.others[key])
            for key in self.lead.order
        }
        return merged, report

    def _new(self, key: str, rule: str) -> Tensor:
        """The result's tensor: uninitialised for what is merged, else a copy."""
        like = self.lead.tensors[key]
        tensor = self.entries.copied.get(key, like)
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
        new = torch.empty_like(tensor.resolve_conj().resolve_neg(), dtype=dtype, device=like.device)
        if rule != MERGED:
            assign(new, tensor)
        return new

    def run(self, state: State, progress: Progress | None, reporting: bool) -> MergeReport | None:
        """Merge into the tensors of ``state``."""
        keys = self.entries.merged
        self._check_devices()
        origin = self._origin
        rows = Rows(
            keys,
            [self._column(model) for model in self.models],
            None if origin is None else self._column(origin),
            [state[key] for key in keys],
            self.per_model,
            self.per_row,
            self.lead.tensors.keys(),
            self.backend,
        )
        backend = ops.choose_backend(self.backend, rows.out[0].device if keys else torch.device("cpu"))
        norms = input_norms(rows, self._column(self.base) if self.base is not None else None) if reporting else {}
        parts: list[tuple[Rows, Counts | None]] = []
        with torch.no_grad():
            for part, done in self._parts(rows, progress is not None):
                with self._naming():
                    counts = apply(self.method, part, reporting)
                parts.append((part, counts))
                if progress is not None:
                    progress(done, len(keys))
        if not reporting:
            return None
        return make_report(
            method=self.method,
            preset=self.preset,
            backend=backend,
            models=self.models,
            base=self.base,
            lead=self.lead,
            entries=self.entries,
            state=state,
            norms=norms,
            parts=parts,
        )

    @property
    def _origin(self) -> Model | None:
        """The base, if the method looks at it."""
        return None if self.method.base == "unused" else self.base

    def refuse_overlap(self) -> None:
        """Check that no tensor of the lead, which is written to, is one of another key in what is read."""
        keys = self.entries.merged
        outputs = [
            ops.Placed(f"{key!r} of {self.lead.name}", row, self.lead.tensors[key]) for row, key in enumerate(keys)
        ]
        inputs = [
            ops.Placed(f"{key!r} of {model.name}", row, model.tensors[key])
            for model in (self._origin, *self.models)
            if model is not None
            for row, key in enumerate(keys)
        ]
        ops.refuse_overlap(outputs, inputs)

    def _naming(self) -> AbstractContextManager[None]:
        """While it lasts, errors and warnings of the ops call models as everywhere in a merge."""
        if isinstance(self.method, methods.Registered):  # whose function may call the ops on tensors of its own
            return nullcontext()
        return ops.naming([model.name for model in self.models], None if self.base is None else self.base.name)

    def _column(self, model: Model) -> list[Tensor]:
        """A model's tensors in the order of the rows, where the lead's are."""
        return [model.tensors[key].to(self.lead.tensors[key].device) for key in self.entries.merged]

    def _parts(self, rows: Rows, divide: bool) -> Iterator[tuple[Rows, int]]:
        """The rows in parts with the number of rows that are done after each, as far as the method allows.

        A part is of one device, and if they are to ``divide`` further, of at least PART elements or the device's last.
        """
        if not rows.keys:
            return
        if not is_divisible(self.method):
            yield rows, len(rows.keys)
            return
        done = 0
        for places in ops.by_device(rows.out):
            start, size = 0, 0
            for stop, place in enumerate(places, start=1):
                size += rows.out[place].numel()
                if (divide and size >= PART) or stop == len(places):
                    done += stop - start
                    yield rows.part(places[start:stop]), done
                    start, size = stop, 0

    def _check_devices(self) -> None:
        """Check that one call of the ops can take what the method looks at as a whole."""
        devices = sorted({str(self.lead.tensors[key].device) for key in self.entries.merged})
        if len(devices) > 1 and not is_divisible(self.method) and not isinstance(self.method, methods.Fisher):
            other = ", or choose scope='tensor'" if hasattr(self.method, "scope") else ""
            raise InputError(
                f"{self.method.name} takes numbers over all tensors together, and those of {self.lead.name} are on "
                f"{' and '.join(devices)}, expected one device; move them to one{other}."
            )


def _prepare(
    models: Iterable[Source],
    base: Source | None,
    method: str | methods.Method | type[methods.Method],
    preset: str | None,
    weights: Any,
    only: Patterns | None,
    skip: Patterns | None,
    dtype: torch.dtype | None,
    backend: str,
    options: Mapping[str, Any],
    target: Model | None = None,
) -> _Task:
    """Read the models and check everything that can be checked before any work."""
    given = dict(options) if weights is None else {**options, "weights": weights}
    chosen = methods.make(method, preset=preset, **given)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype in ops.DTYPES):
        real = ", ".join(str(known) for known in ops.DTYPES if known.is_floating_point)
        raise InputError(f"dtype={dtype!r} is not a dtype of results; those are {real}.")
    if isinstance(models, str | bytes | nn.Module | Mapping | FlatState) or not isinstance(models, Iterable):
        raise InputError(f"models is a {type(models).__name__}, expected a list of models.")
    sources = list(models)
    _check_count(chosen, len(sources))
    _check_base(chosen, sources, base)
    read = [read_model(model, f"model {index}", others=True) for index, model in enumerate(sources, start=1)]
    origin = None if base is None else read_model(base, "the base", others=True)
    lead = target or origin or read[0]
    entries = find_entries(read, origin, lead, only=only, skip=skip)
    by_model, by_row = numbers(chosen, entries.merged, len(read))
    return _Task(chosen, preset or methods.PAPER, read, origin, lead, entries, by_model, by_row, dtype, backend)


def _listed_seeds(seeds: Iterable[int]) -> list[int]:
    """The seeds as different integers."""
    try:
        listed = [operator.index(seed) for seed in seeds]
    except TypeError:
        raise InputError(f"seeds={seeds!r}, expected a list of integers.") from None
    if not listed or len(set(listed)) != len(listed):
        raise InputError(f"seeds={listed}, expected at least one seed, each once.")
    return listed


def _check_count(method: methods.Method, count: int) -> None:
    least, most = method.count
    if count < least or (most is not None and count > most):
        expected = f"exactly {least}" if least == most else f"at least {least}"
        raise InputError(f"{method.name} got {count} models, expected {expected}, the base aside.")


def _check_base(method: methods.Method, models: Sequence[Source], base: Source | None) -> None:
    if base is not None or method.base in ("optional", "unused"):
        return
    if method.base == "deltas" and not any(isinstance(model, nn.Module) for model in models):
        return
    raise InputError(
        f"{method.name} combines task vectors, and base= is not given; pass the model that all were trained from."
    )
