"""The evaluations of a scan: what is measured at each point, and what was found so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.errors import EvaluationError, InputError

from . import metrics
from .evaluate import Evaluator, accuracy
from .result import PathResult
from .shared import SharedLayers

Evaluate = Evaluator | Callable[[nn.Module], float | Mapping[str, float]]

CKA_SAMPLES = 4096  # as many of the first samples are compared by CKA
A, MIDPOINT, B = 0.0, 0.5, 1.0  # the points that figures of merit are measured by


class Scan:
    """The evaluations of one scan, point by point."""

    def __init__(self, model: nn.Module, splits: dict[str, Evaluate], representation: str | None) -> None:
        self.model = model
        self.splits = splits
        self.layer = None if representation is None else _submodule(model, representation, splits)
        self.values: dict[float, dict[str, dict[str, float]]] = {}
        self.seconds: dict[float, float] = {}
        self.correct: dict[str, dict[float, Tensor]] = {}
        self.disagreement: dict[str, float] = {}
        self.ensemble: dict[str, dict[str, float]] = {}
        self.cka: dict[str, float] = {}
        self._end_a: dict[str, tuple[Tensor | None, Tensor | None]] = {}
        self._shared = {
            split: SharedLayers(model, [evaluator.inputs])
            for split, evaluator in splits.items()
            if isinstance(evaluator, Evaluator) and evaluator.share_first_layer and evaluator.dtype is None
        }

    def evaluate(self, alpha: float) -> dict[str, dict[str, float]]:
        """Measure the model, whose weights are those at ``alpha``, on every split."""
        values = {}
        for split, evaluator in self.splits.items():
            self.model.eval()
            try:
                values[split] = self._evaluate_split(split, evaluator, alpha)
            except Exception as error:
                raise EvaluationError(
                    f"the evaluator of split {split!r} failed at alpha = {alpha:g} ({type(error).__name__}: {error}); "
                    "the attribute partial of this error has the points before."
                ) from error
        return values

    def record(self, alpha: float, values: dict[str, dict[str, float]], seconds: float) -> None:
        """Add a finished point to the result."""
        self.values[alpha] = values
        self.seconds[alpha] = seconds

    def _evaluate_split(self, split: str, evaluator: Evaluate, alpha: float) -> dict[str, float]:
        if not isinstance(evaluator, Evaluator):
            returned = evaluator(self.model)
            named = returned if isinstance(returned, Mapping) else {"loss": returned}
            values = {name: float(value) for name, value in named.items()}
        elif alpha in (A, B, MIDPOINT):
            values = self._evaluate_mark(split, evaluator, alpha)
        else:
            with self._shared[split].combine(alpha) if split in self._shared else nullcontext():
                values = evaluator(self.model)
        expected = next(iter(self.values.values()))[split].keys() if self.values else values.keys()
        if values.keys() != expected:
            raise InputError(f"got the metrics {sorted(values)}, expected {sorted(expected)} as at alpha = 0.")
        return values

    def _evaluate_mark(self, split: str, evaluator: Evaluator, alpha: float) -> dict[str, float]:
        """Evaluate an end or the midpoint, where outputs are kept for more than their metrics."""
        shared = self._shared.get(split)
        sharing: AbstractContextManager[None] = nullcontext()
        if shared is not None:
            sharing = shared.combine(alpha) if alpha == MIDPOINT else shared.record(end=int(alpha))
        evaluator.fit_batch_size(self.model)  # its forward pass is none of those recorded and captured below
        watched = self.layer if alpha != MIDPOINT else None
        with sharing, _captured(watched, min(len(evaluator), CKA_SAMPLES)) as features:
            outputs = evaluator.outputs(self.model)
        representation = torch.cat(features) if features else None
        classifies = evaluator.metrics.get("accuracy") is accuracy
        if classifies and evaluator.targets.dim() == 1:
            self.correct.setdefault(split, {})[alpha] = accuracy(outputs, evaluator.targets)
        if alpha == A:
            self._end_a[split] = (outputs if classifies else None, representation)
        elif alpha == B:
            outputs_a, representation_a = self._end_a.pop(split)
            if outputs_a is not None:
                self.disagreement[split] = metrics.disagreement(outputs_a, outputs)
                self.ensemble[split] = metrics.ensemble([outputs_a, outputs], evaluator.targets)
            if representation_a is not None and representation is not None:
                self.cka[split] = metrics.linear_cka(representation_a, representation)
        return evaluator.score(outputs)

    def result(self, *, choices: dict[str, Any], **facts: Any) -> PathResult:
        """What was found so far; ``choices`` and ``facts`` are what the scan itself does not know."""
        alphas = sorted(self.seconds)
        names = {split: list(table) for split, table in self.values[alphas[0]].items()} if alphas else {}
        return PathResult(
            alphas=np.array(alphas, dtype=np.float64),
            values={
                split: {m: np.array([self.values[alpha][split][m] for alpha in alphas], np.float64) for m in table}
                for split, table in names.items()
            },
            seconds=np.array([self.seconds[alpha] for alpha in alphas], dtype=np.float64),
            disagreement=self.disagreement,
            ensemble=self.ensemble,
            cka=self.cka,
            correct={
                split: torch.stack([rows[A], rows[MIDPOINT], rows[B]]).cpu().numpy()
                for split, rows in self.correct.items()
                if len(rows) == 3
            },
            choices={**choices, "splits": self._resolved()},
            **facts,
        )

    def _resolved(self) -> dict[str, dict[str, Any]]:
        """How each split that has an ``Evaluator`` was evaluated."""
        return {
            split: {
                "samples": len(evaluator),
                "batch_size": evaluator.batch_size,
                "autocast": None if evaluator.dtype is None else str(evaluator.dtype).removeprefix("torch."),
                "first_layer": "shared" if split in self._shared and self._shared[split].active else "computed",
                "cka_samples": min(len(evaluator), CKA_SAMPLES) if self.layer is not None else None,
            }
            for split, evaluator in self.splits.items()
            if isinstance(evaluator, Evaluator)
        }


def _submodule(model: nn.Module, name: str, splits: Mapping[str, Evaluate]) -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if name not in modules:
        raise InputError(f"representation={name!r} is no submodule of the model; it has {', '.join(modules)[:500]}.")
    lengths = [len(evaluator) for evaluator in splits.values() if isinstance(evaluator, Evaluator)]
    if not lengths or min(lengths) < 4:
        raise InputError("representation= needs an Evaluator with at least 4 samples, for the outputs to be compared.")
    return modules[name]


@contextmanager
def _captured(layer: nn.Module | None, samples: int) -> Iterator[list[Tensor]]:
    """The outputs of ``layer`` during the block, flattened, for the first ``samples`` samples."""
    features: list[Tensor] = []
    if layer is None:
        yield features
        return

    def hook(_module: nn.Module, _inputs: object, output: object) -> None:
        room = samples - sum(map(len, features))
        if not isinstance(output, Tensor):
            raise InputError(f"the representation is a {type(output).__name__}, expected one tensor.")
        if room > 0:
            features.append(output[:room].flatten(1).clone())

    handle = layer.register_forward_hook(hook)
    try:
        yield features
    finally:
        handle.remove()
