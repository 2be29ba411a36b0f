"""BatchNorm statistics: find the layers, save, re-estimate and restore what they remember.

The running mean and variance of a merged model are not the merge of its parents' statistics: activations of an
interpolated network have less variance than those of either end, and leaving this out can turn a 90 % merge into a
12 % one (Jordan et al., "REPAIR", arXiv 2211.08403). Re-estimating them takes forward passes over training data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .batches import run, size_of, split
from .errors import InputError


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """The BatchNorm layers within ``module`` (1-d to 3-d, synchronised too) that keep running statistics, each once."""
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and layer.running_mean is not None]


def save_statistics(module: nn.Module) -> list[list[Tensor]]:
    """Copies of the statistics of each layer in ``batch_norms(module)``, for ``restore_statistics``."""
    return [[buffer.clone() for buffer in layer.buffers(recurse=False)] for layer in batch_norms(module)]


def restore_statistics(module: nn.Module, saved: list[list[Tensor]]) -> None:
    """Write back, in place, what ``save_statistics`` returned for the same module."""
    with torch.no_grad():
        for layer, tensors in zip(batch_norms(module), saved, strict=True):
            for buffer, tensor in zip(layer.buffers(recurse=False), tensors, strict=True):
                buffer.copy_(tensor)


@contextmanager
def preserved_modes(module: nn.Module) -> Iterator[None]:
    """Give every submodule its training or evaluation mode back at the end of the block."""
    modes = [(layer, layer.training) for layer in module.modules()]
    try:
        yield
    finally:
        for layer, training in modes:
            layer.training = training


def reset_statistics(module: nn.Module, data: Tensor | Iterable[object], batch_size: int = 256) -> int:
    r"""Re-estimate the running statistics of every BatchNorm layer from forward passes over ``data``.

    With batches :math:`k = 1 \dots K` of :math:`n_k` examples, each layer ends up with

    .. math:: \hat\mu = \sum_k \frac{n_k}{n} \mu_k, \qquad \hat\sigma^2 = \sum_k \frac{n_k}{n} s_k^2,

    where :math:`\mu_k` is the mean and :math:`s_k^2` the unbiased variance of batch :math:`k`, seen while the layers in
    front normalise with that batch's own statistics, as in training. The batches [1, 3] and [5, 7] give mean 4 and
    variance 2. Only the BatchNorm layers are in training mode; dropout and its like stay in evaluation mode, so the
    result depends on nothing random. ``num_batches_tracked`` becomes :math:`K`.

    Modes and momenta are as before afterwards. If a forward pass fails, so are the statistics.

    Args:
        module: the model, called with one batch of inputs at a time.
        data: all inputs in one tensor of shape (n, ...), on the device of the module; or an iterable of batches (a
            ``DataLoader``), each a tensor of inputs, a mapping of arguments, or a sequence that begins with one.
        batch_size: examples per batch where ``data`` is one tensor. The statistics depend on it. A last batch of one
            example, which has no variance, joins the batch before it.

    Returns:
        The number of examples seen; 0 if the module has no BatchNorm layer, and then no forward pass is made.

    Raises:
        InputError: there are fewer than two examples, or ``batch_size`` is below 2.
    """
    layers = batch_norms(module)
    if not layers:
        return 0
    saved = save_statistics(module)
    momenta = [layer.momentum for layer in layers]
    seen = 0
    with preserved_modes(module), torch.no_grad():
        module.eval()
        for layer in layers:
            layer.training = True
            layer.reset_running_stats()
        try:
            for inputs in batches(data, batch_size):
                size = size_of(inputs)
                seen += size
                for layer in layers:
                    layer.momentum = size / seen  # running = (1 - momentum) running + momentum batch
                run(module, inputs)
            if seen == 0:
                raise InputError("data for BatchNorm statistics holds no batch; pass training inputs.")
        except BaseException:
            restore_statistics(module, saved)
            raise
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum
    return seen


def batches(data: Tensor | Iterable[object], batch_size: int) -> Iterator[Any]:
    """The inputs of ``data``, batch by batch; arguments as in ``reset_statistics``.

    Raises:
        InputError: ``data`` is a tensor of fewer than two examples, or ``batch_size`` is below 2; or data or a batch
            is none of the kinds above.
    """
    if not isinstance(data, Tensor):
        yield from split(data, batch_size)
        return
    if batch_size < 2 or len(data) < 2:
        raise InputError(
            f"statistics need at least two examples in a batch: batch_size is {batch_size} and there are "
            f"{len(data)} examples. Pass more training data or a larger batch size."
        )
    sizes = [len(part) for part in torch.split(data, batch_size)]
    if sizes[-1] == 1:
        sizes[-2:] = [sizes[-2] + 1]
    yield from torch.split(data, sizes)
