"""The ``isthmus`` command: ``demo``, ``sweep``, ``scan``, ``match``, ``info`` and ``diff``."""

from __future__ import annotations

import sys

from isthmus._optional import optional
from isthmus.errors import DependencyError


def main() -> None:
    """Run the command line; exits with 0, 1 (an error, in one line), 2 (wrong usage) or 130 (interrupted).

    ``diff`` exits with 1 for a difference and with 2 for an error.
    """
    try:
        for package in ("typer", "rich"):
            optional(package, extra="lab", purpose="the isthmus command")
    except DependencyError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    from .app import app

    app()
