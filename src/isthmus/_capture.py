"""What a GPU does apart from the host: work recorded once and replayed, and values that arrive later.

A step of a small model costs the host more in launching operations than the device in doing them. On a CUDA device the
operations are recorded in a CUDA graph and launched as one. A recording keeps the addresses and the Python numbers of
the moment it was made: what changes from replay to replay lives in tensors that stay where they are.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from isthmus.kernels.table import to_device as to_device  # without waiting, for whoever records

Work = Callable[[], None]
Pool = Any  # of torch.cuda.graph_pool_handle

WARM_UPS = 3  # libraries choose algorithms and allocate workspaces in the first runs, which cannot be recorded


class CaptureError(Exception):
    """Work could not be recorded; the message says why, for the records of what was done instead."""


def capture(work: Work, device: torch.device, *, warm_up: Work | None = None, pool: Pool | None = None) -> Work:
    """Record ``work`` and return what replays it on the current stream.

    The work is run a few times first, then recorded without being run: undo what the runs did where it matters.
    torch's global random state is put back; replays draw from it what the work itself would have drawn.

    Recordings of one thread may share workspaces of libraries: replay them one after another. Threads: in the last run
    before the recording an operation for which the host waits is an error, in whichever thread it is, since torch has
    one such mode for all. The recording is made on a stream of torch's pool; what another thread launches meanwhile on
    a stream that the pool gave to both is recorded too.

    Args:
        work: reads and writes tensors that live at least as long as what is returned, and waits for nothing.
        device: where it does so.
        warm_up: what to run before recording instead of the work.
        pool: memory that recordings share, whose replays follow one another on one stream; by default each has its own.

    Raises:
        CaptureError: the device has no graphs, or the work raised an error or cannot be recorded.
    """
    check_device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        return RECORDERS[device.type](work, warm_up or work, device, pool)


def check_device(device: torch.device) -> None:
    """Raise a ``CaptureError`` where ``capture`` would have nothing to record with."""
    if device.type not in RECORDERS:
        raise CaptureError(f"there are no graphs on the device {device}")


def _record_cuda(work: Work, warm_up: Work, device: torch.device, pool: Pool | None) -> Work:
    with torch.cuda.device(device):
        before = torch.cuda.current_stream()
        side = _SIDE.stream(device)
        graph = torch.cuda.CUDAGraph()
        reason = ""  # of an error at the end of the recording, which says only that it is invalid

        def recorded() -> None:
            nonlocal reason
            try:
                work()
            except Exception as error:
                reason = _reason(error)
                raise

        try:
            side.wait_stream(before)
            try:
                with torch.cuda.stream(side):
                    for _ in range(WARM_UPS - 1):
                        warm_up()
                    with _reads_refused():  # a recording that meets one is lost, with some of its memory
                        warm_up()
            finally:
                before.wait_stream(side)
            # other threads, such as one that pins memory, may go on with what recording forbids to this one
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                recorded()
        except Exception as error:
            torch.cuda.set_stream(before)  # a recording that broke off leaves its own as the current one
            raise CaptureError(reason or _reason(error)) from error
    return graph.replay


class _Streams(threading.local):
    """One stream for recordings per thread and device: libraries keep a workspace for each that they ever saw."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in self._streams:
            self._streams[index] = torch.cuda.Stream(index)
        return self._streams[index]


_SIDE = _Streams()


@contextmanager
def _reads_refused() -> Iterator[None]:
    """Within the block, an operation for which the host waits is an error, in every thread."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode")  # which does not find all of them
            torch.cuda.set_sync_debug_mode("error")  # where warnings are errors, it may raise one and be set
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


# device type -> function(work, warm_up, device, pool) that returns the replay; tests add a stand-in for the CPU
RECORDERS: dict[str, Callable[[Work, Work, torch.device, Pool | None], Work]] = {"cuda": _record_cuda}


class Arrival:
    """A tensor on its way to the host, which need not wait for what the device is told to do meanwhile.

    Args:
        value: copied as it is now, in the order of the current stream.
    """

    def __init__(self, value: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if value.device.type != "cuda":
            self._value = value.detach().to("cpu", copy=True)
            return
        self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        with torch.cuda.device(value.device):
            self._value.copy_(value.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def get(self) -> Tensor:
        """The value on the CPU, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._value


def _reason(error: Exception) -> str:
    """The first line of the message of an error, which for CUDA errors is followed by advice on debugging."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
