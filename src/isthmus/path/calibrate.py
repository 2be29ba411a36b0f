"""Choose how a model is run on resident data, by a few timed forward passes: how many examples, how laid out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from isthmus.norms import preserved_modes
from isthmus.preserve import preserved_buffers

# The largest output of a submodule stays within these bytes at first, by which a CPU keeps it in its cache and out of
# fresh memory pages. A GPU wants more per kernel. Measurements then at most double the batch size, which bounds memory.
CPU_ACTIVATION_BYTES = 2**23
GPU_ACTIVATION_BYTES = 2**26
MAX_BATCH_SIZE = 1024  # before measuring
PASSES = 3  # of each kind; the fastest counts, which leaves out the first of a shape, when kernels are prepared
WORTH = 0.95  # a measured alternative is taken where it needs less than this of the time
MIN_BATCHES = 8  # data of fewer batches does not repay measuring batch sizes


def is_compiled(model: nn.Module) -> bool:
    """Whether ``model`` or a part of it runs as compiled by ``torch.compile``, which hooks and patches would upset."""
    return any(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in model.modules())


def clock(device: torch.device) -> float:
    """The time in seconds when all work given to ``device`` is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def starting_batch_size(model: nn.Module, inputs: Tensor) -> int:
    """The largest power of two, 1024 at most, with which no submodule returns more than 8 MiB, or 64 MiB on a GPU.

    Args:
        model: the model, as it will be run.
        inputs: the data, shape (n, ...), on the model's device; the first two examples pass through the model.
    """
    budget = CPU_ACTIVATION_BYTES if inputs.device.type == "cpu" else GPU_ACTIVATION_BYTES
    fitting = max(1, int(budget / _activation_bytes(model, inputs[:2])))
    return min(MAX_BATCH_SIZE, 1 << fitting.bit_length() - 1)


def batch_size(model: nn.Module, inputs: Tensor, start: int) -> int:
    """The power of two near ``start`` of examples per forward pass with the least time for each.

    It is ``start`` where the data has fewer than 8 batches, or the model is compiled and would be so anew for each
    size.
    """
    if len(inputs) < MIN_BATCHES * start or is_compiled(model):
        return start
    return fastest(lambda size: _seconds(model, inputs[:size]), start)


def fastest(seconds: Callable[[int], float], start: int) -> int:
    """A quarter, a half, all or the double of ``start``, whichever takes the least time per example.

    Another than ``start`` must save 5 %.

    Args:
        seconds: the time of a batch of so many examples. It is asked for all sizes in turn, several times, and the
            least of each counts.
        start: a power of two.
    """
    sizes = [size for size in (start // 4, start // 2, start, start * 2) if size]
    each = dict.fromkeys(sizes, math.inf)
    for _ in range(PASSES):
        for size in sizes:
            each[size] = min(each[size], seconds(size) / size)
    best = min(sizes, key=each.__getitem__)
    return best if each[best] < WORTH * each[start] else start


def memory_format(model: nn.Module, inputs: Tensor) -> torch.memory_format:
    """``torch.channels_last`` where convolutions run faster on inputs laid out so, else ``torch.contiguous_format``.

    Args:
        model: the model; one without 2-d convolutions, or compiled, is not timed.
        inputs: one batch.
    """
    convolves = any(isinstance(layer, nn.Conv2d) for layer in model.modules())
    if inputs.dim() != 4 or not inputs.is_floating_point() or not convolves or is_compiled(model):
        return torch.contiguous_format
    channels_last = arranged(inputs, torch.channels_last)
    times = [(_seconds(model, inputs), _seconds(model, channels_last)) for _ in range(PASSES)]
    plain, other = map(min, zip(*times, strict=True))
    return torch.channels_last if other < WORTH * plain else torch.contiguous_format


def in_faster_format(model: nn.Module, inputs: Tensor, size: int) -> Tensor:
    """``inputs`` in the ``memory_format`` for batches of ``size``; the model is timed in evaluation mode."""
    with preserved_modes(model), torch.inference_mode(), preserved_buffers(model):
        model.eval()
        chosen = memory_format(model, inputs[:size])
    return inputs if chosen is torch.contiguous_format else arranged(inputs, chosen)


def arranged(inputs: Tensor, memory_format: torch.memory_format) -> Tensor:
    """``inputs`` in a memory format, a copy where they have another.

    Images of one channel look the same in both formats; their strides alone tell convolutions which one to use.
    """
    inputs = inputs.contiguous(memory_format=memory_format)
    if memory_format is torch.channels_last and inputs.shape[1] == 1:
        _, _, height, width = inputs.shape
        return inputs.as_strided(inputs.shape, (height * width, 1, width, 1))
    return inputs


def _seconds(model: nn.Module, inputs: Tensor) -> float:
    """The time of a forward pass."""
    start = clock(inputs.device)
    model(inputs)
    return clock(inputs.device) - start


def _activation_bytes(model: nn.Module, inputs: Tensor) -> float:
    """Bytes per example of the largest tensor among ``inputs`` and the outputs of the submodules."""
    largest = inputs.nbytes
    if is_compiled(model):
        return max(1, largest) / len(inputs)

    def hook(_module: nn.Module, _inputs: object, output: object) -> None:
        nonlocal largest
        if isinstance(output, Tensor):
            largest = max(largest, output.nbytes)

    handles = [module.register_forward_hook(hook) for module in model.modules()]
    try:
        model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return max(1, largest) / len(inputs)
