"""Draw what a scan found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from isthmus._optional import optional
from isthmus.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .result import PathResult

# Okabe and Ito's palette, which colour-blind readers can tell apart; markers repeat the distinction.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
LABELS = {"loss": "loss (nats)"}
Table = TypeVar("Table", bound=Mapping[str, Any])  # metric -> values


def plot_path(
    result: PathResult,
    ax: Axes | Sequence[Axes] | None = None,
    *,
    metrics: Sequence[str] | None = None,
    split: str | None = None,
) -> list[Axes]:
    """Draw metrics along the path, one panel each: a curve per split, its chord, its barrier and its gain.

    The dashed chord between the ends is what the linear barrier is measured against: a dotted bar shows that barrier
    where it is positive, a broad bar at alpha = 1/2 the gain. Their sizes stand in the legend. Beside an aligned line
    the naive one is drawn, as a pale dash-dotted curve.

    Args:
        result: what ``scan_line`` returned.
        ax: where to draw: one ``Axes`` per metric, or a single one for a single metric; by default a new figure.
        metrics: which metrics; by default all, or the first as many as there are axes.
        split: which split; by default all.

    Returns:
        The axes, one per metric.

    Raises:
        InputError: a metric or split is unknown, there are not as many axes as metrics, or the result has no points.
        DependencyError: matplotlib is not installed.
    """
    shown = shown_splits(result.values, split)
    given, chosen = panels(shown, ax, metrics)
    for axes, metric in zip(given, chosen, strict=True):
        splits = [name for name, table in shown.items() if metric in table]
        for index, name in enumerate(splits):
            colour = COLOURS[index % len(COLOURS)]
            if result.naive is not None and metric in result.naive.values.get(name, {}):
                _draw_naive(axes, result.naive, name, metric, colour)
            _draw(axes, result, name, metric, colour, MARKERS[index % len(MARKERS)])
        axes.set_xlabel(f"{'α' if result.positions is None else 't'} (0: model A, 1: model B)")
        axes.set_ylabel(LABELS.get(metric, metric))
        axes.legend(fontsize="small", frameon=False, loc="lower left", bbox_to_anchor=(0, 1))  # above: it hides nothing
    return given


def shown_splits(values: Mapping[str, Table], split: str | None) -> Mapping[str, Table]:
    """The tables of one split, or of all where none is named.

    Raises:
        InputError: there is no such split, or none at all, because no point was evaluated.
    """
    if not values:
        raise InputError("the result has no points, so there is nothing to draw; the scan stopped before the first.")
    if split is None:
        return values
    if split not in values:
        raise InputError(f"the result has no split {split!r}; it has {', '.join(values)}.")
    return {split: values[split]}


def panels(
    values: Mapping[str, Mapping[str, Any]],
    ax: Axes | Sequence[Axes] | None,
    metrics: Sequence[str] | None,
    size: tuple[float, float] = (4.8, 3.6),
) -> tuple[list[Axes], list[str]]:
    """The axes to draw in, and the metric of each.

    Args:
        values: split -> metric -> values.
        ax: one ``Axes`` per metric, or a single one for a single metric; by default a new figure.
        metrics: which metrics; by default all, or the first as many as there are axes.
        size: width and height of a new panel, in inches.

    Raises:
        InputError: a metric is unknown, or there are not as many axes as metrics.
        DependencyError: matplotlib is not installed.
    """
    known = list(dict.fromkeys(name for table in values.values() for name in table))
    given = None if ax is None else list(ax) if isinstance(ax, Sequence) or hasattr(ax, "__iter__") else [ax]
    chosen = list(metrics) if metrics is not None else known[: None if given is None else len(given)]
    if unknown := [name for name in chosen if name not in known]:
        raise InputError(f"the result has no metric {unknown[0]!r}; it has {', '.join(known) or 'none'}.")
    if not chosen or (given is not None and len(given) != len(chosen)):
        raise InputError(
            f"got {len(given or [])} axes for the metrics {', '.join(chosen) or '(none)'}; give one for each, "
            "and at least one."
        )
    if given is None:
        pyplot = optional("matplotlib.pyplot", extra="lab", purpose="the figure of a scan")
        figure_size = (size[0] * len(chosen), size[1])
        given = list(pyplot.subplots(1, len(chosen), figsize=figure_size, squeeze=False, layout="constrained")[1][0])
    return given, chosen


def _draw_naive(ax: Axes, naive: PathResult, split: str, metric: str, colour: str) -> None:
    label = f"{split}, naive: barrier {naive.summary[split][metric].linear_barrier:.3g}"
    ax.plot(naive.alphas, naive.values[split][metric], color=colour, linestyle="-.", alpha=0.6, label=label)


def _draw(ax: Axes, result: PathResult, split: str, metric: str, colour: str, marker: str) -> None:
    values, figures = result.values[split][metric], result.summary[split][metric]
    name = split if result.naive is None else f"{split}, aligned"
    label = f"{name}: gain {figures.gain:+.3g}, barrier {figures.linear_barrier:.3g}"
    every = max(1, len(values) // 20)  # markers stay apart on dense scans
    ax.plot(result.alphas, values, color=colour, marker=marker, markersize=4, markevery=every, label=label)
    ax.plot([0, 1], figures.ends, color=colour, linestyle="--", linewidth=1)
    if figures.linear_barrier > 0:
        alpha = figures.linear_barrier_alpha
        chord = (1 - alpha) * figures.ends[0] + alpha * figures.ends[1]
        ax.plot([alpha, alpha], [chord, values[result.alphas == alpha][0]], color=colour, linestyle=":", linewidth=1.5)
    if math.isfinite(figures.gain):
        ax.plot([0.5, 0.5], [sum(figures.ends) / 2, figures.merged], color=colour, linewidth=4, alpha=0.4)
