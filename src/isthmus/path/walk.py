"""Walks through weight space: the weights of one point after the other are written into a model and measured there."""

from __future__ import annotations

import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from operator import length_hint
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from isthmus import norms, ops
from isthmus.errors import EvaluationError, InputError, warn
from isthmus.flat import Binding, FlatState
from isthmus.merging.sources import Source, load_source
from isthmus.preserve import preserved_buffers, preserved_model, preserved_random_states

from . import calibrate
from .checkpoint import Checkpoint, Finished
from .evaluate import Data, Evaluator, materialise
from .identity import evaluation, state_digest, tensor_digest
from .pipeline import Pipeline
from .progress import Tell, Values, telling

if TYPE_CHECKING:
    from .device import InOrder
    from .several import SeveralModels
    from .shared import SharedLayers

Evaluate = Evaluator | Callable[[nn.Module], float | Mapping[str, float]]
Progress = Tell | bool  # True: a bar in the terminal
Point = TypeVar("Point", bound=Hashable)
Result = TypeVar("Result")

SINGLE_SPLIT = "data"  # the split's name where only one evaluator is given


class Walk(ABC, Generic[Point, Result]):
    """One scan: which models are looked at, and what was found so far.

    A kind of scan says how the weights of a point are written (``write``), what is measured beyond the evaluators'
    own metrics (``measure``), and what it returns (``result``). This class does what all have in common, and
    ``isthmus.path.pipeline`` has a GPU do it in the background.

    Attributes:
        model: the architecture, whose tensors are views of ``work`` while the walk runs.
        splits: name -> evaluator; a single one is the split "data".
        work: the flat state of the model.
        values: point -> split -> metric -> value, in the order of evaluation.
        seconds: point -> time that it took, BatchNorm statistics included.
        bn_seconds: point -> time that re-estimating BatchNorm statistics took; empty under the policy "keep".
    """

    def __init__(
        self,
        model: nn.Module,
        evaluate: Evaluate | Mapping[str, Evaluate],
        *,
        bn: str = "auto",
        bn_data: Data | Tensor | None = None,
        bn_batch_size: int = 256,
        backend: str = "auto",
        progress: Progress | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        """Resolve what all scans are asked for; arguments and errors as in ``scan_line``."""
        self.model = model
        self.splits = dict(evaluate) if isinstance(evaluate, Mapping) else {SINGLE_SPLIT: evaluate}
        if not self.splits:
            raise InputError("evaluate is an empty mapping; give at least one evaluator.")
        self.bn = _bn_policy(model, bn, bn_data)
        self.work = FlatState.from_module(model)
        self.backend = backend
        self.values: dict[Point, Values] = {}
        self.seconds: dict[Point, float] = {}
        self.bn_seconds: dict[Point, float] = {}
        self._bn_inputs = _bn_inputs(bn_data, self.work.device) if self.bn == "reset" and bn_data is not None else None
        self._bn_batch_size = bn_batch_size
        self._progress = progress
        self._checkpoint = checkpoint
        self._digests: dict[str, str] = {}  # of the sources, where there is a checkpoint
        self._told: tuple[dict[str, Any], dict[str, dict[str, Any]]] = {}, {}

    @abstractmethod
    def write(self, point: Point, out: FlatState) -> None:
        """Write the weights and buffers of ``point`` into ``out``; the host reads nothing from the device."""

    @abstractmethod
    def result(self, complete: bool) -> Result:
        """What was found so far."""

    def measure(self, split: str, evaluate: Evaluate, point: Point) -> dict[str, float]:
        """The metrics of the model, whose weights are those of ``point``, on one split."""
        if isinstance(evaluate, Evaluator):
            return evaluate(self.model)
        with preserved_buffers(self.model):
            returned = evaluate(self.model)
        named = returned if isinstance(returned, Mapping) else {"loss": returned}
        return {name: float(value) for name, value in named.items()}

    def remeasured(self, point: Point) -> bool:
        """Whether a point is evaluated even if a checkpoint has it, because ``measure`` keeps more than its values."""
        return False

    def late(self, point: Point) -> bool:
        """Whether no more is done at a point than to run evaluators, so that their values may be read later."""
        evaluators = all(isinstance(evaluate, Evaluator) for evaluate in self.splits.values())
        return evaluators and bool(self.values) and not self.remeasured(point)  # the first decides how models are run

    def first_layers(self, _split: str) -> SharedLayers | None:
        """What is combined instead of computed on a split, at the ``coordinates`` of points that are evaluated late."""
        return None

    def coordinates(self, _point: Point) -> Sequence[float]:
        """Where a point lies between those whose first layers are combined."""
        return ()

    @property
    def landmarks(self) -> Sequence[Point]:
        """Two points far from each other, where ways to compute the same are compared before one of them is used."""
        return tuple(self.values)[:2]

    def same_layers(self, total: int) -> int:
        """At how many of all points the same ``first_layers`` are combined."""
        return total

    def several(self, _device: InOrder) -> SeveralModels | str:
        """What evaluates several points at once, or why nothing does."""
        return "only the models on a straight line are evaluated several at once"

    def settings(self) -> dict[str, Any]:
        """What decides the values of a point, as nested mappings of what JSON knows; see ``Checkpoint``."""
        inputs = self._bn_inputs
        return {
            "scan": type(self).__name__,
            "architecture": repr(self.model),
            "models": self._digests,
            "splits": {split: evaluation(evaluate) for split, evaluate in self.splits.items()},
            "bn": self.bn,
            "bn_batch_size": None if inputs is None else self._bn_batch_size,
            "bn_data": None if inputs is None else tensor_digest(inputs),
            "device": self.work.device.type,
            "versions": {name: version for name, version in versions().items() if name in ("isthmus", "torch")},
        }

    def load(self, source: Source, name: str) -> FlatState:
        """A source as a flat state in the model's layout; ``name`` is what error messages and checkpoints call it."""
        state = load_source(source, self.work.layout, name, self.work.device)
        if self._checkpoint is not None:
            self._digests[name] = state_digest(state)
        return state

    def run(self, points: Iterable[Point], total: int, *, dependent: bool = False) -> Result:
        """Evaluate ``points``, of which there are ``total`` as far as is known; ``dependent``: on values found before.

        The model and the global random states come back untouched. On an error or interrupt, the exception's attribute
        ``partial`` is the result of the points before. Points that the checkpoint has are taken from there.
        """
        opened = nullcontext() if self._checkpoint is None else Checkpoint(self._checkpoint, self.settings())
        pipeline = Pipeline(self, None if dependent else total)
        try:
            with (
                opened as checkpoint,
                telling(self._progress) as tell,
                preserved_random_states(),
                preserved_model(self.model),
                self.work.bind(self.model) as binding,
                pipeline.opened(binding),
            ):
                if self._bn_inputs is not None:
                    self._bn_inputs = calibrate.in_faster_format(self.model, self._bn_inputs, self._bn_batch_size)
                found = {} if checkpoint is None else checkpoint.found
                remaining = iter(points)
                with closing(pipeline.results(remaining, partial(self._known, found))) as results:
                    for done, (point, finished) in enumerate(results, start=1):
                        self._keep(point, finished)
                        if checkpoint is not None and point not in found:
                            checkpoint.append(point, finished)
                        tell(done, max(total, done + length_hint(remaining)), self.values[point])
        except BaseException as error:
            self._told = pipeline.told()
            error.partial = self.result(complete=False)  # type: ignore[attr-defined]
            raise
        self._told = pipeline.told()
        return self.result(complete=True)

    def _known(self, found: Mapping[Hashable, Finished], point: Point) -> Finished | None:
        """What the checkpoint found at a point, unless it must be evaluated anyway."""
        known = None if self.remeasured(point) else found.get(point)
        if known is not None:
            for split, values in known.values.items():
                self._check(split, values)
        return known

    def _keep(self, point: Point, finished: Finished) -> None:
        if finished.bn_seconds is not None:
            self.bn_seconds[point] = finished.bn_seconds
        self.values[point] = finished.values
        self.seconds[point] = finished.seconds  # last: what has it is finished, whenever an interrupt comes

    def evaluate(self, point: Point, binding: Binding) -> Finished:
        """Evaluate a point in ``work``, to which ``binding`` binds the model, with all that is measured there."""
        start = time.perf_counter()
        bn_seconds = self._prepare(point)
        values = {}
        prepared = self._writes()
        for split, evaluate in self.splits.items():
            if self._writes() != prepared:  # by the evaluator before: this one must not see it
                self._prepare(point)
                prepared = self._writes()
            self.model.eval()
            try:
                values[split] = self.measure(split, evaluate, point)
                self._check(split, values[split])
                binding.check()
            except Exception as error:
                raise self.failed(split, point, error) from error
        return Finished(values, time.perf_counter() - start, bn_seconds)

    def failed(self, split: str, point: Point, error: Exception) -> EvaluationError:
        """What tells of an error at which point it came, and on which split."""
        return EvaluationError(
            f"the evaluator of split {split!r} failed at {self.name(point)} ({type(error).__name__}: {error}); "
            "the attribute partial of this error has the points before."
        )

    def _prepare(self, point: Point) -> float | None:
        """Write the weights and statistics of a point; returns the time that the statistics took, if any."""
        self.write(point, self.work)
        start = time.perf_counter()
        return time.perf_counter() - start if self.estimate(self.model) else None

    def estimate(self, model: nn.Module) -> bool:
        """Re-estimate the BatchNorm statistics of a model, if that is asked for; whether it is."""
        if self._bn_inputs is not None:
            norms.reset_statistics(model, self._bn_inputs, self._bn_batch_size)
        return self._bn_inputs is not None

    def _writes(self) -> int:
        """A number that grows whenever a parameter is written to in place."""
        return sum(parameter._version for parameter in self.model.parameters())

    def name(self, point: Point) -> str:
        """What error messages call a point."""
        return f"alpha = {point:g}" if isinstance(point, float) else f"point {point}"

    def _check(self, split: str, values: dict[str, float]) -> None:
        expected = next(iter(self.values.values()))[split].keys() if self.values else values.keys()
        if values.keys() != expected:
            raise InputError(f"got the metrics {sorted(values)}, expected {sorted(expected)} as at the first point.")

    def choices(self) -> dict[str, Any]:
        """What was resolved on the way, as results keep it."""
        used, used_by_split = self._told
        return {
            "bn": self.bn,
            "bn_batch_size": None if self._bn_inputs is None else self._bn_batch_size,
            "bn_samples": None if self._bn_inputs is None else len(self._bn_inputs),
            "backend": ops.choose_backend(self.backend, self.work.device),
            "device": str(self.work.device),
            "dtypes": sorted(str(dtype).removeprefix("torch.") for dtype in self.work.buffers),
            **used,
            "splits": {
                split: evaluate.choices() | used_by_split.get(split, {})
                for split, evaluate in self.splits.items()
                if isinstance(evaluate, Evaluator)
            },
        }


def versions() -> dict[str, str]:
    """The versions of what decides a result."""
    from isthmus import __version__

    return {
        "isthmus": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _bn_policy(model: nn.Module, bn: str, bn_data: object) -> str:
    """Resolve what was asked to "keep" or "reset"."""
    if bn not in ("auto", "keep", "reset"):
        raise InputError(f"bn={bn!r} is unknown; it is 'auto', 'keep' or 'reset'.")
    has_norms = bool(norms.batch_norms(model))
    if bn == "reset" and not has_norms:
        raise InputError("bn='reset', but the model has no BatchNorm layer with running statistics; use bn='auto'.")
    if bn == "reset" and bn_data is None:
        raise InputError("bn='reset' needs training data to estimate statistics from; pass bn_data=.")
    if bn == "auto" and has_norms and bn_data is None:
        warn(
            "The model has BatchNorm layers and bn_data= is not given, so their running statistics are not those of "
            "the models that are evaluated: between models they are interpolated like weights, around one they stay "
            "its own. That can cost most of the accuracy. Pass training data as bn_data=, or bn='keep'."
        )
    return "reset" if has_norms and bn != "keep" and bn_data is not None else "keep"


def _bn_inputs(data: Data | Tensor, device: torch.device) -> Tensor:
    """The inputs of ``data``, whose items or batches may have no targets."""
    if isinstance(data, Tensor):
        inputs = data
    elif isinstance(data, DataLoader):
        with preserved_random_states():  # it may shuffle
            inputs = torch.cat([_first(batch) for batch in data])
    elif isinstance(data, Dataset):
        inputs = torch.stack([_first(data[i]) for i in range(len(data))])  # type: ignore[arg-type]
    elif all(isinstance(part, Tensor) and part.is_floating_point() and part.dim() > 1 for part in data):
        raise InputError(
            "bn_data holds several tensors of floats: are they batches of inputs, or inputs and targets? Pass the "
            "inputs alone as one tensor; torch.cat joins batches."
        )
    else:
        inputs = materialise(data)[0]
    return inputs.to(device)


def _first(item: Any) -> Tensor:
    inputs: Tensor = item if isinstance(item, Tensor) else item[0]
    return inputs
