"""The device that a run measures: how long calls take there, how much memory there is, and what is left of the time."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[], object]
SHARE = 0.8  # of the free memory that tensors of one case may take


@dataclass
class Card:
    """A GPU, or the CPU as a stand-in on which a run is only tried.

    Args:
        device: where tensors are made.
        rounds: how often each call is timed.
        seconds: of the whole run.
    """

    device: torch.device
    rounds: int
    seconds: float
    started: float = field(default_factory=time.monotonic)

    @property
    def real(self) -> bool:
        """Whether times mean anything."""
        return self.device.type == "cuda"

    @property
    def left(self) -> float:
        """Seconds."""
        return self.seconds - (time.monotonic() - self.started)

    def room(self) -> int:
        """Bytes that tensors of one case may take."""
        if not self.real:
            return 1 << 26
        torch.cuda.empty_cache()  # torch keeps what earlier cases had
        return int(SHARE * torch.cuda.mem_get_info(self.device)[0])

    def wait(self) -> None:
        """For everything that was launched."""
        if self.real:
            torch.cuda.synchronize(self.device)

    def seconds_of(self, call: Call) -> float:
        """The time of one call on the device, from its first launch to its last kernel's end."""
        if not self.real:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def medians(self, calls: Mapping[str, Call], *, rounds: int | None = None) -> dict[str, float]:
        """The median times of calls that take turns, after each has run once to compile and to warm up.

        What they read is larger than the cache, which the others' tensors have gone through between two turns.
        """
        for call in calls.values():
            call()
        self.wait()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds or self.rounds):
            for name, call in calls.items():
                times[name].append(self.seconds_of(call))
        return {name: statistics.median(values) for name, values in times.items()}

    def describe(self) -> dict[str, Any]:
        """The card, the day, and the versions that matter."""
        found: dict[str, Any] = {
            "card": torch.cuda.get_device_name(self.device) if self.real else "not a GPU: times mean nothing",
            "date": time.strftime("%Y-%m-%d"),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        found |= {name: _version(name) for name in ("isthmus", "triton", "peft", "mergekit")}
        if self.real:
            properties = torch.cuda.get_device_properties(self.device)
            found |= {
                "memory": properties.total_memory,
                "capability": f"{properties.major}.{properties.minor}",
                "cuda": torch.version.cuda,
            }
        return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def table(title: str, rows: Sequence[Sequence[str]]) -> str:
    """A table of text, whose first row is its header."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([title, "-" * len(title), *lines, ""])
