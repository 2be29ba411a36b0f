# ruff: noqa: RUF009 (option() is dataclasses.field() with metadata)
"""The merge methods: one small frozen dataclass each, the presets of other tools, and one's own methods.

A method holds the resolved options of a merge and computes nothing; ``isthmus.merging`` carries it out. Write
``isthmus.merge(models, base=base, method="ties", density=0.2)`` or pass ``method=isthmus.methods.Ties(density=0.2)``.

θ₀ is the base, θᵢ a model, τᵢ = θᵢ − θ₀ its task vector, wᵢ its weight, p a density. Numbers that may differ from key
to key are also given by pattern, ``{"*.bias": 0.5, "*": 1.0}`` or a list of such pairs: patterns are those of
``fnmatch`` on canonical keys, and the first that matches a key wins. Numbers that may differ from model to model are
also lists of one for each, inside a pattern too; or lists of one number or set of patterns for each.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from types import NoneType
from typing import Any, ClassVar, SupportsFloat, SupportsIndex

from .errors import InputError

PAPER = "paper"  # the preset that is meant when none is named
PerKey = float | Sequence[Any] | Mapping[str, Any]
# The annotation of an option -> the types of its values, and what an error calls them. Others are checked where used.
KINDS: dict[object, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "True or False"),
    "bool | None": ((bool, NoneType), "True, False or None"),
    "int": ((SupportsIndex,), "an integer"),
    "float": ((SupportsFloat,), "a number"),
    "str": ((str,), "a string"),
}

TIES_PAPER = "Yadav et al. 2023, arXiv 2306.01708"
DARE_PAPER = "Yu et al. 2023, arXiv 2311.03099"
DELLA_PAPER = "Deep et al. 2024, arXiv 2406.11617"
BREADCRUMBS_PAPER = "Davari & Belilovsky 2023, arXiv 2312.06795"
MERGEKIT = "mergekit 0.1.5"
PEFT = "PEFT 0.21"
FUSIONBENCH = "FusionBench 0.2.33"

# What other tools call an option, and what to write here. The values complete "... is called".
OTHER_OPTIONS = {
    "lambda": "scaling_factor",
    "lambda_": "scaling_factor",
    "scaling_coefficient": "scaling_factor",
    "scale": "scaling_factor",
    "weight": "weights",
    "threshold": "density",
    "reset_thresh": "density (a fraction: 20 is 0.2)",
    "topk": "density",
    "k": "density",
    "drop_rate": "density (the fraction that is kept)",
    "base_model": "base",
    "consensus_method": "majority_sign_method ('sum' is 'weighted_total', 'count' is 'frequency')",
    "merge_method": "method",
    "combination_type": "method",
    "alpha": "t (of slerp) or weights",
    "filter_wise": "scope='row'",
    "nuslerp_row_wise": "scope='row'",
    "row_wise": "scope='row'",
    "nuslerp_flatten": "scope='tensor'",
    "normalize_weights": "normalize",
    "rescale_norm": "rescale",
    "eps": "epsilon",
    "tol": "tolerance",
    "max_iter": "iterations",
    "out_dtype": "dtype",
    "random_seed": "seed",
}
# What other tools have and isthmus does not need.
NEEDLESS_OPTIONS = {
    "int8_mask": "isthmus keeps no masks in memory",
    "tokenizer_source": "isthmus merges tensors and leaves tokenizers alone",
    "lazy_unpickle": "isthmus maps safetensors files into memory",
}
OTHER_METHODS = {
    "dare_linear": "dare",
    "average": "linear",
    "mean": "linear",
    "weight_average": "linear",
    "model_soup": "linear",
    "wise_ft": "linear",
    "lerp": "linear",
    "sum": "task_arithmetic",
    "task_vectors": "task_arithmetic",
    "della_magprune": "della",
    "ramplus_tl": "ram_plus",
    "fisher_merging": "fisher",
    "magnitude": "magnitude_prune",
    "stock": "model_stock",
    "greedy_soup": "isthmus.greedy_soup(models, evaluate)",
}


def option(default: Any = MISSING, *, meaning: str, source: str = "", per: str = "") -> Any:
    """A field of a method: its default (required without one), what it means and where it comes from.

    ``per`` says whether it may differ from "key" to key, or also from "model" to model.
    """
    return field(default=default, metadata={"meaning": meaning, "source": source, "per": per})


@dataclass(frozen=True, kw_only=True)
class Method:
    """A merge method and its options.

    Attributes:
        name: what ``merge(method=...)`` calls it.
        source: where it was published.
        base: whether the base model is "required"; "optional" (given one, the method works on task vectors); "deltas"
            (without one, the models are task vectors already and so is the result); or "unused" (it still gives the
            output's dtypes, key order, ties and the entries that are not merged).
        count: the least and the largest number of models, base aside; ``None`` is no limit.
        presets: preset -> the options in which that tool differs from the defaults.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    base: ClassVar[str] = "unused"
    count: ClassVar[tuple[int, int | None]] = (1, None)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {PAPER: {}, "mergekit": {}}

    def __post_init__(self) -> None:
        for item in fields(self):
            types, expected = KINDS.get(item.type, ((object,), ""))
            value = getattr(self, item.name)
            if not isinstance(value, types):
                raise InputError(f"{self.name} has {item.name}={value!r}, expected {expected}.")

    def options(self) -> dict[str, Any]:
        """The options by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Weighted(Method):
    """A method that weights its models."""

    weights: PerKey | None = option(None, meaning="wᵢ; by default all models weigh the same", per="model")


# Linear and spherical rules


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


# The consensus family


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


# Others


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


@dataclass(frozen=True, kw_only=True)
class Registered(Weighted):
    """A method added by ``register_method``: a function of one tensor of each model."""

    base = "optional"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {PAPER: {}}
    function: ClassVar[Callable[..., Any]]

    def own_options(self) -> dict[str, Any]:
        """The options that the function takes besides tensors, base and weights."""
        return {name: value for name, value in self.options().items() if name != "weights"}


_BUILT_IN: dict[str, type[Method]] = {
    cls.name: cls
    for cls in (
        *(Linear, Slerp, Nuslerp, Multislerp, Karcher, ModelStock),
        *(TaskArithmetic, Ties, MagnitudePrune, Dare, DareTies, Della, DellaLinear, Breadcrumbs, BreadcrumbsTies),
        *(Nearswap, Sce, ArceeFusion, Ram, RamPlus, Passthrough, Fisher, RegMean),
    )
}
_registered: dict[str, type[Registered]] = {}


def make(method: str | Method | type[Method], *, preset: str | None = None, **options: Any) -> Method:
    """The method that a name and keywords stand for.

    Args:
        method: a name of ``available()``, a class of this module, or a method with options of its own, which
            ``options`` then replace.
        preset: "paper" (the default: the method's publication and its authors' code), or a tool whose behaviour is
            wanted; each method lists its own.
        options: the method's options; they override the preset.

    Raises:
        InputError: the method, preset or option is unknown, with the nearest known name; an option without a default is
            missing.
    """
    if isinstance(method, Method):
        cls, chosen = _find(type(method)), method.options()
        if preset is not None:
            raise InputError(
                f"preset={preset!r} was given with a {type(method).__name__} whose options are set already. "
                f"Pass method={method.name!r} with the preset, or leave the preset out."
            )
    else:
        cls = _find(method)
        chosen = dict(_find_preset(cls, PAPER if preset is None else preset))
    _check_options(cls, options)
    if options.keys() & {"merge_func", "divisor"}:
        if options.get("normalize") is not None:
            raise InputError(
                f"{cls.name} got normalize= and {' and '.join(sorted(options.keys() & {'merge_func', 'divisor'}))}=, "
                "which say the same thing; leave normalize out."
            )
        chosen.pop("normalize", None)
    values = {**chosen, **options}
    missing = [item.name for item in fields(cls) if item.default is MISSING and item.name not in values]
    if missing:
        raise InputError(f"{cls.name} has no default for {' and '.join(missing)}; give {missing[0]}=.")
    return cls(**values)


def variable_options(method: Method) -> dict[str, str]:
    """The options that may differ: name -> from "key" to key, or from "model" to model too."""
    return {item.name: item.metadata["per"] for item in fields(method) if item.metadata["per"]}


def register_method(name: str, *, replace: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add one's own merge method; a decorator.

    The function is called once for each tensor, ``f(tensors, base, weights, **options) -> tensor``: ``tensors`` is one
    tensor of each model, ``base`` the base's or ``None``, ``weights`` one float per model (1 by default), and further
    parameters of the function are the method's options. It must not modify what it gets; the result has the shape of
    the tensors and is converted to the output's dtype.

    Args:
        name: what ``merge(method=...)`` calls it.
        replace: allow a name that is taken.

    Raises:
        InputError: the name is taken, or the function's parameters are not as above.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        known = _registered.get(name)
        again = known is not None and _place(known.function) == _place(function)  # a cell of a notebook run again
        if not replace and not again and (name in _BUILT_IN or known is not None):
            kind = "a method of isthmus" if name in _BUILT_IN else "a registered method"
            raise InputError(
                f"{name!r} is {kind} already. Choose another name, or pass replace=True to put yours in its place."
            )
        parameters = list(inspect.signature(function).parameters.values())
        variable = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if len(parameters) < 3 or variable:
            raise InputError(
                f"the method {name!r} needs a function f(tensors, base, weights, further options by name), "
                f"and got {function.__qualname__}{inspect.signature(function)}."
            )
        own = [
            (p.name, Any, option(MISSING if p.default is p.empty else p.default, meaning=f"of {_place(function)}"))
            for p in parameters[3:]
        ]
        summary = inspect.getdoc(function) or f"{_place(function)}, registered."
        _registered[name] = make_dataclass(
            "".join(part.title() for part in name.split("_")),
            own,
            bases=(Registered,),
            namespace={
                "name": name,
                "source": _place(function),
                "function": staticmethod(function),
                "__doc__": summary,
            },
            frozen=True,
            kw_only=True,
        )
        return function

    return register


@dataclass(frozen=True)
class OptionInfo:
    """What ``available`` says of an option.

    ``required`` options have no default; ``per`` is "key" for those that may differ from key to key, "model" for those
    that may also differ from model to model, else empty.
    """

    name: str
    required: bool
    default: Any
    meaning: str
    source: str
    per: str


@dataclass(frozen=True)
class MethodInfo:
    """What ``available`` says of a method; ``presets`` maps each preset to the options in which it differs."""

    name: str
    meaning: str
    source: str
    base: str
    models: tuple[int, int | None]
    options: tuple[OptionInfo, ...]
    presets: Mapping[str, Mapping[str, Any]]


def available() -> dict[str, MethodInfo]:
    """The methods by name: options with defaults, meaning and source, and presets."""
    return {name: _describe(cls) for name, cls in _all().items()}


def _describe(cls: type[Method]) -> MethodInfo:
    options = tuple(
        OptionInfo(
            name=item.name,
            required=item.default is MISSING,
            default=None if item.default is MISSING else item.default,
            meaning=item.metadata["meaning"],
            source=item.metadata["source"],
            per=item.metadata["per"],
        )
        for item in fields(cls)
    )
    return MethodInfo(cls.name, inspect.getdoc(cls) or "", cls.source, cls.base, cls.count, options, cls.presets)


def _all() -> dict[str, type[Method]]:
    return {**_BUILT_IN, **_registered}


def _find(method: object) -> type[Method]:
    known = _all()
    if isinstance(method, str) and method in known:
        return known[method]
    if isinstance(method, type) and issubclass(method, Method) and hasattr(method, "name"):
        return method
    hint = _near(method, known)
    if isinstance(method, str) and method in OTHER_METHODS:
        hint = f" What other tools call {method!r} is {OTHER_METHODS[method]} here."
    raise InputError(f"there is no merge method {method!r}.{hint} The methods are {', '.join(known)}.")


def _find_preset(cls: type[Method], preset: object) -> Mapping[str, Any]:
    if isinstance(preset, str) and preset in cls.presets:
        return cls.presets[preset]
    raise InputError(
        f"{cls.name} has no preset {preset!r}.{_near(preset, cls.presets)} Its presets are {', '.join(cls.presets)}."
    )


def _check_options(cls: type[Method], given: Iterable[str]) -> None:
    known = [item.name for item in fields(cls)]
    for name in given:
        if name in known:
            continue
        if name in NEEDLESS_OPTIONS:
            raise InputError(f"{cls.name} has no option {name!r}: {NEEDLESS_OPTIONS[name]}. Leave it out.")
        other = OTHER_OPTIONS.get(name)
        hint = f" What other tools call {name!r} is called {other} here." if other else _near(name, known)
        raise InputError(f"{cls.name} has no option {name!r}.{hint} Its options are {', '.join(known) or 'none'}.")


def _near(name: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.lower(), list(known), n=1) if isinstance(name, str) else []
    return f" Did you mean {close[0]!r}?" if close else ""


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
