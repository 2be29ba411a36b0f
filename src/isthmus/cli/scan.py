"""``isthmus scan``: the path between two models that are there, or the plane through them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from isthmus._optional import optional
from isthmus.errors import FileError, InputError
from isthmus.io import atomic_write
from isthmus.match import PermutationSpec
from isthmus.path import Evaluator, PathResult, PlaneResult, scan_line, scan_plane
from isthmus.train import Data
from isthmus.train.sweep import BN_SAMPLES

from .console import check_device, print_wide
from .task import EXAMPLES, file_task, pair_task

LINE_POINTS, PLANE_POINTS = 101, 41
DTYPES = {"f32": None, "bf16": torch.bfloat16, "f16": torch.float16}


def scan(
    paths: Annotated[
        list[Path], typer.Argument(help="A pair's folder; or two safetensors files, with --model and --data.")
    ],
    model: Annotated[
        str | None, typer.Option(help="mlp, resnet18 or package.module:factory, called with the data.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Name of a data set or package.module:factory.")] = None,
    root: Annotated[Path | None, typer.Option(help="Folder with the data set's files.")] = None,
    base: Annotated[
        Path | None, typer.Option(help="Safetensors file of the model that both come from; a pair has its trunk.")
    ] = None,
    plane: Annotated[
        bool, typer.Option("--plane", help="Scan the plane through the base and both models, not the line.")
    ] = False,
    points: Annotated[
        int | None,
        typer.Option(min=2, help=f"Points from end to end ({LINE_POINTS}), or per side of a plane ({PLANE_POINTS})."),
    ] = None,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="Choose the points of the line: few, more where the loss may peak.")
    ] = False,
    tol: Annotated[float, typer.Option(help="How exact the loss barrier is with --adaptive, in nats.")] = 1e-3,
    splits: Annotated[
        str | None, typer.Option(help="Parts of the data, with commas: train, val, test. By default val and test.")
    ] = None,
    align: Annotated[
        bool, typer.Option("--align", help="Match the units of b to those of a, and scan the line before and after.")
    ] = False,
    bn: Annotated[str, typer.Option(help="BatchNorm statistics at each point: auto, keep or reset.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Evaluate in f32, or under autocast in bf16 or f16.")] = "f32",
    checkpoint: Annotated[
        Path | None, typer.Option(help="File that keeps finished points; the same command then goes on from there.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("isthmus-scan"),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Evaluate loss and accuracy on the straight line between two models, or on the plane through them and their base.

    By default on validation and test data.
    """
    if dtype not in DTYPES:
        raise InputError(f"--dtype is {dtype!r}, expected {', '.join(DTYPES)}.")
    if adaptive and (plane or points is not None):
        raise InputError("--adaptive chooses the points of a line: leave out --plane and --points, or --adaptive.")
    if align and plane:
        raise InputError("--align scans two lines: leave out --plane, or match the models first (isthmus match).")
    check_device(device)
    task = (
        pair_task(paths[0], model, data, root, base, device)
        if len(paths) == 1
        else file_task(paths, model, data, root, base, device)
    )
    if plane and task.base is None:
        raise InputError("--plane needs the model that both come from, as its origin: give --base.")
    evaluators = {split: Evaluator(task.data.parts[split], dtype=DTYPES[dtype]) for split in _splits(splits, task.data)}
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"could not make the folder {out}: {error.strerror}.") from error
    options: dict[str, Any] = {
        "bn": bn,
        "bn_data": None if bn == "keep" else task.data.train_x[:BN_SAMPLES],
        "progress": True,
        "checkpoint": checkpoint,
    }
    name = "plane" if plane else "path"
    result: PathResult | PlaneResult
    try:
        if plane:
            grid = (points or PLANE_POINTS, points or PLANE_POINTS)
            result = scan_plane(
                *(task.model, task.base, [task.a, task.b], evaluators, grid), names=("base", "a", "b"), **options
            )
        else:
            result = scan_line(
                *(task.model, task.a, task.b, evaluators, "adaptive" if adaptive else points or LINE_POINTS),
                base=task.base,
                align=PermutationSpec.from_model(task.model, task.data.train_x[:EXAMPLES]) if align else None,
                tol=tol,
                **options,
            )
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(_kept(error, out / f"{name}.json", checkpoint)) from None
    written = _write(result, out, name)
    if isinstance(result, PlaneResult):
        _print_plane(result)
    else:
        _print_path(result)
    for path in written:
        print(path)


def _splits(given: str | None, data: Data) -> list[str]:
    """The parts of the data to evaluate on."""
    filled = [part for part, (inputs, _) in data.parts.items() if len(inputs)]
    if given is None:
        return [part for part in filled if part != "train"]
    chosen = [part.strip() for part in given.split(",")]
    for part in chosen:
        if part not in filled:
            raise InputError(f"--splits has {part!r}, expected some of {', '.join(filled)}, which {data.name} has.")
    return chosen


def _kept(error: KeyboardInterrupt, path: Path, checkpoint: Path | None) -> str:
    """Write what an interrupted scan has found, and say what is kept and how to go on."""
    partial: PathResult | PlaneResult | None = getattr(error, "partial", None)
    finished = 0 if partial is None else int(np.isfinite(partial.seconds).sum())
    if partial is None or not finished:
        return ""
    partial.to_json(path)
    kept = f"{finished} points are kept in {path}"
    if checkpoint is None:
        return f"{kept}; run the same command again to scan all, with --checkpoint to be able to go on."
    file = f"{checkpoint}.aligned" if "align" in partial.choices else checkpoint
    return f"{kept} and {file}; run the same command again to go on."


def _print_path(result: PathResult) -> None:
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
    if result.naive is not None:
        _print_alignment(result, result.naive)
    for split, ensemble in result.ensemble.items():
        print(
            f"{split}: ensemble of a and b: loss {ensemble['loss']:.4f}, accuracy {ensemble['accuracy']:.4f}; "
            f"they disagree on {100 * result.disagreement[split]:.1f} % of examples."
        )
    distances = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in result.distances.items())
    print(f"distances: {distances}. BatchNorm statistics: {result.choices['bn']}.")
    if adaptive := result.choices["adaptive"]:
        print(f"{adaptive['points']} points; the loss barriers are known to about {adaptive['bound']:.2g}.")


def _print_alignment(result: PathResult, naive: PathResult) -> None:
    """How both lines compare; the table above is that of the aligned one."""
    told = result.choices["align"]
    print(
        f"b is in the order of a: {told['moved']} of {told['units']} units in {told['groups']} groups move, "
        f"similarity {told['similarity_before']:.4f} before and {told['similarity']:.4f} after."
    )
    for split, cuts in result.barrier_cut.items():
        for metric, cut in cuts.items():
            before, after = (found.summary[split][metric].linear_barrier for found in (naive, result))
            change = f"{before:.4f} before, {after:.4f} after: {100 * cut:.1f} % less"
            print(f"{split}: linear barrier of the {metric} {change}.")


def _print_plane(result: PlaneResult) -> None:
    splits = list(result.values)
    chosen_on = "val" if "val" in splits else splits[0]
    title = f"base + x (a − base) + y (b − base), best on {chosen_on}"
    grid = Table("split", "metric", title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in (*result.models, "best", "at x", "at y"):
        grid.add_column(header, justify="right", no_wrap=True)
    for split, tables in result.model_values.items():
        for metric, values in tables.items():
            best = result.best(metric, chosen_on)
            found = [f"{value:.4f}" for value in (*values, best.values[split][metric])]
            grid.add_row(split, metric, *found, f"{best.x:.2f}", f"{best.y:.2f}")
    print_wide(grid)
    print(f"BatchNorm statistics: {result.choices['bn']}.")


def _write(result: PathResult | PlaneResult, out: Path, name: str) -> list[Path]:
    """The result as JSON, as a table and as a figure."""
    figures = optional("matplotlib.figure", extra="lab", purpose="Drawing figures")
    result.to_json(out / f"{name}.json")
    result.to_csv(out / f"{name}.csv")
    figure = figures.Figure(figsize=(6.4, 7.2), layout="constrained")
    result.plot(figure.subplots(2, 1), metrics=("loss", "accuracy"))
    with atomic_write(out / f"{name}.png") as path:
        figure.savefig(path, format="png", dpi=150)
    return [out / f"{name}.{kind}" for kind in ("json", "csv", "png")]
