"""The walk along a line: what is measured at its ends and its midpoint, and what layers need not be computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.errors import InputError
from isthmus.flat import FlatState
from isthmus.merging.sources import Source
from isthmus.merging.states import check_exact, write_lerp

from . import metrics
from .affine_walk import AffineWalk
from .device import InOrder
from .directions import parameter_keys
from .evaluate import Evaluator
from .result import PathResult
from .several import SeveralModels, why_not_several
from .tables import numbers_at, values_at
from .tasks import accuracy, cross_entropy
from .walk import Evaluate, versions

if TYPE_CHECKING:
    from .adaptive import Refinement

CKA_SAMPLES = 4096  # as many of the first samples are compared by CKA
A, MIDPOINT, B = 0.0, 0.5, 1.0  # the points that figures of merit are measured by


class LineWalk(AffineWalk[float, PathResult]):
    """The evaluations on the line between two models; points are interpolation factors.

    Attributes:
        refinement: what chooses the points of an adaptive scan, if it is one.
    """

    def __init__(
        self,
        model: nn.Module,
        a: Source,
        b: Source,
        evaluate: Evaluate | Mapping[str, Evaluate],
        *,
        base: Source | None,
        representation: str | None,
        higher_is_better: tuple[str, ...],
        **shared: Any,
    ) -> None:
        """Load the ends; arguments as in ``scan_line``, ``shared`` those of every walk."""
        super().__init__(model, evaluate, **shared)
        self.refinement: Refinement | None = None
        self._a, self._b = self.load(a, "a"), self.load(b, "b")
        self._distances = _distances(model, self._a, self._b, None if base is None else self.load(base, "base"))
        self._representation = representation
        self._layer = None if representation is None else _submodule(model, representation, self.splits)
        self._higher_is_better = higher_is_better
        self._correct: dict[str, dict[float, Tensor]] = {}
        self._disagreement: dict[str, float] = {}
        self._ensemble: dict[str, dict[str, float]] = {}
        self._cka: dict[str, float] = {}
        self._outputs_a: dict[str, tuple[Tensor | None, Tensor | None]] = {}
        self.anchors = (A, B)
        self.models = {"a": A, "b": B}

    def write(self, point: float, out: FlatState) -> None:
        """Interpolate between the ends; 0 and 1 are the ends to the bit."""
        write_lerp(*self._ends, point, out, backend=self.backend)

    @cached_property
    def _ends(self) -> tuple[FlatState, FlatState]:
        """A and B, when their integer entries were found to be equal."""
        check_exact([self._a, self._b])
        return self._a, self._b

    def coordinates(self, point: float) -> tuple[float, ...]:
        """The interpolation factor."""
        return (point,)

    @property
    def landmarks(self) -> tuple[float, float]:
        """The midpoint and an end: two ends of the same kind may give nearly the same values."""
        return MIDPOINT, B

    def remeasured(self, point: float) -> bool:
        """Ends and midpoint, where outputs are compared."""
        return point in (A, B, MIDPOINT)

    def several(self, device: InOrder) -> SeveralModels | str:
        """What evaluates several models of the line at once, or why nothing does."""
        evaluators = {split: each for split, each in self.splits.items() if isinstance(each, Evaluator)}
        if why_not := why_not_several(self.model, evaluators, device, self.backend):
            return why_not
        return SeveralModels(self.model, *self._ends, evaluators, device, self.backend)

    def measure(self, split: str, evaluate: Evaluate, point: float) -> dict[str, float]:
        """The metrics at one point; at an end or the midpoint, note what else is compared there."""
        if isinstance(evaluate, Evaluator) and self.remeasured(point):
            return self._measure_mark(split, evaluate, point)
        return super().measure(split, evaluate, point)

    def _measure_mark(self, split: str, evaluator: Evaluator, alpha: float) -> dict[str, float]:
        """Evaluate an end or the midpoint, where outputs are kept for more than their metrics."""
        evaluator.calibrate(self.model)  # its forward passes are none of those recorded and captured below
        compared = alpha != MIDPOINT
        # Dense predictions, one for each pixel or token, are too many to keep.
        classifies = evaluator.metrics.get("accuracy") is accuracy and evaluator.targets.dim() == 1
        with (
            self._sharing(split, evaluator, alpha),
            _captured(self._layer if compared else None, min(len(evaluator), CKA_SAMPLES)) as features,
        ):
            outputs = evaluator.outputs(self.model) if classifies else None
            values = evaluator(self.model) if outputs is None else evaluator.score(outputs)
        if outputs is not None:
            self._correct.setdefault(split, {})[alpha] = accuracy(outputs, evaluator.targets)
        if compared:
            self._compare(split, evaluator, alpha, outputs, torch.cat(features) if features else None)
        self.note_autocast(split, evaluator, alpha, values)
        return values

    def _compare(
        self, split: str, evaluator: Evaluator, alpha: float, outputs: Tensor | None, representation: Tensor | None
    ) -> None:
        """Keep what A returned, and compare with it what B returns."""
        if alpha == A:
            self._outputs_a[split] = (outputs, representation)
            return
        outputs_a, representation_a = self._outputs_a.pop(split)
        if outputs_a is not None and outputs is not None:
            self._disagreement[split] = metrics.disagreement(outputs_a, outputs)
            ensemble = metrics.ensemble([outputs_a, outputs], evaluator.targets)
            if evaluator.metrics.get("loss") is not cross_entropy:
                del ensemble["loss"]  # which would look like one to compare with the ends'
            self._ensemble[split] = ensemble
        if representation_a is not None and representation is not None:
            self._cka[split] = metrics.linear_cka(representation_a, representation)

    def result(self, complete: bool) -> PathResult:
        """What was found so far, by increasing factor."""
        alphas = sorted(self.seconds)
        return PathResult(
            alphas=np.array(alphas, dtype=np.float64),
            values=values_at(alphas, self.values),
            seconds=numbers_at(alphas, self.seconds),
            distances=self._distances,
            disagreement=self._disagreement,
            ensemble=self._ensemble,
            cka=self._cka,
            correct={
                split: torch.stack([rows[A], rows[MIDPOINT], rows[B]]).cpu().numpy()
                for split, rows in self._correct.items()
                if len(rows) == 3
            },
            higher_is_better=self._higher_is_better,
            choices=self.choices(),
            versions=versions(),
            complete=complete,
            bn_seconds=numbers_at(alphas, self.bn_seconds) if self.bn_seconds else None,
        )

    def choices(self) -> dict[str, Any]:
        """What was resolved on the way; for each split also how its first layers were computed."""
        choices = super().choices() | {
            "representation": self._representation,
            "adaptive": None if self.refinement is None else self.refinement.choices(),
        }
        for resolved in choices["splits"].values():
            resolved["cka_samples"] = None if self._layer is None else min(resolved["samples"], CKA_SAMPLES)
        return choices


def _distances(model: nn.Module, a: FlatState, b: FlatState, base: FlatState | None) -> dict[str, float]:
    """Distances over the model's parameters; buffers are no directions of training."""
    keys = parameter_keys(model)
    return metrics.distances(
        [a[key] for key in keys], [b[key] for key in keys], None if base is None else [base[key] for key in keys]
    )


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
