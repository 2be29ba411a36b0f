"""A backend that is asked for by name is the one that runs, op by op."""

from __future__ import annotations

import pytest
import torch

from isthmus import _cpp, _native, ops, reference

A, B = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([2.0, 4.0, -8.0])
ORDER = [torch.tensor([2, 0, 1])]
SQUARE = torch.eye(3)
CALLS = {
    "lerp": lambda backend: ops.lerp(A, B, 0.25, backend=backend),
    "weighted_sum": lambda backend: ops.weighted_sum([A, B], [1.0, 2.0], backend=backend),
    "permute": lambda backend: ops.permute(A, ORDER, backend=backend),
    "lerp_permuted": lambda backend: ops.lerp_permuted(A, B, 0.25, ORDER, backend=backend),
    "consensus": lambda backend: ops.consensus([A, B], backend=backend),
    "trimmed": lambda backend: ops.consensus([A, B], density=0.5, ties="exact", backend=backend),
    "random": lambda backend: ops.consensus([A, B], density=0.5, sparsify="random", names="w", backend=backend),
    "l1": lambda backend: ops.consensus([A, B], density=0.5, rescale="l1", ties="exact", backend=backend),
    "thresholds": lambda backend: ops.thresholds([A, B], 0.5, backend=backend),
    "gram": lambda backend: ops.gram([A, B], backend=backend),
    "slerp": lambda backend: ops.slerp(A, B, 0.25, backend=backend),
    "multi_linear": lambda backend: ops.multi_linear(SQUARE, SQUARE, 2 * SQUARE, [0.5], backend=backend),
    "add_product": lambda backend: ops.add_product(
        torch.zeros(3, 3), SQUARE[:, None], SQUARE[:, None], backend=backend
    ),
    "assignment": lambda backend: ops.linear_sum_assignment(SQUARE, backend=backend),
}
OF_TORCH = {"multi_linear", "add_product"}  # products of matrices, which on the CPU are torch's
OF_THE_HOST = {"assignment"}  # no Triton kernel


def forbidden(*args, **kwargs):
    raise AssertionError("another backend was called")


def forbid(monkeypatch, module):
    names = ["lerp", "weighted_sum", "permute", "lerp_permuted", "consensus", "l1", "select", "gram", "multi_linear"]
    for name in [*names, "add_product", "assign"]:
        if hasattr(module, name):
            monkeypatch.setattr(module, name, forbidden)


@pytest.mark.parametrize("op", CALLS.keys() - OF_THE_HOST)
def test_triton_leaves_nothing_to_other_backends(monkeypatch, op):
    expected = CALLS[op]("reference")
    forbid(monkeypatch, reference)
    forbid(monkeypatch, _cpp)
    found = CALLS[op]("triton")
    if isinstance(expected, torch.Tensor):
        assert torch.allclose(found, expected)


@pytest.mark.parametrize("op", CALLS.keys() - OF_TORCH)
def test_cpp_leaves_nothing_to_other_backends(monkeypatch, op):
    forbid(monkeypatch, reference)
    monkeypatch.setattr(_native, "triton", forbidden)
    CALLS[op]("cpp")


@pytest.mark.parametrize("op", CALLS.keys())
def test_the_reference_leaves_nothing_to_other_backends(monkeypatch, op):
    forbid(monkeypatch, _cpp)
    monkeypatch.setattr(_native, "triton", forbidden)
    CALLS[op]("reference")


def test_assignment_is_left_to_the_host_where_triton_is_asked_for(monkeypatch):
    forbid(monkeypatch, reference)
    assert [x.tolist() for x in CALLS["assignment"]("triton")] == [[0, 1, 2], [1, 2, 0]]
