"""Matching by weights: coordinate ascent on the inner product of two models.

Ainsworth, Hayase and Srinivasa, "Git Re-Basin: merging models modulo permutation symmetries", ICLR 2023, arXiv
2209.04836, algorithm 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus.merging.sources import Source
from isthmus.ops import Certificate

from .heads import Best, Family, best_orders, families, reached
from .inputs import check_counts, chosen_groups, read_models, total
from .permutation import check_permutation, random_permutation
from .report import Matching
from .similarity import Similarity, Tensors, groups_of, inner_products
from .spec import Permutation, PermutationSpec

SWEEPS = 100
TOLERANCE = 1e-7

Tell = Callable[[int, int, float], None]  # the start, the sweep, and the objective after it


def weight_matching(
    spec: PermutationSpec,
    a: Source,
    b: Source,
    *,
    restarts: int = 1,
    seed: int = 0,
    max_sweeps: int = SWEEPS,
    tolerance: float = TOLERANCE,
    initial: Permutation | Matching | None = None,
    only: str | Sequence[str] | None = None,
    backend: str = "auto",
    progress: Tell | None = None,
) -> Matching:
    r"""The order of b's units in which its weights are most like a's.

    It ascends, group by group, on

    .. math:: f(P) = \sum_t \langle a_t, P b_t \rangle,

    t over the tensors that groups move, running statistics left out. For one group, with all others as they are, the
    best order is an assignment on a matrix of similarities, which is solved exactly; sweeps visit all groups in random
    order until none gains. The result is a local optimum, and depends on where the ascent starts: from ``initial``
    or the order as it is; from the units matched outwards from what cannot move, inputs and outputs; then from
    random orders. The best is kept, the first of equals; none follows one that reaches ‖a‖‖b‖, as no objective exceeds
    that.

    A group on several axes of one tensor has an objective that is not linear in its order: it is linearised, and the
    new order taken only if the objective itself grows.

    Similarities are float32, of models on scales where these neither vanish nor overflow; objectives are float64. The
    result is the same for any number of threads. Beside the models and the similarities (units² for each group) both
    models are held in float32, once for each axis that a group moves.

    Args:
        spec: which axes move together.
        a: the model whose order stays: a module, a state dict, a ``FlatState`` or the path of a safetensors file.
        b: the model whose units are to be permuted.
        restarts: how many starts at most, at least 1.
        seed: of the order of groups in a sweep, and of random starts: start k draws from ``seed + k``.
        max_sweeps: an ascent ends after so many sweeps at the latest.
        tolerance: the least gain of a new order, as a part of ‖a‖‖b‖ over the places of its group.
        initial: where the first start begins: group -> permutation of b, or the ``Matching`` that has it; it is not
            modified. Groups that are left out begin as they are.
        only: patterns (``fnmatch``) of the groups to match; others keep their ``initial`` order.
        backend: as for ``isthmus.ops``.
        progress: called after each sweep with the number of the start, that of the sweep, and the objective.

    Returns:
        The permutation, for ``apply_permutation(spec, matching.permutation, b)``, and its report.

    Raises:
        InputError: a model does not have the tensors of the spec, weights that are matched are NaN or infinite (the
            message names the tensor and its groups), ``initial`` does not fit the spec, or no group fits ``only``.
    """
    began = time.perf_counter()
    check_counts(restarts=restarts, max_sweeps=max_sweeps)
    free = chosen_groups(spec, only)
    first = check_permutation(spec, {} if initial is None else initial)
    models = read_models(spec, {"a": a, "b": b}, free, backend=backend)
    ascent = Ascent(
        spec, models.tensors, free, models.unit, tolerance=tolerance, max_sweeps=max_sweeps, backend=backend
    )
    bound = math.prod(models.before.diagonal().sqrt().tolist())
    best, best_objective, sweeps, objectives = first, -math.inf, 0, []
    gaps: Mapping[str, float] = {}
    for start in range(restarts):
        generator = torch.Generator().manual_seed(seed + start)
        if start == 0:
            begin = first
        elif start == 1:
            begin = ascent.anchored(first)
        else:
            begin = first | {name: order for name, order in random_permutation(spec, generator).items() if name in free}
        found = ascent.run(begin, generator, start, progress)
        objective = models.objective(found.permutation)
        objectives.append(objective)
        if objective > best_objective:
            best, best_objective, sweeps, gaps = found.permutation, objective, found.sweeps, found.gaps
        if bound - objective <= tolerance * bound:
            break
    report = models.report(
        "weight matching",
        best,
        best_objective,
        sweeps=sweeps,
        starts=objectives,
        gaps=gaps,
        by=dict.fromkeys(free, "weights"),
        began=began,
    )
    return Matching(best, report)


class Found(NamedTuple):
    """Where an ascent ended: the permutation, after how many sweeps, and what each family could gain at most."""

    permutation: dict[str, Tensor]
    sweeps: int
    gaps: dict[str, float]


class Ascent:
    """Coordinate ascent between two models, whose similarities are kept from one start to the next.

    Args:
        spec: which axes move together.
        pairs: the tensors of both models.
        free: the groups that may change their order.
        unit: what objectives and gaps are multiplied by where they are told.
        tolerance: the least gain of a new order.
        max_sweeps: how many sweeps there are at most.
        backend: as for ``isthmus.ops``.
    """

    def __init__(
        self,
        spec: PermutationSpec,
        pairs: Tensors,
        free: frozenset[str],
        unit: float = 1.0,
        *,
        tolerance: float = TOLERANCE,
        max_sweeps: int = SWEEPS,
        backend: str = "auto",
    ) -> None:
        self._spec, self._pairs, self._unit, self._backend = spec, pairs, unit, backend
        self._tolerance, self._max_sweeps = tolerance, max_sweeps
        self._free, self._families = free, families(spec, free)
        self._similarities: dict[tuple[str, bool], Similarity] = {}
        self._keys = {
            family: {key for key in pairs if groups_of(spec.axes[key]) & set(family.members)}
            for family in self._families
        }
        self._curved = {family: _curved(spec, pairs, family) for family in self._families}

    def run(
        self, begin: Permutation, generator: torch.Generator, start: int = 0, progress: Tell | None = None
    ) -> Found:
        """Ascend until no family gains."""
        permutation = dict(begin)
        done: dict[Family, list[int]] = {}  # the versions of its similarities that it was assigned on last
        certificates: dict[Family, Certificate | None] = {}
        gaps: dict[str, float] = {}
        sweeps, gained = 0, True
        while gained and sweeps < self._max_sweeps:
            sweeps += 1
            gained = False
            for batch in self._apart(torch.randperm(len(self._families), generator=generator).tolist()):
                matrices: dict[str, Tensor] = {}
                changed = []
                for family in batch:
                    members = self._of(family)
                    for similarity in members:
                        similarity.update(permutation)
                    versions = [similarity.version for similarity in members]
                    if done.get(family) != versions:
                        changed.append(family)
                        matrices |= {similarity.name: similarity.matrix.cpu() for similarity in members}
                    done[family] = versions
                bests = best_orders(changed, matrices, permutation, certificates, backend=self._backend)
                for family, best in zip(changed, bests, strict=True):
                    certificates[family] = best.certificate
                    if self._gains(family, best, matrices, permutation):
                        permutation |= best.orders
                        gained = True
                    gaps[family.name] = (best.bound - reached(family, matrices, permutation)) * self._unit
            if progress is not None:
                products = inner_products(self._spec, self._pairs, [{}, permutation], backend=self._backend)
                progress(start, sweeps, float(total(products)[0, 1]) * self._unit)
        return Found(permutation, sweeps, gaps)

    def _apart(self, order: Sequence[int]) -> Iterator[list[Family]]:
        """The families in this order, those together that follow each other and have no tensor in common."""
        batch: list[Family] = []
        used: set[str] = set()
        for family in (self._families[position] for position in order):
            if used & self._keys[family]:
                yield batch
                batch, used = [], set()
            batch.append(family)
            used |= self._keys[family]
        if batch:
            yield batch

    def anchored(self, begin: Permutation) -> dict[str, Tensor]:
        """Match families one after the other, by the places alone whose other groups stay or were matched before."""
        permutation = dict(begin)
        waiting = families(self._spec, self._free, at_once=True)
        known = set(self._spec.groups) - {name for family in waiting for name in family.free}
        while waiting:
            family = max(waiting, key=lambda family: self._known_share(family, known))
            matrices = {one.name: one.among(permutation, known).cpu() for one in self._of(family)}
            permutation |= best_orders([family], matrices, permutation, backend=self._backend)[0].orders
            known |= set(family.members)
            waiting.remove(family)
        return permutation

    def _of(self, family: Family) -> list[Similarity]:
        """The similarities of a family's groups."""
        found = []
        for name in family.members:
            shared = name not in family.apart
            if (name, shared) not in self._similarities:
                self._similarities[name, shared] = Similarity(
                    self._spec, name, self._pairs, shared=shared, backend=self._backend
                )
            found.append(self._similarities[name, shared])
        return found

    def _known_share(self, family: Family, known: set[str]) -> float:
        """How much of the similarity of a family's units does not depend on orders that are still to be found."""
        whole = sum(similarity.weight for similarity in self._of(family))
        return sum(similarity.known_weight(known) for similarity in self._of(family)) / whole if whole else 0.0

    def _gains(self, family: Family, best: Best, matrices: Mapping[str, Tensor], permutation: Permutation) -> bool:
        """Whether the new orders raise the objective by more than the tolerance."""
        least = self._tolerance * sum(similarity.weight for similarity in self._of(family))
        if all(torch.equal(best.orders[name], permutation[name]) for name in family.members):
            return False
        if not (pairs := self._curved[family]):
            return best.value - reached(family, matrices, permutation) > least
        before, after = (
            float(total(inner_products(self._spec, pairs, [{}, orders], backend=self._backend))[0, 1])
            for orders in (permutation, {**permutation, **best.orders})
        )
        return after - before > least


def _curved(spec: PermutationSpec, pairs: Tensors, family: Family) -> dict[str, tuple[Tensor, ...]]:
    """All tensors of a family if its groups are on several axes of one of them, so that S is but a gradient."""
    members = set(family.members)
    axes = {key: [bool(groups_of((axis,)) & members) for axis in spec.axes[key]] for key in pairs}
    curved = any(sum(on) > 1 for on in axes.values())
    return {key: pairs[key] for key, on in axes.items() if any(on)} if curved else {}
