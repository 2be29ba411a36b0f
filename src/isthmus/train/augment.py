"""Augmentation of image batches, on their device, from a generator of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from isthmus.errors import InputError


@dataclass(frozen=True)
class Augmentation:
    """Random changes of training inputs, drawn anew for every example at every step.

    They are applied in this order, each example with its own draw.

    Args:
        crop: pad images by this many pixels of zeros on each side, then cut the original size at a random place.
        flip: mirror images left to right, with probability 1/2.
        noise: standard deviation of Gaussian noise added to every input value, in units of the standardised inputs.

    Raises:
        InputError: an argument is out of range.
    """

    crop: int = 0
    flip: bool = False
    noise: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.crop, bool) or not isinstance(self.crop, int) or self.crop < 0:
            raise InputError(f"augmentation: crop is {self.crop!r}, expected a number of pixels, 0 or more.")
        if not isinstance(self.flip, bool):
            raise InputError(f"augmentation: flip is {self.flip!r}, expected true or false.")
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise InputError(f"augmentation: noise is {self.noise}, expected a standard deviation, 0 or more.")

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """Augment a batch.

        Args:
            inputs: (n, ...) floats; (n, channels, height, width) for crop and flip. Not modified.
            generator: where the draws come from, on the device of the inputs.

        Raises:
            InputError: crop or flip of inputs that are not images.
        """
        if (self.crop or self.flip) and inputs.ndim != 4:
            raise InputError(
                f"crop and flip need images of shape (n, channels, height, width); the inputs have shape "
                f"{tuple(inputs.shape)}. Leave both out of the augmentation."
            )
        if self.crop:
            inputs = _random_crop(inputs, self.crop, generator)
        if self.flip:
            mirrored = torch.rand(len(inputs), 1, 1, 1, generator=generator, device=inputs.device) < 0.5
            inputs = torch.where(mirrored, inputs.flip(-1), inputs)
        if self.noise:
            draws = torch.randn(inputs.shape, generator=generator, device=inputs.device, dtype=inputs.dtype)
            inputs = draws.mul_(self.noise).add_(inputs)
        return inputs


def _random_crop(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Windows of the size of ``images`` at random places of the padded ``images``."""
    n, channels, height, width = images.shape
    device = images.device
    corner = torch.randint(2 * padding + 1, (2, n, 1), generator=generator, device=device)
    rows = corner[0] + torch.arange(height, device=device)
    columns = corner[1] + torch.arange(width, device=device)
    return functional.pad(images, (padding,) * 4)[
        torch.arange(n, device=device)[:, None, None, None],
        torch.arange(channels, device=device)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
