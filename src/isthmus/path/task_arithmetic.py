"""Evaluate merges of task vectors at many scaling factors and settings of the method, task by task."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from isthmus.errors import InputError, warn
from isthmus.flat import FlatState
from isthmus.merging.report import plain_option
from isthmus.merging.scaled import MethodLike, ScaledMerges, Setting, make_settings
from isthmus.merging.sources import Source

from .affine_walk import AffineWalk
from .evaluate import Data
from .tables import Tables, numbers_at, values_at
from .task_arithmetic_result import MEAN, TaskArithmeticResult, TaskTables
from .walk import Evaluate, Progress, versions

LOSS = "loss"  # the metric of evaluators that is none to choose by
SCALING_FACTORS = tuple(k / 20 for k in range(21))
Task = Evaluate | Mapping[str, Evaluate]


class FineTuned(NamedTuple):
    """The point of one of the models that are merged."""

    model: int


class Coefficients(NamedTuple):
    """The point of a merge."""

    setting: int
    scaling_factor: float


BASE = Coefficients(0, 0.0)  # the base, whatever the setting
Point = FineTuned | Coefficients


class TaskArithmeticWalk(AffineWalk[Point, TaskArithmeticResult]):
    """The evaluations of fine-tuned models and of their merges, on the tasks of all of them."""

    def __init__(
        self,
        model: nn.Module,
        models: Sequence[Source],
        tasks: Mapping[str, Mapping[str, Evaluate]],
        *,
        base: Source,
        settings: Sequence[Setting],
        scaling_factors: NDArray[np.float64],
        metric: str,
        select_on: str,
        report_on: str,
        **shared: Any,
    ) -> None:
        """Load the base and compute the task vectors.

        Args:
            model: the architecture.
            models: the fine-tuned models, one for each task.
            tasks: task -> split -> evaluator.
            base: what they were fine-tuned from.
            settings: of the method, at least one.
            scaling_factors: increasing.
            metric: the score that is normalised and chosen by.
            select_on: the split that the best coefficients are chosen on.
            report_on: the split that they are reported on.
            shared: as for every walk.
        """
        self._places = {f"{task}/{split}": (task, split) for task, splits in tasks.items() for split in splits}
        super().__init__(model, {f"{t}/{s}": tasks[t][s] for t, s in self._places.values()}, **shared)
        self._tasks = list(tasks)
        self._sources = list(models)
        self._settings = list(settings)
        self._factors = scaling_factors
        self._metric, self._select_on, self._report_on = metric, select_on, report_on
        self._fine_tuned = [FineTuned(index) for index in range(len(models))]
        self.models = {**dict(zip(tasks, self._fine_tuned, strict=True)), "base": BASE}
        self._merges = ScaledMerges(
            self.load(base, "the base"),
            (self._load_model(index) for index in range(len(models))),
            [setting.method for setting in settings],
            backend=self.backend,
        )

    def _load_model(self, index: int) -> FlatState:
        return self.load(self._sources[index], f"model {index + 1}")

    def points(self) -> Iterator[Point]:
        """The fine-tuned models, the base if it is asked for, then setting by setting all other factors.

        While it is gone through, ``anchors`` are the outermost factors of the setting, between which first layers are
        combined.
        """
        yield from self._fine_tuned
        factors = [factor for factor in self._factors.tolist() if factor]
        if len(factors) < len(self._factors):
            yield BASE
        order = sorted(factors, key=lambda factor: factor not in (factors[0], factors[-1]))
        for setting in range(len(self._settings)):
            self._shared.clear()
            if len(factors) > 2:
                self.anchors = (Coefficients(setting, factors[0]), Coefficients(setting, factors[-1]))
            yield from (Coefficients(setting, factor) for factor in order)

    @property
    def total(self) -> int:
        """The number of points."""
        zeros = int((self._factors == 0).sum())
        return len(self._fine_tuned) + zeros + len(self._settings) * (len(self._factors) - zeros)

    def same_layers(self, _total: int) -> int:
        """Those of one setting."""
        return len(self._factors)

    def coordinates(self, point: Point) -> tuple[float, ...]:
        """Where a merge lies between those of the outermost factors of its setting."""
        low, high, factor = (place[-1] for place in (*self.anchors, point))
        return ((factor - low) / (high - low),)

    def write(self, point: Point, out: FlatState) -> None:
        """Write a fine-tuned model, or a merge; the factor 0 is the base to the bit."""
        if isinstance(point, FineTuned):
            out.copy_(self._load_model(point.model))
        else:
            self._merges.write(point.setting, point.scaling_factor, out)

    def measure(self, split: str, evaluate: Evaluate, point: Point) -> dict[str, float]:
        """The metrics at one point, the one that is normalised among them."""
        values = super().measure(split, evaluate, point)
        if self._metric not in values:
            raise InputError(
                f"got the metrics {', '.join(values)}, expected {self._metric!r} among them, by which coefficients are "
                "chosen; pass metric= with the name of a score."
            )
        return values

    def name(self, point: Point) -> str:
        """What error messages call a point."""
        if isinstance(point, FineTuned):
            return f"the model of task {self._tasks[point.model]!r}"
        if point == BASE:
            return "the base"
        options = ", ".join(f"{name} = {value}" for name, value in self._settings[point.setting].varied.items())
        return f"scaling factor {point.scaling_factor:g}" + (f" with {options}" if options else "")

    def settings(self) -> dict[str, Any]:
        """What decides the values; the methods with their options too."""
        return super().settings() | {
            "metric": self._metric,
            "merges": [repr(setting.method) for setting in self._settings],
        }

    def result(self, complete: bool) -> TaskArithmeticResult:
        """What was found so far, in tables of NaN where nothing was."""
        merges = [
            [Coefficients(setting, factor) if factor else BASE for factor in self._factors.tolist()]
            for setting in range(len(self._settings))
        ]
        return TaskArithmeticResult(
            settings=tuple(setting.varied for setting in self._settings),
            scaling_factors=self._factors,
            values=self._by_task(values_at(merges, self.values)),
            fine_tuned=self._by_task(values_at(self._fine_tuned, self.values)),
            seconds=numbers_at(merges, self.seconds),
            bn_seconds=numbers_at(merges, self.bn_seconds) if self.bn_seconds else None,
            metric=self._metric,
            select_on=self._select_on,
            report_on=self._report_on,
            choices=self.choices(),
            versions=versions(),
            complete=complete,
        )

    def _by_task(self, tables: Tables) -> TaskTables:
        """Tables by "task/split" as tables by task and split."""
        by_task: TaskTables = {task: {} for task in self._tasks}
        for name, table in tables.items():
            task, split = self._places[name]
            by_task[task][split] = table
        return by_task

    def choices(self) -> dict[str, Any]:
        """What was resolved on the way; the method and all of its options that do not vary, too."""
        first = self._settings[0]
        aside = {"scaling_factor", *first.varied}
        options = {name: plain_option(value) for name, value in first.method.options().items() if name not in aside}
        return super().choices() | {"method": first.method.name, "preset": first.preset, "options": options}


def scan_task_arithmetic(
    model: nn.Module,
    models: Sequence[Source],
    tasks: Mapping[str, Task],
    *,
    base: Source,
    scaling_factors: ArrayLike = SCALING_FACTORS,
    method: MethodLike = "task_arithmetic",
    preset: str | None = None,
    weights: Any = None,
    metric: str = "accuracy",
    select_on: str = "val",
    report_on: str = "test",
    bn: str = "auto",
    bn_data: Data | Tensor | None = None,
    bn_batch_size: int = 256,
    backend: str = "auto",
    progress: Progress | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    **options: Any,
) -> TaskArithmeticResult:
    r"""Evaluate the merges :math:`\theta_0 + \lambda m` of models that were fine-tuned on one task each.

    m is the merged task vector of the method (Ilharco et al., "Editing Models with Task Arithmetic", arXiv 2212.04089;
    for methods see ``isthmus.methods``). It is computed once for each setting of the options, thresholds for several
    densities in one sweep, and each :math:`\lambda` is one pass more. The merge is ``isthmus.merge`` with
    ``scaling_factor=``:math:`\lambda`, to the bit in all floating-point entries; others are the base's.
    :math:`\lambda = 0` is the base to the bit, and evaluated once for all settings. Between the outermost factors of a
    setting first layers are combined, as on a line (``isthmus.path.shared``).

    Each fine-tuned model is evaluated first, under the same BatchNorm policy. The *normalised accuracy* of a merge on a
    task is its accuracy over that of the task's own model, and the best coefficients have the largest mean of it over
    tasks on the split ``select_on``; what they reach is reported on the split ``report_on``. Where tasks have one
    evaluator only, it is both, with a warning, and the result says "selected on test".

    ``model``, sources and the global random states come back untouched, also after an error or an interrupt; the
    exception's attribute ``partial`` then holds the ``TaskArithmeticResult`` of the points that were finished.

    Args:
        model: the architecture; its own weights are not used. Sources and data must fit its device and dtype.
        models: the fine-tuned models: modules, state dicts, ``FlatState``s or paths of safetensors files. They are read
            when they are needed, and not kept.
        tasks: the name of each model's task, in the order of ``models``, with its evaluator; or with a mapping from the
            names of splits to evaluators, ``{"val": ..., "test": ...}``. Evaluators are as for ``scan_line``; a single
            one is that of ``report_on``.
        base: the model that all were fine-tuned from.
        scaling_factors: :math:`\lambda`, at least one; by default 0, 0.05, ..., 1. They are sorted.
        method: a method that combines task vectors: "task_arithmetic", "ties", "magnitude_prune", "dare", "dare_ties",
            "della", "della_linear", "breadcrumbs" or "breadcrumbs_ties".
        preset: as for ``isthmus.merge``.
        weights: as for ``isthmus.merge``: a number for all models, or one for each.
        metric: the score, more of which is better, that is normalised and chosen by; not a loss.
        select_on: the split on which the best coefficients are chosen.
        report_on: the split on which they are reported.
        bn: "auto", "keep" or "reset", as for ``scan_line``; "keep" merges running statistics like weights.
        bn_data: training data for their re-estimation.
        bn_batch_size: examples per forward pass of it.
        backend: as for ``isthmus.ops.lerp``.
        progress: as for ``scan_line``; splits are called "task/split".
        checkpoint: a file that finished points are written to, and that an interrupted scan goes on from.
        options: options of the method. One that is given as a list, array or range is tried with each of its items,
            several such in all combinations; a value for each model is a tuple, ``density=[(0.1, 0.3), (0.2, 0.2)]``.

    Raises:
        InputError: a source does not have the model's tensors, there is not one task for each model, a split is
            missing, a task is called "mean", the metric is a loss, the method does not combine task vectors, or an
            option is unknown or out of range.
        FileError: a file is missing or not a safetensors file, or the checkpoint cannot be read or written.
        EvaluationError: an evaluator raised; ``partial`` has the points before.

    Warns:
        IsthmusWarning: there is no split to select on.
    """
    if metric == LOSS:
        raise InputError(
            f"metric={metric!r} is a loss, but coefficients are chosen by the largest mean of a score over that of the "
            "task's own model; give a metric of which more is better."
        )
    splits, select_on = _splits(models, tasks, select_on, report_on)
    given = options if weights is None else options | {"weights": weights}
    walk = TaskArithmeticWalk(
        *(model, models, splits),
        base=base,
        settings=make_settings(method, preset, given),
        scaling_factors=_factors(scaling_factors),
        metric=metric,
        select_on=select_on,
        report_on=report_on,
        bn=bn,
        bn_data=bn_data,
        bn_batch_size=bn_batch_size,
        backend=backend,
        progress=progress,
        checkpoint=checkpoint,
    )
    return walk.run(walk.points(), walk.total)


def _splits(
    models: Sequence[Source], tasks: Mapping[str, Task], select_on: str, report_on: str
) -> tuple[dict[str, dict[str, Evaluate]], str]:
    """Task -> split -> evaluator, and the split to select on: the one to report on if there is no other."""
    if not models or len(tasks) != len(models):
        raise InputError(
            f"got {len(models)} models and {len(tasks)} tasks ({', '.join(tasks)}); give one task for each model, in "
            "the order of the models, and at least one."
        )
    if MEAN in tasks:
        raise InputError(f"a task is called {MEAN!r}, as tables call the mean over tasks; give it another name.")
    splits = {task: dict(given) if isinstance(given, Mapping) else {report_on: given} for task, given in tasks.items()}
    if select_on != report_on and all(list(known) == [report_on] for known in splits.values()):
        warn(
            f"There is no split {select_on!r} to select coefficients on, so they are selected on {report_on!r} itself, "
            f"which flatters them. Give tasks as {{{select_on!r}: evaluator, {report_on!r}: evaluator}}."
        )
        select_on = report_on
    for task, known in splits.items():
        for wanted in (select_on, report_on):
            if wanted not in known:
                raise InputError(
                    f"the task {task!r} has no split {wanted!r}; it has {', '.join(known) or 'none'}. Name its splits "
                    "with select_on= and report_on=."
                )
    return splits, select_on


def _factors(scaling_factors: ArrayLike) -> NDArray[np.float64]:
    """The factors, increasing, each once."""
    factors = np.unique(np.asarray(scaling_factors, np.float64)) + 0.0  # of the zeros only the positive one
    if np.ndim(scaling_factors) != 1 or not factors.size or not np.isfinite(factors).all():
        raise InputError(f"scaling_factors={scaling_factors!r}, expected a list of finite numbers, at least one.")
    return factors
