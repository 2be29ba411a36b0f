"""An endless stream of training batches, drawn on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from isthmus._capture import to_device

from .augment import Augmentation
from .seeds import generator

# Gathering and augmenting many batches at once saves most of the overhead of small operations. As many are taken as fit
# a processor's cache, or on a GPU as keep it busy; never more than the steps after which the loss is looked at.
# How an augmentation draws depends on how many there are, so that a stream has as many alone and beside others.
_CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**22}
_CHUNK_STEPS = 128


@dataclass(frozen=True)
class Chunk:
    """Consecutive batches; iterating gives them as pairs of inputs and labels.

    Attributes:
        inputs: (steps, batch_size, ...), or (steps, models, batch_size, ...) of batches for several models.
        labels: (steps, batch_size) or (steps, models, batch_size).
    """

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.inputs.unbind(), self.labels.unbind(), strict=True)


class Batches:
    """Batches of augmented examples: each epoch a permutation of the data, its remainder under a batch left out.

    Args:
        inputs, labels: the training data, (n, ...) and (n,).
        batch_size: examples per batch, at most n.
        augmentation: how examples change.
        seed: seed of order and augmentation.
        purpose: name of the stream; streams of different names are independent.
        channels_last: lay the images (n, channels, height, width) out in the order (n, height, width, channels).

    Attributes:
        capacity: steps of a chunk, but for the last.
    """

    def __init__(
        self,
        inputs: Tensor,
        labels: Tensor,
        batch_size: int,
        augmentation: Augmentation,
        *,
        seed: int,
        purpose: str,
        channels_last: bool = False,
    ) -> None:
        self._inputs, self._labels = inputs, labels
        self._batch_size = batch_size
        self._augmentation = augmentation
        self._rows = self._permutations(generator(seed, f"order/{purpose}"))
        self._draws = generator(seed, f"augmentation/{purpose}", device=inputs.device)
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        elements = _CHUNK_ELEMENTS.get(inputs.device.type, _CHUNK_ELEMENTS["cpu"])
        self.capacity = min(_CHUNK_STEPS, max(1, elements // (batch_size * inputs[0].numel())))

    def chunks(self, steps: int) -> Iterator[Chunk]:
        """The next ``steps`` batches in chunks."""
        for start in range(0, steps, self.capacity):
            rows = torch.stack(list(islice(self._rows, min(self.capacity, steps - start))))
            rows = to_device(rows, self._inputs.device)
            inputs = self._augmentation(self._inputs[rows.flatten()], self._draws)
            inputs = inputs.contiguous(memory_format=self._format)
            yield Chunk(inputs.unflatten(0, rows.shape), self._labels[rows])

    def _permutations(self, order: torch.Generator) -> Iterator[Tensor]:
        """One row of ``batch_size`` indices per step; drawn on the CPU, to be the same on every device."""
        size = len(self._inputs)
        while True:
            epoch = torch.randperm(size, generator=order)
            yield from epoch[: size // self._batch_size * self._batch_size].view(-1, self._batch_size)


class SideBySide:
    """The batches of several models, each from its own stream, step by step together.

    Args:
        streams: of batches of one shape.

    Attributes:
        capacity: as of each stream; chunks take as much memory as those of all streams.
    """

    def __init__(self, streams: Sequence[Batches]) -> None:
        self._streams = streams
        self.capacity = streams[0].capacity

    def chunks(self, steps: int) -> Iterator[Chunk]:
        """The next ``steps`` batches of all streams in chunks."""
        for chunks in zip(*(stream.chunks(steps) for stream in self._streams), strict=True):
            yield Chunk(
                torch.stack([chunk.inputs for chunk in chunks], 1), torch.stack([chunk.labels for chunk in chunks], 1)
            )
