"""The bandwidth on paper: what each op has to move at the least, and how long that takes.

``python -m benchmarks.paper`` prints the table of docs/gpu.md.
"""

from __future__ import annotations

from typing import NamedTuple

BANDWIDTH = 4.3e12  # bytes per second that a copy reaches on a card with 4.8e12 on its label
SIZES = {"bf16": 2, "f32": 4}
PARAMETERS = 1_000_000_000


class Traffic(NamedTuple):
    """What an op moves for each parameter of the result, in elements.

    Attributes:
        sweeps: how often it goes over its inputs.
        reads: of all sweeps together.
        writes: of all sweeps together.
    """

    sweeps: int
    reads: int
    writes: int

    def bytes(self, size: int) -> int:
        """For each parameter, of elements of so many bytes."""
        return (self.reads + self.writes) * size

    def floor(self, size: int, parameters: int = PARAMETERS, bandwidth: float = BANDWIDTH) -> float:
        """Seconds at the least."""
        return self.bytes(size) * parameters / bandwidth

    def then(self, other: Traffic) -> Traffic:
        """One op after the other."""
        return Traffic(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def lerp() -> Traffic:
    """Both ends are read."""
    return Traffic(1, 2, 1)


def weighted_sum(models: int) -> Traffic:
    """Every model is read."""
    return Traffic(1, models, 1)


def consensus(models: int, *, based: bool = True) -> Traffic:
    """Merging by known cuts: the base and every model are read."""
    return Traffic(1, models + based, 1)


def select(models: int, *, based: bool = True) -> Traffic:
    """Finding cuts: the sweep that counts; samples before it and the few segments after it are left out."""
    return Traffic(1, models + based, 0)


def ties(models: int, *, based: bool = True) -> Traffic:
    """Finding cuts, then merging by them."""
    return select(models, based=based).then(consensus(models, based=based))


def slerp() -> Traffic:
    """Dots, then the weighted sum that they decide."""
    return Traffic(1, 2, 0).then(weighted_sum(2))


def permute() -> Traffic:
    """Whole rows move; indices are left out."""
    return Traffic(1, 1, 1)


def lerp_permuted() -> Traffic:
    """Like ``lerp``."""
    return lerp()


def rows() -> dict[str, Traffic]:
    """What docs/gpu.md lists."""
    listed = {"lerp": lerp(), "weighted_sum of 4 models": weighted_sum(4)}
    for models in (4, 8):
        listed[f"consensus of {models} models and a base, cuts known"] = consensus(models)
    for models in (4, 8):
        listed[f"select of {models} models and a base"] = select(models)
    for models in (4, 8):
        listed[f"TIES of {models} models and a base: select, then consensus"] = ties(models)
    listed["TIES of 4 task vectors"] = ties(4, based=False)
    listed |= {"slerp": slerp(), "permute": permute(), "lerp with b permuted": lerp_permuted()}
    return listed


def table() -> str:
    """The table of docs/gpu.md."""
    lines = ["| op | sweeps | bytes per parameter, bf16 | f32 | floor in ms, bf16 | f32 |", "|---|---|---|---|---|---|"]
    for name, traffic in rows().items():
        sizes = SIZES.values()
        cells = [f"{traffic.bytes(size)}" for size in sizes] + [f"{1e3 * traffic.floor(size):.2f}" for size in sizes]
        lines.append(f"| {name} | {traffic.sweeps} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
