"""The errors isthmus raises on purpose, one base class and its few children, and how it warns.

Every message names the thing that is wrong, what was expected, what came, and what to do.
"""

from __future__ import annotations

import sys
import warnings

_PASSED_ON = ("isthmus", "functools", "contextlib", "torch")  # packages that the calls of a user's call go through


class IsthmusError(Exception):
    """Base of every error that isthmus raises on purpose."""


class InputError(IsthmusError, ValueError):
    """An argument, tensor, state dict or configuration cannot be used as asked."""


class BackendError(IsthmusError, RuntimeError):
    """A backend or instruction set was asked for by name and is not available here."""


class DependencyError(IsthmusError, ImportError):
    """An optional package is missing; the message names the extra that brings it."""


class FileError(IsthmusError, OSError):
    """A file or folder is missing, unreadable, truncated or could not be written."""


class EvaluationError(IsthmusError, RuntimeError):
    """An evaluator failed in the middle of a scan; ``partial`` holds what was done until then."""

    partial: object = None


class IsthmusWarning(UserWarning):
    """Something went on in a way the user may not expect; the message says what and how to choose otherwise."""


def warn(message: str) -> None:
    """Issue an ``IsthmusWarning`` that points at the line of the user's that called isthmus, however deep this is."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_ON:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, IsthmusWarning, stacklevel=level)
