"""From the records of a sweep to what people read: summary, table, figures and files.

Files written by ``write_report``:

- ``results.json``: ``schema`` (version, here 1), ``config``, ``noise_formula``, ``machine``, ``seconds``,
  ``scales`` (one object for each point of the grid, see ``ScaleSummary.to_dict``), ``critical_noise_scale`` and
  ``critical_interval`` (null where not resolved, and where the grid has several series), ``critical`` (one object for
  each series, with the largest median gain also where it is not resolved), and ``pairs`` (every record, without the
  correctness of single examples, which the ``record.json`` beside each pair holds). Accuracies and gains are fractions,
  losses are in nats, times in seconds; a value that does not exist is null; a number that JSON does not know is the
  string "nan", "inf" or "-inf".
- ``results.csv``: one number a line.
- ``gain.png``, ``gain.pdf``, ``paths.png``, ``paths.pdf``.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from isthmus._optional import optional
from isthmus.io.atomic import atomic_write, write_json

from . import statistics
from .results import PairRecord, Scale, SweepResult
from .statistics import CriticalScale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

SCHEMA = 1
SPLIT = "test"
ACCURACIES = {"ends": ("a", "b"), "merged": ("merged",), "annealed": ("annealed_a", "annealed_b")} | {
    name: (name,) for name in ("ema", "ensemble")
}
# Okabe and Ito's palette, told apart with every common kind of colour blindness.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#555555"
STYLES = {"ends": (BLUE, "o", "-"), "merged": (ORANGE, "s", "-"), "annealed": (GREEN, "^", "--")}


@dataclass(frozen=True)
class ScaleSummary:
    """The pairs of one noise scale together. Medians are over the pairs that count, on the test split.

    Attributes:
        pairs: numbers of the pairs that count; ``gain``, ``gain_over_better`` and ``barrier`` have one value for each.
        untrained: how many pairs were left out because their ends had learned too little.
        diverged: how many pairs were left out because a loss was not finite.
        accuracy: median accuracy of "ends" (mean of both), "merged", "annealed" (mean of both annealed ends), "ema" and
            "ensemble"; a key is missing where the sweep did not make it.
        loss: the same for the loss.
        gain: accuracy at α = ½ minus the mean of the ends, a value per pair.
        gain_over_better: accuracy at α = ½ minus the better end.
        barrier: largest loss on the path minus the mean of the ends.
        curves: "loss" and "accuracy" -> median over pairs at every α of the scan.
    """

    scale: Scale
    pairs: tuple[int, ...]
    untrained: int
    diverged: int
    accuracy: dict[str, float]
    loss: dict[str, float]
    gain: tuple[float, ...]
    gain_interval: tuple[float, float]
    gain_over_better: tuple[float, ...]
    barrier: tuple[float, ...]
    curves: dict[str, NDArray[np.float64]]

    @property
    def gain_median(self) -> float:
        """Median of ``gain``; NaN without a pair that counts."""
        return float(statistics.median(self.gain)) if self.gain else math.nan

    def to_dict(self) -> dict[str, Any]:
        """The object of this scale in ``results.json``."""
        scale = self.scale
        numbers = {
            "noise_scale": scale.noise_scale,
            "lr": scale.lr,
            "batch_size": scale.batch_size,
            "momentum": scale.momentum,
            "weight_decay": scale.weight_decay,
            "augmentation": dict(scale.augmentation),
            **{f"accuracy_{name}": self.accuracy.get(name) for name in ACCURACIES},
            **{f"loss_{name}": self.loss.get(name) for name in ACCURACIES},
            "pairs": list(self.pairs),
            "gain": list(self.gain),
            "gain_median": self.gain_median,
            "gain_interval": list(self.gain_interval),
            "gain_over_better": list(self.gain_over_better),
            "gain_over_better_median": _median(self.gain_over_better),
            "barrier": list(self.barrier),
            "barrier_median": _median(self.barrier),
            "untrained": self.untrained,
            "diverged": self.diverged,
        }
        if not self.pairs:  # nothing was measured, which is not the same as a measurement that is not a number
            numbers |= {key: None for key in numbers if key.endswith(("_median", "_interval"))}
        return numbers


@dataclass(frozen=True)
class Summary:
    """A sweep's result by noise scale, in the order of S, and the critical S of each series."""

    result: SweepResult
    scales: tuple[ScaleSummary, ...]
    critical: dict[str, CriticalScale]

    @property
    def several(self) -> bool:
        """Whether the grid varies weight decay or augmentation, so that there is more than one series."""
        return len(self.critical) > 1

    def to_dict(self) -> dict[str, Any]:
        """The content of ``results.json``."""
        critical = [{"series": name, "verdict": found.verdict, **vars(found)} for name, found in self.critical.items()]
        only = None if self.several else next(iter(self.critical.values()))
        resolved = only if only is not None and only.resolved else None
        return {
            "schema": SCHEMA,
            "config": self.result.config,
            "noise_formula": self.result.noise_formula,
            "machine": self.result.machine,
            "seconds": self.result.seconds,
            "scales": [scale.to_dict() for scale in self.scales],
            "critical_noise_scale": resolved and resolved.noise_scale,
            "critical_interval": resolved and resolved.interval,
            "critical": critical,
            "pairs": [_without_correctness(record) for record in self.result.records],
        }


def summarise(result: SweepResult, *, resamples: int = statistics.RESAMPLES, seed: int = 0) -> Summary:
    """Take medians over pairs, bootstrap their intervals, and judge the critical S of every series.

    Args:
        result: from ``run_sweep``.
        resamples: number of bootstrap draws.
        seed: of the bootstrap.
    """
    summaries: dict[int, ScaleSummary] = {}
    critical = {}
    pairs = 1 + max(record.pair for record in result.records)
    correct = {(r.scale, r.pair): r.path.correct[SPLIT] for r in result.records if r.status == "ok" and r.path}
    examples = max((array.shape[1] for array in correct.values()), default=1)
    for series in dict.fromkeys(scale.series for scale in result.scales):
        positions = [i for i, scale in enumerate(result.scales) if scale.series == series]
        gains = np.full((len(positions), pairs, examples), np.nan)
        for row, i in enumerate(positions):
            for pair in range(pairs):
                if (i, pair) in correct:
                    gains[row, pair] = statistics.example_gains(correct[i, pair])
        drawn = statistics.bootstrap_medians(gains, resamples=resamples, seed=seed)
        pair_gains = gains.mean(axis=-1)
        noise_scales = [result.scales[i].noise_scale for i in positions]
        critical[series] = statistics.critical_scale(noise_scales, pair_gains, drawn)
        for row, i in enumerate(positions):
            records = [record for record in result.records if record.scale == i]
            summaries[i] = _summarise_scale(result.scales[i], records, pair_gains[row], drawn[:, row])
    order = sorted(summaries, key=lambda i: (result.scales[i].series, result.scales[i].noise_scale, i))
    return Summary(result, tuple(summaries[i] for i in order), critical)


def _summarise_scale(
    scale: Scale, records: Sequence[PairRecord], gains: NDArray[np.float64], drawn: NDArray[np.float64]
) -> ScaleSummary:
    counted = sorted((r for r in records if r.status == "ok"), key=lambda r: r.pair)
    paths = [r.path for r in counted if r.path is not None]
    values = [r.methods(SPLIT) for r in counted]
    medians: dict[str, dict[str, float]] = {"accuracy": {}, "loss": {}}
    for metric, named in medians.items():
        for name, methods in ACCURACIES.items():
            if values and all(method in of_pair for of_pair in values for method in methods):
                named[name] = _median([float(np.mean([of_pair[m][metric] for m in methods])) for of_pair in values])
    return ScaleSummary(
        scale=scale,
        pairs=tuple(r.pair for r in counted),
        untrained=sum(r.status == "untrained" for r in records),
        diverged=sum(r.status == "diverged" for r in records),
        accuracy=medians["accuracy"],
        loss=medians["loss"],
        gain=tuple(float(gains[r.pair]) for r in counted),
        gain_interval=statistics.interval(drawn),
        gain_over_better=tuple(path.summary[SPLIT]["accuracy"].gain_over_better for path in paths),
        barrier=tuple(path.summary[SPLIT]["loss"].barrier for path in paths),
        curves={
            metric: statistics.median(np.stack([path.values[SPLIT][metric] for path in paths], axis=-1))
            for metric in (("loss", "accuracy") if paths else ())
        },
    )


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values)) if len(values) else math.nan


def _without_correctness(record: PairRecord) -> dict[str, Any]:
    values = record.to_dict()
    if values["path"]:
        del values["path"]["correct"]
    return values


def write_report(summary: Summary, out: str | os.PathLike[str]) -> list[Path]:
    """Write ``results.json``, ``results.csv`` and the two figures into the folder ``out``, each atomically.

    Raises:
        DependencyError: matplotlib is not installed; the numbers have been written by then.
        FileError: a file could not be written.
    """
    folder = Path(out)
    write_json(folder / "results.json", summary.to_dict())
    with atomic_write(folder / "results.csv") as path, open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(_tidy(summary.result))
    written = [folder / "results.json", folder / "results.csv"]
    for name, figure in (("gain", gain_figure(summary)), ("paths", paths_figure(summary))):
        for kind in ("png", "pdf"):
            with atomic_write(folder / f"{name}.{kind}") as path:
                figure.savefig(path, format=kind, dpi=150)
            written.append(folder / f"{name}.{kind}")
    return written


def _tidy(result: SweepResult) -> Iterator[Sequence[object]]:
    """One number a row: values along the path (method "path"), of each method, and of the whole path."""
    yield (
        *("scale", "noise_scale", "lr", "batch_size", "momentum", "weight_decay", "augmentation"),
        *("pair", "status", "method", "split", "alpha", "metric", "value"),
    )
    for r in result.records:
        scale = result.scales[r.scale]
        settings = (scale.noise_scale, scale.lr, scale.batch_size, scale.momentum, scale.weight_decay)
        head = (r.scale, *settings, scale.augmentation_text, r.pair, r.status)
        if r.path is None:
            continue
        for split, alpha, metric, value in r.path.rows():
            yield (*head, "path", split, alpha, metric, value)
        for split in r.path.values:
            for method, values in r.methods(split).items():
                alpha_of = {"a": 0.0, "merged": 0.5, "b": 1.0}.get(method, "")
                for metric, value in values.items():
                    yield (*head, method, split, alpha_of, metric, value)
            for metric, figures in r.path.summary[split].items():
                for name in ("gain", "gain_over_better", "barrier", "linear_barrier", "integral"):
                    yield (*head, "path", split, "", f"{metric}_{name}", getattr(figures, name))


def table(summary: Summary) -> Table:
    """The table of a sweep, one row a noise scale, as a ``rich.table.Table``; accuracies and gains in per cent."""
    rich_table = optional("rich.table", extra="lab", purpose="The table of a sweep")
    grid: Table = rich_table.Table(
        box=optional("rich.box", extra="lab", purpose="The table of a sweep").SIMPLE_HEAD,
        title="Test accuracy and gain in %, medians over pairs; barrier in loss",
        caption="\n".join(verdicts(summary)),
        padding=0,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        caption_style="",
    )
    headers = ["lr", "batch", "mom.", "S", "ends", "merged", "gain [95 %]", "over\nbetter", "an-\nnealed", "EMA"]
    headers += ["ensem-\nble", "bar-\nrier", "pairs"] + (["weight\ndecay", "augmentation"] if summary.several else [])
    for header in headers:
        grid.add_column(header, justify="right", no_wrap=True)
    for row in summary.scales:
        scale, low_high = row.scale, ", ".join(f"{100 * value:+.1f}" for value in row.gain_interval)
        accuracy = {name: _percent(row.accuracy.get(name)) for name in ACCURACIES}
        cells = [f"{scale.lr:g}", f"{scale.batch_size}", f"{scale.momentum:g}", f"{scale.noise_scale:.3g}"]
        cells += [accuracy["ends"], accuracy["merged"]]
        cells += [f"{100 * row.gain_median:+.1f} [{low_high}]".replace("[", r"\["), _signed(row.gain_over_better)]
        cells += [accuracy["annealed"], accuracy["ema"], accuracy["ensemble"]]
        cells += [f"{_median(row.barrier):.3f}", f"{len(row.pairs)}"]
        if not row.pairs:
            cells[6:8], cells[11] = ["–", "–"], "–"
        if summary.several:
            cells += [f"{scale.weight_decay:g}", scale.augmentation_text]
        grid.add_row(*cells)
    return grid


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _signed(values: Sequence[float]) -> str:
    return f"{100 * _median(values):+.1f}"


def verdicts(summary: Summary) -> list[str]:
    """What a reader must know beside the numbers: critical S of each series, pairs left out, what gain means."""
    lines = []
    for series, found in summary.critical.items():
        verdict = found.verdict[0].upper() + found.verdict[1:] + "."
        lines.append(f"{series}: {verdict}" if summary.several else verdict)
    for row in summary.scales:
        if row.untrained or row.diverged:
            where = f"S = {row.scale.noise_scale:.3g}" + (f" ({row.scale.series})" if summary.several else "")
            lines.append(f"{where}: {row.untrained} untrained and {row.diverged} diverged pairs are left out.")
    both = [row for row in summary.scales if {"annealed", "merged"} <= row.accuracy.keys()]
    if both:
        ahead = sum(row.accuracy["annealed"] > row.accuracy["merged"] for row in both)
        lines.append(
            f"The annealed ends are more accurate than the merge at {ahead} of {len(both)} noise scales: "
            "a gain partly shows how much noise has cost the ends."
        )
    return lines


def gain_figure(summary: Summary) -> Figure:
    """Gain against S on a log axis, every pair a dot, the median with its interval; under it absolute accuracies."""
    figure = _new_figure(columns=len(summary.critical), heights=(3.0, 2.4))
    axes = figure.subplots(2, len(summary.critical), sharex="col", sharey="row", squeeze=False, height_ratios=(3, 2.4))
    for (upper, lower), (series, found) in zip(axes.T, summary.critical.items(), strict=True):
        rows = [row for row in summary.scales if row.scale.series == series and row.pairs]
        s = [row.scale.noise_scale for row in rows]
        upper.axhline(0, color=GREY, linewidth=0.8)
        for row in rows:
            upper.plot([row.scale.noise_scale] * len(row.gain), _times_100(row.gain), "o", color=BLUE, alpha=0.35, ms=4)
        upper.plot([], [], "o", color=BLUE, alpha=0.35, ms=4, label="one pair")
        upper.plot(s, _times_100([row.gain_median for row in rows]), "-", color=ORANGE, label="median")
        low, high = np.array([row.gain_interval for row in rows]).reshape(-1, 2).T
        upper.fill_between(s, 100 * low, 100 * high, color=ORANGE, alpha=0.25, linewidth=0, label="95 % interval")
        if found.resolved and found.noise_scale and found.interval:
            upper.axvline(found.noise_scale, color=GREEN, linestyle=":", label="critical S")
            upper.axvspan(*found.interval, color=GREEN, alpha=0.12, linewidth=0)
        for name, (colour, marker, line) in STYLES.items():
            measured = [row for row in rows if name in row.accuracy]
            if measured:
                x, y = zip(*((row.scale.noise_scale, 100 * row.accuracy[name]) for row in measured), strict=True)
                lower.plot(x, y, line, color=colour, marker=marker, ms=4, label=name)
        title = found.verdict.partition(":")[0]
        upper.set_title(f"{series}\n{title}" if summary.several else title, fontsize=10)
        if s:
            _log_axis(lower, s)
        lower.set_xlabel(f"noise scale S = {summary.result.noise_formula}")
    axes[0, 0].set_ylabel("gain in test accuracy (points)")
    axes[1, 0].set_ylabel("test accuracy (%)")
    for ax in axes[:, -1]:
        if ax.get_legend_handles_labels()[1]:
            ax.legend(frameon=False, fontsize=8)
    return figure


def paths_figure(summary: Summary) -> Figure:
    """Median loss and accuracy over pairs along the path from a (α = 0) to b (α = 1), a line for each noise scale."""
    matplotlib = optional("matplotlib", extra="lab", purpose="Drawing figures")
    figure = _new_figure(columns=len(summary.critical), heights=(2.8, 2.8))
    s = sorted({row.scale.noise_scale for row in summary.scales if row.pairs})
    shades = np.linspace(0, 0.92, max(len(s), 1))  # without viridis' last yellow, which is too pale for a line
    colours = dict(zip(s, matplotlib.colormaps["viridis"](shades), strict=False))
    axes = figure.subplots(2, len(summary.critical), sharex=True, sharey="row", squeeze=False)
    for column, series in zip(axes.T, summary.critical, strict=True):
        for row in (row for row in summary.scales if row.scale.series == series and row.pairs):
            alphas = next(r.path.alphas for r in summary.result.records if r.path)
            for ax, values in zip(column, (row.curves["loss"], 100 * row.curves["accuracy"]), strict=True):
                ax.plot(alphas, values, color=colours[row.scale.noise_scale])
        if summary.several:
            column[0].set_title(series, fontsize=10)
        column[1].set_xlabel("α: 0 = model a, ½ = merged, 1 = model b")
    axes[0, 0].set_ylabel("test loss (nats)")
    axes[1, 0].set_ylabel("test accuracy (%)")
    lines = [matplotlib.lines.Line2D([], [], color=colours[value], label=f"{value:.3g}") for value in s]
    figure.legend(handles=lines, title="noise scale S", loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _new_figure(*, columns: int, heights: tuple[float, float]) -> Figure:
    module = optional("matplotlib.figure", extra="lab", purpose="Drawing figures")
    figure: Figure = module.Figure(figsize=(max(6.4, 4.8 * columns), sum(heights) + 0.8), layout="constrained")
    return figure


def _log_axis(ax: Axes, values: Sequence[float]) -> None:
    """A log axis with plain numbers: at 1, 2 and 5 of each decade, or at 1 and 3 of more than two decades."""
    ticker = optional("matplotlib.ticker", extra="lab", purpose="Drawing figures")
    ax.set_xscale("log")
    wide = max(values) > 100 * min(values)
    ax.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 3.0) if wide else (1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(ticker.NullFormatter())
    ax.set_xlim(min(values) / 1.15, max(values) * 1.15)


def _times_100(values: Sequence[float]) -> NDArray[np.float64]:
    return 100 * np.asarray(values, dtype=np.float64)
