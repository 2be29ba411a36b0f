"""What a matching found, and how good it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class GroupReport:
    """One group of a matching.

    Attributes:
        units: how many units it has, in all copies.
        fixed: how many of them stay where they were.
        by: what it was matched by, "weights", "activations" or "loss"; None if it was left as it was.
        gap: how much more similarity another order of this group (and of those within it) could reach at most, all
            other groups as they are, by the assignment's duals; None if the method solves no such assignment, or the
            group was left as it was.
    """

    units: int
    fixed: int
    by: str | None = None
    gap: float | None = None


@dataclass(frozen=True, kw_only=True)
class Reached:
    """What a matching reached, and what it took.

    Attributes:
        method: what it was found by.
        objective: Σ ⟨x, y⟩ over all pairs of models, in the orders found, over the weights that the spec's groups move;
            without those that are not finite, which only groups move that were not matched.
        objective_before: the same with the models as they were given.
        similarity: the mean cosine of all pairs.
        similarity_before: the same with the models as they were given.
        sweeps: how often all groups, or all models, were visited in the start that is kept.
        starts: the objective that each start reached, in order.
        seconds: how long it took.
    """

    method: str
    objective: float
    objective_before: float
    similarity: float
    similarity_before: float
    sweeps: int
    starts: tuple[float, ...]
    seconds: float

    def _summary(self, title: str) -> list[str]:
        """Two lines on all this, the first of which begins with ``title``."""
        starts = f", best of {len(self.starts)} starts" if len(self.starts) > 1 else ""
        return [
            f"{title} {self.similarity_before:.4f} -> {self.similarity:.4f}, "
            f"objective {self.objective_before:.6g} -> {self.objective:.6g}",
            f"{self.sweeps} sweeps{starts}, {self.seconds:.2f} s",
        ]


ALIGNED = "the models were aligned already: no unit moves"


@dataclass(frozen=True, kw_only=True)
class MatchReport(Reached):
    """How a matching of two models came about: a, whose order stays, and b.

    Attributes:
        groups: group -> how it came out.
    """

    groups: Mapping[str, GroupReport]

    @property
    def already_aligned(self) -> bool:
        """Whether no unit moves, although there is something to match: the models share a base, or are equal."""
        return self.similarity > 0 and all(group.fixed == group.units for group in self.groups.values())

    def __str__(self) -> str:
        """A summary and a table of the groups."""
        lines = self._summary(f"{self.method}: similarity")
        if self.already_aligned:
            lines.append(ALIGNED)
        width = max([len("group"), *map(len, self.groups)])
        lines.append(f"{'group':{width}}  {'units':>7}  {'stay':>7}  {'gap':>9}  by")
        for name, group in self.groups.items():
            gap = "" if group.gap is None else f"{group.gap:.2g}"
            lines.append(f"{name:{width}}  {group.units:7}  {group.fixed:7}  {gap:>9}  {group.by or ''}".rstrip())
        return "\n".join(lines)


@dataclass(frozen=True)
class Matching:
    """Which units of b are which of a's.

    Attributes:
        permutation: group -> int64 permutation of b, for ``apply_permutation``.
        report: how it was found and what it reaches.
    """

    permutation: dict[str, Tensor]
    report: MatchReport

    def __str__(self) -> str:
        """The report."""
        return str(self.report)
