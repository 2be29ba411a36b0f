"""``isthmus scan``: the path between two models that are there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import nn

from isthmus._optional import optional
from isthmus.errors import FileError, InputError
from isthmus.io import atomic_write
from isthmus.path import Evaluator, PathResult, scan_line
from isthmus.train import Data, Pair, build_model, load_data
from isthmus.train.sweep import BN_SAMPLES

from .console import check_device, print_wide, progress_bar

DTYPES = {"f32": None, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Task:
    """What is scanned: the ends, the base of their task vectors if known, the architecture and the data."""

    a: Any
    b: Any
    base: Any
    model: nn.Module
    data: Data


def scan(
    paths: Annotated[
        list[Path], typer.Argument(help="A pair's folder; or two safetensors files, with --model and --data.")
    ],
    model: Annotated[
        str | None, typer.Option(help="mlp, resnet18 or package.module:factory, called with the data.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Name of a data set or package.module:factory.")] = None,
    root: Annotated[Path | None, typer.Option(help="Folder with the data set's files.")] = None,
    points: Annotated[int, typer.Option(min=2, help="Points from end to end.")] = 101,
    bn: Annotated[str, typer.Option(help="BatchNorm statistics at each point: auto, keep or reset.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Evaluate in f32, or under autocast in bf16 or f16.")] = "f32",
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("isthmus-scan"),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Evaluate loss and accuracy on the straight line between two models, on validation and test data."""
    if dtype not in DTYPES:
        raise InputError(f"--dtype is {dtype!r}, expected {', '.join(DTYPES)}.")
    check_device(device)
    task = _pair(paths[0], model, data, root, device) if len(paths) == 1 else _files(paths, model, data, root, device)
    splits = {
        split: Evaluator(task.data.parts[split], dtype=DTYPES[dtype])
        for split in ("val", "test")
        if len(task.data.parts[split][0])
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"could not make the folder {out}: {error.strerror}.") from error
    with progress_bar() as bar:
        line = bar.add_task("points", total=points)
        try:
            result = scan_line(
                *(task.model, task.a, task.b, splits, points),
                base=task.base,
                bn=bn,
                bn_data=None if bn == "keep" else task.data.train_x[:BN_SAMPLES],
                progress=lambda done, total, _: bar.update(line, completed=done, total=total),
            )
        except KeyboardInterrupt as error:
            partial = getattr(error, "partial", None)
            if partial is None or not len(partial.alphas):
                raise
            partial.to_json(out / "path.json")
            kept = f"{len(partial.alphas)} of {points} points are kept in {out / 'path.json'}"
            raise KeyboardInterrupt(f"{kept}; run the same command again to scan all.") from None
    _print(result)
    for path in _write(result, out):
        print(path)


def _pair(folder: Path, model: str | None, data: str | None, root: Path | None, device: str) -> Task:
    """The task of a saved pair, whose configuration names its model and data unless they are given."""
    if folder.is_file():
        raise InputError(f"{folder} is one file: give a pair's folder, or two safetensors files.")
    pair = Pair.load(folder)
    if pair.a is None or pair.b is None:
        raise InputError(f"the pair in {folder} diverged while training and has no two ends to scan.")
    config = pair.config
    options = dict(config.data_options) if data in (None, config.data) else {}
    loaded = _load(data or config.data, options, root, device)
    architecture = build_model(
        model or config.model, loaded, **(config.model_options if model in (None, config.model) else {})
    )
    return Task(pair.a, pair.b, pair.trunk, architecture.to(device), loaded)


def _files(paths: list[Path], model: str | None, data: str | None, root: Path | None, device: str) -> Task:
    """The task of two safetensors files."""
    if len(paths) != 2:
        raise InputError(f"{len(paths)} paths were given, expected a pair's folder or two safetensors files.")
    if model is None or data is None:
        raise InputError("two files do not say what model and data they belong to: give --model and --data.")
    loaded = _load(data, {}, root, device)
    a, b = paths
    return Task(a, b, None, build_model(model, loaded).to(device), loaded)


def _load(name: str, options: dict[str, Any], root: Path | None, device: str) -> Data:
    return load_data(name, device=device, **(options if root is None else options | {"root": str(root)}))


def _print(result: PathResult) -> None:
    title = "The path from a (α = 0) to b (α = 1), merged at α = ½"
    grid = Table("split", "metric", title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("a", "merged", "b", "gain", "over\nbetter", "barrier\n(at α)", "linear\nbarrier"):
        grid.add_column(header, justify="right", no_wrap=True)
    for split, metrics in result.summary.items():
        for metric, found in metrics.items():
            values = [found.ends[0], found.merged, found.ends[1]]
            signed = [found.gain, found.gain_over_better]
            grid.add_row(
                *(split, metric, *(f"{value:.4f}" for value in values), *(f"{value:+.4f}" for value in signed)),
                f"{found.barrier:.4f} ({found.barrier_alpha:.2f})",
                f"{found.linear_barrier:.4f}",
            )
    print_wide(grid)
    for split, ensemble in result.ensemble.items():
        print(
            f"{split}: ensemble of a and b: loss {ensemble['loss']:.4f}, accuracy {ensemble['accuracy']:.4f}; "
            f"they disagree on {100 * result.disagreement[split]:.1f} % of examples."
        )
    distances = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in result.distances.items())
    print(f"distances: {distances}. BatchNorm statistics: {result.choices['bn']}.")


def _write(result: PathResult, out: Path) -> list[Path]:
    """``path.json``, ``path.csv`` and ``path.png``."""
    figures = optional("matplotlib.figure", extra="lab", purpose="Drawing figures")
    result.to_json(out / "path.json")
    result.to_csv(out / "path.csv")
    figure = figures.Figure(figsize=(6.4, 7.2), layout="constrained")
    result.plot(figure.subplots(2, 1), metrics=("loss", "accuracy"))
    with atomic_write(out / "path.png") as path:
        figure.savefig(path, format="png", dpi=150)
    return [out / f"path.{kind}" for kind in ("json", "csv", "png")]
