r"""Means, variances and covariances of units over batches of samples, without keeping the samples.

A batch of :math:`m` samples with mean :math:`\bar x` joins :math:`n` samples with mean :math:`\mu` by the update of
Chan, Golub and LeVeque (1979),

.. math::

    \mu' = \mu + \tfrac{m}{n + m} \, \delta, \qquad
    C' = C + \sum_k (x_k - \bar x)(y_k - \bar y)^\top + \tfrac{n m}{n + m} \, \delta_x \delta_y^\top, \qquad
    \delta = \bar x - \mu,

whose terms are deviations from means. :math:`E[x y] - E[x] E[y]` would cancel where means are large. All is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Moments:
    """Means and variances of units.

    Attributes:
        count: the number of samples so far.
        mean: float64 of shape (units,); zero before the first sample.
    """

    def __init__(self, units: int, *, device: torch.device | str | None = None) -> None:
        self.count = 0
        self.mean = torch.zeros(units, dtype=torch.float64, device=device)
        self._squares = torch.zeros_like(self.mean)  # the sum of squared deviations from the mean

    def update(self, batch: Tensor) -> None:
        """Add samples of shape (samples, units), real and of any dtype."""
        self._add(batch.detach().double())

    def _add(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Add samples; returns their deviations from their own mean, and that mean's from the mean before."""
        if len(batch) == 0:
            return batch, torch.zeros_like(self.mean)
        count = self.count + len(batch)
        own = batch.mean(0)
        deviations, shift = batch - own, own - self.mean
        self.mean = self.mean + shift * (len(batch) / count)
        self._squares = self._squares + deviations.square().sum(0) + shift.square() * (self.count * len(batch) / count)
        self.count = count
        return deviations, shift

    @property
    def variance(self) -> Tensor:
        """The mean squared deviation of each unit, float64 of shape (units,); NaN before the first sample."""
        return self._squares / self.count if self.count else torch.full_like(self._squares, torch.nan)

    @property
    def deviation(self) -> Tensor:
        """The standard deviation of each unit, the root of the variance."""
        return self.variance.sqrt()


class CrossMoments:
    """Means and variances of two sets of units seen in the same samples, and the covariances between them.

    Attributes:
        first: moments of the first set.
        second: moments of the second.
    """

    def __init__(self, units: int, other_units: int, *, device: torch.device | str | None = None) -> None:
        self.first = Moments(units, device=device)
        self.second = Moments(other_units, device=device)
        self._products = torch.zeros(units, other_units, dtype=torch.float64, device=device)

    def update(self, first: Tensor, second: Tensor) -> None:
        """Add samples of shapes (samples, units) and (samples, other units): rows that belong together."""
        before = self.first.count
        deviations, shift = self.first._add(first.detach().double())
        other_deviations, other_shift = self.second._add(second.detach().double())
        if len(first):
            weight = before * len(first) / self.first.count
            self._products.addmm_(deviations.T, other_deviations).add_(torch.outer(shift, other_shift), alpha=weight)

    @property
    def covariance(self) -> Tensor:
        """The mean product of deviations, float64 of shape (units, other units); NaN before the first sample."""
        return self._products / self.first.count if self.first.count else torch.full_like(self._products, torch.nan)

    @property
    def correlation(self) -> Tensor:
        """The covariance over the product of the deviations; zero for units that do not vary, "dead" ones."""
        scale = torch.outer(self.first.deviation, self.second.deviation)
        return torch.where(scale > 0, self.covariance / scale, 0.0)
