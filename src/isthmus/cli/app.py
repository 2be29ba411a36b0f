"""The command's parts put together."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated

import typer

from isthmus import __version__

from .console import complain, guarded
from .demo import demo
from .diff import TROUBLE, diff
from .info import info
from .match import match
from .scan import scan
from .sweep import sweep

app = typer.Typer(
    help="Train pairs of models, merge and match them, scan the paths between them and compare files.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"isthmus {__version__}")
        raise typer.Exit


@app.callback()
def prepare(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Find the user's own modules in the working folder, as ``python -m`` does, and show warnings in one line."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    warnings.showwarning = lambda message, *_, **__: complain("warning", message)


for command in (demo, sweep, scan, match, info):
    app.command()(guarded(command))
app.command()(guarded(diff, TROUBLE))
