"""Weight matching of two ResNets of torchvision, against rebasin on the same two, with the objectives compared.

Both get the models, and isthmus the spec: what is timed beside rebasin's whole expression, which traces the model too,
is its ascent alone. Models are initialised at random, from two seeds: no two units are alike, so that ascents are long.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from isthmus.match import PermutationSpec, apply_permutation, weight_matching

from . import peers

PEER_ROUNDS = 1  # a call takes half a minute
INPUTS = (1, 3, 64, 64)
ROUNDS = 3


@pytest.mark.parametrize("architecture", ["resnet18", "resnet50"])
def bench_weight_matching(measure: Callable[..., None], architecture: str, benchmark: Any) -> None:
    torchvision = pytest.importorskip("torchvision")
    a, b = (_model(torchvision, architecture, seed) for seed in (0, 1))
    inputs = torch.randn(INPUTS)
    spec = PermutationSpec.from_model(a, inputs)
    descent = peers.rebasin()

    def whole() -> nn.Module:
        torch.manual_seed(0)
        moved = copy.deepcopy(b)
        descent(a, moved, inputs).rebasin()
        return moved

    ready = []
    for _ in range(PEER_ROUNDS + 1):  # one to warm
        torch.manual_seed(0)
        ready.append(descent(a, copy.deepcopy(b), inputs))

    def ours() -> nn.Module:
        return apply_permutation(spec, weight_matching(spec, a, b).permutation, b)

    # The objective of what each returns: that of the order in which a first sweep would begin.
    reached = {name: weight_matching(spec, a, call(), max_sweeps=1).report.objective_before
               for name, call in {"isthmus": ours, "rebasin": whole}.items()}  # fmt: skip
    assert reached["isthmus"] >= reached["rebasin"]
    measure(
        ours,
        peers={"rebasin": whole, "its ascent alone": lambda: ready.pop().rebasin()},
        rounds=ROUNDS,
        peer_rounds=PEER_ROUNDS,
    )
    benchmark.extra_info["objectives"] = reached


def _model(torchvision: Any, architecture: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = getattr(torchvision.models, architecture)(weights=None)
    return model.eval()
