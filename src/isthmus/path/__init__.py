"""Paths between models: evaluate them point by point, and say what was found.

``scan_line`` walks the straight line between two models and returns a ``PathResult``; ``scan_plane``, ``random_plane``
and ``trajectory_plane`` go over a plane and return a ``PlaneResult``, ``random_line`` a ``ProfileResult``.
``Evaluator`` measures a model on resident data; ``metrics`` has the figures of merit as pure functions.
``fit_curve`` bends a ``Curve`` between two models and ``scan_curve`` walks along it; ``scan_task_arithmetic`` evaluates
merges of task vectors at many scaling factors.
"""

from __future__ import annotations

from . import metrics
from .curve import Curve
from .curve_scan import scan_curve
from .directions import random_directions
from .evaluate import Evaluator
from .fit import fit_curve
from .line import scan_line
from .plane import random_plane, scan_plane, trajectory_plane
from .plane_result import PlaneResult
from .profile import ProfileResult, random_line
from .result import PathResult, Summary
from .task_arithmetic import scan_task_arithmetic
from .task_arithmetic_result import Best, TaskArithmeticResult
from .tasks import accuracy, cross_entropy, squared_error, token_accuracy, token_cross_entropy

__all__ = [
    "Best",
    "Curve",
    "Evaluator",
    "PathResult",
    "PlaneResult",
    "ProfileResult",
    "Summary",
    "TaskArithmeticResult",
    "accuracy",
    "cross_entropy",
    "fit_curve",
    "metrics",
    "random_directions",
    "random_line",
    "random_plane",
    "scan_curve",
    "scan_line",
    "scan_plane",
    "scan_task_arithmetic",
    "squared_error",
    "token_accuracy",
    "token_cross_entropy",
    "trajectory_plane",
]
