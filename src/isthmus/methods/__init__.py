"""The merge methods: one small frozen dataclass each, the presets of other tools, and one's own methods.

A method holds the resolved options of a merge and computes nothing; ``isthmus.merging`` carries it out. Write
``isthmus.merge(models, base=base, method="ties", density=0.2)`` or pass ``method=isthmus.methods.Ties(density=0.2)``.

θ₀ is the base, θᵢ a model, τᵢ = θᵢ − θ₀ its task vector, wᵢ its weight, p a density. Numbers that may differ from key
to key are also given by pattern, ``{"*.bias": 0.5, "*": 1.0}`` or a list of such pairs: patterns are those of
``fnmatch`` on canonical keys, and the first that matches a key wins. Numbers that may differ from model to model are
also lists of one for each, inside a pattern too; or lists of one number or set of patterns for each.
"""

from __future__ import annotations

from .consensus import (
    Breadcrumbs,
    BreadcrumbsTies,
    Consensus,
    Dare,
    DareTies,
    Della,
    DellaLinear,
    Drawn,
    MagnitudePrune,
    Ranked,
    Summed,
    TaskArithmetic,
    Ties,
    Voted,
)
from .listing import MethodInfo, OptionInfo, available
from .making import make, variable_options
from .method import PAPER, Method, PerKey, Weighted, option
from .registry import Registered, register_method
from .rules import (
    ArceeFusion,
    Fisher,
    Karcher,
    Linear,
    ModelStock,
    Multislerp,
    Nearswap,
    Nuslerp,
    Passthrough,
    Ram,
    RamPlus,
    RegMean,
    Sce,
    Slerp,
)

__all__ = [
    "PAPER",
    "ArceeFusion",
    "Breadcrumbs",
    "BreadcrumbsTies",
    "Consensus",
    "Dare",
    "DareTies",
    "Della",
    "DellaLinear",
    "Drawn",
    "Fisher",
    "Karcher",
    "Linear",
    "MagnitudePrune",
    "Method",
    "MethodInfo",
    "ModelStock",
    "Multislerp",
    "Nearswap",
    "Nuslerp",
    "OptionInfo",
    "Passthrough",
    "PerKey",
    "Ram",
    "RamPlus",
    "Ranked",
    "RegMean",
    "Registered",
    "Sce",
    "Slerp",
    "Summed",
    "TaskArithmetic",
    "Ties",
    "Voted",
    "Weighted",
    "available",
    "make",
    "option",
    "register_method",
    "variable_options",
]
