"""What a sweep found, as plain records: the points of its grid, the evaluation of each pair, and all of it together."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Status = Literal["ok", "untrained", "diverged"]
Values = dict[str, dict[str, dict[str, float]]]
METHODS = ("a", "b", "merged", "annealed_a", "annealed_b", "ema", "ensemble")


@dataclass(frozen=True)
class Scale:
    """One point of a sweep's grid.

    Attributes:
        noise_scale: S under the rule of the sweep's configuration.
        augmentation: options of the input augmentation; pairs with another weight decay or augmentation are another
            series, with a critical S of its own.
    """

    noise_scale: float
    lr: float
    batch_size: int
    momentum: float
    weight_decay: float
    augmentation: Mapping[str, Any]

    @property
    def series(self) -> str:
        """Name of the scales that differ from this one in the noise scale alone."""
        augmentation = ", ".join(f"{key} {value}" for key, value in sorted(self.augmentation.items())) or "none"
        return f"weight decay {self.weight_decay:g}, augmentation: {augmentation}"


@dataclass(frozen=True)
class PairRecord:
    """The evaluation of one pair.

    Attributes:
        scale: position of its ``Scale`` in the sweep.
        pair: number of the pair, from 0; the same number has the same seed at every scale.
        status: "ok"; "untrained", mean accuracy of the ends under the configured minimum on the validation split;
            "diverged", a loss that was not finite. A diverged pair has no values.
        digest: of everything that decided the result: training configuration and evaluation settings.
        alphas: the grid of the scan, from 0 (model a) to 1 (model b).
        curves: split -> metric -> value at every α.
        values: split -> method -> metric -> value, for the methods in ``METHODS`` that were asked for.
        summary: split -> metric -> name -> value: ``gain``, ``gain_over_better``, ``barrier``, ``linear_barrier`` ...
        correct: booleans (3, examples) on the test split: a, merged, b.
        seconds: spent on "train" and on "evaluate".
    """

    scale: int
    pair: int
    seed: int
    status: Status
    digest: str
    alphas: tuple[float, ...]
    curves: dict[str, dict[str, list[float]]]
    values: Values
    summary: Values
    correct: NDArray[np.bool_] | None
    seconds: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-compatible dict; ``correct`` is packed, eight examples a byte, in base64."""
        result = {field.name: getattr(self, field.name) for field in fields(self)} | {"alphas": list(self.alphas)}
        if self.correct is not None:
            bits = base64.b64encode(np.packbits(self.correct, axis=1).tobytes()).decode("ascii")
            result["correct"] = {"examples": self.correct.shape[1], "bits": bits}
        return result

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PairRecord:
        """The inverse of ``to_dict``; also turns the strings "nan", "inf" and "-inf" back into numbers."""
        known = {field.name: values[field.name] for field in fields(cls)}
        correct = known["correct"]
        if correct is not None:
            packed = np.frombuffer(base64.b64decode(correct["bits"]), dtype=np.uint8).reshape(3, -1)
            known["correct"] = np.unpackbits(packed, axis=1, count=correct["examples"]).astype(bool)
        numbers = {name: _numbers(known[name]) for name in ("curves", "values", "summary", "seconds")}
        return cls(**{**known, **numbers, "alphas": tuple(known["alphas"])})


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


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, str) else value
