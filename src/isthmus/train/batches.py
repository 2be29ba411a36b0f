"""An endless stream of training batches, drawn on the device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from .augment import Augmentation
from .seeds import generator

# Gathering and augmenting many batches at once saves most of the overhead of small operations. As many are taken as fit
# a processor's cache, or on a GPU as keep it busy; never more than the steps after which the loss is looked at.
_CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**25}
_CHUNK_STEPS = 128


class Batches:
    """Batches of augmented examples: each epoch a permutation of the data, its remainder under a batch left out.

    Args:
        inputs, labels: the training data, (n, ...) and (n,).
        batch_size: examples per batch, at most n.
        augmentation: how examples change.
        seed: seed of order and augmentation.
        purpose: name of the stream; streams of different names are independent.
    """

    def __init__(
        self, inputs: Tensor, labels: Tensor, batch_size: int, augmentation: Augmentation, *, seed: int, purpose: str
    ) -> None:
        self._inputs, self._labels = inputs, labels
        self._batch_size = batch_size
        self._augmentation = augmentation
        self._rows = self._permutations(generator(seed, f"order/{purpose}"))
        self._draws = generator(seed, f"augmentation/{purpose}", device=inputs.device)
        elements = _CHUNK_ELEMENTS.get(inputs.device.type, _CHUNK_ELEMENTS["cpu"])
        self._chunk = min(_CHUNK_STEPS, max(1, elements // (batch_size * inputs[0].numel())))

    def chunks(self, steps: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """The next ``steps`` batches in chunks: lists of inputs (batch_size, ...) and labels (batch_size,)."""
        for start in range(0, steps, self._chunk):
            rows = torch.stack(list(islice(self._rows, min(self._chunk, steps - start)))).to(self._inputs.device)
            inputs = self._augmentation(self._inputs[rows.flatten()], self._draws)
            yield list(zip(torch.split(inputs, self._batch_size), self._labels[rows].unbind(), strict=True))

    def _permutations(self, order: torch.Generator) -> Iterator[Tensor]:
        """One row of ``batch_size`` indices per step; drawn on the CPU, to be the same on every device."""
        size = len(self._inputs)
        while True:
            epoch = torch.randperm(size, generator=order)
            yield from epoch[: size // self._batch_size * self._batch_size].view(-1, self._batch_size)
