"""What commands work on: models from files or a saved pair, their architecture and their data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from isthmus.errors import InputError
from isthmus.train import Data, Pair, build_model, load_data

EXAMPLES = 2  # inputs that a model is traced with


@dataclass(frozen=True)
class Task:
    """What a command is about: the ends, the base of their task vectors if known, the architecture and the data."""

    a: Any
    b: Any
    base: Any
    model: nn.Module
    data: Data


def pair_task(
    folder: Path, model: str | None, data: str | None, root: Path | None, base: Path | None, device: str
) -> Task:
    """The task of a saved pair, whose configuration names its model and data unless they are given."""
    if folder.is_file():
        raise InputError(f"{folder} is one file: give a pair's folder, or two safetensors files.")
    pair = Pair.load(folder)
    if pair.a is None or pair.b is None:
        raise InputError(f"the pair in {folder} diverged while training and has no two ends to scan.")
    config = pair.config
    options = dict(config.data_options) if data in (None, config.data) else {}
    loaded = load(data or config.data, options, root, device)
    architecture = build_model(
        model or config.model, loaded, **(config.model_options if model in (None, config.model) else {})
    )
    return Task(pair.a, pair.b, base or pair.trunk, architecture.to(device), loaded)


def file_task(
    paths: list[Path], model: str | None, data: str | None, root: Path | None, base: Path | None, device: str
) -> Task:
    """The task of two safetensors files."""
    if len(paths) != 2:
        raise InputError(f"{len(paths)} paths were given, expected a pair's folder or two safetensors files.")
    if model is None or data is None:
        raise InputError("two files do not say what model and data they belong to: give --model and --data.")
    loaded = load(data, {}, root, device)
    a, b = paths
    return Task(a, b, base, build_model(model, loaded).to(device), loaded)


def load(name: str, options: dict[str, Any], root: Path | None, device: str) -> Data:
    """A data set by name, from the files in ``root`` if that is given."""
    return load_data(name, device=device, **(options if root is None else options | {"root": str(root)}))
