# ruff: noqa: RUF009 (option() is dataclasses.field() with metadata)
"""The methods that combine task vectors, forms of ``isthmus.ops.consensus``, and their presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from .method import MERGEKIT, PAPER, PEFT, PerKey, Weighted, option

TIES_PAPER = "Yadav et al. 2023, arXiv 2306.01708"
DARE_PAPER = "Yu et al. 2023, arXiv 2311.03099"
DELLA_PAPER = "Deep et al. 2024, arXiv 2406.11617"
BREADCRUMBS_PAPER = "Davari & Belilovsky 2023, arXiv 2312.06795"


@dataclass(frozen=True, kw_only=True)
class Consensus(Weighted):
    """Combines task vectors: θ₀ + λ · (Σ_{i ∈ A} wᵢ rᵢ τᵢ) / D; see ``isthmus.ops.consensus``."""

    base = "deltas"
    sparsify: ClassVar[str] = "none"
    scaling_factor: PerKey = option(1.0, meaning="λ", per="key")

    def consensus_options(self) -> dict[str, Any]:
        """The keywords of ``isthmus.ops.consensus`` that hold for all keys."""
        aside = {"normalize", *(item.name for item in fields(self) if item.metadata["per"])}
        own = {name: value for name, value in self.options().items() if name not in aside}
        return {"sparsify": self.sparsify, "majority_sign_method": "none", "merge_func": "sum"} | own


@dataclass(frozen=True, kw_only=True)
class Summed(Consensus):
    """Sums without a vote."""

    normalize: bool = option(False, meaning="divide the weights by their sum", source=MERGEKIT)


@dataclass(frozen=True, kw_only=True)
class Voted(Consensus):
    """Elects a sign for each element and merges the models that agree with it."""

    majority_sign_method: str = option(
        "total",
        meaning="'total' (sign Στ), 'frequency' (sign Σ sign τ), 'weighted_total' (sign Σwτ) or 'none'",
        source=TIES_PAPER,
    )
    zero_sign: str = option(
        "majority",
        meaning="the sign elected by a vote of zero: that of the sum of all elected signs ('majority'), 'positive', "
        "'negative', or 'zero' (no model agrees)",
        source=TIES_PAPER,
    )
    merge_func: str = option("mean", meaning="'mean', 'sum' or 'max' of the agreeing wᵢrᵢτᵢ", source=TIES_PAPER)
    divisor: str = option("count", meaning="what a mean divides by: the 'count' of agreeing models or their 'weight'")
    normalize: bool | None = option(
        None,
        meaning="another tool's word for two options: True is merge_func='mean' with divisor='weight', False is "
        "merge_func='sum'; it has the last word",
        source=MERGEKIT,
    )

    def consensus_options(self) -> dict[str, Any]:
        """The keywords of ``isthmus.ops.consensus`` that hold for all keys."""
        options = super().consensus_options()
        if self.normalize is not None:
            options |= {"merge_func": "mean", "divisor": "weight"} if self.normalize else {"merge_func": "sum"}
        return options


@dataclass(frozen=True, kw_only=True)
class Ranked(Consensus):
    """Keeps the fraction p of each task vector's elements, by magnitude."""

    density: PerKey = option(meaning="p, the fraction of elements kept", per="model")
    scope: str = option("global", meaning="what is ranked together: all of a model, each 'tensor', each 'row'")
    ties: str = option(
        "inclusive", meaning="of equals at the threshold keep all, or the first in order until the count is 'exact'"
    )
    min_kept: int = option(0, meaning="keep at least so many where the density is above 0", source=MERGEKIT)
    rescale: str = option(
        "none", meaning="factor of what is kept: 'none', or the L1 norm before over that after ('l1')", source=MERGEKIT
    )


@dataclass(frozen=True, kw_only=True)
class Drawn(Consensus):
    """Keeps elements at random, with one mask per (seed, model, name)."""

    density: PerKey = option(meaning="p, the probability that an element is kept", per="model")
    rescale: str = option(
        "inverse_density",
        meaning="factor of what is kept: 1/p ('inverse_density'), the L1 norm before over that after ('l1') or 'none'",
    )
    seed: int = option(0, meaning="of the masks; the same masks on every backend, thread count and shard")


_MERGEKIT_RANKED = {"density": 1.0, "scope": "tensor", "ties": "exact", "min_kept": 1}
_MERGEKIT_DRAWN = {"density": 1.0, "rescale": "l1"}
_MERGEKIT_VOTE = {"majority_sign_method": "weighted_total", "zero_sign": "positive"}
_PEFT_RANKED = {"scope": "tensor", "ties": "exact"}
_PEFT_VOTE = {"zero_sign": "positive"}


@dataclass(frozen=True, kw_only=True)
class TaskArithmetic(Summed):
    """θ₀ + λ Σ wᵢ τᵢ."""

    name = "task_arithmetic"
    source = "Ilharco et al. 2022, arXiv 2212.04089"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {PAPER: {}, "mergekit": {}, "peft": {}}


@dataclass(frozen=True, kw_only=True)
class Ties(Ranked, Voted):
    """Trim by magnitude, elect signs, merge what agrees."""

    name = "ties"
    source = TIES_PAPER
    sparsify = "magnitude"
    density: PerKey = option(0.2, meaning="p, the fraction of elements kept", source=TIES_PAPER, per="model")
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        PAPER: {},
        "mergekit": {**_MERGEKIT_RANKED, **_MERGEKIT_VOTE, "normalize": True},
        "peft": {**_PEFT_RANKED, **_PEFT_VOTE},
    }


@dataclass(frozen=True, kw_only=True)
class MagnitudePrune(Ranked, Summed):
    """θ₀ + λ Σ wᵢ τ̂ᵢ with τ̂ the largest elements of τ by magnitude."""

    name = "magnitude_prune"
    source = PEFT
    sparsify = "magnitude"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {PAPER: {}, "peft": _PEFT_RANKED}


@dataclass(frozen=True, kw_only=True)
class Dare(Drawn, Summed):
    """θ₀ + λ Σ wᵢ rᵢ τ̂ᵢ with elements dropped at random and the rest scaled up."""

    name = "dare"
    source = DARE_PAPER
    sparsify = "random"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {PAPER: {}, "mergekit": _MERGEKIT_DRAWN, "peft": {}}


@dataclass(frozen=True, kw_only=True)
class DareTies(Drawn, Voted):
    """Elements dropped at random as in DARE, signs elected as in TIES."""

    name = "dare_ties"
    source = DARE_PAPER
    sparsify = "random"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        PAPER: {},
        "mergekit": {**_MERGEKIT_DRAWN, **_MERGEKIT_VOTE, "normalize": False},
        "peft": _PEFT_VOTE,
    }


@dataclass(frozen=True, kw_only=True)
class Della(Drawn, Voted):
    """Random drops whose probability falls with the magnitude's rank in its row, then a vote as in TIES."""

    name = "della"
    source = DELLA_PAPER
    sparsify = "magnitude_random"
    epsilon: PerKey = option(
        0.15, meaning="p runs from density − ε to density + ε with the rank", source=MERGEKIT, per="model"
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        PAPER: {},
        "mergekit": {**_MERGEKIT_DRAWN, **_MERGEKIT_VOTE, "normalize": True},
    }


@dataclass(frozen=True, kw_only=True)
class DellaLinear(Drawn, Summed):
    """DELLA's drops without a vote."""

    name = "della_linear"
    source = DELLA_PAPER
    sparsify = "magnitude_random"
    epsilon: PerKey = option(
        0.15, meaning="p runs from density − ε to density + ε with the rank", source=MERGEKIT, per="model"
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {PAPER: {}, "mergekit": _MERGEKIT_DRAWN}


_MERGEKIT_OUTLIERS = {"density": 1.0, "scope": "tensor"}


@dataclass(frozen=True, kw_only=True)
class Breadcrumbs(Ranked, Summed):
    """Drop the fraction γ of largest magnitude, keep the fraction p that comes next, add up."""

    name = "breadcrumbs"
    source = BREADCRUMBS_PAPER
    sparsify = "outliers"
    scope: str = option("row", meaning="what is ranked together: each 'row', each 'tensor', all of a model ('global')")
    ties: str = option("exact", meaning="of equals at a threshold keep 'exact'ly the count, or all ('inclusive')")
    gamma: PerKey = option(0.01, meaning="γ, the fraction of largest elements dropped", source=MERGEKIT, per="model")
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {PAPER: {}, "mergekit": _MERGEKIT_OUTLIERS}


@dataclass(frozen=True, kw_only=True)
class BreadcrumbsTies(Ranked, Voted):
    """Breadcrumbs' selection, then a vote as in TIES."""

    name = "breadcrumbs_ties"
    source = BREADCRUMBS_PAPER
    sparsify = "outliers"
    scope: str = option("row", meaning="what is ranked together: each 'row', each 'tensor', all of a model ('global')")
    ties: str = option("exact", meaning="of equals at a threshold keep 'exact'ly the count, or all ('inclusive')")
    gamma: PerKey = option(0.01, meaning="γ, the fraction of largest elements dropped", source=MERGEKIT, per="model")
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        PAPER: {},
        "mergekit": {**_MERGEKIT_OUTLIERS, **_MERGEKIT_VOTE, "normalize": False},
    }
