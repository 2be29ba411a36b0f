"""Every op in plain PyTorch, for any device and dtype: the meaning of the library.

Each function uses only operations that round once, in the type named by ``compute_dtype``, and rounds once more where
it stores. ``torch.lerp``, ``add(alpha=...)`` and ``addcmul`` are not used because they fuse a multiplication and an
addition. Arguments are validated by ``isthmus.ops``; shapes are equal and weights are Python floats here.

On the CPU these functions flush subnormal numbers if ``torch.set_flush_denormal(True)`` was called; compiled backends
never do.
"""

from .elementwise import compute_dtype, lerp, narrow, weighted_sum
from .reductions import gram

__all__ = ["compute_dtype", "gram", "lerp", "narrow", "weighted_sum"]
