"""Import optional packages where they are first used, and say what is missing by name."""

from __future__ import annotations

import importlib
from types import ModuleType

from .errors import DependencyError


def optional(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import ``module``, or raise a ``DependencyError`` that names the extra which installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        raise DependencyError(
            f"{purpose} needs the package {missing!r}, which is not installed here. "
            f"Install it with: pip install 'isthmus[{extra}]'"
        ) from error
