"""Merges of the same models at many scaling factors and settings, which share what does not depend on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus import methods, ops
from isthmus.errors import InputError
from isthmus.flat import FlatState

from .entries import find_entries
from .report import plain_option
from .rules import Rows, consensus, find_thresholds, numbers
from .sources import read_model

MethodLike = str | methods.Method | type[methods.Method]


@dataclass(frozen=True, eq=False)
class Setting:
    """One setting of a method that combines task vectors.

    Attributes:
        varied: the options in which settings differ, as JSON can hold them.
        method: the method with all of its options.
        preset: where the options come from that were not given.
    """

    varied: dict[str, Any]
    method: methods.Consensus
    preset: str


def make_settings(method: MethodLike, preset: str | None, options: Mapping[str, Any]) -> list[Setting]:
    """The settings of a method to be tried: all combinations of the options that are given as several.

    Args:
        method: a method that combines task vectors, or its name.
        preset: as for ``isthmus.merge``.
        options: of the method. A list, range or array is several values, except of ``weights``; a tuple is one value.

    Raises:
        InputError: the method has no scaling factor of task vectors, or one is given; an option is unknown, or has no
            value at all.
    """
    if "scaling_factor" in options:
        raise InputError("scaling_factor= is what the scan varies; pass scaling_factors=.")
    grid = {
        name: value.tolist() if isinstance(value, np.ndarray) else list(value)
        for name, value in options.items()
        if isinstance(value, list | range | np.ndarray) and name != "weights"
    }
    if empty := [name for name, values in grid.items() if not values]:
        raise InputError(f"{empty[0]}= is empty; give at least one value.")
    settings = []
    for values in itertools.product(*grid.values()):
        varied = dict(zip(grid, values, strict=True))
        made = methods.make(method, preset=preset, **(dict(options) | varied))
        if not isinstance(made, methods.Consensus):
            known = [name for name, info in methods.available().items() if info.base == "deltas"]
            raise InputError(
                f"{made.name} has no scaling factor of task vectors; the methods that have one are {', '.join(known)}."
            )
        if made.scaling_factor != 1:
            raise InputError(
                f"the method has scaling_factor={made.scaling_factor!r}, which the scan varies; pass scaling_factors=."
            )
        plain = {name: plain_option(value) for name, value in varied.items()}
        settings.append(Setting(plain, made, preset or methods.PAPER))
    return settings


class ScaledMerges:
    r"""The merges :math:`\theta_0 + \lambda m` for many :math:`\lambda`.

    The merged task vector m of a method that combines task vectors does not depend on :math:`\lambda`. So it is
    computed once for each setting of the method, when it is first asked for, and each :math:`\lambda` is one more pass.
    Settings that rank magnitudes in one way share the sweep that finds the thresholds of all their densities.

    Memory: one task vector per model, m, and the base, in float32 at least.
    """

    def __init__(
        self,
        base: FlatState,
        models: Iterable[FlatState],
        settings: Sequence[methods.Consensus],
        *,
        backend: str = "auto",
    ) -> None:
        r"""Compute the task vectors.

        Args:
            base: the base :math:`\theta_0`.
            models: the models, of the layout of the base; none of them is kept.
            settings: methods that combine task vectors, whose own scaling factors come on top of :math:`\lambda`.
            backend: as for ``isthmus.ops.lerp``.

        Raises:
            InputError: entries of base and models do not agree, an option does not fit them, or a task vector that must
                be ranked is not finite.
        """
        self._base = base
        self._settings = list(settings)
        self._backend = backend
        lead = read_model(base, "the base")
        self._task_vectors: list[list[Tensor]] = []
        for index, model in enumerate(models, start=1):
            entries = find_entries([read_model(model, f"model {index}")], lead, lead)
            task_vector = self._wide()
            with torch.no_grad():
                ops.weighted_sum([model.averaged, base.averaged], [1.0, -1.0], out=task_vector, backend=backend)
            self._task_vectors.append(task_vector)
        self._keys = entries.merged
        count = len(self._task_vectors)
        self._numbers = [numbers(setting, self._keys, count) for setting in self._settings]
        self._names = [f"the task vector of model {index}" for index in range(1, count + 1)]
        self._merged = self._wide()
        self._current: int | None = None  # the setting that _merged is of
        self._thresholds: dict[int, ops.Thresholds] = {}  # by setting
        with torch.no_grad(), ops.naming(self._names, None):
            for setting, method in enumerate(self._settings):
                self._try(setting)
                if isinstance(method, methods.Ranked) and setting not in self._thresholds:
                    alike = [k for k in range(len(self._settings)) if self._ranking(k) == self._ranking(setting)]
                    densities = [self._numbers[k][0]["density"] for k in alike]
                    found = find_thresholds(method, self._rows(setting), densities)
                    self._thresholds.update(zip(alike, found, strict=True))

    def write(self, setting: int, factor: float, out: FlatState) -> None:
        r"""Write :math:`\theta_0 + \lambda m`.

        Every operation rounds once, so that the floating-point and complex entries are those of ``isthmus.merge`` with
        this ``scaling_factor``, to the bit (with a negative factor up to the signs of zeros). For :math:`\lambda = 0`
        they are the base's. All other entries are the base's anyway.

        Args:
            setting: the index of a setting.
            factor: :math:`\lambda`.
            out: where to write, of the layout of the base.
        """
        if factor == 0:
            out.copy_(self._base)
            return
        if setting != self._current:
            self._merge(setting)
        for dtype, buffer in out.buffers.items():
            if not (dtype.is_floating_point or dtype.is_complex):
                buffer.copy_(self._base.buffers[dtype])
        ops.weighted_sum([self._base.averaged, self._merged], [1.0, factor], out=out.averaged, backend=self._backend)

    def _merge(self, setting: int) -> None:
        """Compute the merged task vector of a setting."""
        self._current = None
        with torch.no_grad(), ops.naming(self._names, None):
            consensus(self._settings[setting], self._rows(setting), self._thresholds.get(setting))
        for buffer in self._merged:  # a zero of either sign is added to the base, which -0 leaves as it is
            real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
            real.masked_fill_(real == 0, -0.0)
        self._current = setting

    def _try(self, setting: int) -> None:
        """Merge one element of each tensor, so that options out of range are found before any work."""
        method, rows = self._settings[setting], self._rows(setting)
        if isinstance(method, methods.Ranked):  # whose densities are looked at where magnitudes are ranked
            rows = replace(rows, per_model=rows.per_model | {"density": [1.0] * len(rows.models)})
        firsts = [[tensor.flatten()[:1] for tensor in column] for column in (rows.out, *rows.models)]
        consensus(method, replace(rows, out=firsts[0], models=firsts[1:]))

    def _ranking(self, setting: int) -> object:
        """What the ranking of magnitudes depends on besides the density."""
        method = self._settings[setting]
        if not isinstance(method, methods.Ranked):
            return None
        return method.scope, method.ties, method.min_kept, self._numbers[setting][0].get("gamma")

    def _rows(self, setting: int) -> Rows:
        per_model, per_row = self._numbers[setting]
        return Rows(
            self._keys,
            [self._views(task_vector) for task_vector in self._task_vectors],
            None,
            self._views(self._merged),
            per_model,
            per_row,
            self._base.layout.entries.keys(),
            self._backend,
        )

    def _views(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """The tensor of each merged key in buffers that are laid out as those of the base."""
        by_dtype = dict(zip((buffer.dtype for buffer in self._base.averaged), buffers, strict=True))
        entries = [self._base.layout.entries[key] for key in self._keys]
        return [by_dtype[e.dtype].narrow(0, e.offset, e.numel).view(e.shape) for e in entries]

    def _wide(self) -> list[Tensor]:
        """Zeros in the place of the base's buffers, in the dtypes that merges compute in."""
        return [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in self._base.averaged]
