"""``isthmus match``: put the units of one model in the order of another's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from isthmus.errors import InputError
from isthmus.io import load_metadata, save_state
from isthmus.match import PermutationSpec, apply_permutation, weight_matching
from isthmus.train import build_model
from isthmus.train.factory import call_factory

from .task import EXAMPLES, load


def match(
    a: Annotated[Path, typer.Argument(help="Safetensors file of the model whose order stays.")],
    b: Annotated[Path, typer.Argument(help="Safetensors file of the model whose units are put in that order.")],
    model: Annotated[
        str, typer.Option(help="mlp, resnet18 or package.module:factory, called with the data if it is given.")
    ],
    data: Annotated[
        str | None, typer.Option(help="Name of a data set or package.module:factory, for the model's inputs.")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Folder with the data set's files.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="In place of --data: the shape of one input, such as 3,224,224.")
    ] = None,
    restarts: Annotated[int, typer.Option(min=1, help="Starts, of which the best counts.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the starts.")] = 0,
    only: Annotated[
        list[str] | None, typer.Option(help="Pattern of the groups to match; again for more. By default all.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Where B goes in A's order.")] = Path("matched.safetensors"),
    permutation: Annotated[
        Path | None, typer.Option(help="Where the permutation goes: a safetensors file, int64 by group.")
    ] = None,
) -> None:
    """Match the units of model B to those of A by their weights, and write B in A's order: the same function.

    The architecture is traced to find out which axes move together.
    """
    architecture, examples = _architecture(model, data, root, shape)
    spec = PermutationSpec.from_model(architecture, examples)
    print(spec, end="\n\n")
    found = weight_matching(spec, a, b, restarts=restarts, seed=seed, only=only or None)
    print(found)
    save_state(output, apply_permutation(spec, found.permutation, b), load_metadata(b))
    print(output)
    if permutation is not None:
        save_state(permutation, found.permutation)
        print(permutation)


def _architecture(model: str, data: str | None, root: Path | None, shape: str | None) -> tuple[nn.Module, Tensor]:
    """The model to trace, and inputs for it."""
    if (data is None) == (shape is None):
        raise InputError("the model is traced with inputs: give --data, or --shape and a factory of your own.")
    if data is not None:
        loaded = load(data, {}, root, "cpu")
        return build_model(model, loaded), loaded.train_x[:EXAMPLES]
    built = call_factory(model, {}, "model")
    if not isinstance(built, nn.Module):
        raise InputError(f"the model {model!r} is a {type(built).__name__}, expected a torch.nn.Module.")
    return built, torch.randn(EXAMPLES, *_sizes(str(shape)))


def _sizes(shape: str) -> list[int]:
    """The lengths of a shape as it was typed."""
    try:
        sizes = [int(size) for size in shape.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise InputError(f"--shape is {shape!r}, expected positive lengths with commas, such as 3,224,224.")
    return sizes
