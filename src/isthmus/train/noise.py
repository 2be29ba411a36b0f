"""The effective noise scale of stochastic gradient descent."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from isthmus.errors import InputError

Rule = Literal["sgd", "adam"]


@dataclass(frozen=True)
class NoiseScale:
    """The effective noise scale S of an optimiser (Zhang et al., arXiv 2510.04686).

    ========  ============================================
    rule      S
    ========  ============================================
    ``sgd``   lr / (batch_size · (1 − momentum)^exponent)
    ``adam``  lr / √batch_size
    ========  ============================================

    Values of two rules cannot be compared, nor can values of two exponents.

    Args:
        lr: learning rate, positive.
        batch_size: examples per step, at least 1.
        momentum: momentum of SGD, in [0, 1).
        exponent: power q of 1 − momentum.
        rule: the formula. ``adam`` takes neither momentum nor exponent.

    Raises:
        InputError: an argument is out of range, or does not belong to the rule.
    """

    lr: float
    batch_size: int
    momentum: float = 0.0
    exponent: float = 1.0
    rule: Rule = "sgd"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise InputError(f"lr is {self.lr}, expected a positive number.")
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise InputError(f"batch_size is {self.batch_size!r}, expected a positive integer.")
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum is {self.momentum}, expected a number from 0 up to, not including, 1.")
        if not math.isfinite(self.exponent):
            raise InputError(f"exponent is {self.exponent}, expected a finite number.")
        if self.rule not in ("sgd", "adam"):
            raise InputError(f"rule is {self.rule!r}, expected 'sgd' or 'adam'.")
        if self.rule == "adam" and (self.momentum != 0 or self.exponent != 1):
            raise InputError("rule='adam' is lr / sqrt(batch_size): leave momentum at 0 and exponent at 1.")

    @property
    def value(self) -> float:
        """The noise scale S."""
        return self.lr / self._divisor

    def solve(self, value: float, *, vary: Literal["lr", "batch_size"]) -> NoiseScale:
        """The setting whose noise scale is ``value`` when only ``vary`` changes.

        Args:
            value: the noise scale wanted, positive.
            vary: what changes. A learning rate always exists; a batch size must come out as a positive integer, to a
                relative error of 1e-9.

        Raises:
            InputError: ``value`` is not positive, ``vary`` is unknown, or no whole batch size has this noise scale; the
                message names the nearest one and its noise scale.
        """
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"the noise scale is {value}, expected a positive number.")
        if vary == "lr":
            return replace(self, lr=value * self._divisor)
        if vary != "batch_size":
            raise InputError(f"vary is {vary!r}, expected 'lr' or 'batch_size'.")
        ratio = self.value / value
        exact = self.batch_size * (ratio if self.rule == "sgd" else ratio**2)
        nearest = replace(self, batch_size=max(1, round(exact)))
        if not math.isclose(nearest.batch_size, exact, rel_tol=1e-9):
            raise InputError(
                f"a noise scale of {value:g} needs a batch of {exact:g} examples, expected a positive integer. The "
                f"nearest is batch_size={nearest.batch_size} with a noise scale of {nearest.value:g}; "
                "or vary the learning rate."
            )
        return nearest

    @property
    def _divisor(self) -> float:
        """What the learning rate is divided by."""
        if self.rule == "adam":
            return math.sqrt(self.batch_size)
        return float(self.batch_size * (1 - self.momentum) ** self.exponent)
