"""``isthmus diff``: compare two files of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from isthmus.merging import diff as compare
from isthmus.merging.diff import Diff, TensorDiff

from .console import print_wide

DIFFERENT = 1
TROUBLE = 2  # as diff(1) has it


def diff(
    a: Annotated[Path, typer.Argument(help="A safetensors file.")],
    b: Annotated[Path, typer.Argument(help="The file to compare it with.")],
) -> None:
    """Show the tensors in which two files differ; exits with 0 if there are none, 1 if there are, 2 on trouble.

    Units in the last place are counted in representable numbers between two values.
    """
    found = compare(a, b)
    if found.equal:
        print(f"{len(found.tensors)} tensors are equal.")
        return
    _print(found)
    raise typer.Exit(DIFFERENT)


def _print(found: Diff) -> None:
    different = [tensor for tensor in found.tensors.values() if not tensor.equal]
    table = Table("tensor", "a", "b", title="Tensors that differ", title_justify="left")
    for header in ("changed", "max |a − b|", "max ulp", "‖a − b‖", "‖a − b‖ / ‖a‖"):
        table.add_column(header, justify="right", no_wrap=True)
    for tensor in different:
        same_shape = tensor.shapes[0] == tensor.shapes[1]
        ulp = "" if tensor.max_ulp is None else str(tensor.max_ulp)
        largest, distance, relative = (f"{x:.4g}" for x in (tensor.max_abs, tensor.distance, tensor.relative))
        values = [f"{tensor.changed} of {tensor.numel}", largest, ulp, distance, relative]
        table.add_row(escape(tensor.key), _kind(tensor, 0), _kind(tensor, 1), *(values if same_shape else []))
    if different:
        print_wide(table)
    for name, keys in (("a", found.only_a), ("b", found.only_b)):
        for key in keys:
            print(f"only in {name}: {key}")
    equal = len(found.tensors) - len(different)
    print(
        f"{equal} tensors are equal, {len(different)} differ, {len(found.only_a) + len(found.only_b)} are in one only."
    )


def _kind(tensor: TensorDiff, side: int) -> str:
    return escape(f"{tensor.dtypes[side]} {list(tensor.shapes[side])}")
