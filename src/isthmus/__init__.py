"""Merge neural networks and scan the paths between them, with compiled kernels.

``merge``, ``merge_into``, ``TaskVector``, ``diff`` and ``greedy_soup`` take whole models; ``isthmus.methods`` describes
the merge methods, and the tensor-level functions are in ``isthmus.ops``. Scans are in ``isthmus.path`` and the trainer
of model pairs in ``isthmus.train``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import methods, ops
from .flat import FlatState
from .merging import TaskVector, collect_grams, diff, fisher_diagonal, greedy_soup, lerp_states, merge, merge_into
from .methods import register_method
from .ops import lerp, linear_sum_assignment, weighted_sum

if TYPE_CHECKING:
    from .path import (
        Curve,
        Evaluator,
        PathResult,
        PlaneResult,
        ProfileResult,
        TaskArithmeticResult,
        fit_curve,
        random_line,
        random_plane,
        scan_curve,
        scan_line,
        scan_plane,
        scan_task_arithmetic,
        trajectory_plane,
    )

__version__ = "0.1.0"

__all__ = [
    "Curve",
    "Evaluator",
    "FlatState",
    "PathResult",
    "PlaneResult",
    "ProfileResult",
    "TaskArithmeticResult",
    "TaskVector",
    "__version__",
    "collect_grams",
    "diff",
    "fisher_diagonal",
    "fit_curve",
    "greedy_soup",
    "lerp",
    "lerp_states",
    "linear_sum_assignment",
    "merge",
    "merge_into",
    "methods",
    "ops",
    "random_line",
    "random_plane",
    "register_method",
    "scan_curve",
    "scan_line",
    "scan_plane",
    "scan_task_arithmetic",
    "trajectory_plane",
    "weighted_sum",
]


def __getattr__(name: str) -> object:
    """Import scans when first asked for: who only merges does not wait for them."""
    if name in __all__:
        from . import path

        return getattr(path, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
