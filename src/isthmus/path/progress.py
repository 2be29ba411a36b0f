"""What is told while a scan goes on: to a function of the user's, or by a bar in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from isthmus._optional import optional

Values = dict[str, dict[str, float]]  # split -> metric -> value
Tell = Callable[[int, int, Values], None]  # points done, points in all, what was found at the last point


@contextmanager
def telling(progress: Tell | bool | None, unit: str = "points") -> Iterator[Tell]:
    """What to call after each point: ``progress`` if it is a function, a bar's update if it is True, else nothing.

    Args:
        progress: what the user gave.
        unit: what the bar counts.

    Raises:
        DependencyError: a bar is asked for and rich is not installed.
    """
    if callable(progress):
        yield progress
    elif progress:
        with progress_bar() as bar:
            task = bar.add_task(unit, total=None)

            def update(done: int, total: int, found: Values) -> None:
                bar.update(task, completed=done, total=total, description=f"{_latest(found)}, {unit}")

            yield update
    else:
        yield lambda *_: None


def progress_bar() -> Any:
    """A ``rich.progress.Progress`` with counts, time so far and time left; it goes when it is done.

    It stands on standard error, where that is a terminal.

    Raises:
        DependencyError: rich is not installed.
    """
    rich = optional("rich.progress", extra="lab", purpose="A progress bar")
    console = optional("rich.console", extra="lab", purpose="A progress bar")
    return rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("left"),
        rich.TimeRemainingColumn(),
        console=console.Console(stderr=True),
        transient=True,
        speed_estimate_period=3600,  # a pair takes minutes, a point may take seconds: estimate from all of them
    )


def _latest(found: Values) -> str:
    """The first metric of each split."""
    firsts = {split: next(iter(table.items())) for split, table in found.items() if table}
    return ", ".join(f"{split} {name} {value:.4f}" for split, (name, value) in firsts.items())
