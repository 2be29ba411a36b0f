"""Linear layers between two models against float64 and against layers one after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from isthmus import _native, ops
from isthmus.errors import BackendError, InputError
from isthmus.testing import same_bits

BACKENDS = ["reference", "triton"]
EPS = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}  # one rounding to these is at most half of it


@pytest.fixture(params=BACKENDS)
def product(request):
    """The backends that have this op."""
    module, reason = _native.load_triton()
    if request.param == "triton" and module is None:
        pytest.skip(reason)
    return request.param


def make(layers, rows, inputs, outputs, *, dtype=torch.float32, shared=True, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x = draw(rows, inputs) if shared else draw(layers, rows, inputs)
    return x, [draw(outputs, inputs) for _ in range(2)], [draw(outputs) for _ in range(2)]


def exact(x, weights, alphas, biases=None):
    """The layers in float64, of weights interpolated and rounded as ``lerp`` does; and ‖x‖ ‖W‖ for each element."""
    results, scales = [], []
    for k, alpha in enumerate(alphas):
        inputs, weight = (x if x.dim() == 2 else x[k]).double(), ops.lerp(*weights, alpha).double()
        result = inputs @ weight.T
        results.append(result if biases is None else result + ops.lerp(*biases, alpha).double())
        scales.append(inputs.norm(dim=1)[:, None] * weight.norm(dim=1)[None, :])
    return torch.stack(results), torch.stack(scales)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize(
    ("layers", "rows", "inputs", "outputs"),
    [(1, 70, 130, 65), (2, 64, 64, 64), (3, 5, 7, 3), (5, 65, 300, 1), (6, 1, 1, 129), (9, 3, 16, 5), (64, 6, 33, 10)],
)
def test_float32_is_within_a_millionth(product, layers, rows, inputs, outputs, shared):
    x, weights, biases = make(layers, rows, inputs, outputs, shared=shared)
    alphas = torch.linspace(-0.25, 1.25, layers, dtype=torch.float64).tolist()
    for its in (None, biases):
        a, b = its or (None, None)
        result = ops.multi_linear(x, *weights, alphas, bias_a=a, bias_b=b, backend=product)
        expected, scales = exact(x, weights, alphas, its)
        assert result.shape == (layers, rows, outputs)
        scales = scales if its is None else scales + torch.stack([ops.lerp(*its, w).abs() for w in alphas])[:, None, :]
        assert ((result.double() - expected).abs() <= 1e-6 * scales).all()


def test_it_is_the_loop_of_layers(product):
    x, weights, biases = make(4, 50, 70, 30)
    alphas = [0.0, 0.3, 0.6, 1.0]
    result = ops.multi_linear(x, *weights, alphas, bias_a=biases[0], bias_b=biases[1], backend=product)
    for k, alpha in enumerate(alphas):
        layer = torch.nn.functional.linear(x, ops.lerp(*weights, alpha), ops.lerp(*biases, alpha))
        assert (result[k] - layer).abs().max() <= 1e-6 * layer.abs().max()


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_round_weights_and_results_once(product, dtype, shared):
    x, weights, biases = make(5, 20, 70, 33, dtype=dtype, shared=shared)
    alphas = [0.0, 0.1, 0.5, 0.9, 1.0]
    result = ops.multi_linear(x, *weights, alphas, bias_a=biases[0], bias_b=biases[1], backend=product)
    expected, scales = exact(x, weights, alphas, biases)
    assert result.dtype == dtype
    assert ((result.double() - expected).abs() <= 1e-6 * scales + EPS[dtype] / 2 * expected.abs()).all()


def test_float64(product):
    x, weights, biases = make(3, 33, 40, 35, dtype=torch.float64, shared=False)
    result = ops.multi_linear(x, *weights, [0.2, 0.5, 0.7], bias_a=biases[0], bias_b=biases[1], backend=product)
    expected, scales = exact(x, weights, [0.2, 0.5, 0.7], biases)
    assert ((result - expected).abs() <= 1e-14 * (scales + 1)).all()


def test_weights_are_those_of_lerp_to_the_bit(product):
    """One input that is one picks single weights, of which sums make nothing else."""
    _, weights, _ = make(1, 1, 12, 40)
    weights[1][0, 0], weights[0][1, 0] = 1e30, -0.0
    alphas = [0.0, 0.1, 0.3, 0.499, 0.5, 0.7, 1.0, -2.5]
    result = ops.multi_linear(torch.eye(12), *weights, alphas, backend=product)
    for k, alpha in enumerate(alphas):
        assert torch.equal(result[k].T, ops.lerp(*weights, alpha))


@settings(max_examples=25, deadline=None)
@given(
    layers=st.integers(1, 10),
    rows=st.integers(1, 70),
    inputs=st.integers(1, 140),
    outputs=st.integers(1, 70),
    shared=st.booleans(),
    transposed=st.booleans(),
    seed=st.integers(0, 100),
)
def test_any_sizes_and_strides(layers, rows, inputs, outputs, shared, transposed, seed):
    x, weights, _ = make(layers, rows, inputs, outputs, shared=shared, seed=seed)
    alphas = torch.linspace(0, 1, layers)
    expected, scales = exact(x, weights, alphas.tolist())
    if transposed:
        x, weights = x.mT.contiguous().mT, [weight.T.contiguous().T for weight in weights]
    for backend in BACKENDS if _native.load_triton()[0] else BACKENDS[:1]:
        result = ops.multi_linear(x, *weights, alphas, backend=backend)
        assert ((result.double() - expected).abs() <= 1e-6 * scales).all()


def test_values_by_hand(product):
    a, b = torch.tensor([[1.0, 0.0], [2.0, 4.0]]), torch.tensor([[3.0, 8.0], [2.0, 0.0]])
    x = torch.tensor([[1.0, 2.0]])
    result = ops.multi_linear(
        x, a, b, [0.0, 0.25, 1.0], bias_a=torch.zeros(2), bias_b=torch.tensor([4.0, 8.0]), backend=product
    )
    assert result.tolist() == [[[1.0, 10.0]], [[6.5, 10.0]], [[23.0, 10.0]]]
    separate = torch.stack([x, 2 * x])
    assert ops.multi_linear(separate, a, b, [1.0, 0.0], backend=product).tolist() == [[[19.0, 2.0]], [[2.0, 20.0]]]


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_empty_axes(product, rows, inputs, outputs):
    x, weights, biases = make(2, rows, inputs, outputs)
    result = ops.multi_linear(x, *weights, [0.0, 1.0], bias_a=biases[0], bias_b=biases[1], backend=product)
    assert result.shape == (2, rows, outputs)
    if inputs == 0:
        assert same_bits(result, torch.stack(biases)[:, None, :].expand(2, rows, outputs))


def test_infinity_and_nan_propagate(product):
    x, weights, _ = make(1, 3, 5, 4)
    weights[1][2, 0], x[1, 1] = float("inf"), float("nan")
    result = ops.multi_linear(x, *weights, [0.25, 0.0], backend=product)
    assert result[0, 1].isnan().all()
    assert result[0, [0, 2], 2].isinf().all()
    assert result[1, [0, 2]].isfinite().all()  # where α is 0 the other end is not looked at


def test_inputs_are_not_modified_and_tensors_of_places_are_taken(product):
    x, weights, biases = make(2, 6, 10, 4)
    copies = [tensor.clone() for tensor in (x, *weights, *biases)]
    args = {"bias_a": biases[0], "bias_b": biases[1], "backend": product}
    result = ops.multi_linear(x, *weights, [0.25, 0.5], **args)
    for dtype in (torch.float64, torch.float32):
        assert same_bits(ops.multi_linear(x, *weights, torch.tensor([0.25, 0.5], dtype=dtype), **args), result)
    assert all(same_bits(*pair) for pair in zip(copies, (x, *weights, *biases), strict=True))


ONES = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.multi_linear(ONES, ONES, ONES, []), "alphas is empty"),
        (lambda: ops.multi_linear(ONES, ONES, ONES, [0.5, float("nan")]), r"alphas\[1\] is nan"),
        (lambda: ops.multi_linear(ONES, ONES, ONES, torch.ones(1, 2)), r"alphas is a tensor of shape \(1, 2\)"),
        (lambda: ops.multi_linear(ONES, ONES, ONES, torch.tensor(0.5)), r"alphas is a tensor of shape \(\)"),
        (lambda: ops.multi_linear(ONES, ONES, ONES[1:], [0.5]), r"weight_b has shape \(3, 3\), expected \(4, 3\)"),
        (lambda: ops.multi_linear(ONES[0], ONES, ONES, [0.5]), r"x has shape \(3,\), expected \(n, 3\)"),
        (lambda: ops.multi_linear(ONES[:, :2], ONES, ONES, [0.5]), r"x has shape \(4, 2\), expected \(n, 3\)"),
        (lambda: ops.multi_linear(ONES.expand(3, 4, 3), ONES, ONES, [0.5, 1.0]), r"\(2, n, 3\)"),
        (lambda: ops.multi_linear(ONES, ONES[0], ONES[0], [0.5]), r"weight_a has shape \(3,\), expected two axes"),
        (lambda: ops.multi_linear(ONES, ONES.long(), ONES, [0.5]), "weight_a has dtype torch.int64"),
        (lambda: ops.multi_linear(ONES.to(torch.complex64), ONES, ONES, [0.5]), "x has dtype torch.complex64"),
        (lambda: ops.multi_linear(ONES, ONES, ONES.half(), [0.5]), "weight_b has dtype torch.float16, expected torch."),
        (lambda: ops.multi_linear(ONES, ONES, ONES, [0.5], bias_a=ONES[0]), "bias_a is given and bias_b is None"),
        (lambda: ops.multi_linear(ONES, ONES, ONES, [0.5], bias_a=ONES[0], bias_b=ONES[0]), r"expected \(4,\)"),
        (lambda: ops.multi_linear(ONES.to("meta"), ONES, ONES, [0.5]), "weight_a is on cpu, expected meta"),
        (lambda: ops.multi_linear(3.0, ONES, ONES, [0.5]), "x is a float"),
    ],
)
def test_bad_input_names_the_thing(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_the_compiled_backend_has_none():
    with pytest.raises(BackendError, match="'cpp' has no multi_linear"):
        ops.multi_linear(ONES, ONES, ONES, [0.5], backend="cpp")


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("biased", [True, False], ids=["biased", "plain"])
def test_gradients(shared, biased):
    x, weights, biases = make(2, 3, 4, 2, dtype=torch.float64, shared=shared)
    alphas = torch.tensor([0.3, 0.8], dtype=torch.float64)
    inputs = [tensor.requires_grad_() for tensor in (x, *weights, alphas, *(biases if biased else ()))]

    def function(x, a, b, alphas, bias_a=None, bias_b=None):
        return ops.multi_linear(x, a, b, alphas, bias_a=bias_a, bias_b=bias_b)

    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


def test_gradients_of_some_inputs_in_low_precision(product):
    x, weights, biases = make(2, 8, 6, 4, dtype=torch.bfloat16)
    alphas = torch.tensor([0.25, 1.0], requires_grad=True)
    weights[1].requires_grad_()
    ops.multi_linear(x, *weights, alphas, bias_a=biases[0], bias_b=biases[1], backend=product).sum().backward()
    sums = x.float().sum(0)
    assert torch.allclose(weights[1].grad.float(), (1.25 * sums).expand(4, 6), rtol=1e-2)
    slope = (weights[1] - weights[0]).detach().float() @ sums + 8 * (biases[1] - biases[0]).float()
    assert torch.allclose(alphas.grad, slope.sum().expand(2), rtol=1e-1, atol=1e-1)
