"""What a sweep found, as plain records: the points of its grid, the evaluation of each pair, and all of it together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from isthmus.path.result import PathResult

Status = Literal["ok", "untrained", "diverged"]
Metrics = dict[str, float]


@dataclass(frozen=True)
class Scale:
    """One point of a sweep's grid.

    Attributes:
        noise_scale: S under the rule of the sweep's configuration.
        lr: learning rate.
        batch_size: examples per step.
        momentum: momentum of SGD.
        weight_decay: weight decay.
        augmentation: the options of the input augmentation that are not at their default.
    """

    noise_scale: float
    lr: float
    batch_size: int
    momentum: float
    weight_decay: float
    augmentation: Mapping[str, Any]

    @property
    def augmentation_text(self) -> str:
        """The augmentation in one short line."""
        return " ".join(f"{key}={value}" for key, value in sorted(self.augmentation.items())) or "none"

    @property
    def series(self) -> str:
        """Name of the scales that differ from this one in lr, batch size and momentum alone.

        Weight decay and augmentation change more than the noise scale, so each of their values has a critical S of its
        own.
        """
        return f"weight decay {self.weight_decay:g}, augmentation {self.augmentation_text}"


@dataclass(frozen=True)
class PairRecord:
    """The evaluation of one pair.

    Attributes:
        scale: position of its ``Scale`` in the sweep.
        pair: number of the pair, from 0.
        seed: its seed; the same number has the same seed at every scale.
        status: "ok"; "untrained": the mean accuracy of the ends on the validation split is under the configured
            minimum; "diverged": a loss or a weight was not finite.
        digest: of everything that decided the result: training configuration and evaluation settings.
        path: the scan from model a (α = 0) to model b (α = 1); None for a diverged pair.
        others: split -> "annealed_a", "annealed_b", "ema" (as far as there are any) -> metric -> value.
        seconds: wall-clock time by "train" and "evaluate".
    """

    scale: int
    pair: int
    seed: int
    status: Status
    digest: str
    path: PathResult | None
    others: dict[str, dict[str, Metrics]]
    seconds: dict[str, float]

    def methods(self, split: str) -> dict[str, Metrics]:
        """Loss and accuracy on one split of "a", "b", "merged" (α = ½), "ensemble" and ``others``; {} if diverged."""
        if self.path is None:
            return {}
        summary = self.path.summary[split]
        ends = ({metric: figures.ends[i] for metric, figures in summary.items()} for i in (0, 1))
        own = dict(zip("ab", ends, strict=True))
        own["merged"] = {metric: figures.merged for metric, figures in summary.items()}
        return own | {"ensemble": self.path.ensemble[split]} | self.others.get(split, {})

    def to_dict(self) -> dict[str, Any]:
        """A JSON-compatible dict, but for numbers that are not finite."""
        return vars(self) | {"path": self.path and self.path.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PairRecord:
        """The inverse of ``to_dict``, also after a way through ``write_json``."""
        path = values["path"]
        others = {
            split: {
                method: {metric: float(value) for metric, value in named.items()} for method, named in methods.items()
            }
            for split, methods in values["others"].items()
        }
        return cls(**{**values, "path": path and PathResult.from_dict(path), "others": others})


@dataclass(frozen=True)
class SweepResult:
    """A sweep's grid and the records of its pairs.

    Attributes:
        config: the ``SweepConfig`` as a dict.
        noise_formula: how S follows from the configuration, for axes and files.
        scales: the points of the grid.
        records: one for every scale and pair.
        machine: versions, processor and device.
        seconds: wall-clock time of this run; pairs that were there already cost nothing.
    """

    config: dict[str, Any]
    noise_formula: str
    scales: tuple[Scale, ...]
    records: tuple[PairRecord, ...]
    machine: dict[str, Any]
    seconds: float
