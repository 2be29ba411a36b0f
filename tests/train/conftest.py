"""A device for tests of captured steps, and recorders that stand in for CUDA graphs where there is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isthmus import _capture

WAITS = ("_local_scalar_dense", "nonzero", "equal")


class Tape(TorchDispatchMode):
    """Keeps operations with the tensors and numbers that they had, as a CUDA graph keeps kernels with theirs.

    Played again, every operation reads and writes the memory that it read and wrote when it was recorded. What the host
    would have to wait for cannot be recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name.split("::")[1] in WAITS:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **kwargs)
        returns = func._schema.returns
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        writes = any(value.alias_info is not None and value.alias_info.is_write for value in func._schema.arguments)
        if writes:
            self.entries.append(lambda: func(*args, **kwargs))
        elif not any(value.alias_info is not None for value in returns):  # views look at the memory that they have
            self.entries.append(lambda: self._repeat(func, args, kwargs, outputs))
        return result

    @staticmethod
    def _repeat(func, args, kwargs, outputs: list[Tensor]) -> None:
        again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
        for output, value in zip(outputs, again, strict=True):
            output.copy_(value)


def run_again(work: _capture.Work, warm_up: _capture.Work, device: torch.device) -> _capture.Work:
    """A recorder that keeps nothing: its replay runs the work again."""
    warm_up()
    return work


def record_on_tape(work: _capture.Work, warm_up: _capture.Work, device: torch.device) -> _capture.Work:
    """A recorder that freezes what a CUDA graph freezes."""
    try:
        warm_up()
        with Tape() as tape:
            work()
    except Exception as error:
        raise _capture.CaptureError(str(error)) from error

    @torch.no_grad()
    def replay() -> None:
        for entry in tape.entries:
            entry()

    return replay


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
def tape() -> Callable[[_capture.Work, _capture.Work, torch.device], _capture.Work]:
    """The stricter stand-in."""
    return record_on_tape
