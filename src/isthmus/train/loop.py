"""The inner training loop.

A step of a small model costs more in launching operations than in arithmetic. So the parameters and their gradients are
views of one flat buffer each, which makes the optimiser a single operation; batches are drawn many at a time; and
nothing waits for the device except one look at the losses of each chunk of batches.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from isthmus.errors import InputError
from isthmus.flat import FlatState

from .batches import Batches
from .config import TrainConfig
from .data import Data
from .schedules import Schedule
from .seeds import global_seed

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
    """Weights, buffers and optimiser state at one moment; trainers of one model can go on from it."""

    state: dict[str, Tensor]
    optimizer: dict[str, Any] = field(repr=False)


class FlatParameters:
    """The trainable parameters of a module, and their gradients, as views of flat buffers; one of each per dtype.

    Attributes:
        values: the flat parameters, for the optimiser; their ``grad`` are the flat gradients.
        gradients: the flat gradients.
    """

    def __init__(self, module: nn.Module) -> None:
        named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        if not named:
            raise InputError(f"the model {type(module).__name__} has no parameters that require gradients.")
        flat = FlatState.from_state_dict(named)
        gradients = FlatState.zeros(flat.layout, device=flat.device)
        keys = dict(zip(named, flat, strict=True))
        for name, parameter in named.items():
            parameter.data = flat[keys[name]]
            parameter.grad = gradients[keys[name]]
        self.values = [nn.Parameter(buffer) for buffer in flat.buffers.values()]
        self.gradients = list(gradients.buffers.values())
        for value, gradient in zip(self.values, self.gradients, strict=True):
            value.grad = gradient

    def zero_grad(self) -> None:
        """Set all gradients to zero, in place."""
        for gradient in self.gradients:
            gradient.zero_()


class MovingAverage:
    """Exponential moving average of a module's parameters and floating-point buffers, from its present state on.

    BatchNorm's running statistics are averaged like weights; integer buffers are the module's own.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._state = {key: value.detach() for key, value in module.state_dict().items()}  # the module's own memory
        self._sources = {key: value for key, value in self._state.items() if value.is_floating_point()}
        self._averages = {key: value.clone() for key, value in self._sources.items()}
        self._decay = decay

    def update(self) -> None:
        """Set average = decay · average + (1 − decay) · value."""
        torch._foreach_lerp_(list(self._averages.values()), list(self._sources.values()), 1 - self._decay)

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged state of the module."""
        return self._state | self._averages


class Trainer:
    """Trains one model on one data set, phase after phase.

    Args:
        model: trained in place; its parameters become views of flat buffers.
        data: on the model's device.
        config: optimiser, batch size, augmentation and seed are taken from here.
    """

    def __init__(self, model: nn.Module, data: Data, config: TrainConfig) -> None:
        self.model = model
        self._data = data
        self._config = config
        self._parameters = FlatParameters(model)
        self._optimizer = _optimizer(self._parameters.values, config)
        self._weights = [weight.detach() for weight in model.parameters() if weight.ndim >= 2]

    def checkpoint(self) -> Checkpoint:
        """A copy of the present weights, buffers and optimiser state."""
        state = {key: value.detach().clone() for key, value in self.model.state_dict().items()}
        return Checkpoint(state, copy.deepcopy(self._optimizer.state_dict()))

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to ``checkpoint``, exactly."""
        self.model.load_state_dict(checkpoint.state)
        self._optimizer.load_state_dict(copy.deepcopy(checkpoint.optimizer))

    def run(
        self,
        purpose: str,
        schedule: Schedule,
        steps: range,
        *,
        average: MovingAverage | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Phase:
        """Train over ``steps``, or until a loss is not finite.

        Args:
            purpose: name of the phase's streams of data order, augmentation and dropout.
            schedule: learning rate at each step.
            steps: the steps of the schedule, consecutive.
            average: a moving average to update after each step.
            progress: called after each chunk of batches with the number of steps in it.
        """
        config = self._config
        batches = Batches(
            self._data.train_x,
            self._data.train_y,
            config.batch_size,
            config.augmentation,
            seed=config.seed,
            purpose=purpose,
        )
        start = time.perf_counter()
        losses: list[Tensor] = []
        norms: list[Tensor] = []
        finite = True
        self.model.train()
        with torch.enable_grad(), global_seed(config.seed, f"dropout/{purpose}", self._data.device):
            for chunk in batches.chunks(len(steps)):
                for inputs, labels in chunk:
                    losses.append(self._step(inputs, labels, schedule(steps[len(losses)])))
                    if average is not None:
                        average.update()
                    if len(losses) % config.record_every == 0 or len(losses) == len(steps):
                        norms.append(self._weight_norm_squared())
                finite = bool(torch.stack(losses[-len(chunk) :]).isfinite().all())
                if progress is not None:
                    progress(len(chunk))
                if not finite:
                    break
        finite = finite and all(bool(value.isfinite().all()) for value in self._parameters.values)
        return Phase(
            steps=len(losses),
            finite=finite,
            seconds=time.perf_counter() - start,
            history=self._history(losses, norms, schedule, steps),
        )

    def _step(self, inputs: Tensor, labels: Tensor, lr: float) -> Tensor:
        """One step of the optimiser; returns the loss before it."""
        self._parameters.zero_grad()
        loss = functional.cross_entropy(self.model(inputs), labels)
        torch.autograd.backward(loss)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        return loss.detach()

    def _weight_norm_squared(self) -> Tensor:
        """‖θ‖² over the parameters of two or more dimensions."""
        return sum((weight.square().sum() for weight in self._weights), start=torch.zeros((), device=self._data.device))

    def _history(
        self, losses: list[Tensor], norms: list[Tensor], schedule: Schedule, steps: range
    ) -> dict[str, list[float]]:
        every = self._config.record_every
        done = [min(every * (record + 1), len(losses)) for record in range(len(norms))]
        if not done:
            return {column: [] for column in COLUMNS}
        windows = torch.split(torch.stack(losses[: done[-1]]).double(), every)
        rates = torch.tensor([schedule(steps[count - 1]) for count in done], dtype=torch.float64)
        squares = torch.stack(norms).double().cpu()
        columns = (
            [float(steps[count - 1] + 1) for count in done],
            torch.stack([window.mean() for window in windows]).tolist(),
            rates.tolist(),
            squares.tolist(),
            (rates / squares).tolist(),
        )
        return dict(zip(COLUMNS, columns, strict=True))


def _optimizer(parameters: list[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    if config.optimizer == "adamw":
        return torch.optim.AdamW(
            parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
    return torch.optim.SGD(
        parameters,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
        fused=True,
    )
