"""``isthmus info``: what is built and what is used."""

from __future__ import annotations

import importlib.metadata
import platform

import torch
from rich.markup import escape
from rich.table import Table

from isthmus import __version__, _dispatch

from .console import print_wide

LAB = ("torchvision", "scikit-learn", "matplotlib", "rich", "typer", "safetensors")


def info() -> None:
    """Show which backends and instruction sets are built, which are chosen and why not the others, and versions."""
    backends = Table("backend", "available", "chosen", "why", title="Backends and instruction sets")
    for row in _dispatch.describe():
        cells = (row.name, "yes" if row.available else "no", "yes" if row.chosen else "", escape(row.reason))
        backends.add_row(*cells)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    packages = Table("package", "version", title="Versions")
    packages.add_row("isthmus", __version__)
    packages.add_row("python", platform.python_version())
    packages.add_row("torch", torch.__version__)
    for name in LAB:
        packages.add_row(name, _version(name))
    packages.add_row("GPU", ", ".join(gpus) or "none")
    print_wide(backends)
    print_wide(packages)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return escape("not installed: pip install 'isthmus[lab]'")
