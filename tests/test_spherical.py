"""Norms, dots and the merges along arcs: values by hand, their definitions in float64, limits, structure and errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus import _dispatch, ops, reference, spherical
from isthmus.errors import InputError
from isthmus.testing import FLOATS, same_bits

HALF = math.sqrt(0.5)
RULES = ["slerp", "nuslerp", "multislerp", "karcher", "model_stock"]


def tensor(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def at(degrees, length=1.0, dtype=torch.float64):
    return tensor(length * math.cos(math.radians(degrees)), length * math.sin(math.radians(degrees)), dtype=dtype)


def normal(*shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(result, *values, tolerance=1e-6):
    return torch.allclose(result.double(), tensor(*values, dtype=torch.float64), rtol=tolerance, atol=tolerance)


def call(rule, a, b, base=None, **options):
    """Any of the rules on two models."""
    if rule == "slerp":
        return ops.slerp(a, b, 0.3, **options)
    if rule == "model_stock":
        return ops.model_stock([a, b], base=a if base is None else base, **options)
    arguments = ([a, b], [0.7, 0.3])
    return getattr(ops, rule)(*arguments, **options)


# --- norms and dots ---------------------------------------------------------------------------------------------------


def dot(x, y):
    """The dot product in the order that is promised."""
    total = 0.0
    for start in range(0, len(x), 4096):
        lanes = [0.0] * 16
        for k, (p, q) in enumerate(zip(x[start : start + 4096], y[start : start + 4096], strict=True)):
            lanes[k % 16] += p * q
        block = 0.0
        for lane in lanes:
            block += lane
        total += block
    return total


def assert_dots(backend, got, expected, x, y):
    """To the bit, or on a GPU up to the bound that ``isthmus.kernels.reductions`` states."""
    if backend != "triton":
        assert got == expected
        return
    terms = (x.double() * y.double()).abs().sum().item()
    assert abs(got - expected) <= 2**-53 * (x.numel() / 2048 + 600) * terms


@pytest.mark.parametrize("length", [0, 1, 15, 17, 4096, 4099, 70_001])
def test_dots_are_added_up_in_the_promised_order(backend, threads, length):
    a, b, c = (normal(length, seed=k) for k in range(3))
    gram = _dispatch.gram([[a], [b], [c]], based=False, backend=backend)
    assert gram.shape == (1, 3, 3)
    assert gram[0, 0, 1].item() == gram[0, 1, 0].item()
    assert_dots(backend, gram[0, 0, 1].item(), dot(a.tolist(), b.tolist()), a, b)
    assert_dots(backend, gram[0, 2, 2].item(), dot(c.tolist(), c.tolist()), c, c)
    gram = _dispatch.gram([[a], [b], [c]], based=True, backend=backend)
    assert_dots(backend, gram[0, 0, 1].item(), dot((b - a).tolist(), (c - a).tolist()), b - a, c - a)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dots_of_rows(backend, dtype):
    shapes = [(3, 5000), (70, 9), (4,)]
    columns = [[normal(*shape, seed=k, dtype=dtype) for shape in shapes] for k in range(3)]
    gram = _dispatch.gram(columns, based=True, lengths=[5000, 9, 4], backend=backend)
    assert gram.shape == (3 + 70 + 1, 2, 2)
    compute = torch.promote_types(dtype, torch.float32)
    for vector, (row, line) in {2: (0, 2), 72: (1, 69), 73: (2, None)}.items():
        x, y, z = (column[row].to(compute) if line is None else column[row][line].to(compute) for column in columns)
        assert_dots(backend, gram[vector, 0, 1].item(), dot((y - x).tolist(), (z - x).tolist()), y - x, z - x)


def test_dots_of_many_elements_equal_the_reference(backend, threads):
    columns = [[normal(3_000_001, seed=k), normal(2, 33, seed=k)] for k in range(2)]
    expected = reference.gram(columns, based=False)
    got = _dispatch.gram(columns, based=False, backend=backend)
    assert got.shape == expected.shape
    for row, i, j in itertools.product(range(2), repeat=3):
        assert_dots(backend, got[row, i, j].item(), expected[row, i, j].item(), columns[i][row], columns[j][row])


@pytest.mark.parametrize(
    ("most", "grids"), [(2**31 - 1, [3 * 65536]), (2 * 65536, [2 * 65536, 65536]), (1, [65536] * 3)]
)
def test_a_launch_has_one_axis_of_as_many_programs_as_a_gpu_takes(monkeypatch, most, grids):
    reductions = pytest.importorskip("isthmus.kernels.reductions")
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append((grid, len(args[1]), len(args[3])))

    monkeypatch.setattr(reductions, "_add_up", Kernel())
    monkeypatch.setattr(reductions, "_PROGRAMS", most)
    counts = torch.tensor([1, 2, 3])
    assert reductions._totals(torch.zeros(6, 256, 256), counts.cumsum(0) - counts, counts).shape == (3, 256, 256)
    assert launched == [((programs,), programs // 65536, programs // 65536) for programs in grids]


def test_totals_in_several_launches(monkeypatch):
    pytest.importorskip("isthmus.kernels.reductions")
    columns = [[torch.randn(70_001), torch.randn(9)] for _ in range(3)]
    expected = _dispatch.gram(columns, based=False, backend="triton")
    monkeypatch.setattr("isthmus.kernels.reductions._PROGRAMS", 4)
    assert torch.equal(_dispatch.gram(columns, based=False, backend="triton"), expected)


def test_gram_by_hand(backend):
    a, b, base = (
        tensor([3.0, 4.0], [0.0, 1.0]),
        tensor([1.0, 2.0], [5.0, -1.0]),
        tensor([1.0, 1.0], [0.0, 0.0], dtype=torch.float16),
    )
    assert ops.gram([a, b], backend=backend).tolist() == [[[26.0, 10.0], [10.0, 31.0]]]
    assert ops.gram([a, b], base=base, backend=backend).tolist() == [[[14.0, 2.0], [2.0, 27.0]]]
    rows = ops.gram([[a, a[0]], [b, b[0]]], row_wise=True, backend=backend)
    assert rows[:, 0, 1].tolist() == [11.0, -1.0, 11.0]
    assert ops.gram([[], []], backend=backend).shape == (0, 2, 2)
    complexes = [torch.view_as_complex(x) for x in (a, b)]
    assert torch.equal(ops.gram(complexes, backend=backend), ops.gram([a, b], backend=backend))
    assert ops.gram([tensor(1.0, math.nan), tensor(1.0, 2.0)], backend=backend)[0].isnan().tolist() == [
        [True, True],
        [True, False],
    ]


# --- slerp ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_slerp_by_hand(backend, dtype):
    store = 4 * torch.finfo(dtype).eps
    a, b = tensor(1.0, 0.0, dtype=dtype), tensor(-HALF, HALF, dtype=dtype)
    assert close(ops.slerp(a, b, 0.5, backend=backend), 0.38268343, 0.92387953, tolerance=max(store, 1e-7))
    # Perpendicular, of lengths 2 and 4: sin 67.5° · 2 and sin 22.5° · 4.
    a, b = tensor(2.0, 0.0, dtype=dtype), tensor(0.0, 4.0, dtype=dtype)
    assert close(ops.slerp(a, b, 0.25, backend=backend), 1.84775907, 1.53073373, tolerance=max(store, 1e-7))


def test_nearly_parallel_vectors_are_interpolated_linearly_with_the_ends_in_order(backend):
    a, b = tensor(1.0, 0.0), tensor(1.0, 0.001)
    assert torch.equal(ops.slerp(a, b, 0.25, backend=backend), tensor(1.0, 0.00025))
    assert same_bits(ops.slerp(a, b, 0.75, backend=backend), ops.lerp(a, b, 0.75, backend=backend))
    # cos 1.8° = 0.99951 is above the limit, cos 1.9° = 0.99945 is not.
    for degrees, linear in ((1.8, True), (1.9, False)):
        result = ops.slerp(at(0), at(degrees), 0.5, backend=backend)
        assert (result.norm().item() < 1 - 1e-5) == linear


def test_opposite_and_zero_vectors_are_interpolated_linearly(backend):
    a = tensor(3.0, -4.0)
    assert torch.equal(ops.slerp(a, -a, 0.25, backend=backend), a / 2)
    assert torch.equal(ops.slerp(a, -a, 0.5, backend=backend), tensor(0.0, 0.0))
    zero = torch.zeros(2)
    assert torch.equal(ops.slerp(zero, a, 0.25, backend=backend), a / 4)
    assert torch.equal(ops.slerp(a, zero, 0.25, backend=backend), 3 * a / 4)
    assert torch.equal(ops.slerp(zero, zero, 0.25, backend=backend), zero)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_ends_and_equal_vectors_are_exact(backend, dtype):
    a, b = (normal(1003, seed=k, dtype=dtype) for k in range(2))
    a[:2] = tensor(-0.0, 0.0, dtype=dtype)
    assert same_bits(ops.slerp(a, b, 0.0, backend=backend), a)
    assert same_bits(ops.slerp(a, b, 1.0, backend=backend), b)
    assert torch.equal(ops.slerp(a, a.clone(), 0.3, backend=backend), a)
    assert torch.equal(ops.nuslerp([a, a.clone()], [0.3, 0.9], backend=backend), a)
    base = normal(1003, seed=2, dtype=dtype)
    assert same_bits(ops.nuslerp([a, b], [0.0, 2.0], base=base, backend=backend), b)


def test_norms_of_float16_do_not_overflow(backend):
    a, b = torch.full((5,), 256.0, dtype=torch.float16), tensor(256, -256, 256, -256, 0, dtype=torch.float16)
    # Perpendicular, 5 · 256² = 327680 is above the largest float16.
    result = ops.slerp(a, b, 0.5, backend=backend)
    assert result.tolist() == ((a.double() + b.double()) * HALF).half().tolist()
    a, b = tensor(1000.0, 0.0, dtype=torch.float16), tensor(0.0, 1000.0, dtype=torch.float16)
    assert ops.slerp(a, b, 0.5, backend=backend).tolist() == [707.0, 707.0]
    assert ops.multislerp([a, b], backend=backend).tolist() == [707.0, 707.0]
    assert ops.karcher([a, b], backend=backend).tolist() == [707.0, 707.0]


def test_slerp_goes_on_beyond_its_ends(backend):
    assert close(ops.slerp(at(0), at(90), 1.5, backend=backend), *at(135).tolist())
    assert close(ops.slerp(at(0), at(90), -0.5, backend=backend), *at(-45).tolist())


def test_slerp_takes_a_t_for_each_tensor(backend):
    a, b = [at(0), at(0), at(0)], [at(90), at(90), at(90)]
    for ts in ([0.0, 0.5, 1.0], torch.tensor([0.0, 0.5, 1.0])):
        result = ops.slerp(a, b, ts, backend=backend)
        assert torch.equal(result[0], at(0))
        assert close(result[1], HALF, HALF)
        assert torch.equal(result[2], at(90))
    with pytest.raises(InputError, match=r"t.* has 2 entries, expected 3"):
        ops.slerp(a, b, [0.5, 0.5])


def test_one_angle_for_the_whole_model(backend):
    a = [normal(30, 7, seed=0), normal(11, seed=1), torch.zeros(3)]
    b = [normal(30, 7, seed=2), normal(11, seed=3), torch.ones(3)]
    whole = ops.slerp(a, b, 0.3, whole=True, backend=backend)
    one = ops.slerp(torch.cat([x.reshape(-1) for x in a]), torch.cat([x.reshape(-1) for x in b]), 0.3, backend=backend)
    assert torch.allclose(torch.cat([x.reshape(-1) for x in whole]), one, rtol=1e-6, atol=1e-7)
    apart = ops.slerp(a, b, 0.3, backend=backend)
    assert not torch.allclose(whole[1], apart[1], rtol=1e-3)


angles = st.floats(2.0, 178.0)
fractions = st.floats(0.0, 1.0)


@given(angles, fractions)
def test_unit_vectors_stay_unit_vectors(degrees, t):
    a, b = at(10), at(10 + degrees)
    assert close(ops.slerp(a, b, t), *at(10 + t * degrees).tolist(), tolerance=1e-12)


@given(angles, st.floats(-0.5, 1.5), st.floats(0.01, 100.0), st.integers(-20, 20))
def test_slerp_is_symmetric_and_scales(degrees, t, length, power):
    a, b = at(33), at(33 + degrees, length)
    expected = ops.slerp(a, b, t)
    assert torch.allclose(ops.slerp(b, a, 1 - t), expected, rtol=1e-11, atol=1e-12 * length)
    assert torch.equal(ops.slerp(a * 2.0**power, b * 2.0**power, t), expected * 2.0**power)


# --- nuslerp ----------------------------------------------------------------------------------------------------------


def test_nuslerp_by_hand(backend):
    a, b, base = tensor(2.0, 0.0), tensor(0.0, 4.0), tensor(1.0, 1.0)
    # t = 3/4: sin 22.5° · 2 and sin 67.5° · 4.
    assert close(ops.nuslerp([a, b], [1.0, 3.0], backend=backend), 0.76536686, 3.69551813)
    result = ops.nuslerp([a + base, b + base], [1.0, 3.0], base=base, backend=backend)
    assert close(result, 1.76536686, 4.69551813)
    # One degree apart slerp would be linear: sin ½° / sin 1° = 0.500019.
    expected = (at(0) + at(1)) * (math.sin(math.radians(0.5)) / math.sin(math.radians(1)))
    assert close(ops.nuslerp([at(0), at(1)], [1.0, 1.0], backend=backend), *expected.tolist(), tolerance=1e-13)


def test_nuslerp_of_colinear_and_zero_vectors_is_linear(backend):
    a, zero = tensor(3.0, -4.0), torch.zeros(2)
    assert torch.equal(ops.nuslerp([a, -2 * a], [3.0, 1.0], backend=backend), a / 4)
    assert torch.equal(ops.nuslerp([a, zero], [3.0, 1.0], backend=backend), 3 * a / 4)
    assert torch.equal(ops.nuslerp([a, 3 * a], [3.0, 1.0], base=a, backend=backend), 3 * a / 2)
    assert torch.equal(ops.nuslerp([a, a], [3.0, 1.0], base=a, backend=backend), a)


def test_nuslerp_of_rows(backend):
    a, b = normal(5, 6, seed=0), normal(5, 6, seed=1)
    base = normal(5, 6, seed=2)
    for options in ({}, {"base": base}):
        rows = ops.nuslerp([a, b], [1.0, 2.0], row_wise=True, backend=backend, **options)
        for k in range(5):
            part = {name: x[k] for name, x in options.items()}
            assert same_bits(rows[k], ops.nuslerp([a[k], b[k]], [1.0, 2.0], backend=backend, **part))
    mixed = ops.nuslerp([[a, a[0], a[0, 0]], [b, b[0], b[0, 0]]], [1.0, 2.0], row_wise=True, backend=backend)
    assert [x.shape for x in mixed] == [(5, 6), (6,), ()]
    assert same_bits(mixed[1], ops.nuslerp([a[0], b[0]], [1.0, 2.0], backend=backend))


def test_nuslerp_takes_two_models_and_weights_with_a_sum():
    a = torch.ones(2)
    with pytest.raises(InputError, match=r"nuslerp got 3 models, expected exactly 2"):
        ops.nuslerp([a, a, a], [1.0, 1.0, 1.0])
    with pytest.raises(InputError, match=r"weights 1.0, -1.0 sum to zero"):
        ops.nuslerp([a, a], [1.0, -1.0])


# --- multislerp -------------------------------------------------------------------------------------------------------


def multislerp_by_definition(tensors, weights, epsilon=1e-8):
    """The exponential map of the weighted tangent vectors at the normalised weighted mean, in float64."""
    x = torch.stack([t.double().reshape(-1) for t in tensors])
    w = torch.tensor(weights, dtype=torch.float64)[:, None]
    norms = x.norm(dim=1, keepdim=True)
    units = x / (norms + epsilon)
    mean = (w * units).sum(0)
    mean /= mean.norm()
    tangent = (w * (units - (units @ mean)[:, None] * mean)).sum(0)
    length = tangent.norm() + epsilon
    point = mean * torch.cos(length) + tangent * torch.sin(length) / length
    return (point * (w * norms).sum()).reshape(tensors[0].shape)


def test_multislerp_by_hand(backend):
    # The direction of (½, ½), the length of (3 + 4) / 2.
    a, b = tensor(3.0, 0.0), tensor(0.0, 4.0)
    assert close(ops.multislerp([a, b], backend=backend), 3.5 * HALF, 3.5 * HALF)
    assert close(ops.multislerp([a, b], [3.0, 1.0], backend=backend), 3.25 * 0.9486833, 3.25 * 0.3162278)
    base = tensor(10.0, -10.0)
    result = ops.multislerp([a + base, b + base], base=base, backend=backend)
    assert close(result, 10 + 3.5 * HALF, -10 + 3.5 * HALF)
    # Raw weights of 1: the direction as before, the length 3 + 4.
    assert close(ops.multislerp([a, b], [1.0, 1.0], normalize=False, backend=backend), 7 * HALF, 7 * HALF)


@settings(max_examples=30)
@given(st.integers(2, 5), st.integers(0, 10_000), st.lists(st.floats(0.05, 3.0), min_size=5, max_size=5))
def test_multislerp_is_its_definition(models, seed, weights):
    tensors = [normal(4, 9, seed=seed + k, dtype=torch.float64) for k in range(models)]
    shares = [w / sum(weights[:models]) for w in weights[:models]]
    expected = multislerp_by_definition(tensors, shares)
    assert torch.allclose(ops.multislerp(tensors, weights[:models]), expected, rtol=1e-9, atol=1e-10)


def test_multislerp_where_directions_cancel(backend):
    a, b = tensor(1.0, 0.0), tensor(-3.0, 0.0)
    assert torch.equal(ops.multislerp([a, b], backend=backend), tensor(-1.0, 0.0))
    assert torch.equal(ops.multislerp([a, b], base=tensor(0.0, 0.0), backend=backend), tensor(-1.0, 0.0))
    three = [at(k, dtype=torch.float32) for k in (0, 120, 240)]
    with pytest.raises(InputError, match=r"multislerp of lm_head: .*3 models cancel.*Change the weights"):
        ops.multislerp(three, names=["lm_head"], backend=backend)


def test_multislerp_of_one_model_and_of_zeros(backend):
    a, base = normal(100, seed=0), normal(100, seed=1)
    assert same_bits(ops.multislerp([a], [0.3], base=base, backend=backend), a)
    assert same_bits(ops.multislerp([base] * 3, base=base, backend=backend), base)
    assert torch.equal(ops.multislerp([torch.zeros(3)] * 3, backend=backend), torch.zeros(3))
    assert torch.equal(ops.multislerp([[a, torch.zeros(2)], [a, torch.ones(2)]], backend=backend)[1], tensor(0.5, 0.5))


# --- karcher ----------------------------------------------------------------------------------------------------------


def test_karcher_on_a_circle_is_the_mean_of_the_angles(backend):
    vectors = [at(0, 2.0), at(30, 3.0), at(90, 7.0)]
    assert close(ops.karcher(vectors, backend=backend), *at(40, 4.0).tolist(), tolerance=1e-5)
    # Weights ½, ¼, ¼: the angle is 30°, the length 3.5.
    result = ops.karcher(vectors, [2.0, 1.0, 1.0], backend=backend)
    assert close(result, *at(30, 3.5).tolist(), tolerance=1e-5)


@settings(max_examples=30)
@given(st.integers(2, 5), st.integers(0, 10_000))
def test_the_weighted_logarithms_at_the_karcher_mean_cancel(models, seed):
    shared = 2 * normal(12, seed=seed + 99, dtype=torch.float64)
    tensors = [shared + normal(12, seed=seed + k, dtype=torch.float64) for k in range(models)]
    result = ops.karcher(tensors, iterations=50, tolerance=1e-6)
    assert math.isclose(result.norm(), sum(x.norm() for x in tensors) / models, rel_tol=1e-6)
    mean = result / result.norm()
    total = torch.zeros_like(mean)
    for x in tensors:
        cosine = (x @ mean) / x.norm()
        tangent = x / x.norm() - cosine * mean
        total += torch.acos(cosine) * tangent / tangent.norm()
    assert total.norm() / models < 2e-6


def test_karcher_of_zero_opposite_and_equal_vectors(backend):
    zero, x, y = torch.zeros(2), tensor(2.0, 0.0), tensor(0.0, 2.0)
    assert close(ops.karcher([zero, x, y], backend=backend), 4 / 3 * HALF, 4 / 3 * HALF)
    assert torch.equal(ops.karcher([zero, zero], backend=backend), zero)
    assert close(ops.karcher([x, -2 * x], backend=backend), 3.0, 0.0)
    assert close(ops.karcher([x, x, x], backend=backend), 2.0, 0.0)
    assert same_bits(ops.karcher([y], backend=backend), y)
    with pytest.raises(InputError, match=r"weights 1\.0, -1\.0 sum to zero"):
        ops.karcher([zero, x, y], [3.0, 1.0, -1.0])


def test_karcher_stops_after_its_iterations():
    vectors = [at(0), at(10), at(120)]
    start = sum(vectors) / sum(vectors).norm()
    assert close(ops.karcher(vectors, iterations=0), *start.tolist(), tolerance=1e-12)
    with pytest.raises(InputError, match="iterations=-1"):
        ops.karcher(vectors, iterations=-1)


# --- model_stock ------------------------------------------------------------------------------------------------------


def test_model_stock_by_hand(backend):
    base, a, b = tensor(10.0, 20.0), tensor(1.0, 0.0), tensor(0.5, 0.8660254)
    # c = cos 60° = ½, N = 2: t = 2/3, the mean (0.75, 0.4330127).
    result = ops.model_stock([base + a, base + b], base, backend=backend)
    assert close(result, 10 + 0.5, 20 + 0.2886751)
    # Perpendicular task vectors say nothing: the base. The third is zero: c = (½ + 0 + 0) / 3 = 1/6, t = 3/8.
    assert torch.equal(ops.model_stock([base + a, base + tensor(0.0, 3.0)], base, backend=backend), base)
    result = ops.model_stock([base + a, base + b, base], base, backend=backend)
    assert close(result, 10 + 0.1875, 20 + 0.1082532)


def test_model_stock_of_equal_models_is_the_model_and_of_opposite_ones_the_base(backend):
    base, tau = tensor(1.0, -2.0), tensor(0.5, 0.25)
    assert torch.equal(ops.model_stock([base + tau] * 4, base, backend=backend), base + tau)
    # c = -1, N = 2: the denominator is zero.
    assert torch.equal(ops.model_stock([base + tau, base - tau], base, backend=backend), base)


def test_model_stock_of_rows(backend):
    base = normal(6, 8, seed=9)
    models = [base + normal(6, 8, seed=k) + 1 for k in range(3)]
    rows = ops.model_stock(models, base, filter_wise=True, backend=backend)
    for k in range(6):
        assert same_bits(rows[k], ops.model_stock([x[k] for x in models], base[k], backend=backend))
    assert not same_bits(rows, ops.model_stock(models, base, backend=backend))


def test_model_stock_needs_two_models():
    with pytest.raises(InputError, match=r"model_stock got 1 models, expected at least 2 besides a base"):
        ops.model_stock([torch.ones(2)], torch.zeros(2))


# --- what the rules share ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_equal_the_reference(backend, threads, monkeypatch, rule, dtype):
    shapes = [(), (0, 3), (1,), (33, 65), (9001,)]
    a, b, c = ([normal(*shape, seed=k, dtype=dtype) for shape in shapes] for k in range(3))
    with monkeypatch.context() as patch:
        if backend == "triton":  # dots are those of the reference up to a bound: the same for both here
            gram = _dispatch.gram
            patch.setattr(_dispatch, "gram", lambda *args, **options: gram(*args, **options | {"backend": backend}))
        expected = call(rule, a, b, base=c, backend="reference")
    result = call(rule, a, b, base=c, backend=backend)
    assert all(same_bits(x, y) for x, y in zip(result, expected, strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_any_strides_and_out(backend, rule):
    a, b, c = (normal(6, 10, seed=k) for k in range(3))
    expected = call(rule, a, b, base=c, backend=backend)
    views = [x.t().contiguous().t() for x in (a, b, c)]
    result = call(rule, *views[:2], base=views[2], backend=backend)
    assert same_bits(result, expected)
    assert result.stride() == views[0].stride()
    out = torch.zeros(6, 10, 2)[..., 0]
    assert call(rule, a, b, base=c, out=out, backend=backend) is out
    assert same_bits(out, expected)
    inplace = b.clone()
    call(rule, a, inplace, base=c, out=inplace, backend=backend)
    assert same_bits(inplace, expected)
    with pytest.raises(InputError, match="overlap"):
        call(rule, a, b, base=c, out=b.view(-1).view(10, 6).t(), backend=backend)


@pytest.mark.parametrize("strided", [False, True])
def test_rows_of_any_strides(backend, strided):
    a, b = normal(7, 5, seed=0), normal(7, 5, seed=1)
    expected = ops.nuslerp([a, b], [1.0, 2.0], row_wise=True, backend=backend)
    out = torch.zeros(7, 5, 2)[..., 0] if strided else torch.zeros(7, 5)
    x = a.t().contiguous().t() if strided else a
    assert ops.nuslerp([x, b], [1.0, 2.0], row_wise=True, out=out, backend=backend) is out
    assert same_bits(out, expected)
    assert same_bits(ops.nuslerp([x, b], [1.0, 2.0], row_wise=True, backend=backend), expected)
    target = b.clone()
    ops.nuslerp([a, target], [1.0, 2.0], row_wise=True, out=target, backend=backend)
    assert same_bits(target, expected)


def test_rows_are_written_some_at_a_time(backend, monkeypatch):
    shapes = [(7, 5), (0, 3), (4,), (2, 3, 5)]
    a, b, base = ([normal(*shape, seed=k) for shape in shapes] for k in range(3))
    b[0][3] = a[0][3]  # a linear interpolation among the arcs
    for options in ({}, {"base": base}):
        expected = ops.nuslerp([a, b], [1.0, 2.0], row_wise=True, backend=backend, **options)
        with monkeypatch.context() as patch:
            patch.setattr("isthmus.ops.spherical._ROWS", 2)
            result = ops.nuslerp([a, b], [1.0, 2.0], row_wise=True, backend=backend, **options)
        assert all(same_bits(x, y) for x, y in zip(result, expected, strict=True))


def test_mixed_dtypes_take_the_type_of_the_first_or_of_the_base(backend):
    a, b = tensor(1.0, 0.0, dtype=torch.bfloat16), tensor(0.0, 1.0)
    assert ops.slerp(a, b, 0.5, backend=backend).dtype == torch.bfloat16
    assert ops.slerp(a, b, 1.0, backend=backend).dtype == torch.bfloat16
    base = torch.zeros(2, dtype=torch.float16)
    for weights in ([1.0, 1.0], [1.0, 0.0]):
        assert ops.nuslerp([a, b], weights, base=base, backend=backend).dtype == torch.float16


def test_a_complex_tensor_is_a_vector_of_real_numbers(backend):
    a, b = normal(3, 4, 2, seed=0), normal(3, 4, 2, seed=1)
    complex_a, complex_b = torch.view_as_complex(a), torch.view_as_complex(b)
    result = ops.slerp(complex_a, complex_b, 0.3, backend=backend)
    assert same_bits(torch.view_as_real(result), ops.slerp(a, b, 0.3, backend=backend))
    rows = ops.nuslerp([complex_a, complex_b], [1.0, 1.0], row_wise=True, backend=backend)
    expected = ops.nuslerp([a.view(3, 8), b.view(3, 8)], [1.0, 1.0], row_wise=True, backend=backend)
    assert same_bits(torch.view_as_real(rows).reshape(3, 8), expected)
    conjugate = ops.slerp(complex_a.conj(), complex_b.conj(), 0.3, backend=backend)
    assert torch.equal(conjugate, result.conj())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_raise_and_name_the_tensor(backend, rule, value):
    good, bad = [torch.ones(3), torch.arange(3.0)], [torch.ones(3), tensor(1.0, value, 0.0)]
    with pytest.raises(
        InputError, match=rf"{rule} of head\.bias: (b|tensors\[1\]( less the base)?) holds NaN or infinity"
    ):
        call(rule, good, bad, names=["body.weight", "head.bias"], backend=backend)
    with pytest.raises(InputError, match=f"{rule} of tensor 1: "):
        call(rule, good, bad, backend=backend)


@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_refused_rather_than_lost(rule):
    a, b = torch.ones(3, requires_grad=True), torch.arange(3.0)
    with pytest.raises(InputError, match=rf"{rule} records no gradient.*torch\.no_grad"):
        call(rule, a, b)
    with torch.no_grad():
        assert not call(rule, a, b).requires_grad


def test_gradients_of_factors_are_refused_rather_than_lost():
    a, b = torch.ones(3), torch.arange(3.0)
    with pytest.raises(InputError, match="t requires a gradient, which would be lost"):
        ops.slerp(a, b, torch.tensor(0.3, requires_grad=True))
    with pytest.raises(InputError, match="weights requires a gradient, which would be lost"):
        ops.karcher([a, b], torch.tensor([0.3, 0.7], requires_grad=True))
    with torch.no_grad():
        ops.slerp(a, b, torch.tensor([0.3], requires_grad=True))


@pytest.mark.parametrize("rule", RULES)
def test_no_tensors_give_no_tensors(backend, rule):
    assert call(rule, [], [], base=[], backend=backend) == []


def test_weights_for_each_tensor(backend):
    a, b = [at(0), at(0)], [at(90), at(90)]
    result = ops.nuslerp([a, b], [[1.0, 3.0], [1.0, 0.0]], backend=backend)
    assert close(result[0], HALF, HALF)
    assert torch.equal(result[1], at(0))
    with pytest.raises(InputError, match=r"weights"):
        ops.multislerp([a, b], [1.0, 1.0, 1.0])


@pytest.mark.parametrize("weights", [[0.1, 0.2, -0.3], [1.0, -1.0], [0.0, 0.0]])
def test_weights_that_sum_to_zero_cannot_be_normalised(weights):
    with pytest.raises(InputError, match="sum to zero"):
        spherical.normalised(weights)


def test_normalised_weights():
    assert spherical.normalised([3.0, 1.0, 4.0]) == [0.375, 0.125, 0.5]
