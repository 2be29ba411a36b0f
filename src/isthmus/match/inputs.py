"""What a matching begins with: models as the tensors that groups move, and the groups that are free to move."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import InputError
from isthmus.flat import with_tied
from isthmus.merging.sources import Model, Source, read_model

from .permutation import check_spec, units_that_stay
from .report import GroupReport, MatchReport
from .similarity import Tensors, groups_of, inner_products, moving_tensors
from .spec import Permutation, PermutationSpec

COMFORT = (2.0**-24, 2.0**40)  # norms of models with which float32 products neither vanish nor overflow


@dataclass(frozen=True)
class Given:
    """Models that are to be matched.

    Attributes:
        spec: which axes move together.
        tensors: key -> the tensor of each model, times the scale of the model.
        scales: for each model a power of two: 1, unless its norm is far from where float32 products are safe.
        before: the Gram matrix of the models as they came, float64 of shape (models, models).
        backend: as for ``isthmus.ops``.
    """

    spec: PermutationSpec
    tensors: Tensors
    scales: tuple[float, ...]
    before: Tensor
    backend: str

    @property
    def unit(self) -> float:
        """What inner products of the first two models' scaled tensors are multiplied by to be those of the models."""
        return 1 / (self.scales[0] * self.scales[1])

    def gram(self, permutations: Sequence[Permutation]) -> Tensor:
        """The Gram matrix of the models, each in its order."""
        products = inner_products(self.spec, self.tensors, permutations, backend=self.backend)
        scales = torch.tensor(self.scales, dtype=torch.float64)
        return total(products, len(scales)) / torch.outer(scales, scales)

    def objective(self, permutation: Permutation) -> float:
        """⟨a, b⟩ of two models, b in this order."""
        return float(self.gram([{}, permutation])[0, 1])

    def scaled(self, tensors: Tensors) -> dict[str, tuple[Tensor, ...]]:
        """Those of other tensors of the models that count here, on the same scales."""
        return {key: _scaled(each, self.scales) for key, each in tensors.items() if key in self.tensors}

    def report(
        self,
        method: str,
        permutation: Permutation,
        objective: float,
        *,
        sweeps: int,
        starts: Sequence[float],
        gaps: Mapping[str, float],
        by: Mapping[str, str],
        began: float,
    ) -> MatchReport:
        """The report of a matching of two models by what it reached."""
        before = float(self.before[0, 1])
        norms = math.sqrt(float(self.before[0, 0])) * math.sqrt(float(self.before[1, 1]))
        stay = units_that_stay(self.spec, permutation)
        return MatchReport(
            method=method,
            objective=objective,
            objective_before=before,
            similarity=objective / norms if norms else 0.0,
            similarity_before=before / norms if norms else 0.0,
            sweeps=sweeps,
            starts=tuple(starts),
            groups={
                name: GroupReport(order.numel(), stay[name], by.get(name), gaps.get(name))
                for name, order in permutation.items()
            },
            seconds=time.perf_counter() - began,
        )


def read_models(
    spec: PermutationSpec,
    models: Mapping[str, Source],
    free: frozenset[str],
    *,
    one_scale: bool = False,
    backend: str = "auto",
) -> Given:
    """Models, by what messages call them, for a matching of the groups that are free.

    Tensors that none of these moves may hold NaN or infinity; they do not count then.

    Args:
        spec: which axes move together.
        models: name -> model.
        free: the groups that are matched.
        one_scale: whether all models are scaled alike.
        backend: as for ``isthmus.ops``.

    Raises:
        InputError: a model does not have the tensors of the spec, or one that free groups move is not finite, or so
            large or small that its norm is none of float64.
    """
    tensors = moving_tensors(spec, *(read_for(spec, source, name).tensors for name, source in models.items()))
    products = inner_products(spec, tensors, [{} for _ in models], backend=backend)
    for key, gram in list(products.items()):
        for number, (name, square) in enumerate(zip(models, gram.diagonal().tolist(), strict=True)):
            if math.isfinite(square):
                continue
            if groups_of(spec.axes[key]) & free:
                raise InputError(_why_not(spec, key, name, tensors[key][number]))
            products.pop(key, None)
    tensors = {key: tensors[key] for key in products}
    before = total(products, len(models))
    norms = before.diagonal().sqrt().tolist()
    for number, (name, norm) in enumerate(zip(models, norms, strict=True)):
        if norm == 0 and any(bool(each[number].any()) for each in tensors.values()):
            raise InputError(f"the weights of {name} are so small that their squares vanish in float64; scale them up.")
    scales = [_scale(norm) for norm in ([max(norms)] * len(norms) if one_scale else norms)]
    return Given(spec, {key: _scaled(each, scales) for key, each in tensors.items()}, tuple(scales), before, backend)


def read_for(spec: PermutationSpec, source: Source, name: str) -> Model:
    """The tensors of a model, which are those of the spec; of a state dict other entries, too.

    Raises:
        InputError: a tensor is missing, and none that it is tied to is there; one is unexpected; or has another shape.
    """
    model = read_model(source, name, others=isinstance(source, Mapping))
    model = model._replace(tensors=with_tied(model.tensors, spec.ties))
    spec.check(model.tensors, name=model.name)
    return model


def chosen_groups(spec: PermutationSpec, only: str | Sequence[str] | None) -> frozenset[str]:
    """The groups whose names fit one of the patterns; all where it is None.

    Raises:
        InputError: the spec is none, there is no pattern, or one fits no group.
    """
    check_spec(spec)
    if only is None:
        return frozenset(spec.groups)
    patterns = [only] if isinstance(only, str) else list(only)
    if not patterns:
        raise InputError("only= holds no pattern, so that no group would be matched; leave it out to match all.")
    chosen: set[str] = set()
    for pattern in patterns:
        fitting = {name for name in spec.groups if fnmatchcase(name, pattern)}
        if not fitting:
            raise InputError(f"only= has the pattern {pattern!r}, which fits none of the groups {sorted(spec.groups)}.")
        chosen |= fitting
    return frozenset(chosen)


def check_counts(**counts: object) -> None:
    """Check that options are integers of at least 1.

    Raises:
        InputError: one is not; the message names it.
    """
    for name, count in counts.items():
        if not isinstance(count, int | np.integer) or count < 1:
            raise InputError(f"{name} is {count!r}, expected an integer of at least 1.")


def total(products: Mapping[str, Tensor], models: int = 2) -> Tensor:
    """The sum of Gram matrices of so many models."""
    return torch.stack([torch.zeros(models, models, dtype=torch.float64), *products.values()]).sum(0)


def _scale(norm: float) -> float:
    """The power of two that takes a norm to between 1/2 and 1, or 1 where none is needed."""
    least, most = COMFORT
    return 1.0 if norm == 0 or least <= norm <= most else math.ldexp(1.0, -math.frexp(norm)[1])


def _scaled(each: Sequence[Tensor], scales: Sequence[float]) -> tuple[Tensor, ...]:
    return tuple(x if scale == 1 else x * scale for x, scale in zip(each, scales, strict=True))


def _why_not(spec: PermutationSpec, key: str, model: str, tensor: Tensor) -> str:
    """What is wrong with a tensor that has no finite norm."""
    groups = ", ".join(repr(name) for name in sorted(groups_of(spec.axes[key])))
    if bool(tensor.isfinite().all()):
        return f"{key!r} of {model} is so large that its norm overflows in float64; scale the weights down."
    return (
        f"{key!r} of {model} holds NaN or infinity, so that the units of {groups} have no similarity; repair the "
        "weights, or match other groups alone with only=."
    )
