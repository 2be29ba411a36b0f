"""Models that differ in their seeds alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def three(make: Callable[[], nn.Module], device: torch.device) -> list[nn.Module]:
    """Three models, made with the seeds 0, 1 and 2."""
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(make().to(device))
    return models
