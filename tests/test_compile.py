"""Ops in compiled functions, and every op of ``torch.ops.isthmus`` as torch.library wants it, on all kernels."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from isthmus import _library, ops
from isthmus.reference import Cuts, Plan
from isthmus.testing import same_bits

# name -> which of its arguments may ask for gradients, and what makes the arguments, without the backend
CASES = {}


def case(name, *differentiable, backend=True):
    return lambda make: CASES.setdefault(name, (differentiable, make, backend))


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plan():
    return Plan(
        based=True,
        weights=torch.tensor([[0.3, 0.9]], dtype=torch.float64),
        scaling=torch.tensor([0.7], dtype=torch.float64),
        vote="total",
        zero_sign="majority",
        tally_rows=False,
        merge_func="mean",
        divisor="count",
        rescale=None,
        keep=Cuts(torch.tensor([[0.5, 0.25]], dtype=torch.float64), torch.tensor([[20, 20]])),
        drop=None,
        lengths=None,
        random=None,
    )


def flat():
    return _library._flat_plan([[draw(5, 4, seed=k)] for k in range(3)], plan())


@case("lerp", 0, 1, 2)
def _():
    return (draw(5, 4), draw(5, 4, seed=1), torch.tensor(0.3)), {}


@case("lerp_out")
def _():
    return (draw(5, 4), draw(5, 4, seed=1), torch.tensor(0.3)), {"out": torch.empty(5, 4)}


@case("weighted_sum", 0, 1)
def _():
    return ([draw(5, 4), draw(5, 4, seed=1)], torch.tensor([0.3, 0.9])), {}


@case("weighted_sum_out")
def _():
    return ([draw(5, 4), draw(5, 4, seed=1)], torch.tensor([0.3, 0.9])), {"out": torch.empty(5, 4)}


@case("permute", 0)
def _():
    return (draw(5, 4), [torch.tensor([3, 0, 4, 2, 1])], [0]), {}


@case("permute_out")
def _():
    return (draw(5, 4), [torch.tensor([3, 0, 4, 2, 1])], [0]), {"out": torch.empty(5, 4)}


@case("permute_adjoint", 0)
def _():
    return (draw(5, 4), [torch.tensor([0, 0, 1, 2, 3])], [0]), {}


@case("multi_linear", 0, 1, 2, 3, 4, 5)
def _():
    weights = draw(4, 6, seed=1), draw(4, 6, seed=2)
    return (draw(5, 6), *weights, draw(4, seed=3), draw(4, seed=4), torch.tensor([0.2, 0.5, 1.0])), {}


@case("consensus", 0, 1, 2)
def _():
    return flat(), {}


@case("consensus_out")
def _():
    return flat(), {"out": [torch.empty(5, 4)]}


@case("consensus_backward", backend=False)
def _():
    return ([draw(5, 4, seed=9)], *flat()), {}


@case("l1")
def _():
    return flat(), {}


@case("select")
def _():
    tensors = [draw(5, 4, seed=k) for k in range(3)]
    return (tensors, True, True, None, torch.tensor([[[3, 5], [2, 20]]]), True), {}


@case("random_keys", backend=False)
def _():
    return (torch.ones(1, 2), "3", ["w"]), {}


def test_every_op_has_a_case():
    registered = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    assert {name for name in registered if name.startswith("isthmus::")} == {f"isthmus::{name}" for name in CASES}


FORMS = [(name, False) for name in CASES] + [(name, True) for name, (places, _, _) in CASES.items() if places]


@pytest.mark.parametrize(("name", "requires_grad"), FORMS)
def test_opcheck(name, requires_grad, kernels):
    differentiable, make, has_backend = CASES[name]
    args, kwargs = make()
    for place in differentiable if requires_grad else ():
        for tensor in args[place] if isinstance(args[place], list) else [args[place]]:
            tensor.requires_grad_()
    torch.library.opcheck(getattr(torch.ops.isthmus, name), (*args, *([kernels] if has_backend else [])), kwargs)


def test_one_graph_for_all_factors(kernels):
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")

    def function(a, b, base, w, ws, scaling):
        between = ops.lerp(a, b, w, backend=kernels)
        first, second = ops.lerp([a, b], [b, a], ws, backend=kernels)
        summed = ops.weighted_sum([between, first, second], torch.cat([ws, w[None]]), backend=kernels)
        merged = ops.consensus(
            [a, summed], ws, base=base, density=0.4, ties="exact", scaling_factor=scaling, backend=kernels
        )
        return summed, merged, ops.multi_linear(a.view(5, 10), b.view(5, 10), base.view(5, 10), ws, backend=kernels)

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    a, b, base = (draw(50, seed=seed) for seed in range(3))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for k, w in enumerate(torch.linspace(0, 1, 20, dtype=torch.float64)):
            factors = w, torch.stack([w, 1.5 - w]), 2 * w
            results = compiled(a, b, base, *factors)
            if k % 6 == 0:
                assert all(map(same_bits, results, function(a, b, base, *factors)))
    graphs = [graph for graph in backend.graphs if any(node.op == "call_function" for node in graph.graph.nodes)]
    assert len(graphs) == 1


def test_gradients_of_compiled_functions(kernels):
    torch._dynamo.reset()

    def function(a, b, w, ws):
        merged = ops.consensus([ops.lerp(a, b, w, backend=kernels), b], ws, backend=kernels)
        return ops.multi_linear(a, merged, b, ws, backend=kernels).square().sum()

    def gradients(function):
        inputs = [draw(6, 4), draw(6, 4, seed=1), torch.tensor(0.3), torch.tensor([0.25, 0.5])]
        inputs = [tensor.requires_grad_() for tensor in inputs]
        return torch.autograd.grad(function(*inputs), inputs)

    compiled = gradients(torch.compile(function, fullgraph=True, backend="aot_eager"))
    for found, expected in zip(compiled, gradients(function), strict=True):
        torch.testing.assert_close(found, expected)
