"""Random programs of reshapes, slices, concatenations, sums and products: no traced group may change their outputs.

``PermutationSpec.from_model`` warns of groups that do, and warnings are errors in tests.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from isthmus.match import PermutationSpec


class Program(nn.Module):
    """A linear layer, random steps on what it makes, and a linear layer that reads what comes out."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.first = nn.Linear(6, draw.choice([8, 12, 18, 24]))
        self.parameters_of_steps = nn.ParameterList()
        self.steps: list[tuple[str, int, object]] = []
        h = self.first(torch.zeros(2, 6))
        for _ in range(draw.randrange(2, 9)):
            possible = self.possible(draw, h)
            if not possible:
                break
            self.steps.append(draw.choice(possible))
            h = self.step(h, *self.steps[-1])
        self.last = nn.Linear(h[0].numel(), 3)

    def parameter(self, *shape: int) -> int:
        self.parameters_of_steps.append(nn.Parameter(torch.ones(shape)))
        return len(self.parameters_of_steps) - 1

    def possible(self, draw: random.Random, h: Tensor) -> list[tuple[str, int, object]]:
        """One step of each kind that fits, along an axis that is drawn."""
        if h.dim() == 1 or h.numel() > 200:
            return []
        dim = draw.randrange(1, h.dim())
        size, last = h.shape[dim], dim == h.dim() - 1
        start = draw.randrange(0, max(size - 1, 1))
        found: list[tuple[str, int, object]] = [
            ("softmax", dim, None),
            ("scale", dim, self.parameter(size, *[1] * (h.dim() - 1 - dim))),
        ]
        found += [("bias", dim, self.parameter(*h.shape[1:])), ("product", dim, self.parameter(h.shape[-1], 4))]
        found += [("split", dim, outer) for outer in (2, 3, 4) if size % outer == 0 and size > outer]
        if not last:
            found += [("merge", dim, None), ("transpose", dim, dim + 1), ("flatten", dim, None)]
        else:
            found.append(("norm", dim, self.parameter(size)))
        if h.dim() > 2:
            found += [("sum", dim, None), ("select", dim, start)]
        if size > 2:
            found += [("slice", dim, (start, draw.randrange(start + 2, size + 1))), ("swap", dim, None)]
        if size % 2 == 0 and size > 2:
            found.append(("gate", dim, None))
        return [*found, ("double", dim, None), ("append", dim, None), ("repeat", dim, None)]

    def step(self, h: Tensor, kind: str, dim: int, detail: object) -> Tensor:
        parameter = self.parameters_of_steps[detail] if kind in ("scale", "bias", "product", "norm") else None
        match kind:
            case "softmax":
                return h.softmax(dim)
            case "scale":
                return h * parameter
            case "bias":
                return h + parameter
            case "product":
                return h @ parameter
            case "norm":
                return functional.layer_norm(h, h.shape[-1:], parameter)
            case "split":
                return h.unflatten(dim, (detail, -1))
            case "merge":
                return h.flatten(dim, dim + 1)
            case "flatten":
                return h.flatten(1)
            case "transpose":
                return h.transpose(dim, detail)
            case "sum":
                return h.sum(dim)
            case "select":
                return h.select(dim, detail)
            case "slice":
                return h.narrow(dim, detail[0], detail[1] - detail[0])
            case "swap":
                return torch.cat(h.tensor_split(2, dim)[::-1], dim)
            case "gate":
                one, other = h.chunk(2, dim)
                return one * other.sigmoid()
            case "double":
                return torch.cat([h, h.tanh()], dim)
            case "append":
                return torch.cat([h, h.sum(dim, keepdim=True)], dim)
            case _:
                return h.repeat_interleave(2, dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for step in self.steps:
            h = self.step(h, *step)
        return self.last(h.tanh().flatten(1))


class Programs(nn.Module):
    """Several programs, traced at once."""

    def __init__(self, seed: int, count: int = 8) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.programs = nn.ModuleList(Program(draw) for _ in range(count))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(program(x) for program in self.programs)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 40))])
def test_random_programs(seed):
    model = Programs(seed)
    spec = PermutationSpec.from_model(model, torch.rand(2, 6))
    assert len(spec.groups) >= len(model.programs) / 2  # most have units that move
