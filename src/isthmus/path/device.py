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

from isthmus._capture import Arrival, CaptureError, capture, to_device

Read = Callable[[], list[Any]]  # waits for a tensor that is on its way to the host
Replay = Callable[[], Tensor]  # does again what was captured; the tensor is overwritten the next time
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
        self._pool: Any = None  # of the memory of graphs

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

    def upload(self, numbers: Sequence[float]) -> Tensor:
        """Numbers as a float64 tensor on the device."""
        with torch.inference_mode(False):
            moved: Tensor = to_device(torch.tensor(numbers, dtype=torch.float64), self.device)
            return moved

    def fetch(self, tensor: Tensor) -> Read:
        """Send a tensor to the host; whoever reads waits for it, and for nothing that is asked for later."""
        arrival = Arrival(tensor)
        return lambda: arrival.get().tolist()

    def free_bytes(self) -> float:
        """How much more memory the device has."""
        return math.inf

    def capture(self, function: Callable[[], Tensor]) -> Replay:
        """Capture what ``function`` has the device do, which only depends on memory that stays where it is.

        What is captured for one device shares memory: replays must follow one another on one stream. The tensor that
        ``function`` returns has memory of its own for as long as the replay is kept.

        Raises:
            CaptureError: it cannot be captured.
        """
        outputs: list[Tensor] = []

        def work() -> None:
            outputs[:] = [function()]

        replay = capture(work, self.device, pool=self._pool)
        (captured,) = outputs

        def replayed() -> Tensor:
            replay()
            return captured

        return replayed


class Cuda(InOrder):
    """A CUDA device: a second stream beside the current one, and events."""

    background = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._second = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._latest: Replay | None = None

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

    def capture(self, function: Callable[[], Tensor]) -> Replay:
        """As ``InOrder.capture``. The latest is kept, because torch keeps a pool only while some graph has it."""
        try:
            self._latest = super().capture(function)
        except CaptureError:
            self._pool = torch.cuda.graph_pool_handle()  # what broke off may still be recording into the other one
            raise
        return self._latest

    def free_bytes(self) -> float:
        """What the device has left, and what torch holds of it without using it."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)


def device_of(device: torch.device) -> InOrder:
    """What is known of a device."""
    return Cuda(device) if device.type == "cuda" else InOrder(device)
