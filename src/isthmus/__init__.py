"""Merge neural networks and scan the paths between them, with compiled kernels.

The tensor-level functions are in ``isthmus.ops``, model-level merging in ``isthmus.merging``, scans in ``isthmus.path``
and the trainer of model pairs in ``isthmus.train``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .flat import FlatState
from .merging import lerp_states
from .ops import lerp, weighted_sum

if TYPE_CHECKING:
    from .path import Evaluator, PathResult, scan_line

__version__ = "0.1.0"

__all__ = [
    "Evaluator",
    "FlatState",
    "PathResult",
    "__version__",
    "lerp",
    "lerp_states",
    "scan_line",
    "weighted_sum",
]


def __getattr__(name: str) -> object:
    """Import scans when first asked for: who only merges does not wait for them."""
    if name in ("Evaluator", "PathResult", "scan_line"):
        from . import path

        return getattr(path, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
