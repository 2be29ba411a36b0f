"""What a GPU does apart from the host: work recorded once and replayed, and values that arrive later.

A step of a small model costs the host more in launching operations than the device in doing them. On a CUDA device the
operations are recorded in a CUDA graph and launched as one. A recording keeps the addresses and the Python numbers of
the moment it was made: what changes from replay to replay lives in tensors that stay where they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Work = Callable[[], None]

WARM_UPS = 3  # libraries choose algorithms and allocate workspaces in the first runs, which cannot be recorded


class CaptureError(Exception):
    """Work could not be recorded; the message says why, for the records of what was done instead."""


def capture(work: Work, device: torch.device, *, warm_up: Work | None = None) -> Work:
    """Record ``work`` and return what replays it on the current stream.

    The work is run a few times first, then recorded without being run: undo what the runs did where it matters.
    torch's global random state is put back; replays draw from it what the work itself would have drawn.

    Args:
        work: reads and writes tensors that live at least as long as what is returned, and waits for nothing.
        device: where it does so.
        warm_up: what to run before recording instead of the work.

    Raises:
        CaptureError: the device has no graphs, or the work raised an error or cannot be recorded.
    """
    check_device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        return RECORDERS[device.type](work, warm_up or work, device)


def check_device(device: torch.device) -> None:
    """Raise a ``CaptureError`` where ``capture`` would have nothing to record with."""
    if device.type not in RECORDERS:
        raise CaptureError(f"there are no graphs on the device {device}")


def _record_cuda(work: Work, warm_up: Work, device: torch.device) -> Work:
    with torch.cuda.device(device):
        before = torch.cuda.current_stream()
        side = torch.cuda.Stream()
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
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                recorded()
        except Exception as error:
            _clean_up(before)
            raise CaptureError(reason or _reason(error)) from error
    return graph.replay


@contextmanager
def _reads_refused() -> Iterator[None]:
    """Within the block, an operation for which the host waits is an error."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # which does not find all of them: no matter
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _clean_up(before: torch.cuda.Stream) -> None:
    """Undo what a recording that broke off leaves: its stream is current, and the generator may belong to it."""
    torch.cuda.set_stream(before)
    try:
        torch.rand(1, device=before.device)
    except RuntimeError:
        generator = torch.cuda.default_generators[before.device_index]
        generator.graphsafe_set_state(generator.clone_state())


# device type -> function(work, warm_up, device) that returns the replay; tests add a stand-in for the CPU
RECORDERS: dict[str, Callable[[Work, Work, torch.device], Work]] = {"cuda": _record_cuda}


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


def send(value: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on ``device``; the host does not wait for the copy."""
    if device.type == "cuda" and value.device.type == "cpu":
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)


def _reason(error: Exception) -> str:
    """The first line of the message of an error, which for CUDA errors is followed by advice on debugging."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
