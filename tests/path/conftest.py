"""Fixtures of the tests of scans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isthmus import _capture
from isthmus.path import pipeline
from isthmus.path.device import InOrder, device_of

READS = ("item", "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "unique", "masked_select")


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


class Recording(TorchDispatchMode):
    """Operations as a CUDA graph keeps them: with the tensors and numbers that they were called with.

    Reading a value is an error. Doing them again writes into the memory that the results had the first time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        results = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, results))
        return results

    def replay(self) -> None:
        for func, args, kwargs, kept in self.steps:
            results = func(*args, **kwargs)
            for old, new in zip(tree_leaves(kept), tree_leaves(results), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record(work: _capture.Work, warm_up: _capture.Work, _device: torch.device) -> _capture.Work:
    """A recorder for ``_capture.RECORDERS``."""
    recording = Recording()
    try:
        with Recording():
            warm_up()
        with recording:
            work()
    except Exception as error:
        raise _capture.CaptureError(str(error)) from error
    return torch.inference_mode()(recording.replay)


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it to choose whether points are evaluated in the background, on a CPU with recordings instead of graphs."""

    def choose(*, background: bool, graphs: bool = False) -> None:
        monkeypatch.setattr(pipeline, "device_of", device_of if background else InOrder)
        monkeypatch.setattr(InOrder, "background", background)
        if graphs:
            monkeypatch.setitem(_capture.RECORDERS, "cpu", record)
        else:
            monkeypatch.delitem(_capture.RECORDERS, "cpu", raising=False)

    return choose
