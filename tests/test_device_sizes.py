"""Blocks, tiles and steps of the sizes that a GPU takes; in the interpreter all other tests take larger ones."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernels_with_the_sizes_of_a_gpu():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("there is no Triton here")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def _check() -> None:
    """Compare the ops with the reference; run where kernels have not been imported."""
    sys.path.insert(0, str(Path(__file__).parent))
    import conftest  # noqa: F401 - it makes the interpreter quicker
    import torch

    from isthmus.kernels import numbers

    numbers.INTERPRETED, numbers.BLOCK = False, 2048  # as where a GPU is: other modules read them when imported
    from isthmus import ops, testing
    from isthmus._gpu import triton
    from isthmus.kernels import select, similarity, trimming

    triton.INTERPRETED = True  # the kernels run on the CPU all the same
    assert (triton.BLOCK, select.STEPS, similarity._ROWS, trimming.block_of(9, 4096)) == (2048, 16, 16, 4096)

    torch.manual_seed(1)
    shapes = {(4_501,): torch.float32, (2, 1025): torch.bfloat16, (7, 11): torch.float64, (5, 3): torch.float16}
    x = [[torch.randn(shape).to(dtype) for shape, dtype in shapes.items()] for _ in range(3)]
    x[1][0] = (x[1][0] * 16).round()  # many ties
    base = [torch.randn_like(tensor) for tensor in x[0]]
    small = [column[1:] for column in x]
    index = [[torch.randperm(n) if n > 3 else None for n in tensor.shape] for tensor in x[0]]
    names = [f"w{row}" for row in range(len(shapes))]
    calls = {
        "lerp": lambda b: ops.lerp(x[0], x[1], 0.3, backend=b),
        "weighted_sum": lambda b: ops.weighted_sum(x, [1.0, -0.3, 0.7], backend=b),
        "ties": lambda b: ops.consensus(x, density=0.2, base=base, backend=b),
        "by_piece": lambda b: ops.consensus(x, density=0.5, scope="row", ties="exact", backend=b),
        "outliers": lambda b: ops.consensus(x, density=0.5, sparsify="outliers", gamma=0.1, scope="tensor", backend=b),
        "random": lambda b: ops.consensus(
            x, density=0.3, sparsify="random", rescale="inverse_density", names=names, backend=b
        ),
        "by_rank": lambda b: ops.consensus(
            small, density=0.3, sparsify="magnitude_random", epsilon=0.1, names=names[1:], backend=b
        ),
        "many": lambda b: ops.consensus(small * 3, density=0.4, base=base[1:], scope="tensor", backend=b),
        "cuts": lambda b: ops.thresholds(x, 0.35, scope="tensor", backend=b).keep,
        "whole": lambda b: ops.thresholds(x, 0.35, ties="exact", backend=b).keep,
        "permute": lambda b: ops.permute(x[0], index, backend=b),
        "lerp_permuted": lambda b: ops.lerp_permuted(x[0], x[1], 0.3, index, backend=b),
    }
    for name, call in calls.items():
        for expected, found in zip(call("reference"), call("triton"), strict=True):
            equal = torch.equal if expected.dtype == torch.int64 else testing.same_bits
            assert equal(found, expected), name
    a, b = torch.randn(70, 3, 70), torch.randn(70, 3, 65)
    sums = {
        "gram": lambda backend: ops.gram(x, base=base, backend=backend),
        "rows": lambda backend: ops.gram(x, row_wise=True, backend=backend),
        "l1": lambda backend: ops.consensus(x, density=0.5, rescale="l1", scope="tensor", backend=backend)[0],
        "multi_linear": lambda backend: ops.multi_linear(
            a[:, 0], b[:70, 0, :1].expand(70, 70), a[:70, 1], [0.1, 0.8], backend=backend
        ),
        "add_product": lambda backend: ops.add_product(
            torch.zeros(70, 65), a, b, torch.arange(70).flip(0), backend=backend
        ),
    }
    for name, call in sums.items():
        expected, found = call("reference"), call("triton")
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=name)


if __name__ == "__main__":
    _check()
