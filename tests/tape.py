"""Recorders that stand in for CUDA graphs where there is no GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isthmus import _capture

# operations for whose results the host waits
READS = ("item", "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "_unique2", "unique_dim", "masked_select")


class Tape(TorchDispatchMode):
    """Keeps operations with the tensors and numbers that they had, as a CUDA graph keeps kernels with theirs.

    Played again, every operation reads and writes the memory that it read and wrote when it was recorded. What the host
    would have to wait for cannot be recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.entries.append((func, args, kwargs or {}, tree_leaves(result)))
        return result

    def play(self) -> None:
        """Do everything again."""
        with torch.inference_mode():  # in which tensors may be written to whether or not they were made in it
            for func, args, kwargs, outputs in self.entries:
                for output, value in zip(outputs, tree_leaves(func(*args, **kwargs)), strict=True):
                    # views, and what operations write in place, lie where they lay
                    if isinstance(output, Tensor) and output.data_ptr() != value.data_ptr():
                        output.copy_(value)


def run_again(work: _capture.Work, warm_up: _capture.Work, _device: torch.device, _pool: object) -> _capture.Work:
    """A recorder that keeps nothing: its replay runs the work again."""
    warm_up()
    return work


def record_on_tape(work: _capture.Work, warm_up: _capture.Work, _device: torch.device, _pool: object) -> _capture.Work:
    """A recorder that freezes what a CUDA graph freezes."""
    tape = Tape()
    try:
        with Tape():  # which refuses reads in the run before the recording as well
            warm_up()
        with tape:
            work()
    except Exception as error:
        raise _capture.CaptureError(str(error)) from error
    return tape.play
