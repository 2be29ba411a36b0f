"""Learning rate schedules, as factors of the peak learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable

from .config import TrainConfig

Schedule = Callable[[int], float]


def schedule(config: TrainConfig, steps: int) -> Schedule:
    """The learning rate at each step 0 .. ``steps`` − 1 of training.

    With w warm-up steps and d = round(decay_fraction · steps) steps of decay, the rate is lr times

        min(1, (t + 1) / w)                        all schedules, t < w
        1                                          constant
        ½ (1 + cos(π (t − w) / (steps − w)))       cosine
        min(1, (steps − t) / d)                    wsd
    """
    warmup, decay = config.warmup_steps, max(1, round(config.decay_fraction * steps))

    def after_warmup(step: int) -> float:
        if config.schedule == "cosine":
            return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
        if config.schedule == "wsd":
            return min(1.0, (steps - step) / decay)
        return 1.0

    return lambda step: config.lr * ((step + 1) / warmup if step < warmup else after_warmup(step))


def annealing(config: TrainConfig) -> Schedule:
    """The rates of annealing: at step t of n, lr · (1 − t / n), which would be zero at step n."""
    return lambda step: config.lr * (1 - step / config.anneal_steps)
