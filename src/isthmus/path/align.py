"""Scan the line between two models twice: as they are, and with the units of B in the order of A's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from isthmus.errors import InputError
from isthmus.merging.sources import Source

from .result import PathResult

if TYPE_CHECKING:
    from isthmus.match import Matching, PermutationSpec
    from isthmus.match.spec import Permutation

    Align: TypeAlias = PermutationSpec | tuple[PermutationSpec, Permutation | Matching]

CheckpointPath = str | os.PathLike[str] | None


def scan_aligned(
    scan: Callable[[Source, CheckpointPath], PathResult],
    align: Align,
    a: Source,
    b: Source,
    *,
    checkpoint: CheckpointPath,
    backend: str,
) -> PathResult:
    """The result of the aligned line, whose ``naive`` is that of the other.

    Args:
        scan: scans the line from A to a model, with a checkpoint file.
        align: as in ``scan_line``.
        a: model A.
        b: model B.
        checkpoint: the file of the naive line, as of a scan without alignment; the aligned one's has ``.aligned`` after
            its name.
        backend: as for ``isthmus.ops.permute``.

    Raises:
        InputError: ``align`` is not what it should be, or a model does not fit the spec. Others as ``scan`` does; if
            that is within the naive line, ``partial`` has the aligned one.
    """
    from isthmus.match import apply_permutation

    spec, permutation, told = _permutation(align, a, b)
    moved: Source = apply_permutation(spec, permutation, b, backend=backend)

    def with_alignment(result: PathResult, **changes: Any) -> PathResult:
        arrays = {name: order.numpy() for name, order in permutation.items()}
        return replace(result, permutation=arrays, choices=result.choices | {"align": told}, **changes)

    try:
        aligned = with_alignment(scan(moved, None if checkpoint is None else f"{os.fspath(checkpoint)}.aligned"))
    except BaseException as error:
        if isinstance(partial := getattr(error, "partial", None), PathResult):
            error.partial = with_alignment(partial)  # type: ignore[attr-defined]
        raise
    try:
        naive = scan(b, checkpoint)
    except BaseException as error:
        error.partial = replace(  # type: ignore[attr-defined]
            aligned, naive=getattr(error, "partial", None), complete=False
        )
        raise
    return replace(aligned, naive=naive)


def _permutation(align: Align, a: Source, b: Source) -> tuple[PermutationSpec, dict[str, Tensor], dict[str, Any]]:
    """The spec, the permutation found or given, and what results tell of it."""
    from isthmus.match import Matching, PermutationSpec, weight_matching
    from isthmus.match.permutation import check_permutation, units_that_stay

    spec, found = align if isinstance(align, tuple) and len(align) == 2 else (align, None)
    if not isinstance(spec, PermutationSpec) or not isinstance(found, Mapping | Matching | None):
        raise InputError(
            f"align= is a {type(align).__name__}, expected a PermutationSpec, or a tuple of one and a permutation or "
            "Matching of its groups."
        )
    if found is None:
        found = weight_matching(spec, a, b)
    permutation = check_permutation(spec, found)
    units = sum(map(torch.numel, permutation.values()))
    moved = units - sum(units_that_stay(spec, permutation).values())
    told: dict[str, Any] = {"groups": len(permutation), "units": units, "moved": moved}
    if isinstance(found, Matching):
        report = found.report
        told |= {name: getattr(report, name) for name in ("method", "objective", "objective_before", "seconds")}
        told |= {name: getattr(report, name) for name in ("similarity", "similarity_before", "already_aligned")}
    return spec, permutation, told
