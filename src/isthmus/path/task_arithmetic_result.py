"""What a scan of scaling factors found: accuracies per task, normalised, and the best coefficients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import InputError

from .files import Recorded, array
from .tables import Tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TaskTables = dict[str, Tables]  # task -> split -> metric -> values
MEAN = "mean"  # what the mean over tasks is called among them in tables


@dataclass(frozen=True)
class Best:
    """The coefficients with the largest mean normalised accuracy on one split, and what they reach on another.

    Attributes:
        options: the setting's options, of those that vary.
        scaling_factor: λ.
        selection: "selected on val, reported on test"; "selected on test" if that is one split, which flatters.
        selected_mean: the mean normalised accuracy on the split of the selection.
        mean: that on the split of the report.
        normalised: task -> normalised accuracy on the split of the report.
        accuracy: task -> accuracy on the split of the report, or whatever the metric is.
    """

    options: dict[str, Any]
    scaling_factor: float
    selection: str
    selected_mean: float
    mean: float
    normalised: dict[str, float]
    accuracy: dict[str, float]


@dataclass(frozen=True, eq=False)
class TaskArithmeticResult(Recorded):
    """The metrics of merges of task vectors, for each setting of the method and each scaling factor.

    Attributes:
        settings: for each setting the options in which settings differ.
        scaling_factors: λ, increasing, shape (factors,).
        values: task -> split -> metric -> values of the merges, shape (settings, factors); NaN where a scan was
            interrupted.
        fine_tuned: task -> split -> metric -> values of the fine-tuned models, in the order of the tasks, shape
            (models,).
        seconds: time that each merge took, shape (settings, factors), the merging itself in the first of a setting; NaN
            where there is none.
        metric: the score that is normalised.
        select_on: the split on which the best coefficients are chosen.
        report_on: the split on which they are reported.
        choices: what was resolved on the way: method, options, BatchNorm policy, backend, and so on.
        versions: package -> version.
        complete: False if the scan was interrupted.
        bn_seconds: how much of ``seconds`` went into re-estimating BatchNorm statistics, of the same shape; None where
            they were kept.
    """

    KIND = "task arithmetic result"
    SCHEMA = 1
    COLUMNS = ("model", "scaling_factor", "task", "split", "metric", "value")

    settings: tuple[dict[str, Any], ...]
    scaling_factors: NDArray[np.float64]
    values: TaskTables
    fine_tuned: TaskTables
    seconds: NDArray[np.float64]
    metric: str = "accuracy"
    select_on: str = "val"
    report_on: str = "test"
    choices: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    complete: bool = True
    bn_seconds: NDArray[np.float64] | None = None

    @property
    def tasks(self) -> list[str]:
        """The tasks, in the order of the models."""
        return list(self.values)

    def normalised(self, split: str | None = None) -> dict[str, NDArray[np.float64]]:
        """Task -> the merges' accuracy over that of the task's own model, shape (settings, factors).

        Source: Ilharco et al., "Editing Models with Task Arithmetic", arXiv 2212.04089. NaN where the task's own model
        has an accuracy of 0, or was not evaluated.

        Args:
            split: by default the one that is reported on.

        Raises:
            InputError: a task has no such split.
        """
        split = self.report_on if split is None else split
        normalised = {}
        for index, task in enumerate(self.tasks):
            if split not in self.values[task]:
                raise InputError(
                    f"the task {task!r} has no values on the split {split!r}; it has "
                    f"{', '.join(self.values[task]) or 'none'}."
                )
            own = float(self.fine_tuned[task][split][self.metric][index])
            normalised[task] = self.values[task][split][self.metric] / (own or math.nan)
        return normalised

    def mean(self, split: str | None = None) -> NDArray[np.float64]:
        """The mean over tasks of ``normalised(split)``, shape (settings, factors)."""
        mean: NDArray[np.float64] = np.mean(list(self.normalised(split).values()), axis=0)
        return mean

    @cached_property
    def best(self) -> Best | None:
        """The best coefficients, of equals the first setting and then the smallest factor; None if nothing is known."""
        if not all(self.select_on in splits and self.report_on in splits for splits in self.values.values()):
            return None
        selected = self.mean(self.select_on)
        if np.isnan(selected).all():
            return None
        setting, factor = np.unravel_index(np.nanargmax(selected), selected.shape)
        normalised = {task: float(table[setting, factor]) for task, table in self.normalised().items()}
        honest = self.select_on != self.report_on
        return Best(
            options=self.settings[setting],
            scaling_factor=float(self.scaling_factors[factor]),
            selection=f"selected on {self.select_on}" + (f", reported on {self.report_on}" if honest else ""),
            selected_mean=float(selected[setting, factor]),
            mean=float(np.mean(list(normalised.values()))),
            normalised=normalised,
            accuracy={
                task: float(splits[self.report_on][self.metric][setting, factor])
                for task, splits in self.values.items()
            },
        )

    def label(self, setting: int) -> str:
        """A setting in words: "density = 0.2"."""
        return ", ".join(f"{name} = {value}" for name, value in self.settings[setting].items())

    def columns(self) -> tuple[str, ...]:
        """The header of the tidy table, with a column for each option that varies."""
        return (*self.settings[0], *self.COLUMNS)

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """The tidy table: the options that vary, then (model, scaling factor, task, split, metric, value).

        ``model`` is "merged", or "fine-tuned on TASK", without options and factor. Of merges it has the normalised
        metric too, and its mean over tasks, for which the task is "mean". Merges that were not evaluated are left out.
        """
        nothing = [None] * len(self.settings[0])
        for task, splits in self.fine_tuned.items():
            for split, table in splits.items():
                for metric, values in table.items():
                    for own, value in zip(self.tasks, values.tolist(), strict=True):
                        yield *nothing, f"fine-tuned on {own}", None, task, split, metric, value
        for task, split, metric, values in self._tables():
            for (setting, factor), seconds in np.ndenumerate(self.seconds):
                if not math.isnan(seconds):
                    options, where = self.settings[setting].values(), float(self.scaling_factors[factor])
                    yield *options, "merged", where, task, split, metric, float(values[setting, factor])

    def _tables(self) -> Iterator[tuple[str, str, str, NDArray[np.float64]]]:
        """(task, split, metric, values) of merges, with normalised metrics and their means."""
        for task, splits in self.values.items():
            for split, table in splits.items():
                for metric, values in table.items():
                    yield task, split, metric, values
        for split in {split: None for splits in self.values.values() for split in splits}:
            if all(split in splits for splits in self.values.values()):
                normalised = self.normalised(split)
                for task, values in normalised.items():
                    yield task, split, f"normalised {self.metric}", values
                yield MEAN, split, f"normalised {self.metric}", self.mean(split)

    def content(self) -> dict[str, Any]:
        """Everything by name; ``best`` is there for readers and is computed again when read back."""
        return {
            "settings": self.settings,
            "scaling_factors": self.scaling_factors,
            "values": self.values,
            "fine_tuned": self.fine_tuned,
            "best": None if self.best is None else asdict(self.best),
            "seconds": self.seconds,
            "metric": self.metric,
            "select_on": self.select_on,
            "report_on": self.report_on,
            "choices": self.choices,
            "versions": self.versions,
            "complete": self.complete,
            "bn_seconds": self.bn_seconds,
        }

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> TaskArithmeticResult:
        """The result with this content."""
        return cls(
            settings=tuple(dict(setting) for setting in content["settings"]),
            scaling_factors=array(content["scaling_factors"]),
            values=_tables(content["values"]),
            fine_tuned=_tables(content["fine_tuned"]),
            seconds=array(content["seconds"]),
            metric=content["metric"],
            select_on=content["select_on"],
            report_on=content["report_on"],
            choices=dict(content["choices"]),
            versions=dict(content["versions"]),
            complete=content["complete"],
            bn_seconds=None if content.get("bn_seconds") is None else array(content["bn_seconds"]),
        )

    def plot(self, ax: Axes | Sequence[Axes] | None = None, *, split: str | None = None) -> list[Axes]:
        """Draw normalised accuracy against λ, one panel for each setting; see ``plot_task_arithmetic``."""
        from .task_arithmetic_plot import plot_task_arithmetic

        return plot_task_arithmetic(self, ax, split=split)


def _tables(content: Mapping[str, Any]) -> TaskTables:
    return {
        task: {split: {metric: array(values) for metric, values in table.items()} for split, table in splits.items()}
        for task, splits in content.items()
    }
