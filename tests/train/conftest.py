"""A device for tests of captured steps, and recorders that stand in for CUDA graphs where there is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tape import record_on_tape, run_again

from isthmus import _capture


@pytest.fixture
def device() -> str:
    """A GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["again", "tape"])
def graphs(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device's own graphs, or on the CPU each stand-in."""
    if device == "cpu":
        stand_in = {"again": run_again, "tape": record_on_tape}[request.param]
        monkeypatch.setitem(_capture.RECORDERS, "cpu", stand_in)
    elif request.param == "tape":
        pytest.skip("the device has graphs of its own")
    return device


@pytest.fixture
def tape() -> Callable[..., _capture.Work]:
    """The stricter stand-in."""
    return record_on_tape
