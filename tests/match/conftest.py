"""Small networks as states with specs written by hand, for tests of matching."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from isthmus.match import PermutationSpec


class Networks:
    """Makers of a state dict with random values and its spec."""

    def mlp(self, widths: Sequence[int]) -> tuple[dict[str, Tensor], PermutationSpec]:
        """Linear layers of these widths; the first and the last stay."""
        state, axes = {}, {}
        groups = [None, *(f"h{i}" for i in range(1, len(widths) - 1)), None]
        for i, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
            self._linear(state, axes, f"{i}", fan_in, fan_out, groups[i], groups[i + 1])
        return state, PermutationSpec.from_dict(axes, state)

    def residual(self, inputs: int, width: int, hidden: int, blocks: int = 3) -> tuple[dict, PermutationSpec]:
        """A stream of ``width`` units that each block reads, and adds to what it computes by ``hidden`` units."""
        state, axes = {}, {}
        self._linear(state, axes, "in", inputs, width, None, "stream")
        for k in range(blocks):
            self._linear(state, axes, f"{k}.a", width, hidden, "stream", f"h{k}")
            self._linear(state, axes, f"{k}.b", hidden, width, f"h{k}", "stream")
        self._linear(state, axes, "out", width, 10, "stream", None)
        return state, PermutationSpec.from_dict(axes, state)

    def transformer(self, width: int = 32, heads: int = 4, hidden: int = 64, blocks: int = 2, vocabulary: int = 100):
        """A transformer with tied embeddings, whose heads have columns for query and key and others for the value."""
        state: dict[str, Tensor] = {"wte": 0.02 * torch.randn(vocabulary, width), "wpe": 0.01 * torch.randn(16, width)}
        axes: dict = {"wte": (None, "stream"), "wpe": (None, "stream"), "head": (None, "stream")}
        state["head"] = state["wte"]
        within, sizes = {}, {}
        for k in range(blocks):
            names = {name: f"{k}.{name}" for name in ("heads", "qk", "v", "mlp")}
            within |= {names["qk"]: names["heads"], names["v"]: names["heads"]}
            sizes[names["heads"]] = heads
            columns = {part: (names["heads"], names["v" if part == "v" else "qk"]) for part in "qkv"}
            for norm in ("ln1", "ln2"):
                state[f"{k}.{norm}.weight"] = 1 + 0.1 * torch.randn(width)
                axes[f"{k}.{norm}.weight"] = ("stream",)
            state[f"{k}.qkv.weight"] = 0.02 * torch.randn(3 * width, width)
            state[f"{k}.qkv.bias"] = 0.02 * torch.randn(3 * width)
            axes[f"{k}.qkv.weight"] = ([columns[part] for part in "qkv"], "stream")
            axes[f"{k}.qkv.bias"] = ([columns[part] for part in "qkv"],)
            self._linear(state, axes, f"{k}.proj", width, width, columns["v"], "stream")
            self._linear(state, axes, f"{k}.up", width, hidden, "stream", names["mlp"])
            self._linear(state, axes, f"{k}.down", hidden, width, names["mlp"], "stream")
        return state, PermutationSpec.from_dict(axes, state, within=within, sizes=sizes)

    def grouped_attention(self, width: int = 24, heads: int = 3, queries: int = 2, size: int = 5):
        """Attention whose heads have keys and values, and several queries that share them."""
        shapes = {"q": (heads * queries * size, width), "k": (heads * size, width), "v": (heads * size, width)}
        state = {name: 0.1 * torch.randn(shape) for name, shape in shapes.items()}
        state |= {"o": 0.1 * torch.randn(width, heads * queries * size), "embed": torch.randn(40, width)}
        axes: dict = {"q": (("heads", "queries", size), "stream"), "k": (("heads", size), "stream")}
        axes |= {"v": (("heads", "v"), "stream"), "o": ("stream", ("heads", "queries", "v"))}
        axes |= {"embed": (None, "stream")}
        within, sizes = {"queries": "heads", "v": "heads"}, {"heads": heads, "queries": queries, "v": size}
        return state, PermutationSpec.from_dict(axes, state, within=within, sizes=sizes)

    def resnet18(self, width: int = 16, classes: int = 10) -> tuple[dict, PermutationSpec]:
        """The tensors of a ResNet-18 whose first stage has ``width`` channels."""
        state: dict[str, Tensor] = {}
        axes: dict = {}

        def convolution(name: str, fan_in: int, fan_out: int, size: int, before: str | None, after: str) -> None:
            state[f"{name}.weight"] = torch.randn(fan_out, fan_in, size, size) * (2 / fan_out / size**2) ** 0.5
            axes[f"{name}.weight"] = (after, before, None, None)
            for part, value in {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}.items():
                state[f"{name}.bn.{part}"] = torch.full((fan_out,), value)
                axes[f"{name}.bn.{part}"] = (after,)

        convolution("conv1", 3, width, 3, None, "stage0")
        channels = width
        for stage in range(4):
            wide, stream = width * 2**stage, f"stage{stage}"
            for block in range(2):
                name, before = f"{stage}.{block}", stream if block or stage == 0 else f"stage{stage - 1}"
                convolution(f"{name}.conv1", channels, wide, 3, before, f"{name}.inner")
                convolution(f"{name}.conv2", wide, wide, 3, f"{name}.inner", stream)
                if before != stream:
                    convolution(f"{name}.downsample", channels, wide, 1, before, stream)
                channels = wide
        self._linear(state, axes, "fc", channels, classes, "stage3", None)
        return state, PermutationSpec.from_dict(axes, state)

    def _linear(self, state: dict, axes: dict, name: str, fan_in: int, fan_out: int, before: object, after: object):
        layer = nn.Linear(fan_in, fan_out)
        state[f"{name}.weight"], state[f"{name}.bias"] = layer.weight.detach(), layer.bias.detach()
        axes[f"{name}.weight"], axes[f"{name}.bias"] = (after, before), (after,)


def on_threads(function: Callable[[], Sequence[Mapping[str, Tensor]]]) -> bool:
    """Whether a function finds the same permutations with one, two and three threads."""
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(function())
    finally:
        torch.set_num_threads(before)
    return all(
        torch.equal(order, one[name])
        for other in found[1:]
        for first, one in zip(found[0], other, strict=True)
        for name, order in first.items()
    )


@pytest.fixture
def same_on_threads() -> Callable[[Callable[[], Sequence[Mapping[str, Tensor]]]], bool]:
    return on_threads


@pytest.fixture
def networks() -> Networks:
    return Networks()
