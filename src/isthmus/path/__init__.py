"""Paths between models: evaluate them point by point, and say what was found.

``scan_line`` walks the straight line between two models and returns a ``PathResult``; ``Evaluator`` measures a model on
resident data; ``metrics`` has the figures of merit as pure functions.
"""

from __future__ import annotations

from . import metrics
from .evaluate import Evaluator
from .line import scan_line
from .result import PathResult, Summary
from .tasks import accuracy, cross_entropy, squared_error, token_accuracy, token_cross_entropy

__all__ = [
    "Evaluator",
    "PathResult",
    "Summary",
    "accuracy",
    "cross_entropy",
    "metrics",
    "scan_line",
    "squared_error",
    "token_accuracy",
    "token_cross_entropy",
]
