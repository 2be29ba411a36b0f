"""``isthmus demo``: the main finding, on a data set that is at hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from isthmus.errors import InputError
from isthmus.train import Augmentation, TrainConfig
from isthmus.train.sweep import SweepConfig

from .console import check_device, default_workers, run_and_report


@dataclass(frozen=True)
class Preset:
    """A demonstration: what is trained, at which learning rates, and about how long a pair takes on one core."""

    base: TrainConfig
    lr: tuple[float, ...]
    seconds_per_pair: float


PRESETS = {
    "digits": Preset(
        TrainConfig(
            data="digits",
            model="mlp",
            model_options={"widths": [64, 64], "norm": "layer"},
            batch_size=16,
            momentum=0.9,
            weight_decay=5e-4,
            steps=600,
            branch_step=150,
            warmup_steps=50,
            anneal_steps=200,
            ema_decay=0.99,
            augmentation=Augmentation(noise=0.3),
            threads=1,
        ),
        lr=(0.005, 0.02, 0.05, 0.1, 0.2, 0.25, 0.3, 0.35),
        seconds_per_pair=1.4,
    ),
    "fashion-mnist": Preset(
        TrainConfig(
            data="fashion-mnist",
            model="mlp",
            model_options={"widths": [256, 256], "norm": "layer"},
            batch_size=128,
            momentum=0.9,
            weight_decay=5e-4,
            steps=2000,
            branch_step=300,
            warmup_steps=50,
            anneal_steps=500,
            ema_decay=0.99,
            threads=1,
        ),
        lr=(0.001, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8),
        seconds_per_pair=20,
    ),
}


def demo(
    data: Annotated[str, typer.Option(help="digits (no files) or fashion-mnist (IDX files in --root).")] = "digits",
    root: Annotated[Path | None, typer.Option(help="Folder with the data set's files.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results. [default: isthmus-demo, or isthmus-demo-fashion-mnist]")
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of models at each noise scale.")] = 10,
    device: Annotated[str, typer.Option(help="cpu, or cuda with the data resident there.")] = "cpu",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes side by side. [default: one a core; on a GPU one]")
    ] = None,
) -> None:
    """Train pairs of a small MLP at eight noise scales, merge and scan each, and report where merging pays.

    Interrupted and started again, it goes on from the pairs that are finished.
    """
    if data not in PRESETS:
        raise InputError(f"there is no demo on {data!r}; --data takes {' or '.join(PRESETS)}. Others: isthmus sweep.")
    preset = PRESETS[data]
    if (root is None) != (data == "digits"):
        hint = "comes with scikit-learn: leave --root out" if data == "digits" else "is read from files: give --root"
        raise InputError(f"{data} {hint}.")
    check_device(device)
    options = {} if root is None else {"root": str(root.expanduser().resolve())}
    config = SweepConfig(replace(preset.base, data_options=options, device=device), lr=preset.lr, pairs=pairs)
    folder = out or Path("isthmus-demo" if data == "digits" else f"isthmus-demo-{data}")
    processes = workers or default_workers(config)
    expected = _duration(len(preset.lr) * pairs * preset.seconds_per_pair / processes)
    print(
        f"{data}: {len(preset.lr)} noise scales, {pairs} pairs each, into {folder}; "
        f"about {expected} on {processes} CPU cores, less what is there already."
    )
    run_and_report(config, folder, workers=processes)


def _duration(seconds: float) -> str:
    return f"{max(seconds, 10):.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
