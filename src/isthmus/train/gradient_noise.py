"""The noise of minibatch gradients, measured."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from isthmus.errors import InputError

from .config import TrainConfig
from .data import Data
from .networks import Network
from .noise import NoiseScale
from .seeds import generator, global_seed


@dataclass(frozen=True)
class GradientNoise:
    """Noise of the gradient of the training loss at fixed weights θ.

    With K independent batches of B examples, gradients gₖ and their mean ḡ:

        tr Σ = B / (K − 1) · Σₖ ‖gₖ − ḡ‖²        (of one example: the trace for batches, times B)
        ‖g‖² = ‖ḡ‖² − tr Σ / (B K)               (of the true gradient, without bias; may come out negative)

    (McCandlish et al., arXiv 1812.06162, appendix A.) With BatchNorm in the model the examples of a batch depend on
    each other, and tr Σ holds for batches of B only.

    Attributes:
        trace: tr Σ of one example's gradient.
        gradient_norm_squared: ‖g‖².
        batches: number K of batches.
        batch_size: examples B of each.
    """

    trace: float
    gradient_norm_squared: float
    batches: int
    batch_size: int

    @property
    def gradient_noise_scale(self) -> float:
        """The batch size tr Σ / ‖g‖² at which noise and gradient are equally large; infinite where ‖g‖² ≤ 0."""
        return self.trace / self.gradient_norm_squared if self.gradient_norm_squared > 0 else math.inf

    def scaled_trace(self, noise_scale: NoiseScale) -> float:
        """S · tr Σ: the noise that an optimiser of noise scale S feels at these weights."""
        return noise_scale.value * self.trace


def gradient_noise(
    model: nn.Module, data: Data, config: TrainConfig, state: Mapping[str, Tensor], *, batches: int, seed: int = 0
) -> GradientNoise:
    """Measure the noise of minibatch gradients at the weights ``state``.

    The gradients are those of training: cross-entropy without weight decay, training mode, augmentation and dropout
    drawn anew for each batch. Examples are drawn with replacement.

    Args:
        model: the architecture; not modified.
        data: the training part is used.
        config: batch size, augmentation, precision and device are taken from here.
        state: the weights and buffers at which to measure: a trunk, or an end of a pair.
        batches: number of batches, at least 2. The relative standard error of tr Σ is about √(2 / batches) or less.
        seed: seed of examples, augmentation and dropout.

    Raises:
        InputError: fewer than two batches, or a state that does not fit the model.
    """
    if batches < 2:
        raise InputError(f"batches is {batches}, expected at least 2 to measure a variance.")
    data = data.to(config.device)
    model = copy.deepcopy(model).to(data.device).train()
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise InputError(f"the state does not fit the model {type(model).__name__}: {error}") from error
    network = Network([model], config.precision)
    order = generator(seed, "gradient noise/order")
    draws = generator(seed, "gradient noise/augmentation", device=data.device)
    gradients = network.parameters.gradients
    sums = [torch.zeros_like(gradient, dtype=torch.float64) for gradient in gradients]
    squares = torch.zeros((), dtype=torch.float64, device=data.device)
    autocast = torch.autocast(data.device.type, enabled=False)  # one around the call would change backward passes too
    with torch.enable_grad(), autocast, global_seed(seed, "gradient noise/dropout", data.device):
        for _ in range(batches):
            rows = torch.randint(len(data.train_x), (config.batch_size,), generator=order).to(data.device)
            network.backward(config.augmentation(data.train_x[rows], draws), data.train_y[rows])
            for total, gradient in zip(sums, gradients, strict=True):
                wide = gradient.double()
                total += wide
                squares += wide.square().sum()
    mean_squared = sum(float((total / batches).square().sum()) for total in sums)
    batch_trace = (float(squares) - batches * mean_squared) / (batches - 1)
    return GradientNoise(
        trace=config.batch_size * batch_trace,
        gradient_norm_squared=mean_squared - batch_trace / batches,
        batches=batches,
        batch_size=config.batch_size,
    )
