"""The public functions over tensors: validate once, then dispatch.

Every merging function takes one tensor per operand, or a list of tensors per operand: then it is applied to the first
of each list, to the second of each, and so on, in one call. Results have the same structure.

Tensors are float64, float32, bfloat16, float16 or complex, on any device, of any strides; those combined with each
other have equal shapes, with no broadcasting. Dtypes may be mixed: float16 and bfloat16 are widened to float32, the
rest is promoted as torch does, and the result is rounded once, to the dtype of ``out`` or of the first operand. Inputs
are never modified, and results share no memory with them, except that ``out`` may be exactly one input. Results of one
call on lists of small tensors may share one allocation with each other.

Gradients flow through ``lerp``, ``weighted_sum``, ``permute``, ``lerp_permuted`` and ``multi_linear`` (twice if need
be), ``linear`` and ``consensus``, to tensors, factors and weights; under ``torch.compile`` pass factors and weights as
tensors. The other merge rules refuse tensors that ask for a gradient. All functions are safe to call from several
threads.

Errors and warnings call a model ``tensors[k]``, k from 0; those about values use other names within ``naming``.
"""

from isthmus._dispatch import choose as choose_backend
from isthmus.reference import Stats

from ._naming import naming
from ._overlap import Placed, refuse_overlap
from ._validate import DTYPES, by_device
from .assignment import Certificate, linear_sum_assignment
from .consensus import consensus
from .elementwise import lerp, weighted_sum
from .multi_linear import multi_linear
from .permute import lerp_permuted, permute
from .rules import arcee_fusion, linear, nearswap, ram, ram_plus, sce
from .selection import Thresholds, thresholds
from .similarity import add_product
from .spherical import gram, karcher, model_stock, multislerp, nuslerp, slerp

__all__ = [
    "DTYPES",
    "Certificate",
    "Placed",
    "Stats",
    "Thresholds",
    "add_product",
    "arcee_fusion",
    "by_device",
    "choose_backend",
    "consensus",
    "gram",
    "karcher",
    "lerp",
    "lerp_permuted",
    "linear",
    "linear_sum_assignment",
    "model_stock",
    "multi_linear",
    "multislerp",
    "naming",
    "nearswap",
    "nuslerp",
    "permute",
    "ram",
    "ram_plus",
    "refuse_overlap",
    "sce",
    "slerp",
    "thresholds",
    "weighted_sum",
]
