"""Permuting every channel axis of a ResNet-50 against the copy bandwidth and a loop of ``torch.index_select``."""

from __future__ import annotations

import pytest
import torch
import torchvision

from isthmus import ops
from isthmus.flat import FlatState


def units(key):
    """The groups that a tensor's output and input channels belong to; none for the image and the classes."""
    layer = key.rpartition(".")[0]
    stage, _, rest = layer.partition(".")
    if layer in ("conv1", "bn1"):
        return "stem", None
    if layer == "fc":
        return None, "layer4"
    block, _, part = rest.partition(".")
    stream = stage if block != "0" else {"1": "stem"}.get(stage[-1], f"layer{int(stage[-1]) - 1}")
    inner = {n: f"{stage}.{block}.{n}" for n in "12"}
    outputs = inner.get(part[-1], stage) if part.startswith(("conv", "bn")) else stage
    inputs = {"conv2": inner["1"], "conv3": inner["2"]}.get(part, stream)
    return outputs, inputs


@pytest.fixture(scope="module", params=["f32", "bf16"])
def models(request):
    """Two flat states of random values, and the indices of each tensor."""
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[request.param]
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = {k: x.shape for k, x in torchvision.models.resnet50().state_dict().items() if x.is_floating_point()}
    permutations: dict[tuple[str, int], torch.Tensor] = {}

    def index(group, size):
        if group is None:
            return None
        return permutations.setdefault((group, size), torch.randperm(size, generator=generator))

    a, b = (
        FlatState.from_state_dict({k: torch.randn(s, generator=generator).to(dtype) for k, s in shapes.items()})
        for _ in range(2)
    )
    indices = [
        [index(units(key)[axis], n) if axis < 2 else None for axis, n in enumerate(shape)]
        for key, shape in shapes.items()
    ]
    assert len({group for group, _ in permutations}) == len(permutations)  # every group has one size
    return [a[key] for key in shapes], [b[key] for key in shapes], indices


def loop(tensors, indices):
    results = []
    for tensor, entry in zip(tensors, indices, strict=True):
        for axis, index in enumerate(entry):
            if index is not None:
                tensor = tensor.index_select(axis, index)
        results.append(tensor)
    return results


def like(tensors):
    """Warm outputs of a flat state of their own."""
    state = FlatState.from_state_dict({str(i): torch.zeros_like(x) for i, x in enumerate(tensors)})
    return [state[str(i)] for i in range(len(tensors))]


def bench_permute_warm(measure, models):
    tensors, _, indices = models
    out = like(tensors)
    assert all(map(torch.equal, ops.permute(tensors, indices, out=out), loop(tensors, indices)))
    measure(
        lambda: ops.permute(tensors, indices, out=out),
        bytes_moved=2 * sum(x.nbytes for x in tensors),
        peers={"index_select": lambda: loop(tensors, indices)},
    )


def bench_permute_fresh(measure, models):
    tensors, _, indices = models
    measure(
        lambda: ops.permute(tensors, indices),
        bytes_moved=2 * sum(x.nbytes for x in tensors),
        peers={"index_select": lambda: loop(tensors, indices)},
    )


def bench_lerp_permuted_warm(measure, models):
    a, b, indices = models
    out, between = like(a), like(a)
    measure(
        lambda: ops.lerp_permuted(a, b, 0.3, indices, out=out),
        bytes_moved=3 * sum(x.nbytes for x in a),
        peers={
            "permute, then lerp": lambda: ops.lerp(a, ops.permute(b, indices, out=between), 0.3, out=out),
            "lerp alone": lambda: ops.lerp(a, b, 0.3, out=out),
        },
    )
