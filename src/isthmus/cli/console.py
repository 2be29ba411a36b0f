"""What all commands share: errors in one line, interrupts, and the table of a sweep."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from isthmus.errors import InputError, IsthmusError
from isthmus.path.progress import progress_bar
from isthmus.train.report import summarise, table, write_report
from isthmus.train.sweep import SweepConfig, run_sweep

INTERRUPTED = 130  # 128 + SIGINT, as shells count


def complain(kind: str, message: object) -> None:
    """Print ``kind: message`` in one line on standard error."""
    print(f"{kind}: {' '.join(str(message).split())}", file=sys.stderr)


def guarded(command: Callable[..., None], status: int = 1) -> Callable[..., None]:
    """The command with errors of isthmus in one line (exit ``status``) and interrupts without traceback (exit 130)."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except IsthmusError as error:
            complain("error", error)
            raise typer.Exit(status) from None
        except KeyboardInterrupt as error:
            complain("interrupted", str(error) or "nothing was kept.")
            raise typer.Exit(INTERRUPTED) from None

    return run


def run_and_report(config: SweepConfig, out: Path, *, workers: int | None, together: int | None = None) -> None:
    """Run a sweep with a progress bar, print its table and write its files.

    Args:
        config: the sweep.
        out: its folder.
        workers: processes; None takes as many as the cores allow on a CPU, and one on a GPU.
        together: pairs trained at once; see ``run_sweep``.

    Raises:
        KeyboardInterrupt: with a message that says how to go on.
    """
    with progress_bar() as bar:
        task = bar.add_task("pairs", total=None)
        try:
            result = run_sweep(
                *(config, out),
                workers=workers or default_workers(config),
                together=together,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"run the same command again to go on; finished pairs are kept in {out}.") from None
    summary = summarise(result)
    print_wide(table(summary))
    for path in write_report(summary, out):
        print(path)


def print_wide(table: Table) -> None:
    """Print a table in full: a terminal too narrow for it wraps lines, rather than have columns cut."""
    console = Console()
    console.width = max(console.width, Console(width=1000).measure(table).maximum)
    console.print(table)


def default_workers(config: SweepConfig) -> int:
    """One process for every ``threads`` cores that this process may use; one on a GPU."""
    if config.base.device != "cpu":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // (config.base.threads or 1))


def check_device(device: str) -> None:
    """Say at once that a device is not there, rather than from inside torch."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"the device {device!r} cannot be used here: {reason} Use --device cpu.") from None
