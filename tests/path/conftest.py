"""Fixtures of the tests of scans."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tape import record_on_tape

from isthmus import _capture
from isthmus.path import pipeline
from isthmus.path.device import InOrder, device_of


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run on one thread: very small models gain nothing from more, and lose much where processors are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it to choose whether points are evaluated in the background, on a CPU with recordings instead of graphs."""

    def choose(*, background: bool, graphs: bool = False) -> None:
        monkeypatch.setattr(pipeline, "device_of", device_of if background else InOrder)
        monkeypatch.setattr(InOrder, "background", background)
        monkeypatch.setattr("isthmus.path.graphs.FEWEST", 1)
        if graphs:
            monkeypatch.setitem(_capture.RECORDERS, "cpu", record_on_tape)
        else:
            monkeypatch.delitem(_capture.RECORDERS, "cpu", raising=False)

    return choose
