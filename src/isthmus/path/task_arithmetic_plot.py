"""Draw what a scan of scaling factors found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from isthmus._optional import optional
from isthmus.errors import InputError

from .plot import COLOURS, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .task_arithmetic_result import TaskArithmeticResult

PER_ROW = 3  # panels side by side


def plot_task_arithmetic(
    result: TaskArithmeticResult, ax: Axes | Sequence[Axes] | None = None, *, split: str | None = None
) -> list[Axes]:
    """Draw normalised accuracy against the scaling factor, one panel for each setting.

    A curve for each task, and a black one for the mean over tasks. The grey line is at 1, where a merge is as good on a
    task as the task's own model. A star marks the coefficients that were selected, wherever they were selected.

    Args:
        result: what ``scan_task_arithmetic`` returned.
        ax: where to draw: one ``Axes`` for each setting, or a single one for a single setting; by default a new figure.
        split: by default the one that is reported on.

    Returns:
        The axes, one for each setting.

    Raises:
        InputError: a task has no such split, there are not as many axes as settings, or the result has no merges.
        DependencyError: matplotlib is not installed.
    """
    if np.isnan(result.seconds).all():
        raise InputError("the result has no merges, so there is nothing to draw; the scan stopped before the first.")
    normalised, mean = result.normalised(split), result.mean(split)
    count = len(result.settings)
    given = _new_axes(count) if ax is None else list(ax) if hasattr(ax, "__iter__") else [ax]
    if len(given) != count:
        raise InputError(f"got {len(given)} axes for {count} settings; give one for each.")
    best, name = result.best, split or result.report_on
    for setting, axes in enumerate(given):
        axes.axhline(1, color="0.7", linewidth=1)
        for index, (task, values) in enumerate(normalised.items()):
            style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
            every = max(1, len(values[setting]) // 10)
            axes.plot(result.scaling_factors, values[setting], label=task, markersize=4, markevery=every, **style)
        axes.plot(result.scaling_factors, mean[setting], color="black", linewidth=2.5, label="mean of tasks")
        if best is not None and result.settings[setting] == best.options:
            height = mean[setting][result.scaling_factors == best.scaling_factor][0]
            label = f"λ = {best.scaling_factor:.3g}: {height:.3f},\n{best.selection}"
            axes.plot([best.scaling_factor], [height], "k*", markersize=14, markeredgecolor="white", label=label)
        axes.set_xlabel("scaling factor λ")
        axes.set_ylabel(f"normalised {result.metric} on {name}")
        if result.label(setting):
            axes.set_title(result.label(setting))
        axes.legend(fontsize="small")
    return given


def _new_axes(count: int) -> list[Axes]:
    pyplot = optional("matplotlib.pyplot", extra="lab", purpose="TaskArithmeticResult.plot")
    columns = min(count, PER_ROW)
    rows = math.ceil(count / columns)
    grid = {"figsize": (4.8 * columns, 3.6 * rows), "squeeze": False, "sharey": True, "layout": "constrained"}
    axes = list(np.ravel(pyplot.subplots(rows, columns, **grid)[1]))
    for unused in axes[count:]:
        unused.remove()
    return axes[:count]
