"""The inner training loop.

A step of a small model costs more in launching operations than in arithmetic. So the parameters and their gradients are
views of one flat buffer each, which makes the optimiser a single operation; batches are drawn many at a time; and
nothing waits for the device except one look at the losses of each chunk of batches, while the next chunk is on its way.
On a CUDA device the step is one recording that is replayed, and several models of one shape take their steps in one.
Moving averages, and norms at the steps that are recorded in the history, are launched beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn

from isthmus._capture import Arrival, CaptureError, check_device

from .batches import Batches, Chunk, SideBySide
from .config import TrainConfig
from .data import Data
from .host_state import HostState
from .networks import Network, rounding
from .parameters import MovingAverage
from .schedules import Schedule
from .seeds import global_seed
from .steps import PlainSteps, RecordedSteps, take_few

COLUMNS = ("step", "loss", "lr", "weight_norm_squared", "effective_lr")


@dataclass(frozen=True)
class Phase:
    """What happened in one phase of training: trunk, branch or annealing.

    Attributes:
        steps: steps done; fewer than asked for if the loss or a weight stopped being finite.
        finite: whether all losses and the final weights are finite.
        seconds: wall-clock time.
        history: column -> values, one for each ``record_every`` steps of the phase, and one for the rest at its end:
            ``step`` (steps done by the schedule), ``loss`` (mean over these steps' batches), ``lr`` (of the last of
            these steps), ``weight_norm_squared`` (‖θ‖² after them, over the parameters of two or more dimensions:
            matrices and convolution kernels, which a normalisation after them makes scale-invariant) and
            ``effective_lr`` (lr / ‖θ‖²).
    """

    steps: int
    finite: bool
    seconds: float
    history: dict[str, list[float]]


@dataclass(frozen=True)
class Checkpoint:
    """Weights, buffers and optimiser state of all models of a trainer at one moment."""

    tensors: list[Tensor] = field(repr=False)
    optimizer: list[dict[str, Tensor]] = field(repr=False)


class Trainer:
    """Trains one model, or several of one architecture at once, on one data set, phase after phase.

    Args:
        models: trained in place; their parameters become views of flat buffers.
        data: on the models' device.
        configs: one for each model. Optimiser, batch size, augmentation, seed and precision are taken from here; those
            of several models differ in nothing but what ``pair.SHARED`` leaves open.
        capture: record the step and replay it, where the device has graphs and the step can be recorded.

    Attributes:
        models: the models.
        channels_last: whether images and convolution kernels are laid out with the channels last, as they are on CUDA
            devices.
        eager_reason: why steps are launched operation by operation; empty where they are replayed, None before the
            first step.

    Raises:
        InputError: one model has nothing to train.
        StackError: several have nothing to train, or differ in their parameters or buffers.
    """

    def __init__(
        self, models: Sequence[nn.Module], data: Data, configs: Sequence[TrainConfig], *, capture: bool = True
    ) -> None:
        self.models = list(models)
        self.channels_last = len(models) == 1 and channels_last(models[0], data)
        self.eager_reason: str | None = None
        self._data = data
        self._configs = list(configs)
        self._capture = capture
        self._network = Network(models, configs[0].precision, channels_last=self.channels_last)
        self._optimizer = _optimizer(self._network.parameters.values, configs)
        self._recorded: RecordedSteps | None = None
        # fused optimisers on CUDA take tensors of learning rates in float32 alone
        self._rate_dtype = torch.float32 if data.device.type == "cuda" else torch.float64

    def checkpoint(self) -> Checkpoint:
        """A copy of the present weights, buffers and optimiser state."""
        optimizer = [
            {name: tensor.clone() for name, tensor in self._optimizer.state[value].items()} for value in self._values()
        ]
        return Checkpoint([tensor.detach().clone() for tensor in self._tensors()], optimizer)

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to ``checkpoint``, exactly; everything stays where it is in memory."""
        for tensor, saved in zip(self._tensors(), checkpoint.tensors, strict=True):
            tensor.copy_(saved)
        for value, states in zip(self._values(), checkpoint.optimizer, strict=True):
            for name, tensor in self._optimizer.state[value].items():
                if name in states:
                    tensor.copy_(states[name])
                else:
                    tensor.zero_()  # an optimiser that has not begun takes its first step as with zeros

    def run(
        self,
        purpose: str,
        schedules: Sequence[Schedule],
        steps: range,
        *,
        averages: Sequence[MovingAverage] = (),
        progress: Callable[[int], None] | None = None,
    ) -> list[Phase]:
        """Train over ``steps``, or until no model's losses are finite; then a chunk of batches more may be spent.

        Args:
            purpose: name of the phase's streams of data order, augmentation and dropout.
            schedules: of each model, the learning rate at each step.
            steps: the steps of the schedules, consecutive.
            averages: moving averages to update after each step.
            progress: called after each chunk of batches with the number of steps in it.

        Returns:
            What happened to each model. One with a loss that is not finite stops counting after the chunk of it.

        Raises:
            StackError: several models cannot be trained at once; found before the first step.
        """
        batches = self._batches(purpose)
        start = time.perf_counter()
        record = _Record(len(self.models), self._configs[0].record_every, len(steps))
        self._network.train()
        device = self._data.device
        with (
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),  # one around the call would change backward passes too
            global_seed(self._configs[0].seed, f"dropout/{purpose}", device),
        ):
            for chunk in batches.chunks(len(steps)):
                ahead = steps[record.taken : record.taken + len(chunk)]
                rates = torch.tensor([[rate(step) for rate in schedules] for step in ahead], dtype=self._rate_dtype)
                if self.eager_reason is None:
                    self._prepare(chunk, rates, batches.capacity)
                # not kept: it would keep this trainer, and what lies on the device, until cycles are collected
                taking = self._recorded or PlainSteps(self._step, self._optimizer.param_groups)
                taking.begin(chunk, rates)
                for _ in ahead:
                    taking.take()
                    for average in averages:
                        average.update()
                    if record.step():
                        record.norms.append(self._network.weight_norms_squared())
                record.chunk(taking.losses().view(len(chunk), -1))
                if progress is not None:
                    progress(len(chunk))
                if not any(record.finite):
                    break
        record.close()
        weights = [all(bool(value.isfinite().all()) for value in own) for own in self._network.parameters.values]
        seconds = time.perf_counter() - start
        return [
            Phase(
                steps=record.counts[model],
                finite=record.finite[model] and weights[model],
                seconds=seconds,
                history=record.history(model, schedules[model], steps),
            )
            for model in range(len(self.models))
        ]

    def _batches(self, purpose: str) -> Batches | SideBySide:
        streams = [
            Batches(
                self._data.train_x,
                self._data.train_y,
                config.batch_size,
                config.augmentation,
                seed=config.seed,
                purpose=purpose,
                channels_last=self.channels_last,
            )
            for config in self._configs
        ]
        return streams[0] if len(streams) == 1 else SideBySide(streams)

    def _step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """One step of the optimiser; returns the losses before it."""
        losses = self._network.backward(inputs, labels)
        self._optimizer.step()
        return losses

    def _prepare(self, chunk: Chunk, rates: Tensor, capacity: int) -> None:
        """Check several models on the first batch; record the step if that is asked for and possible, or say why not.

        Raises:
            StackError: the models cannot be trained at once.
        """
        if len(self.models) > 1:
            self._network.check(chunk.inputs[0], chunk.labels[0])
        try:
            if not self._capture:
                raise CaptureError("not asked for")
            check_device(self._data.device)
            if self._network.counts_batches:
                raise CaptureError("BatchNorm with momentum=None averages by another factor at every step")
            self._recorded = self._record(chunk, rates, capacity)
            self.eager_reason = ""
        except CaptureError as error:
            self.eager_reason = str(error)

    def _record(self, chunk: Chunk, rates: Tensor, capacity: int) -> RecordedSteps:
        """Record the step, and leave models and optimiser as they were.

        Raises:
            CaptureError: the step cannot be recorded, or replays would not be the steps launched one by one.
        """
        host, before = HostState(self.models), self.checkpoint()
        change = ""

        def undo() -> None:
            nonlocal change
            change = host.change()
            if change:
                host.restore()
            self.restore(before)

        try:
            recorded = RecordedSteps(self._step, self._optimizer.param_groups, chunk, rates, capacity, undo)
            if change:
                raise CaptureError(f"in a step {change}, which a recording does not do again")
            recorded.reads = HostState(self.models)
            self._compare(recorded, chunk, rates, before)
        except Exception:
            host.restore()
            self.restore(before)
            raise
        return recorded

    def _compare(self, recorded: RecordedSteps, chunk: Chunk, rates: Tensor, before: Checkpoint) -> None:
        """Compare weights, buffers and losses after a few replays with those after the steps launched one by one.

        With weights θ₀ before, θ after the steps and θ' after the replays, b the bound on the rounding of a pass, and ε
        the spacing of numbers at 1, ‖θ' − θ‖ ≤ b ‖θ − θ₀‖ + 4 ε ‖θ‖; of losses and buffers, ‖x' − x‖ ≤ b (1 + ‖x‖).

        Raises:
            CaptureError: they differ by more.
        """
        rates = rates.amax(0).expand_as(rates).contiguous()  # weights show little of steps at the start of a warm-up
        devices = [self._data.device] if self._data.device.type == "cuda" else []
        start = [value.detach().clone() for value in self._values()]
        buffers = [buffer for model in self.models for buffer in model.buffers() if buffer.is_floating_point()]
        groups = self._optimizer.param_groups
        recorded_rates = [group["lr"] for group in groups]
        results = []
        for steps in (recorded, PlainSteps(self._step, groups)):
            with torch.random.fork_rng(devices):  # both draw the same numbers
                losses = take_few(steps, chunk, rates)
            results.append([tensor.detach().clone() for tensor in (*self._values(), losses, *buffers)])
            self.restore(before)
        for group, rate in zip(groups, recorded_rates, strict=True):
            group["lr"] = rate
        for index, (found, expected) in enumerate(zip(*results, strict=True)):
            precision = self._configs[0].precision
            bound, size = rounding(expected.dtype, precision), _norm(expected)
            if index < len(start):
                spacing = torch.finfo(expected.dtype).eps
                limit = bound * _norm(expected - start[index]) + 4 * spacing * size
            else:
                limit = bound * (1 + size)
            same = torch.equal(found.isfinite(), expected.isfinite())
            if not (same and _norm(found - expected) <= limit):
                raise CaptureError("replayed steps gave other results than steps launched one by one")

    def _tensors(self) -> Iterator[Tensor]:
        for model in self.models:
            yield from chain(model.parameters(), model.buffers())

    def _values(self) -> list[nn.Parameter]:
        """What the optimiser steps."""
        return list(chain.from_iterable(self._network.parameters.values))


class _Record:
    """Losses and norms of a phase, and which models' losses are finite; read from the device a chunk late.

    Attributes:
        taken: steps taken.
        finite: of each model, whether its losses are finite as far as they were looked at.
        counts: of each model, the steps up to the first chunk with a loss that is not.
        norms: ‖θ‖² of the models, (models,), at the steps that are recorded.
    """

    def __init__(self, models: int, every: int, total: int) -> None:
        self.taken = 0
        self.finite = [True] * models
        self.counts = [0] * models
        self.norms: list[Tensor] = []
        self._every, self._total = every, total
        self._losses: list[Tensor] = []
        self._unread: tuple[int, Arrival] | None = None

    def step(self) -> bool:
        """Count a step; whether the norms after it are recorded."""
        self.taken += 1
        return self.taken % self._every == 0 or self.taken == self._total

    def chunk(self, losses: Tensor) -> None:
        """Take the losses (steps, models) of a chunk, and look at those of the chunk before."""
        self._losses.append(losses)
        arriving = (self.taken, Arrival(losses.isfinite().all(0)))
        self._look()
        self._unread = arriving

    def close(self) -> None:
        """Look at the last chunk."""
        self._look()
        empty = torch.empty(0, len(self.finite))
        self._all_losses = torch.cat(self._losses).double().cpu() if self._losses else empty
        self._all_norms = torch.stack(self.norms).double().cpu() if self.norms else empty

    def history(self, model: int, schedule: Schedule, steps: range) -> dict[str, list[float]]:
        """See ``Phase.history``."""
        count = self.counts[model]
        done = list(range(self._every, count + 1, self._every))
        if count == self._total and count % self._every:
            done.append(count)
        if not done:
            return {column: [] for column in COLUMNS}
        windows = torch.split(self._all_losses[: done[-1], model], self._every)
        rates = torch.tensor([schedule(steps[number - 1]) for number in done], dtype=torch.float64)
        squares = self._all_norms[: len(done), model]
        columns = (
            [float(steps[number - 1] + 1) for number in done],
            torch.stack([window.mean() for window in windows]).tolist(),
            rates.tolist(),
            squares.tolist(),
            (rates / squares).tolist(),
        )
        return dict(zip(COLUMNS, columns, strict=True))

    def _look(self) -> None:
        if self._unread is None:
            return
        taken, arrival = self._unread
        self._unread = None
        for model, finite in enumerate(arrival.get().tolist()):
            if self.finite[model]:
                self.counts[model] = taken
                self.finite[model] = finite


def _norm(tensor: Tensor) -> float:
    """‖x‖ over the numbers of a tensor that are finite."""
    return float(tensor.double().nan_to_num(0, 0, 0).norm())


def channels_last(model: nn.Module, data: Data) -> bool:
    """Whether images are laid out with the channels last: for convolutions on CUDA devices."""
    images = data.device.type == "cuda" and data.train_x.ndim == 4
    return images and any(isinstance(layer, nn.Conv2d) for layer in model.modules())


def _optimizer(values: Sequence[list[nn.Parameter]], configs: Sequence[TrainConfig]) -> torch.optim.Optimizer:
    """The optimiser of all models, with a group for each."""
    adamw = configs[0].optimizer == "adamw"
    names = ("lr", "betas", "weight_decay") if adamw else ("lr", "momentum", "nesterov", "weight_decay")
    groups = [
        {"params": own} | {name: getattr(config, name) for name in names}
        for own, config in zip(values, configs, strict=True)
    ]
    return torch.optim.AdamW(groups, fused=True) if adamw else torch.optim.SGD(groups, fused=True)
