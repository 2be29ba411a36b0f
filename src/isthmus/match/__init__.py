"""Permutation matching: which units of one network are which of another's, and networks in a common order."""

from .apply import apply_permutation
from .permutation import compose, identity_permutation, invert, random_permutation
from .spec import Group, PermutationSpec

__all__ = [
    "Group",
    "PermutationSpec",
    "apply_permutation",
    "compose",
    "identity_permutation",
    "invert",
    "random_permutation",
]
