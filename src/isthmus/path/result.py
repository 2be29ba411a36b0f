"""What the scan of a path found: values along it, their summary, and the figure."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import metrics
from .files import Recorded, array, floats
from .tables import line_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Summary:
    """One metric on one split, in figures; formulas and signs as in ``isthmus.path.metrics``.

    Barriers and the integral are over the points within [0, 1]. NaN wherever a value that enters is NaN or missing.

    Attributes:
        ends: values of A and B.
        merged: value of the model at alpha = 1/2.
        gain: how much better the merged model is than the mean of the ends.
        gain_over_better: how much better it is than the better end.
        barrier: largest worsening against the mean of the ends.
        barrier_alpha: where it lies.
        linear_barrier: largest worsening against the straight line between the ends.
        linear_barrier_alpha: where it lies.
        integral: mean along the path, weighted by length.
    """

    ends: tuple[float, float]
    merged: float
    gain: float
    gain_over_better: float
    barrier: float
    barrier_alpha: float
    linear_barrier: float
    linear_barrier_alpha: float
    integral: float


@dataclass(frozen=True, eq=False)
class PathResult(Recorded):
    """The metrics of every model on a path from A (alpha = 0) to B (alpha = 1).

    Attributes:
        alphas: the points, increasing, shape (points,), float64.
        values: split -> metric -> values at the points, shape (points,), float64.
        seconds: time that each point took, shape (points,).
        distances: how far apart the ends are, as ``metrics.distances`` names it, over trainable and other parameters.
        disagreement: split -> fraction of samples that the ends classify differently.
        ensemble: split -> ``loss`` and ``accuracy`` of the ends' averaged probabilities; the loss only where the
            evaluator's is ``cross_entropy``, so that they compare.
        cka: split -> debiased linear CKA between the ends' representations, where one was asked for.
        correct: split -> which samples A, the midpoint and B classify correctly, shape (3, samples), bool.
        higher_is_better: the metrics that are scores.
        choices: what was resolved on the way: BatchNorm policy, backend, dtypes, batch sizes, and so on.
        versions: package -> version.
        complete: False if the scan was interrupted; then the points are those that were finished.
        positions: of a curve, its length up to each point, shape (points,); None on a straight line, where length is
            proportional to alpha.
        bn_seconds: how much of ``seconds`` went into re-estimating BatchNorm statistics, shape (points,); None where
            they were kept.
        naive: the result of the line to B as it is, where this one leads to a B whose units were put in the order of
            A's; else None.
        permutation: the order of B's units on an aligned line: group -> where each unit comes from, int64.
    """

    KIND = "path result"
    SCHEMA = 1
    COLUMNS = ("split", "alpha", "metric", "value")

    alphas: NDArray[np.float64]
    values: dict[str, dict[str, NDArray[np.float64]]]
    seconds: NDArray[np.float64]
    distances: dict[str, float] = field(default_factory=dict)
    disagreement: dict[str, float] = field(default_factory=dict)
    ensemble: dict[str, dict[str, float]] = field(default_factory=dict)
    cka: dict[str, float] = field(default_factory=dict)
    correct: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    higher_is_better: tuple[str, ...] = ("accuracy",)
    choices: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    complete: bool = True
    positions: NDArray[np.float64] | None = None
    bn_seconds: NDArray[np.float64] | None = None
    naive: PathResult | None = None
    permutation: dict[str, NDArray[np.int64]] = field(default_factory=dict)

    @cached_property
    def summary(self) -> dict[str, dict[str, Summary]]:
        """Split -> metric -> its figures."""
        return {
            split: {name: self._summarise(values, name in self.higher_is_better) for name, values in table.items()}
            for split, table in self.values.items()
        }

    def _summarise(self, values: NDArray[np.float64], higher_is_better: bool) -> Summary:
        at = dict(zip(self.alphas.tolist(), values.tolist(), strict=True))
        ends = at.get(0.0, math.nan), at.get(1.0, math.nan)
        merged = at.get(0.5, math.nan)
        inside = (self.alphas >= 0) & (self.alphas <= 1)
        alphas, values = self.alphas[inside], values[inside]
        positions = alphas if self.positions is None else self.positions[inside]
        sign = {"higher_is_better": higher_is_better}
        barrier = metrics.barrier(alphas, values, ends, **sign)
        linear_barrier = metrics.linear_barrier(alphas, values, ends, **sign)
        return Summary(
            ends=ends,
            merged=merged,
            gain=metrics.gain(merged, ends, **sign),
            gain_over_better=metrics.gain_over_better(merged, ends, **sign),
            barrier=barrier.height,
            barrier_alpha=barrier.alpha,
            linear_barrier=linear_barrier.height,
            linear_barrier_alpha=linear_barrier.alpha,
            integral=metrics.integral(values, positions) if len(alphas) > 1 else math.nan,
        )

    @cached_property
    def barrier_cut(self) -> dict[str, dict[str, float]]:
        """Split -> metric -> how much of the linear barrier of the naive line the alignment takes away.

        1 less the ratio of both: 1 where no barrier is left, 0 where it is as high as before, negative where it is
        higher. NaN where the naive line has no barrier. Empty for a line that is not aligned.
        """
        if self.naive is None:
            return {}
        naive = self.naive.summary
        return {
            split: {
                metric: metrics.relative_cut(naive[split][metric].linear_barrier, figures.linear_barrier)
                for metric, figures in table.items()
                if metric in naive.get(split, {})
            }
            for split, table in self.summary.items()
        }

    def columns(self) -> tuple[str, ...]:
        """The header of the tidy table; of an aligned line it says in front which line a row is of."""
        return self.COLUMNS if self.naive is None else ("line", *self.COLUMNS)

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """The tidy table: (split, alpha, metric, value), after "aligned" or "naive" where there are two lines."""
        if self.naive is None:
            yield from line_rows(self.alphas, self.values)
            return
        for name, result in (("aligned", self), ("naive", self.naive)):
            for row in line_rows(result.alphas, result.values):
                yield name, *row

    def content(self) -> dict[str, Any]:
        """Everything by name.

        ``correct`` has, per split, the number of samples and three base64 strings of bits, most significant first
        (``numpy.packbits``). ``summary`` and ``barrier_cut`` are there for readers and are computed again when read
        back.
        """
        return {
            "alphas": self.alphas,
            "values": self.values,
            "summary": {s: {m: asdict(figures) for m, figures in table.items()} for s, table in self.summary.items()},
            "seconds": self.seconds,
            "distances": self.distances,
            "disagreement": self.disagreement,
            "ensemble": self.ensemble,
            "cka": self.cka,
            "correct": {split: _pack(bits) for split, bits in self.correct.items()},
            "higher_is_better": self.higher_is_better,
            "choices": self.choices,
            "versions": self.versions,
            "complete": self.complete,
            "positions": self.positions,
            "bn_seconds": self.bn_seconds,
            "naive": None if self.naive is None else self.naive.to_dict(),
            "permutation": self.permutation,
            "barrier_cut": self.barrier_cut,
        }

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> PathResult:
        """The result with this content."""
        return cls(
            alphas=array(content["alphas"]),
            values={s: {m: array(v) for m, v in table.items()} for s, table in content["values"].items()},
            seconds=array(content["seconds"]),
            distances=floats(content["distances"]),
            disagreement=floats(content["disagreement"]),
            ensemble={split: floats(figures) for split, figures in content["ensemble"].items()},
            cka=floats(content["cka"]),
            correct={split: _unpack(packed) for split, packed in content["correct"].items()},
            higher_is_better=tuple(content["higher_is_better"]),
            choices=dict(content["choices"]),
            versions=dict(content["versions"]),
            complete=content["complete"],
            positions=None if content.get("positions") is None else array(content["positions"]),
            bn_seconds=None if content.get("bn_seconds") is None else array(content["bn_seconds"]),
            naive=None if content.get("naive") is None else cls.from_dict(content["naive"]),
            permutation={name: np.array(order, np.int64) for name, order in content.get("permutation", {}).items()},
        )

    def plot(
        self, ax: Axes | Sequence[Axes] | None = None, *, metrics: Sequence[str] | None = None, split: str | None = None
    ) -> list[Axes]:
        """Draw the metrics along the path, one panel each; see ``isthmus.path.plot.plot_path``."""
        from .plot import plot_path

        return plot_path(self, ax, metrics=metrics, split=split)


def _pack(bits: NDArray[np.bool_]) -> dict[str, Any]:
    a, midpoint, b = (base64.b64encode(np.packbits(row).tobytes()).decode("ascii") for row in bits)
    return {"samples": bits.shape[1], "a": a, "midpoint": midpoint, "b": b}


def _unpack(packed: Mapping[str, Any]) -> NDArray[np.bool_]:
    rows = [np.frombuffer(base64.b64decode(packed[name]), np.uint8) for name in ("a", "midpoint", "b")]
    return np.unpackbits(np.stack(rows), axis=1, count=packed["samples"]).astype(np.bool_)
