"""TIES in plain torch, and the methods of other tools: what merging is compared with.

mergekit and PEFT come with the ``peers`` extra, which ``make bench`` installs; a case skips where its peer is missing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn


def ties_as_published(task_vectors: Sequence[Tensor], density: float) -> Tensor:
    """The three steps of Yadav et al. 2023 in plain torch: trim each vector, elect signs, average those that agree."""
    stacked = torch.stack(list(task_vectors))
    magnitudes, numel = stacked.abs(), stacked.shape[1]
    thresholds = magnitudes.kthvalue(numel - int(density * numel), dim=1, keepdim=True).values
    trimmed = torch.where(magnitudes >= thresholds, stacked, 0.0)
    signs = trimmed.sum(dim=0).sign()
    signs = torch.where(signs == 0, signs.sum().sign(), signs)
    agreeing = torch.where(trimmed.sign() == signs, trimmed, 0.0)
    return agreeing.sum(dim=0) / (agreeing != 0).sum(dim=0).clamp(min=1)


def peft() -> Any:
    """PEFT's functions over task vectors: ``ties(task_tensors, weights, density)`` and the like."""
    return pytest.importorskip("peft.utils.merge_utils", reason="PEFT is not installed; run make bench")


def mergekit() -> Callable[..., Tensor]:
    """The methods of mergekit by name, over tensors."""
    base = pytest.importorskip("mergekit.merge_methods.base", reason="mergekit is not installed; run make bench")
    registry = importlib.import_module("mergekit.merge_methods.registry")

    def merge(method: str, tensors: Sequence[Tensor], *, base_index: int | None = None, **parameters: Any) -> Tensor:
        group = base.TensorGroup.from_tensors(tensors, base_index=base_index)
        return registry.get(method)([group], parameters=parameters)[0]

    return merge


def mergekit_ties() -> Callable[[Sequence[Tensor], float], Tensor]:
    """The trimming and sign election of mergekit, from task vectors as the others take them."""
    trimming = pytest.importorskip("mergekit.sparsify", reason="mergekit is not installed; run make bench")
    election = importlib.import_module("mergekit.merge_methods.generalized_task_arithmetic")

    def merge(task_vectors: Sequence[Tensor], density: float) -> Tensor:
        trimmed = torch.stack([trimming.sparsify(x, density, "magnitude") for x in task_vectors])
        mask = election.get_mask(trimmed, method="sum")
        return (trimmed * mask).sum(dim=0) / mask.sum(dim=0).clamp(min=1)

    return merge


def loss_landscapes() -> SimpleNamespace:
    """loss-landscapes: its scans, its metrics, and the two directions that its random plane draws."""
    package = pytest.importorskip("loss_landscapes", reason="loss-landscapes is not installed; run make bench")
    vectors = importlib.import_module("loss_landscapes.model_interface.model_parameters")

    def directions(model: nn.Module, distance: float) -> list[list[Tensor]]:
        """As long as ``steps`` of its steps, filter-normalised."""
        start = vectors.ModelParameters(list(model.parameters()))
        one = vectors.rand_u_like(start)
        two = vectors.orthogonal_to(one)
        for direction in (one, two):
            direction.filter_normalize_(start)
            direction.mul_(start.model_norm() / distance / direction.model_norm())
        return [one.parameters, two.parameters]

    return SimpleNamespace(
        linear_interpolation=package.linear_interpolation,
        random_plane=package.random_plane,
        metrics=importlib.import_module("loss_landscapes.metrics"),
        directions=directions,
    )


def rebasin() -> Callable[..., Any]:
    """Matching by weights of rebasin: ``descent(a, b, inputs).rebasin()`` permutes b in place."""
    package = pytest.importorskip("rebasin", reason="rebasin is not installed; run make bench")
    descent: Callable[..., Any] = package.PermutationCoordinateDescent
    return descent
