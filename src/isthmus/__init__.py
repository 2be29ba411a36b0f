"""Merge neural networks and scan the paths between them, with compiled kernels.

The tensor-level functions are in ``isthmus.ops``, model-level merging in ``isthmus.merge``, scans in ``isthmus.path``
and the trainer of model pairs in ``isthmus.train``.
"""

from __future__ import annotations

from .ops import lerp, weighted_sum

__version__ = "0.1.0"

__all__ = ["__version__", "lerp", "weighted_sum"]
