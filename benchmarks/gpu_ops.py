"""Merges on the card: as a fraction of its copy bandwidth, and against eager torch and other tools."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus import ops

from . import paper, peers
from .card import Call, Card

DENSITY = 0.2
WEIGHTS = [0.4, 0.3, 0.2, 0.1]
SUM = {"majority_sign_method": "none", "merge_func": "sum"}
WIDTH = 4096  # of the matrix that is permuted
BUFFERS = 10  # a base, eight models and a result
SMALL = 16  # the part of the parameters that slower tools are given; ours, beside them, too


@dataclass
class Case:
    """One op.

    Attributes:
        name: of the op.
        traffic: what it moves at the least.
        ours: makes the call from a result, a base and models, for a backend.
        others: by name, the same in eager torch or by another tool.
    """

    name: str
    traffic: paper.Traffic
    ours: Callable[[Tensor, list[Tensor], str], Call]
    others: dict[str, Callable[[list[Tensor]], Call]] = field(default_factory=dict)


def cases() -> Iterator[Case]:
    """Of all ops."""
    yield Case(
        "lerp",
        paper.lerp(),
        lambda out, xs, backend: lambda: ops.lerp(xs[0], xs[1], 0.3, out=out, backend=backend),
        {
            "eager": lambda xs: lambda: (1 - 0.3) * xs[0] + 0.3 * xs[1],
            "torch.lerp": lambda xs: lambda: torch.lerp(*xs[:2], 0.3),
        },
    )
    yield Case(
        "weighted_sum of 4",
        paper.weighted_sum(4),
        lambda out, xs, backend: lambda: ops.weighted_sum(xs[:4], WEIGHTS, out=out, backend=backend),
        {
            "eager": lambda xs: lambda: sum(w * x for w, x in zip(WEIGHTS, xs[:4], strict=True)),
            **_mergekit("linear", 4, weight=WEIGHTS),
        },
    )
    yield Case(
        "task arithmetic of 4 and a base",
        paper.consensus(4),
        lambda out, xs, backend: (
            lambda: ops.consensus(xs[1:5], WEIGHTS, base=xs[0], sparsify="none", out=out, backend=backend, **SUM)
        ),
        {
            "eager": lambda xs: lambda: xs[0] + sum(w * (x - xs[0]) for w, x in zip(WEIGHTS, xs[1:5], strict=True)),
            **_mergekit("task_arithmetic", 5, base_index=0, weight=WEIGHTS),
        },
    )
    yield Case(
        "DARE of 4 and a base",
        paper.consensus(4),
        lambda out, xs, backend: lambda: ops.consensus(
            xs[1:5], WEIGHTS, DENSITY, base=xs[0], sparsify="random", rescale="inverse_density", names="weight",
            out=out, backend=backend, **SUM,
        ),
        _mergekit("dare_linear", 5, base_index=0, weight=WEIGHTS, density=[DENSITY] * 4),
    )  # fmt: skip
    for models in (4, 8):
        yield Case(
            f"consensus of {models} and a base",
            paper.consensus(models),
            lambda out, xs, backend, models=models: _by_known_cuts(out, xs, models, backend),
        )
    yield Case(
        "thresholds of 4 and a base",
        paper.select(4),
        lambda out, xs, backend: lambda: ops.thresholds(xs[1:5], DENSITY, base=xs[0], backend=backend),
    )
    for models in (4, 8):
        yield Case(
            f"TIES of {models} and a base",
            paper.ties(models),
            lambda out, xs, backend, models=models: (
                lambda: ops.consensus(xs[1 : models + 1], density=DENSITY, base=xs[0], out=out, backend=backend)
            ),
        )
    yield Case(
        "TIES of 4 task vectors",
        paper.ties(4, based=False),
        lambda out, xs, backend: lambda: ops.consensus(xs[:4], density=DENSITY, out=out, backend=backend),
        {"published steps": lambda xs: lambda: peers.ties_as_published(xs[:4], DENSITY), **_ties_of_tools()},
    )
    yield Case(
        "slerp",
        paper.slerp(),
        lambda out, xs, backend: lambda: ops.slerp(xs[0], xs[1], 0.3, out=out, backend=backend),
        _mergekit("slerp", 2, base_index=0, t=0.3),
    )
    yield Case(
        "permute",
        paper.permute(),
        lambda out, xs, backend: _permuted(out, xs, backend, lerp=False),
        {"eager": lambda xs: (lambda matrix, order: lambda: matrix[order])(*_matrix(xs[0]))},
    )
    yield Case(
        "lerp with b permuted",
        paper.lerp_permuted(),
        lambda out, xs, backend: _permuted(out, xs, backend, lerp=True),
        {"eager": lambda xs: (lambda b, order: lambda: 0.7 * _matrix(xs[0])[0] + 0.3 * b[order])(*_matrix(xs[1]))},
    )


def _by_known_cuts(out: Tensor, xs: list[Tensor], models: int, backend: str) -> Call:
    found: Any = ops.thresholds(xs[1 : models + 1], DENSITY, base=xs[0], backend=backend)
    return lambda: ops.consensus(xs[1 : models + 1], base=xs[0], thresholds=found, out=out, backend=backend)


def _matrix(x: Tensor) -> tuple[Tensor, Tensor]:
    matrix = x[: len(x) // WIDTH * WIDTH].view(-1, WIDTH)
    return matrix, torch.randperm(len(matrix), generator=torch.Generator().manual_seed(0)).to(x.device)


def _permuted(out: Tensor, xs: list[Tensor], backend: str, *, lerp: bool) -> Call:
    (a, order), (b, _), (target, _) = (_matrix(x) for x in (xs[0], xs[1], out))
    if lerp:
        return lambda: ops.lerp_permuted(a, b, 0.3, [order, None], out=target, backend=backend)
    return lambda: ops.permute(b, [order, None], out=target, backend=backend)


def _mergekit(method: str, models: int, **parameters: Any) -> dict[str, Callable[[list[Tensor]], Call]]:
    try:
        merge = peers.mergekit()
    except pytest.skip.Exception:
        return {}
    return {"mergekit": lambda xs: lambda: merge(method, xs[:models], **parameters)}


def _ties_of_tools() -> dict[str, Callable[[list[Tensor]], Call]]:
    found: dict[str, Callable[[list[Tensor]], Call]] = {}
    try:
        peft = peers.peft()
        found["PEFT"] = lambda xs: lambda: peft.ties(xs[:4], torch.ones(4, device=xs[0].device), DENSITY)
    except pytest.skip.Exception:
        pass
    try:
        mergekit = peers.mergekit_ties()
        found["mergekit's steps"] = lambda xs: lambda: mergekit(xs[:4], DENSITY)
    except pytest.skip.Exception:
        pass
    return found


def measure(card: Card, backends: list[str], parameters: dict[torch.dtype, int]) -> Iterator[dict[str, Any]]:
    """Time every case in each dtype with so many parameters, or as many as there is room for."""
    for dtype, wanted in parameters.items():
        count = min(wanted, card.room() // (BUFFERS * dtype.itemsize)) // WIDTH * WIDTH
        generator = torch.Generator(card.device).manual_seed(0)
        xs = [
            torch.empty(count, dtype=dtype, device=card.device).normal_(0, 0.01, generator=generator)
            for _ in range(BUFFERS - 1)
        ]
        out = torch.zeros(count, dtype=dtype, device=card.device)
        for case in cases():
            for backend in backends:
                common = {"case": case.name, "dtype": str(dtype).removeprefix("torch."), "backend": backend}
                if card.left <= 0:
                    yield common | {"left_out": "no time left"}
                    continue
                try:
                    yield common | {"parameters": count, "wanted": wanted} | _timed(card, case, out, xs, backend)
                except Exception as error:  # the others are measured all the same
                    yield common | {"left_out": f"{type(error).__name__}: {error}"}
        del xs, out


def _timed(card: Card, case: Case, out: Tensor, xs: list[Tensor], backend: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "entries equal to the threshold")  # of bfloat16 magnitudes, many are
        times = card.medians({"ours": case.ours(out, xs, backend), "copy": lambda: out.copy_(xs[0])})
        moved, copied = case.traffic.bytes(out.element_size()) * out.numel(), 2 * out.nbytes
        found = {
            "seconds": times["ours"],
            "bytes": moved,
            "copy_bandwidth": copied / times["copy"],
            "of_copy": moved / times["ours"] / (copied / times["copy"]),
            "speedups": {},
        }
        few = [x[: len(x) // SMALL // WIDTH * WIDTH or WIDTH] for x in xs]
        small = out[: len(few[0])]
        for name, other in case.others.items():
            try:
                both = card.medians({"ours": case.ours(small, few, backend), name: other(few)}, rounds=3)
                found["speedups"][name] = both[name] / both["ours"]
            except Exception as error:  # a tool that fails is told, not followed
                found.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"
    return found
