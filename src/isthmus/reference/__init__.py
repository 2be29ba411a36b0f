"""Every op in plain PyTorch, for any device and dtype: the meaning of the library.

Each function uses only operations that round once, in the type named by ``compute_dtype``, and rounds once more where
it stores. ``torch.lerp``, ``add(alpha=...)`` and ``addcmul`` are not used because they fuse a multiplication and an
addition. Arguments are validated by ``isthmus.ops``; shapes are equal and weights are Python floats or float64 tables
here.

On the CPU these functions flush subnormal numbers if ``torch.set_flush_denormal(True)`` was called; compiled backends
never do.
"""

from .assignment import Assignments, Proofs, assign
from .consensus import Plan, Random, Stats, consensus, consensus_gradient, l1
from .elementwise import compute_dtype, lerp, narrow, weighted_sum
from .multi_linear import multi_linear
from .permute import permute, permute_adjoint
from .random import philox, random_keys, random_words
from .reductions import gram
from .selection import NO_INDEX, Cuts, Groups, Selected, select
from .similarity import add_product

__all__ = [
    "NO_INDEX",
    "Assignments",
    "Cuts",
    "Groups",
    "Plan",
    "Proofs",
    "Random",
    "Selected",
    "Stats",
    "add_product",
    "assign",
    "compute_dtype",
    "consensus",
    "consensus_gradient",
    "gram",
    "l1",
    "lerp",
    "multi_linear",
    "narrow",
    "permute",
    "permute_adjoint",
    "philox",
    "random_keys",
    "random_words",
    "select",
    "weighted_sum",
]
