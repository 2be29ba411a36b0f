"""What a device does in the background: streams, events, reads that nobody waits for, and graphs.

Scans are written for a device that works through a queue while Python runs ahead. ``InOrder`` is a device where
everything is done when it is asked for, as on a CPU, so that all of these mean nothing; ``Cuda`` has them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

Read = Callable[[], list[Any]]  # waits for a tensor that is on its way to the host
Replay = Callable[[], Tensor]  # does again what was captured; returns a tensor of its own
Mark = Any  # a place in the queue of the device


class InOrder:
    """A device that does everything when it is asked for.

    Attributes:
        background: whether the device works while Python goes on.
        device: which it is.
    """

    background = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def here(self) -> AbstractContextManager[Any]:
        """Within the block, this is the current device."""
        return nullcontext()

    def aside(self, _used: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Within the block, work goes into a second queue; ``_used`` are the tensors that it uses beyond its own."""
        return nullcontext()

    def mark(self) -> Mark:
        """The end of the current queue as it is now."""
        return time.perf_counter()

    def wait(self, _mark: Mark) -> None:
        """Let the current queue go on when the device has come to a mark of the other one."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """The time between two marks, when the device has come to both."""
        elapsed: float = end - start
        return elapsed

    def upload(self, numbers: Sequence[float], out: Tensor) -> None:
        """Write numbers into a tensor on the device."""
        out.copy_(torch.tensor(numbers, dtype=out.dtype))

    def fetch(self, tensor: Tensor) -> Read:
        """Send a tensor to the host."""
        numbers = tensor.tolist()
        return lambda: numbers

    def free_bytes(self) -> float:
        """How much more memory the device has."""
        return math.inf

    def capture(self, _function: Callable[[], Tensor]) -> Replay:
        """Capture what ``function`` has the device do, which only depends on memory that stays where it is.

        Raises:
            RuntimeError: it cannot be captured.
        """
        raise RuntimeError(f"there are no graphs on the device {str(self.device)!r}")


class Cuda(InOrder):
    """A CUDA device: a second stream beside the current one, events, pinned memory, and CUDA graphs."""

    background = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._second = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()  # one for all graphs, of which only one runs at a time

    def here(self) -> AbstractContextManager[Any]:
        """Within the block, this is the current device."""
        return torch.cuda.device(self.device)

    @contextmanager
    def aside(self, used: Sequence[Tensor]) -> Iterator[None]:
        """Within the block, work goes to the second stream. It writes through addresses, of which torch is told."""
        for tensor in used:
            tensor.record_stream(self._second)
        with torch.cuda.stream(self._second):
            yield

    def mark(self) -> Mark:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: Mark) -> None:
        """Have the current stream wait for an event, not the host."""
        torch.cuda.current_stream().wait_event(mark)

    def seconds(self, start: Mark, end: Mark) -> float:
        """The time between two events; the host waits for the later one."""
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1000

    def upload(self, numbers: Sequence[float], out: Tensor) -> None:
        """Write numbers into a tensor; from pinned memory, since the host waits for a copy from any other."""
        out.copy_(torch.tensor(numbers, dtype=out.dtype, pin_memory=True), non_blocking=True)

    def fetch(self, tensor: Tensor) -> Read:
        """Send a tensor to pinned memory; whoever reads waits for it and for nothing that was asked for later."""
        landed = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        landed.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

        def read() -> list[Any]:
            arrived.synchronize()
            return landed.tolist()

        return read

    def free_bytes(self) -> float:
        """What the device has left, and what torch holds of it without using it."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def capture(self, function: Callable[[], Tensor]) -> Replay:
        """Capture a CUDA graph, after a warm-up on the same stream in which reading the device is an error."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), _reads_refused():
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            outputs = function()

        def replay() -> Tensor:
            graph.replay()
            return outputs.clone()  # whose memory other graphs of the pool may use, too

        return replay


def device_of(device: torch.device) -> InOrder:
    """What is known of a device."""
    return Cuda(device) if device.type == "cuda" else InOrder(device)


@contextmanager
def _reads_refused() -> Iterator[None]:
    """Make reads of the device errors within the block: a capture that meets one is lost, and some of its memory."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
