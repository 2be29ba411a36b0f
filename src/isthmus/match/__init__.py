"""Permutation matching: which units of one network are which of another's, and networks in a common order."""

from .activations import activation_matching
from .apply import apply_permutation
from .many import ManyMatching, ManyReport, match_many
from .permutation import compose, identity_permutation, invert, random_permutation
from .repair import Repaired, repair
from .report import GroupReport, Matching, MatchReport
from .spec import Group, PermutationSpec
from .straight_through import straight_through
from .weight_matching import weight_matching

__all__ = [
    "Group",
    "GroupReport",
    "ManyMatching",
    "ManyReport",
    "MatchReport",
    "Matching",
    "PermutationSpec",
    "Repaired",
    "activation_matching",
    "apply_permutation",
    "compose",
    "identity_permutation",
    "invert",
    "match_many",
    "random_permutation",
    "repair",
    "straight_through",
    "weight_matching",
]
