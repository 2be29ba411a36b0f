"""``isthmus sweep``: a grid of training configurations from a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from isthmus.train.sweep import SweepConfig

from .console import check_device, run_and_report


def sweep(
    config: Annotated[Path, typer.Argument(help="TOML file: pairs, points, and the tables [base] and [grid].")],
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("isthmus-sweep"),
    device: Annotated[str | None, typer.Option(help="Instead of the file's: cpu or cuda.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes side by side. [default: one a core; on a GPU one]")
    ] = None,
    together: Annotated[
        int | None,
        typer.Option(
            min=1, help="Pairs trained at once. [default: 8 on a GPU for models without convolutions, else 1]"
        ),
    ] = None,
) -> None:
    """Train and merge pairs over a grid of learning rate, batch size, momentum, weight decay and augmentation.

    Interrupted and started again, it goes on from the pairs that are finished.
    """
    settings = SweepConfig.from_toml(config)
    if device is not None:
        settings = replace(settings, base=replace(settings.base, device=device))
    check_device(settings.base.device)
    run_and_report(settings, out, workers=workers, together=together)
