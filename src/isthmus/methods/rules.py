# ruff: noqa: RUF009 (option() is dataclasses.field() with metadata)
"""The methods of their own kind: averages, means on the sphere, and what goes by variance, energy or data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .method import FUSIONBENCH, MERGEKIT, PAPER, Method, PerKey, Weighted, option


@dataclass(frozen=True, kw_only=True)
class Linear(Weighted):
    """The weighted average: with ŵ = w / Σw, θ₁ + Σ_{i≥2} ŵᵢ (θᵢ − θ₁); raw, Σ wᵢ θᵢ."""

    name = "linear"
    source = "Wortsman et al. 2022, arXiv 2203.05482"
    normalize: bool = option(True, meaning="divide the weights by their sum", source=MERGEKIT)


@dataclass(frozen=True, kw_only=True)
class Slerp(Method):
    """Spherical interpolation from the first model (t = 0) to the second (t = 1), of the vectors as they are.

    Nearly parallel pairs are interpolated linearly.
    """

    name = "slerp"
    source = "Shoemake 1985, doi 10.1145/325165.325242"
    count = (2, 2)
    t: PerKey = option(0.5, meaning="the way from the first model to the second", per="key")
    scope: str = option("tensor", meaning="one angle for each 'tensor', or one for the model ('global')")


@dataclass(frozen=True, kw_only=True)
class Nuslerp(Weighted):
    """Spherical interpolation at t = w₂ / (w₁ + w₂), of task vectors where a base is given."""

    name = "nuslerp"
    source = MERGEKIT
    base = "optional"
    count = (2, 2)
    scope: str = option("tensor", meaning="one angle for each 'tensor' or each 'row' (last axis)", source=MERGEKIT)


@dataclass(frozen=True, kw_only=True)
class Multislerp(Weighted):
    """Barycentre on the sphere by one exponential map at the weighted mean direction, times Σ wᵢ‖θᵢ‖."""

    name = "multislerp"
    source = MERGEKIT
    base = "optional"
    normalize: bool = option(True, meaning="divide the weights by their sum", source=MERGEKIT)
    epsilon: float = option(1e-8, meaning="norms below this count as zero", source=MERGEKIT)


@dataclass(frozen=True, kw_only=True)
class Karcher(Weighted):
    """The Karcher (Riemannian) mean of directions, by fixed-point iteration, times the weighted mean norm."""

    name = "karcher"
    source = "Karcher 1977, doi 10.1002/cpa.3160300502"
    iterations: int = option(10, meaning="at most so many iterations", source=MERGEKIT)
    tolerance: float = option(1e-5, meaning="stop when the tangent mean is shorter (radians)", source=MERGEKIT)


@dataclass(frozen=True, kw_only=True)
class ModelStock(Method):
    """t · mean + (1 − t) · θ₀ with t = N c / (1 + (N − 1) c), c the mean cosine between task vectors."""

    name = "model_stock"
    source = "Jang et al. 2024, arXiv 2403.19522"
    base = "required"
    count = (2, None)
    scope: str = option("tensor", meaning="one cosine for each 'tensor' or each 'row' (last axis)", source=MERGEKIT)


@dataclass(frozen=True, kw_only=True)
class Nearswap(Method):
    """Towards the second model where it is near the first: w = min(t / |θ₂ − θ₁|, 1), θ₁ + w (θ₂ − θ₁)."""

    name = "nearswap"
    source = MERGEKIT
    count = (2, 2)
    t: PerKey = option(meaning="the distance up to which elements are swapped", per="key")


@dataclass(frozen=True, kw_only=True)
class Sce(Method):
    """Select elements by their variance across models, weight models by their energy, erase minority signs."""

    name = "sce"
    source = "Wan et al. 2024, arXiv 2408.07990"
    base = "required"
    select_topk: PerKey = option(1.0, meaning="the fraction of elements selected", per="key")
    floor: float = option(0.0, meaning="energies, and sums of weights that divide, are at least this", source=MERGEKIT)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {PAPER: {}, "mergekit": {"floor": 1e-6}}


@dataclass(frozen=True, kw_only=True)
class ArceeFusion(Method):
    """Take the elements of one model whose importance |τ| · KL is above the median + 1.5 interquartile ranges."""

    name = "arcee_fusion"
    source = MERGEKIT
    base = "required"
    count = (1, 1)


@dataclass(frozen=True, kw_only=True)
class Ram(Method):
    """Add what one model alone changed, average what several changed; changed means |τ| > ε."""

    name = "ram"
    source = "arXiv 2601.13572"
    base = "required"
    epsilon: float = option(1e-5, meaning="changes up to this size count as none", source=MERGEKIT)
    scaling_factor: PerKey = option(1.0, meaning="λ", per="key")


@dataclass(frozen=True, kw_only=True)
class RamPlus(Method):
    """As ram, with what one model alone changed enlarged by 1 + r · min(ρᵢ, α), ρᵢ its shared over its own changes."""

    name = "ram_plus"
    source = "arXiv 2601.13572"
    base = "required"
    r: float = option(0.1, meaning="how much of the ratio is added to the factor", source=MERGEKIT)
    alpha: float = option(0.2, meaning="α, the largest ratio that counts", source=MERGEKIT)
    epsilon: float = option(1e-5, meaning="changes up to this size count as none", source=MERGEKIT)


@dataclass(frozen=True, kw_only=True)
class Fisher(Weighted):
    """Σ cᵢ θᵢ / Σ cᵢ, cᵢ = wᵢ (Fᵢ + ε), element by element; entries without Fishers are averaged."""

    name = "fisher"
    source = "Matena & Raffel 2021, arXiv 2111.09832"
    fishers: Any = option(meaning="for each model the diagonals by key, as isthmus.fisher_diagonal estimates them")
    epsilon: float = option(1e-6, meaning="added to every Fisher", source=FUSIONBENCH)
    normalize_fishers: bool = option(False, meaning="divide each model's Fishers by their norm", source=FUSIONBENCH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {PAPER: {}, "fusionbench": {"normalize_fishers": True}}


@dataclass(frozen=True, kw_only=True)
class RegMean(Weighted):
    """Linear layers whose outputs are nearest to the models' own, by least squares; other entries are averaged."""

    name = "regmean"
    source = "Jin et al. 2023, arXiv 2212.09849"
    grams: Any = option(meaning="for each model XᵀX of the inputs of its layers by key, as isthmus.collect_grams does")
    off_diagonal: float = option(0.9, meaning="factor of the elements beside the diagonal of XᵀX")
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {PAPER: {}, "fusionbench": {"off_diagonal": 0.95}}


@dataclass(frozen=True, kw_only=True)
class Passthrough(Method):
    """One model, times a factor."""

    name = "passthrough"
    source = MERGEKIT
    count = (1, 1)
    scaling_factor: PerKey = option(1.0, meaning="the factor", per="key")
