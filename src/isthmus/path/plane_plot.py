"""Draw landscapes: planes as contours, profiles as curves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from isthmus._optional import optional
from isthmus.errors import InputError

from .plot import COLOURS, LABELS, MARKERS, panels, shown_splits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .plane_result import PlaneResult
    from .profile import ProfileResult

LEVELS = 24  # contours
WIDE = 5.0  # from this ratio of the highest to the lowest value on, levels are spaced by ratio
TO_SCALE = ("metric", "principal")  # coordinates that are distances
MARK, BEST, NOTHING = "white", COLOURS[1], "0.85"


def plot_plane(
    result: PlaneResult,
    ax: Axes | Sequence[Axes] | None = None,
    *,
    metrics: Sequence[str] | None = None,
    split: str | None = None,
) -> list[Axes]:
    """Draw metrics over the plane as filled contours, one panel each.

    Bright is good: viridis, which colour-blind readers can tell apart, runs down for losses and up for scores. Where a
    loss is positive and its range wide, levels are spaced by ratio. White dots are the models, dashed lines the
    straight paths between them, joined dots the trajectory; the star is the best point. Grey is what is not finite or
    was not evaluated. Where both coordinates are distances, both axes have one scale.

    Args:
        result: what the scan of a plane returned.
        ax: where to draw: one ``Axes`` per metric, or a single one for a single metric; by default a new figure.
        metrics: which metrics; by default all, or the first as many as there are axes.
        split: which split; by default the first that has the metric.

    Returns:
        The axes, one per metric.

    Raises:
        InputError: a metric or split is unknown, there are not as many axes as metrics, or no value is finite.
        DependencyError: matplotlib is not installed.
    """
    shown = shown_splits(result.values, split)
    height = 3.9 * np.ptp(result.y) / np.ptp(result.x) if result.coordinates in TO_SCALE else 3.7
    given, chosen = panels(shown, ax, metrics, size=(5.6, 0.9 + min(6.0, max(2.2, float(height)))))
    for axes, metric in zip(given, chosen, strict=True):
        _draw_plane(axes, result, result.split_with(metric, split), metric)
    return given


def _draw_plane(ax: Axes, result: PlaneResult, split: str, metric: str) -> None:
    values = np.ma.masked_invalid(result.values[split][metric])
    if not values.count():
        raise InputError(f"no value of {metric!r} on the split {split!r} is finite; there is nothing to draw.")
    is_score = metric in result.higher_is_better
    levels, norm = _levels(values.compressed(), is_score)
    ax.set_facecolor(NOTHING)
    filled = ax.contourf(result.x, result.y, values, levels, norm=norm, cmap="viridis" if is_score else "viridis_r")
    ax.contour(result.x, result.y, values, levels, colors="black", linewidths=0.3, alpha=0.4)
    ticker = optional("matplotlib.ticker", extra="lab", purpose="PlaneResult.plot")
    column = ax.inset_axes((1.03, 0.0, 0.05, 1.0))  # as high as the plane, whatever its aspect
    bar = ax.figure.colorbar(filled, cax=column, label=f"{LABELS.get(metric, metric)}, {split}")
    column.yaxis.set_major_locator(ticker.MaxNLocator(6) if norm is None else ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    column.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    bar.minorticks_off()
    ax.xaxis.set_major_locator(ticker.MaxNLocator(5))
    ax.set_xlim(result.x[0], result.x[-1])
    ax.set_ylim(result.y[0], result.y[-1])
    if result.coordinates in TO_SCALE:
        ax.set_aspect("equal")
    _draw_models(ax, result)
    best = result.best(metric, split)
    star: dict[str, Any] = {"markersize": 13, "markeredgecolor": "white", "zorder": 5, "clip_on": False}
    ax.plot(best.x, best.y, marker="*", color=BEST, linestyle="", **star)
    kind = "highest" if is_score else "lowest"
    ax.set_title(f"★ {kind} {best.values[split][metric]:.4g} at ({best.x:.3g}, {best.y:.3g})", fontsize="medium")
    for axis, label in zip((ax.xaxis, ax.yaxis), _axis_labels(result), strict=True):
        axis.set_label_text(label)


def _levels(values: NDArray[np.float64], is_score: bool) -> tuple[NDArray[np.float64], Any]:
    """Contour levels, and the norm of the colours: None where it is linear."""
    low, high = float(values.min()), float(values.max())
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # a constant has one level, in the middle
        margin = 0.5 * abs(low) or 0.5
        return np.linspace(low - margin, low + margin, 3), None
    if is_score or low <= 0 or high < WIDE * low:
        return np.linspace(low, high, LEVELS + 1), None
    levels = np.geomspace(low, high, LEVELS + 1)
    levels[[0, -1]] = low, high  # geomspace may round past them
    colors = optional("matplotlib.colors", extra="lab", purpose="PlaneResult.plot")
    return levels, colors.LogNorm(low, high)


def _draw_models(ax: Axes, result: PlaneResult) -> None:
    """The models with their names, the lines between them, and the trajectory."""
    lines: list[Any] = list(itertools.combinations(result.models.values(), 2))
    if len(result.trajectory):
        lines.append(result.trajectory)
    effects = optional("matplotlib.patheffects", extra="lab", purpose="PlaneResult.plot")
    outline = [effects.withStroke(linewidth=2.5, foreground="black")]
    for line in lines:
        xs, ys = zip(*line, strict=True)
        dots: dict[str, Any] = {"marker": "o", "markersize": 3.5} if len(line) > 2 else {"linestyle": "--"}
        ax.plot(xs, ys, color=MARK, linewidth=1.2, path_effects=outline, zorder=3, **dots)
    named = dict(result.models)
    if len(result.trajectory):
        named["first"] = tuple(result.trajectory[0].tolist())
    for name, (x, y) in named.items():
        ax.plot(x, y, marker="o", color=MARK, markeredgecolor="black", markersize=7, linestyle="", zorder=4)
        right, top = x > result.x.mean(), y > result.y.mean()
        ax.annotate(
            name,
            (x, y),
            xytext=(-7 if right else 7, -7 if top else 7),
            textcoords="offset points",
            ha="right" if right else "left",
            va="top" if top else "bottom",
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
            zorder=6,
        )


def _axis_labels(result: PlaneResult) -> tuple[str, str]:
    if result.coordinates == "random":
        return "random direction 1", "random direction 2"
    if result.coordinates == "principal":
        first, second = (
            f"principal direction {k}\n(distance; {fraction:.1%} of variance)"
            for k, fraction in enumerate(result.explained.tolist(), start=1)
        )
        return first, second
    base, a, b = result.models
    if result.coordinates == "task":
        return f"coefficient of {a} − {base}", f"coefficient of {b} − {base}"
    return f"distance along {a} − {base}", "distance at right angles to it"


def plot_profile(
    result: ProfileResult,
    ax: Axes | Sequence[Axes] | None = None,
    *,
    metrics: Sequence[str] | None = None,
    split: str | None = None,
) -> list[Axes]:
    """Draw metrics along a direction through one model, one panel each: a curve per split, the model at the line.

    Args:
        result: what ``random_line`` returned.
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
        every = max(1, len(result.alphas) // 20)
        for index, (name, table) in enumerate(shown.items()):
            if metric in table:
                colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
                line = axes.plot(result.alphas, table[metric], color=colour, marker=marker, label=name)[0]
                line.set(markersize=4, markevery=every)
        axes.axvline(0.0, color="0.5", linestyle=":", linewidth=1.2)
        axes.set_xlabel("α (0: the model)")
        axes.set_ylabel(LABELS.get(metric, metric))
        axes.legend(fontsize="small")
    return given
