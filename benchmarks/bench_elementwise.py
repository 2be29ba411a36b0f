"""lerp and weighted_sum against the copy bandwidth and torch's own interpolation."""

from __future__ import annotations

import pytest
import torch

from isthmus import ops
from isthmus.flat import FlatState
from isthmus.merging import lerp_states

COUNT = 25_600_000
DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}


@pytest.fixture(scope="module", params=DTYPES)
def models(request):
    dtype = DTYPES[request.param]
    return [torch.linspace(-1, k, COUNT).to(dtype) for k in range(1, 5)]


def bench_lerp_warm(measure, models):
    a, b, out = models[0], models[1], torch.empty_like(models[0]).zero_()
    measure(
        lambda: ops.lerp(a, b, 0.3, out=out),
        bytes_moved=3 * a.nbytes,
        peers={"torch.lerp": lambda: torch.lerp(a, b, 0.3, out=out)},
    )


def bench_lerp_fresh(measure, models):
    a, b = models[:2]
    measure(
        lambda: ops.lerp(a, b, 0.3),
        bytes_moved=3 * a.nbytes,
        peers={"torch.lerp": lambda: torch.lerp(a, b, 0.3)},
    )


def bench_weighted_sum_of_4_warm(measure, models):
    out = torch.empty_like(models[0]).zero_()
    measure(lambda: ops.weighted_sum(models, [0.1, 0.2, 0.3, 0.4], out=out), bytes_moved=5 * out.nbytes)


def bench_weighted_sum_of_4_fresh(measure, models):
    measure(lambda: ops.weighted_sum(models, [0.1, 0.2, 0.3, 0.4]), bytes_moved=5 * models[0].nbytes)


@pytest.fixture(scope="module")
def small():
    """Two models of 100 small tensors, 10^5 parameters in all."""
    shapes = {f"layer{i}.{name}": shape for i in range(50) for name, shape in (("weight", (40, 49)), ("bias", (40,)))}
    generator = torch.Generator().manual_seed(0)
    a, b = ({key: torch.randn(shape, generator=generator) for key, shape in shapes.items()} for _ in range(2))
    assert sum(tensor.numel() for tensor in a.values()) == 100_000
    return a, b


def bench_small_flat_to_flat(measure, small):
    a, b = small
    flat_a, flat_b = FlatState.from_state_dict(a), FlatState.from_state_dict(b)
    out = flat_a.clone()
    measure(
        lambda: lerp_states(flat_a, flat_b, 0.3, out=out),
        peers={"a loop of torch.lerp": lambda: {key: torch.lerp(a[key], b[key], 0.3) for key in a}},
        rounds=25,
        repeat=100,
    )


def bench_small_dict_to_dict(measure, small):
    a, b = small
    measure(
        lambda: dict(zip(a, ops.lerp(list(a.values()), list(b.values()), 0.3), strict=True)),
        peers={"a loop of torch.lerp": lambda: {key: torch.lerp(a[key], b[key], 0.3) for key in a}},
        rounds=25,
        repeat=100,
    )
