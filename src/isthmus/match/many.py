r"""Several models in one common order.

*Frank-Wolfe* (Crisostomi, Fumero, Baieri, Bernard and Rodolà, "C²M³: cycle-consistent multi-model merging", NeurIPS
2024, arXiv 2405.17897): every model has its own map to a common order, so that maps between models are consistent
along any cycle; the maps are doubly stochastic matrices at first, and permutations at the end. *Mean* (Ainsworth,
Hayase and Srinivasa, arXiv 2209.04836, algorithm 3): each model in turn is matched to the mean of the others.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from isthmus import ops
from isthmus.errors import InputError
from isthmus.flat import FlatState
from isthmus.merging.sources import Source

from .heads import Family, best_orders, families
from .inputs import check_counts, chosen_groups, read_models, total
from .permutation import compose, identity_permutation, invert, random_permutation, units_that_stay
from .report import ALIGNED, Reached
from .similarity import Place, Tensors, groups_of, inner_products, ordered, places
from .spec import PermutationSpec, Segment
from .weight_matching import TOLERANCE, Ascent

STEP = 1e-4  # the least gain of a step of Frank-Wolfe, as a part of the sum of norms: it only nears its limit

Method = Literal["auto", "frank_wolfe", "mean"]
Soft = dict[str, Tensor]  # group -> a doubly stochastic matrix of its units; within another, of those of all copies
Tell = Callable[[int, int, float], None]  # the start, the sweep, and the objective after it


@dataclass(frozen=True, kw_only=True)
class ManyReport(Reached):
    """How several models were brought to one order; sweeps are Frank-Wolfe's and those by the mean together.

    Attributes:
        fixed: for each model, which part of its units stays.
    """

    fixed: tuple[float, ...]

    @property
    def already_aligned(self) -> bool:
        """Whether no unit of any model moves, although there is something to match."""
        return self.similarity > 0 and all(part == 1 for part in self.fixed)

    def __str__(self) -> str:
        """A summary."""
        lines = self._summary(f"{len(self.fixed)} models, {self.method}: mean similarity")
        lines.append("units that stay: " + ", ".join(f"{part:.1%}" for part in self.fixed))
        if self.already_aligned:
            lines.append(ALIGNED)
        return "\n".join(lines)


@dataclass(frozen=True)
class ManyMatching:
    """The order of each of several models in which they are most alike.

    Attributes:
        permutations: for each model group -> int64 permutation, for ``apply_permutation``; the first model's is the
            identity.
        report: how they were found and what they reach.
    """

    permutations: tuple[dict[str, Tensor], ...]
    report: ManyReport

    def __str__(self) -> str:
        """The report."""
        return str(self.report)


def match_many(
    spec: PermutationSpec,
    models: Iterable[Source],
    *,
    method: Method = "auto",
    restarts: int = 1,
    seed: int = 0,
    max_sweeps: int = 100,
    tolerance: float = TOLERANCE,
    only: str | Sequence[str] | None = None,
    backend: str = "auto",
    progress: Tell | None = None,
) -> ManyMatching:
    r"""The orders of several models' units in which they are most alike: consistent, whichever two are compared.

    It ascends on the sum over all pairs of models

    .. math:: f(P_1, \dots, P_m) = \sum_{p < q} \langle P_p \theta_p, P_q \theta_q \rangle .

    ``"frank_wolfe"`` lets doubly stochastic matrices take the place of permutations. For one group after the other,
    in random order, the best vertex for each model is an assignment on its gradient; all models step towards theirs
    together. Along the step f is a polynomial, of degree 2 where the group is on one axis of each tensor, so the best
    step is known in closed form. At the end the matrices are rounded to permutations by assignment, and improved by

    ``"mean"``: in turn each model is matched by weights to the mean of the others, until none gains. f never falls.

    Starts begin with the models as they are; then with each matched to the mean of those before it, outwards from
    what cannot move; then with random orders. The best is kept, the first of equals.

    Beside the models, Frank-Wolfe holds a float32 copy of each and its matrices, units² for each model and group; the
    mean takes what ``weight_matching`` does.

    Args:
        spec: which axes move together.
        models: at least two modules, state dicts, flat states or paths of safetensors files. They are not modified.
        method: "frank_wolfe", "mean", or "auto": Frank-Wolfe, but the mean where query heads share keys and values,
            which Frank-Wolfe cannot mix.
        restarts: how many starts, at least 1.
        seed: of the order of groups and models, and of random starts: start k draws from ``seed + k``.
        max_sweeps: Frank-Wolfe, and matching to the mean, end after so many sweeps each at the latest.
        tolerance: the least gain of a sweep of the matching to the mean, as a part of the sum of ‖θ_p‖‖θ_q‖ over all
            pairs.
        only: patterns (``fnmatch``) of the groups to match; others stay.
        backend: as for ``isthmus.ops``.
        progress: called after each sweep of the matching to the mean with the number of the start, that of the sweep,
            and the objective.

    Returns:
        A permutation for each model, that of the first being the identity, and a report.

    Raises:
        InputError: there are fewer than two models, one does not have the tensors of the spec, weights are NaN or
            infinite (the message names the tensor and its groups), an option is unknown, or no group fits ``only``.
    """
    began = time.perf_counter()
    if method not in ("auto", "frank_wolfe", "mean"):
        raise InputError(f'method is {method!r}, expected "auto", "frank_wolfe" or "mean".')
    check_counts(restarts=restarts, max_sweeps=max_sweeps)
    if isinstance(models, nn.Module | Mapping | FlatState | str | os.PathLike):
        raise InputError(f"models is a {type(models).__name__}, expected several models, in a list.")
    sources = list(models)
    names = [f"model {number}" for number in range(1, len(sources) + 1)]
    if len(names) < 2:
        raise InputError(f"match_many got {len(names)} models, expected at least two.")
    free = chosen_groups(spec, only)
    given = read_models(spec, dict(zip(names, sources, strict=True)), free, one_scale=True, backend=backend)
    if method == "auto":
        method = "mean" if any(family.apart for family in families(spec, free)) else "frank_wolfe"
    stay = [identity_permutation(spec) for _ in names]
    norms = given.before.diagonal().sqrt() * given.scales[0]
    scale = float(_pairs(torch.outer(norms, norms)))
    search = _Search(spec, given.tensors, free, scale, tolerance, max_sweeps, backend)
    best, reached, sweeps, objectives = stay, -math.inf, 0, []
    for start in range(restarts):
        generator = torch.Generator().manual_seed(seed + start)
        begin, spent = stay, 0
        if start == 1:
            begin = search.anchored()
        elif start > 1:
            begin = [
                one | {name: order for name, order in random_permutation(spec, generator).items() if name in free}
                for one in stay
            ]
        if method == "frank_wolfe":
            begin, spent = search.frank_wolfe(begin, generator)
        tell = (
            None if progress is None else lambda sweep, value, start=start: progress(start, sweep, value * given.unit)
        )
        found, taken = search.to_mean(begin, generator, tell)
        objectives.append(search.objective(found) * given.unit)
        if objectives[-1] > reached:
            best, reached, sweeps = found, objectives[-1], spent + taken
    back = invert(spec, best[0])
    best = [compose(spec, one, back) for one in best]
    after = given.gram(best)
    report = ManyReport(
        method=method,
        objective=float(_pairs(after)),
        objective_before=float(_pairs(given.before)),
        similarity=_mean_cosine(after),
        similarity_before=_mean_cosine(given.before),
        sweeps=sweeps,
        starts=tuple(objectives),
        fixed=tuple(_part_that_stays(spec, one) for one in best),
        seconds=time.perf_counter() - began,
    )
    return ManyMatching(tuple(best), report)


class _Search:
    """Ways to higher objectives for given models."""

    def __init__(
        self,
        spec: PermutationSpec,
        tensors: Tensors,
        free: frozenset[str],
        scale: float,
        tolerance: float,
        max_sweeps: int,
        backend: str,
    ) -> None:
        self._spec, self._tensors, self._free, self._backend = spec, tensors, free, backend
        self._families = families(spec, free)
        self._scale, self._tolerance, self._max_sweeps = scale, tolerance, max_sweeps
        self._models = len(next(iter(tensors.values()), ()))

    def objective(self, permutations: Sequence[Mapping[str, Tensor]]) -> float:
        """The sum over all pairs."""
        products = inner_products(self._spec, self._tensors, permutations, backend=self._backend)
        return float(_pairs(total(products, len(permutations))))

    def anchored(self) -> list[dict[str, Tensor]]:
        """Each model matched to the mean of those before it, outwards from what cannot move."""
        found = [identity_permutation(self._spec)]
        for model in range(1, self._models):
            ascent = self._ascent(model, dict(enumerate(found)))
            begin = ascent.anchored(identity_permutation(self._spec))
            found.append(ascent.run(begin, torch.Generator().manual_seed(model)).permutation)
        return found

    def to_mean(
        self, begin: Sequence[dict[str, Tensor]], generator: torch.Generator, tell: Callable[[int, float], None] | None
    ) -> tuple[list[dict[str, Tensor]], int]:
        """Match each model to the mean of the others until none gains; also the number of sweeps."""
        permutations, value = list(begin), self.objective(begin)
        for sweep in range(1, self._max_sweeps + 1):
            for model in torch.randperm(self._models, generator=generator).tolist():
                others = {other: order for other, order in enumerate(permutations) if other != model}
                permutations[model] = self._ascent(model, others).run(permutations[model], generator).permutation
            before, value = value, self.objective(permutations)
            if tell is not None:
                tell(sweep, value)
            if value - before <= self._tolerance * self._scale:
                break
        return permutations, sweep

    def _ascent(self, model: int, others: Mapping[int, dict[str, Tensor]]) -> Ascent:
        """Of one model towards the mean of others."""
        indices = {other: self._spec.indices(order) for other, order in others.items()}
        pairs = {}
        for key, each in self._tensors.items():
            moved = [ordered(each[other], index[key], self._backend).float() for other, index in indices.items()]
            pairs[key] = (torch.stack(moved).mean(0), each[model])
        return Ascent(self._spec, pairs, self._free, backend=self._backend)

    def frank_wolfe(
        self, begin: Sequence[dict[str, Tensor]], generator: torch.Generator
    ) -> tuple[list[dict[str, Tensor]], int]:
        """Ascend over doubly stochastic matrices and round them; also the number of sweeps."""
        spec, vertices = self._spec, [dict(one) for one in begin]
        if shared := [name for family in self._families for name in family.apart]:
            raise InputError(
                f"the groups {shared} are in one product with others within the same group (as grouped queries are "
                'with values), which Frank-Wolfe cannot mix; use method="mean".'
            )
        soft = [_matrices(spec, one) for one in begin]
        mixed = {
            key: [_mixed(spec, key, x, matrices) for x, matrices in zip(each, soft, strict=True)]
            for key, each in self._tensors.items()
        }
        sweeps = 0
        gained = True
        while gained and sweeps < self._max_sweeps:
            gained = False
            sweeps += 1
            for position in torch.randperm(len(self._families), generator=generator).tolist():
                family = self._families[position]
                for model, vertex in enumerate(vertices):
                    gradient = {name: self._gradient(name, model, soft[model], mixed) for name in family.members}
                    vertex |= best_orders([family], gradient, vertex, backend=self._backend)[0].orders
                ends = [_matrices(spec, {name: one[name] for name in family.members}) for one in vertices]
                gained |= self._step(family, soft, ends, mixed)
        for family in self._families:
            for matrices, vertex in zip(soft, vertices, strict=True):
                held = {name: matrices[name].cpu() for name in family.members}
                vertex |= best_orders([family], held, vertex, backend=self._backend)[0].orders
        return vertices, sweeps

    def _gradient(self, name: str, model: int, matrices: Soft, mixed: Mapping[str, Sequence[Tensor]]) -> Tensor:
        """How f changes with a group's matrix of one model, on the CPU."""
        units = len(matrices[name])
        gradient = torch.zeros(units, units)
        for place in places(self._spec, name, mixed):
            spec = self._spec
            others = torch.stack([x for other, x in enumerate(mixed[place.key]) if other != model]).sum(0)
            own = _mixed(spec, place.key, self._tensors[place.key][model], matrices, place)
            gradient = gradient.to(own.device)
            ops.add_product(gradient, place.arranged(others, spec), place.arranged(own, spec), backend=self._backend)
        return gradient.cpu()

    def _step(self, family: Family, soft: list[Soft], ends: list[Soft], mixed: dict[str, list[Tensor]]) -> bool:
        """Move the matrices of a family, of all models, to the best point on the way to the ends, if that gains."""
        spec, members = self._spec, set(family.members)
        on = {key: sum(bool(groups_of((axis,)) & members) for axis in spec.axes[key]) for key in mixed}
        keys = [key for key, axes in on.items() if axes]
        if not keys:
            return False

        def at(step: float) -> tuple[list[Soft], dict[str, list[Tensor]]]:
            between = [
                matrices | {name: matrices[name] + step * (end[name] - matrices[name]) for name in members}
                for matrices, end in zip(soft, ends, strict=True)
            ]
            return between, {
                key: [_mixed(spec, key, x, one) for x, one in zip(self._tensors[key], between, strict=True)]
                for key in keys
            }

        nodes = np.linspace(0, 1, 2 * max(on.values()) + 1)  # as many as determine the polynomial
        values = [self._value({key: mixed[key] for key in keys}), *(self._value(at(node)[1]) for node in nodes[1:])]
        step = _argmax(nodes, np.array(values))
        if step == 0:
            return False
        between, moved = at(step)
        if self._value(moved) - values[0] <= STEP * self._scale:
            return False
        soft[:] = between
        mixed |= moved
        return True

    def _value(self, mixed: Mapping[str, Sequence[Tensor]]) -> float:
        """The sum over all pairs for tensors that are mixed already."""
        return sum(float(_pairs(ops.gram(each, backend=self._backend)[0])) for each in mixed.values())


def _argmax(nodes: np.ndarray, values: np.ndarray) -> float:
    """Where in [0, 1] the polynomial through these points is highest; of equals the first."""
    polynomial = np.polynomial.Polynomial.fit(nodes, values - values[0], len(nodes) - 1, domain=[0, 1], window=[0, 1])
    roots = polynomial.deriv().roots()
    inner = [float(root.real) for root in np.atleast_1d(roots) if abs(root.imag) < 1e-9 and 0 < root.real < 1]
    return max([0.0, 1.0, *sorted(inner)], key=lambda step: float(polynomial(step)))


def _matrices(spec: PermutationSpec, permutation: Mapping[str, Tensor]) -> Soft:
    """The matrices P of permutations, float32, so that P x is x in the new order."""
    matrices = {}
    for name, order in permutation.items():
        within = spec.groups[name].within
        whole = order if within is None else (permutation[within][:, None] * order.shape[1] + order).flatten()
        matrices[name] = torch.nn.functional.one_hot(whole, len(whole)).float()
    return matrices


def _mixed(spec: PermutationSpec, key: str, tensor: Tensor, matrices: Soft, without: Place | None = None) -> Tensor:
    """The tensor with the matrices applied to all its axes, float32; but for the units of one place, perhaps."""
    tensor = tensor.float()
    for dimension, axis in enumerate(spec.axes[key]):
        if not groups_of((axis,)):
            continue
        parts, start = [], 0
        for segment in axis:
            length = math.prod(factor.size for factor in segment)
            part: Tensor = tensor.narrow(dimension, start, length).unflatten(
                dimension, [factor.size for factor in segment]
            )
            here = without if without is not None and (without.dimension, without.start) == (dimension, start) else None
            for name, digits in _digits(spec, segment):
                if here is None or here.units != digits:
                    matrix = matrices[name].to(part.device)
                    part = _applied(part, [dimension + digit for digit in digits], matrix)
            parts.append(part.flatten(dimension, dimension + len(segment) - 1))
            start += length
        tensor = torch.cat(parts, dimension)
    return tensor


def _digits(spec: PermutationSpec, segment: Segment) -> list[tuple[str, tuple[int, ...]]]:
    """The groups of a segment and the factors that count their units; parents are part of the groups within them."""
    names = [factor.group for factor in segment]
    found: list[tuple[str, tuple[int, ...]]] = []
    for digit, name in enumerate(names):
        if name is None or any(other and spec.groups[other].within == name for other in names):
            continue
        within = spec.groups[name].within
        found.append((name, (digit,) if within is None else (names.index(within), digit)))
    return found


def _applied(tensor: Tensor, dimensions: list[int], matrix: Tensor) -> Tensor:
    """A matrix applied to some dimensions taken as one."""
    last = list(range(-len(dimensions), 0))
    moved = tensor.movedim(dimensions, last)
    mixed = moved.flatten(-len(dimensions)) @ matrix.T
    return mixed.view(moved.shape).movedim(last, dimensions)


def _pairs(gram: Tensor) -> Tensor:
    """The sum over all pairs of models."""
    return gram.triu(1).sum()


def _mean_cosine(gram: Tensor) -> float:
    """Of all pairs; those of a zero model count as 0."""
    norms = gram.diagonal().sqrt()
    scale = torch.outer(norms, norms)
    pairs = len(gram) * (len(gram) - 1) / 2
    return float(_pairs(torch.where(scale > 0, gram / scale, 0.0))) / pairs


def _part_that_stays(spec: PermutationSpec, permutation: Mapping[str, Tensor]) -> float:
    units = sum(order.numel() for order in permutation.values())
    return sum(units_that_stay(spec, permutation).values()) / units if units else 1.0
