"""linear_sum_assignment against SciPy on the similarities that matching meets; both run on one thread."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment as scipy_assignment

from isthmus import ops

UNITS = 512  # inputs of a layer, or samples


def normal(generator, *shape):
    return generator.standard_normal(shape, dtype=np.float32)


def independent(generator, n):
    """No structure at all."""
    return normal(generator, n, n)


def lognormal_norms(generator, n):
    """Products of weights whose units have norms of very different size."""
    a, b = (normal(generator, n, UNITS) * np.exp(normal(generator, n, 1)) for _ in range(2))
    return a @ b.T


def relu_products(generator, n):
    """Uncentred products of what units do on samples, not negative: some units are large to all."""
    a, b = (np.maximum(normal(generator, n, UNITS), 0) for _ in range(2))
    return a @ b.T


def relu_products_of_shared_samples(generator, n):
    """The same of two random layers that see the same samples."""
    samples = normal(generator, UNITS, UNITS)
    a, b = (np.maximum(normal(generator, n, UNITS) @ samples, 0) for _ in range(2))
    return a @ b.T / UNITS


def correlations(generator, n):
    """Correlations of the units of two random layers that see the same samples."""
    samples = normal(generator, 64, 2 * UNITS)
    a, b = (np.maximum(normal(generator, n, 64) @ samples, 0) for _ in range(2))
    a, b = ((x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True) for x in (a, b))
    return a @ b.T / (2 * UNITS)


def planted(generator, n):
    """A layer and its copy in another order with noise: each row's nearest column is its own."""
    a = normal(generator, n, UNITS)
    return a @ (a[generator.permutation(n)] + 0.1 * normal(generator, n, UNITS)).T


def planted_in_noise(generator, n):
    """The same with so much noise that a tenth of the rows are nearer to another."""
    a = normal(generator, n, 64)
    return a @ (a[generator.permutation(n)] + 1.5 * normal(generator, n, 64)).T


KINDS = [
    independent,
    lognormal_norms,
    relu_products,
    relu_products_of_shared_samples,
    correlations,
    planted,
    planted_in_noise,
]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same_objective(matrix, found, expected):
    return np.isclose(matrix[found].sum(dtype=np.float64), matrix[expected].sum(dtype=np.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("n", [1024, 2048, 4096])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def bench_assign(measure, kind, n):
    matrix = kind(np.random.default_rng(n), n)
    assert same_objective(matrix, ops.linear_sum_assignment(matrix, True), scipy_assignment(matrix, True))
    measure(
        lambda: ops.linear_sum_assignment(matrix, True),
        peers={"SciPy": lambda: scipy_assignment(matrix, True)},
        rounds=5,
        peer_rounds=3,
    )


def bench_assign_products(measure):
    """Integers of which every row wants the same columns, in the same order: searches go through most rows."""
    matrix = np.outer(np.arange(1024), np.arange(1024)).astype(np.float32)
    measure(
        lambda: ops.linear_sum_assignment(matrix, True),
        peers={"SciPy": lambda: scipy_assignment(matrix, True)},
        rounds=5,
        peer_rounds=3,
    )


@pytest.mark.parametrize(("batch", "n"), [(4096, 8), (1024, 64), (64, 256)])
def bench_assign_a_batch(measure, batch, n):
    matrices = np.random.default_rng(0).standard_normal((batch, n, n), dtype=np.float32)
    measure(
        lambda: ops.linear_sum_assignment(matrices, True),
        peers={"a loop of SciPy": lambda: [scipy_assignment(matrix, True) for matrix in matrices]},
    )


def bench_assign_warm(measure):
    """A similarity that changed a little since its duals were found, against a start from nothing."""
    generator = np.random.default_rng(0)
    matrix = lognormal_norms(generator, 2048)
    duals = ops.linear_sum_assignment(matrix, True, certificate=True)[2]
    changed = matrix + 1e-3 * matrix.std() * normal(generator, 2048, 2048)
    measure(
        lambda: ops.linear_sum_assignment(changed, True, duals=duals),
        peers={"a cold start": lambda: ops.linear_sum_assignment(changed, True)},
    )
