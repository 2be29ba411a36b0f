"""How the steps of a chunk of batches are taken: operation by operation, or replayed from a recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isthmus._capture import CaptureError, capture, to_device

from .batches import Chunk

CHECKED = 3  # steps by which a recording is compared with steps launched one by one

Step = Callable[[Tensor, Tensor], Tensor]  # inputs and labels of one batch of each model -> losses, () or (models,)


class PlainSteps:
    """Steps launched operation by operation.

    Args:
        step: takes one step of the optimiser and returns the losses before it.
        groups: the optimiser's parameter groups, one per model.
    """

    def __init__(self, step: Step, groups: Sequence[dict[str, Any]]) -> None:
        self._step = step
        self._groups = groups
        self._losses: list[Tensor] = []

    def begin(self, chunk: Chunk, rates: Tensor) -> None:
        """Get ready for the steps of a chunk; ``rates`` are the learning rates (steps, models), on the CPU."""
        self._batches = zip(chunk, rates.tolist(), strict=True)
        self._losses = []

    def take(self) -> None:
        """Take the next step of the chunk."""
        (inputs, labels), rates = next(self._batches)
        for group, rate in zip(self._groups, rates, strict=True):
            group["lr"] = rate
        self._losses.append(self._step(inputs, labels))

    def losses(self) -> Tensor:
        """The losses of the chunk, (steps,) or (steps, models)."""
        return torch.stack(self._losses)


class RecordedSteps:
    """Steps replayed from one recording: a step is one launch of the host, which waits for nothing.

    The recorded step finds its batch, learning rates and the place of its losses by a position on the device, which it
    moves on by itself.

    Args:
        step: as in ``PlainSteps``; it must do the same at every step, on tensors that stay where they are.
        groups: the optimiser's parameter groups, whose learning rates become tensors.
        chunk: batches to warm up with; the shapes of all to come.
        rates: their learning rates, (steps, models), of the dtype in which the optimiser takes tensors of them.
        capacity: steps of the longest chunk to come.
        restore: undoes what the steps of the warm-up did to weights, buffers and optimiser.

    Attributes:
        reads: keeps alive what the recording may read beside it, such as what a model made when it first ran.

    Raises:
        CaptureError: the step could not be recorded; ``restore`` was called.
    """

    def __init__(
        self,
        step: Step,
        groups: Sequence[dict[str, Any]],
        chunk: Chunk,
        rates: Tensor,
        capacity: int,
        restore: Callable[[], None],
    ) -> None:
        device = chunk.inputs.device
        # a batch is picked along the first axis of contiguous memory, whatever the order of its axes
        inputs = chunk.inputs
        self._axes = sorted(range(1, inputs.ndim), key=inputs.stride, reverse=True)
        stored = inputs.permute(0, *self._axes)
        self._inputs = stored.new_empty(capacity, *stored.shape[1:])
        self._labels = chunk.labels.new_empty(capacity, *chunk.labels.shape[1:])
        self._rates = rates.new_empty(capacity, len(groups), device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._rate = self._rates[0].clone()
        self._losses: Tensor | None = None
        self._count = 0
        self.reads: object = None
        for group, rate in zip(groups, self._rate.unbind(), strict=True):
            group["lr"] = rate
        order = [self._axes.index(axis) for axis in range(1, inputs.ndim)]

        def recorded() -> None:
            batch = self._inputs.index_select(0, self._position)[0].permute(order)
            labels = self._labels.index_select(0, self._position)[0]
            self._rate.copy_(self._rates.index_select(0, self._position)[0])
            losses = step(batch, labels)
            if self._losses is None:
                self._losses = losses.new_empty(capacity, *losses.shape)
            self._losses.index_copy_(0, self._position, losses[None])
            self._position.add_(1)

        self.begin(chunk, rates)

        def warm_up() -> None:
            self._position.zero_()
            recorded()

        def record() -> None:
            _set_capturable(groups, True)
            recorded()

        try:
            self._replay = capture(record, device, warm_up=warm_up)
        finally:
            _set_capturable(groups, False)
            restore()

    def begin(self, chunk: Chunk, rates: Tensor) -> None:
        """See ``PlainSteps.begin``."""
        self._count = len(chunk)
        self._inputs[: self._count].copy_(chunk.inputs.permute(0, *self._axes))
        self._labels[: self._count].copy_(chunk.labels)
        self._rates[: self._count].copy_(to_device(rates, self._rates.device))
        self._position.zero_()

    def take(self) -> None:
        """Take the next step of the chunk."""
        self._replay()

    def losses(self) -> Tensor:
        """The losses of the chunk, (steps,) or (steps, models)."""
        if self._losses is None:
            raise CaptureError("no step was recorded")
        return self._losses[: self._count].clone()


def take_few(steps: PlainSteps | RecordedSteps, chunk: Chunk, rates: Tensor) -> Tensor:
    """Take ``CHECKED`` steps on the batches of a chunk, from its start again at its end; returns the last losses."""
    for index in range(CHECKED):
        if index % len(chunk) == 0:
            steps.begin(chunk, rates)
        steps.take()
    return steps.losses()[: (CHECKED - 1) % len(chunk) + 1]


def _set_capturable(groups: Sequence[dict[str, Any]], value: bool) -> None:
    """Tell optimisers that ask for it that they are being recorded; they warn where they are told so and are not."""
    for group in groups:
        if "capturable" in group:
            group["capturable"] = value
