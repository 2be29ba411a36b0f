"""linear, nearswap, sce, arcee_fusion, ram and ram_plus: values by hand, limits, structure and errors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus import ops
from isthmus.errors import InputError
from isthmus.reference import rules
from isthmus.testing import FLOATS, same_bits

ON_A_BASE = ["sce", "ram", "ram_plus", "arcee_fusion"]


def tensor(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def normal(*shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def call(rule, a, b, base, **options):
    """Any of the rules; those on two models, the second being the base of ``arcee_fusion``."""
    if rule == "nearswap":
        return ops.nearswap(a, b, 0.1, **options)
    if rule == "arcee_fusion":
        return ops.arcee_fusion(a, base, **options)
    return getattr(ops, rule)([a, b], base, **options)


# --- linear -----------------------------------------------------------------------------------------------------------


def test_linear_by_hand(backend):
    a, b, c = tensor(1.0, 2.0), tensor(3.0, -2.0), tensor(5.0, 4.0)
    # 1 + ¼ · 2 + ½ · 4 and 2 + ¼ · (-4) + ½ · 2.
    assert ops.linear([a, b, c], [1.0, 1.0, 2.0], backend=backend).tolist() == [3.5, 2.0]
    assert ops.linear([a, b, c], [1.0, 1.0, 2.0], normalize=False, backend=backend).tolist() == [14.0, 8.0]
    assert ops.linear([a, b, c], backend=backend).tolist() == pytest.approx([3.0, 4 / 3], rel=1e-6)
    assert ops.linear([a, b], [1.0, -1.0], normalize=False, backend=backend).tolist() == [-2.0, 4.0]
    with pytest.raises(InputError, match="sum to zero"):
        ops.linear([a, b], [1.0, -1.0], backend=backend)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_model_averaged_with_itself_is_itself(backend, dtype):
    a = normal(1003, seed=0, dtype=dtype)
    a[:2] = tensor(-0.0, 0.0, dtype=dtype)
    assert same_bits(ops.linear([a, a.clone()], [0.1, 1.0], backend=backend), a)
    assert same_bits(ops.linear([a] * 5, [0.3, 0.1, 0.7, 1.0, 0.9], backend=backend), a)
    assert same_bits(ops.linear([a], [0.3], backend=backend), a)
    raw = ops.linear([a, a], [0.1, 1.0], normalize=False, backend=backend)
    assert torch.allclose(raw.double(), 1.1 * a.double(), rtol=2 * torch.finfo(dtype).eps)


def test_many_float16_models_are_averaged_without_overflow(backend):
    models = [torch.full((5,), 500.0, dtype=torch.float16)] * 300
    assert ops.linear(models, backend=backend).tolist() == [500.0] * 5


def test_linear_takes_weights_for_each_tensor(backend):
    a, b = [tensor(0.0), tensor(0.0)], [tensor(4.0), tensor(4.0)]
    result = ops.linear([a, b], [[1.0, 3.0], [1.0, 1.0]], backend=backend)
    assert [x.item() for x in result] == [2.0, 1.0]
    raw = ops.linear([a, b], [[1.0, 3.0], [1.0, 2.0]], normalize=False, backend=backend)
    assert [x.item() for x in raw] == [4.0, 8.0]


@pytest.mark.parametrize("normalize", [True, False])
def test_linear_has_gradients(backend, normalize):
    a, b = (normal(5, seed=k, dtype=torch.float64).requires_grad_() for k in range(2))
    w = tensor(0.3, 0.9, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, y, weights: ops.linear([x, y], weights, normalize=normalize, backend=backend), (a, b, w)
    )


@pytest.mark.parametrize("normalize", [True, False])
def test_linear_with_gradients_is_linear_without(backend, normalize):
    a, b = [tensor(0.0, 1.0), tensor(0.5)], [tensor(4.0, 3.0), tensor(4.0)]
    for numbers in (tensor([1.0, 0.7], [3.0, 0.1]), tensor(0.3, 0.9)):
        expected = ops.linear([a, b], numbers, normalize=normalize, backend=backend)
        weights = numbers.clone().requires_grad_()
        result = ops.linear([a, b], weights, normalize=normalize, backend=backend)
        assert all(x.requires_grad and torch.equal(x, y) for x, y in zip(result, expected, strict=True))
    assert ops.linear([[], []], [0.3, 0.7], normalize=normalize, backend=backend) == []
    one = torch.tensor(0.3, requires_grad=True)
    assert ops.linear(iter([a[0], b[0]]), one, backend=backend).tolist() == [2.0, 2.0]


# --- nearswap ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_nearswap_by_hand(backend, dtype):
    # Differences of -0.25, 0.5, 1, -4, 0 with t = ½: the first two are swapped, the others shrink by ½.
    a, b = tensor(1.0, 1.0, 1.0, 1.0, 1.0, dtype=dtype), tensor(0.75, 1.5, 2.0, -3.0, 1.0, dtype=dtype)
    result = ops.nearswap(a, b, 0.5, backend=backend)
    assert result.dtype == dtype
    assert result.tolist() == [0.75, 1.5, 1.5, 0.5, 1.0]


def test_nearswap_limits(backend):
    a, b = normal(1003, seed=0), normal(1003, seed=1)
    assert same_bits(ops.nearswap(a, b, 0.0, backend=backend), a)
    assert same_bits(ops.nearswap(a, b, 1e6, backend=backend), b)
    # Differences count as at least 1e-6: half of this one is gone, not all of it.
    assert ops.nearswap(tensor(0.0), tensor(5e-7), 5e-7, backend=backend).item() == pytest.approx(2.5e-7)
    assert ops.nearswap(tensor(1.0, math.nan), tensor(math.inf, 1.0), 0.1, backend=backend).isnan().all()
    assert [x.item() for x in ops.nearswap([a[0], a[1]], [b[0], b[1]], [0.0, 1e6])] == [a[0].item(), b[1].item()]
    with pytest.raises(InputError, match=r"t is -0\.1"):
        ops.nearswap(a, b, -0.1)


@given(st.floats(-10, 10), st.floats(-10, 10), st.floats(1e-5, 5))
def test_nearswap_steps_by_t_and_never_beyond(a, b, t):
    result = ops.nearswap(tensor(a, dtype=torch.float64), tensor(b, dtype=torch.float64), t).item()
    expected = a + max(-t, min(t, b - a))
    assert result == pytest.approx(expected, rel=1e-12, abs=1e-12)


# --- sce --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_sce_by_hand(backend, dtype):
    base = tensor(1.0, 1.0, 1.0, 1.0, dtype=dtype)
    a, b = tensor(2.0, 0.0, 0.0, 1.0, dtype=dtype), tensor(2.0, 2.0, -1.0, -1.0, dtype=dtype)
    # All entries: energies ¼ (4 + 0 + 0 + 1) and ¼ (4 + 4 + 1 + 1), weights 1/3 and 2/3; the sums' signs + + - +, where
    # 1 and -1 cancel: the first has 2 of both, the second 2 of b, the third -1 of b, the last 1 of a.
    result = ops.sce([a + base, b + base], base, backend=backend)
    assert result.tolist() == [3.0, 3.0, 0.0, 2.0]
    # Variances 0, 1, ¼, 1: three differ; of them int(⅔ · 3) = 2 are selected, the second and the last.
    result = ops.sce([a + base, b + base], base, select_topk=0.67, backend=backend)
    # Weights: energies of (0, 1) and (2, -1) are 1 and 5. The second: 2 of b. The last: 1 of a.
    assert result.tolist() == [1.0, 3.0, 1.0, 2.0]
    # One of the two largest, which are equal: the first.
    result = ops.sce([a + base, b + base], base, select_topk=0.34, backend=backend)
    assert result.tolist() == [1.0, 3.0, 1.0, 1.0]


def test_sce_weighs_by_energy(backend):
    base = torch.zeros(2, dtype=torch.float64)
    a, b = tensor(1.0, 1.0, dtype=torch.float64), tensor(3.0, 1.0, dtype=torch.float64)
    # Energies 1 and 5: (1 · 1 + 5 · 3) / 6 and 1.
    assert ops.sce([a, b], base, backend=backend).tolist() == pytest.approx([16 / 6, 1.0], rel=1e-14)
    # Small task vectors weigh the same where they do not reach the floor: (1e-4 + 3e-4) / 2.
    result = ops.sce([1e-4 * a, 1e-4 * b], base, floor=1e-6, backend=backend)
    assert result.tolist() == pytest.approx([2e-4, 1e-4], rel=1e-12)
    result = ops.sce([1e-4 * a, 1e-4 * b], base, backend=backend)
    assert result.tolist() == pytest.approx([16e-4 / 6, 1e-4], rel=1e-12)


def test_sce_limits(backend):
    base, a, b = (normal(5000, seed=k) for k in range(3))
    assert same_bits(ops.sce([a, b], base, select_topk=0.0, backend=backend), base)
    assert same_bits(ops.sce([base, base.clone()], base, backend=backend), base)
    # Equal models differ nowhere, so nothing is selected below 1.
    assert same_bits(ops.sce([a, a], base, select_topk=0.9, backend=backend), base)
    assert torch.allclose(ops.sce([a, a], base, backend=backend), a, atol=1e-6)
    assert torch.allclose(ops.sce([a], base, backend=backend), a, atol=1e-6)
    for fraction in (0.1, 0.37, 1.0):
        changed = ops.sce([a, b], base, select_topk=fraction, backend=backend) != base
        assert changed.sum().item() == int(fraction * 5000)
    with pytest.raises(InputError, match=r"select_topk is 1\.5"):
        ops.sce([a, b], base, select_topk=1.5)
    with pytest.raises(InputError, match="floor=-1"):
        ops.sce([a, b], base, floor=-1)


# --- arcee_fusion -----------------------------------------------------------------------------------------------------


def test_arcee_fusion_by_hand(backend):
    # Rows that are equal have no divergence, and importance 0. Of the 8 values in order 0 0 0 0 0 0 x y the quartiles
    # are those of index 1, 3 and 5, all 0: the cut is 0 and everything is taken.
    base = torch.zeros(4, 2, dtype=torch.float64)
    model = tensor([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 3.0], dtype=torch.float64)
    assert torch.equal(ops.arcee_fusion(model, base, backend=backend), model)
    # One row: importance goes as |τ|, in order 1 2 3 4 5 6 7 8 20 (and a divergence that all share); the quartiles
    # of index 2, 4, 6 are 3, 5 and 7; the cut is 5 + 1.5 · 4 = 11.
    tau = tensor(1.0, -2.0, 3.0, 4.0, -20.0, 5.0, 6.0, 7.0, 8.0, dtype=torch.float64) / 64
    base = torch.ones(9, dtype=torch.float64)
    expected = base.clone()
    expected[4] -= 20 / 64
    assert torch.equal(ops.arcee_fusion(base + tau, base, backend=backend), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_arcee_fusion_takes_entries_to_the_bit(backend, dtype):
    model, base = (normal(37, 41, seed=k, dtype=dtype) for k in range(2))
    result = ops.arcee_fusion(model, base, backend=backend)
    taken = result == model
    assert 0 < taken.sum() < model.numel() / 4
    assert torch.equal(result, torch.where(taken, model, base))


def test_arcee_fusion_ranks_rows_by_their_divergence(backend):
    base = normal(100, 8, seed=0, dtype=torch.float64)
    model = base.clone()
    model[:, 0] += 0.01
    model[7, 0] += 5
    taken = ops.arcee_fusion(model, base, backend=backend) != base
    assert taken[7].tolist() == [True] + [False] * 7
    assert same_bits(ops.arcee_fusion(base.clone(), base, backend=backend), base)


# --- ram --------------------------------------------------------------------------------------------------------------


def test_ram_by_hand(backend):
    base = tensor(10.0, 10.0, 10.0, 10.0, 10.0)
    a = base + tensor(1.0, 1.0, 0.0, 0.25, 0.0)
    b = base + tensor(0.0, -3.0, 0.0, 2.0, -0.5)
    # One model: added. Both: averaged. At most ε = ¼: not changed.
    assert ops.ram([a, b], base, epsilon=0.25, backend=backend).tolist() == [11.0, 9.0, 10.0, 12.0, 9.5]
    assert ops.ram([a, b], base, backend=backend).tolist() == [11.0, 9.0, 10.0, 11.125, 9.5]
    result = ops.ram([a, b], base, scaling_factor=2.0, backend=backend)
    assert result.tolist() == [12.0, 8.0, 10.0, 12.25, 9.0]
    with pytest.raises(InputError, match="epsilon=-1"):
        ops.ram([a, b], base, epsilon=-1)


def test_the_cut_of_ram_is_rounded_to_the_type_computed_in(backend):
    # 0.1 as a float32 is more than 0.1; it does not exceed itself.
    base, model = torch.zeros(2), tensor(0.1, 0.2)
    assert ops.ram([model], base, epsilon=0.1, backend=backend).tolist() == [0.0, model[1].item()]
    assert ops.ram_plus([model], base, epsilon=0.1, backend=backend).tolist() == [0.0, model[1].item()]


def test_ram_plus_by_hand(backend):
    base = torch.zeros(6, dtype=torch.float64)
    a = tensor(1.0, 2.0, 4.0, 8.0, 0.0, 0.0, dtype=torch.float64)
    b = tensor(0.0, 0.0, 0.0, 4.0, 1.0, 0.0, dtype=torch.float64)
    # a changed three entries alone and shares one: the ratio 1/3; b one and one: 1, cut to ½. Factors 1 + r/3, 1 + r/2.
    result = ops.ram_plus([a, b], base, r=0.6, alpha=0.5, backend=backend)
    assert result.tolist() == pytest.approx([1.2, 2.4, 4.8, 6.0, 1.3, 0.0], rel=1e-14)
    # By default r = 0.1 and α = 0.2 cut both: 1.02.
    assert ops.ram_plus([a, b], base, backend=backend).tolist() == pytest.approx([1.02, 2.04, 4.08, 6.0, 1.02, 0.0])
    assert torch.equal(ops.ram_plus([a, b], base, r=0.0, backend=backend), ops.ram([a, b], base, backend=backend))
    # No entry alone: nothing is enlarged.
    assert torch.equal(ops.ram_plus([a, a], base, backend=backend), a)
    with pytest.raises(InputError, match="alpha=-1"):
        ops.ram_plus([a, b], base, alpha=-1)


# --- what the rules share ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["nearswap", *ON_A_BASE])
@pytest.mark.parametrize("dtype", FLOATS)
def test_lists_strides_and_out(backend, rule, dtype):
    shapes = [(), (0, 3), (1,), (33, 65)]
    a, b, base = ([normal(*shape, seed=k, dtype=dtype) for shape in shapes] for k in range(3))
    result = call(rule, a, b, base, backend=backend)
    assert [x.shape for x in result] == [x.shape for x in a]
    assert all(x.dtype == dtype for x in result)
    assert all(same_bits(x, call(rule, *row, backend=backend)) for x, *row in zip(result, a, b, base, strict=True))
    views = [x[3].t().contiguous().t() for x in (a, b, base)]
    out = torch.zeros(33, 65, 2, dtype=dtype)[..., 0]
    assert call(rule, *views, out=out, backend=backend) is out
    assert same_bits(out, result[3])
    inplace = a[3].clone()
    call(rule, inplace, b[3], base[3], out=inplace, backend=backend)
    assert same_bits(inplace, result[3])
    assert call(rule, [], [], [], backend=backend) == []


@pytest.mark.parametrize("rule", ["nearswap", "sce", "ram_plus", "arcee_fusion"])
def test_pieces_do_not_change_the_result(rule, monkeypatch):
    a, b, base = (normal(9, 3001, seed=k) for k in range(3))
    options = {"select_topk": 0.3} if rule == "sce" else {}
    expected = call(rule, a, b, base, **options)
    monkeypatch.setattr(rules, "_CHUNK", 4096)
    assert same_bits(call(rule, a, b, base, **options), expected)


@pytest.mark.parametrize("rule", ON_A_BASE)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_raise_and_name_the_tensor(backend, rule, value):
    good, bad = [torch.ones(3), torch.arange(3.0)], [torch.ones(3), tensor(1.0, value, 0.0)]
    with pytest.raises(InputError, match=rf"{rule} of head\.bias: base holds NaN or infinity"):
        call(rule, good, good, bad, names=["body.weight", "head.bias"], backend=backend)
    with pytest.raises(InputError, match=rf"{rule} of tensor 1: tensors?.* holds NaN or infinity"):
        call(rule, bad, good, good, backend=backend)


@pytest.mark.parametrize("rule", ["nearswap", *ON_A_BASE])
def test_nothing_is_written_where_a_later_tensor_is_refused(backend, rule):
    ok, kind = torch.arange(3.0), torch.complex64 if rule == "nearswap" else torch.float32
    bad = tensor(1.0, math.nan, 0.0).to(kind)
    models = [[x.clone(), bad.clone()] for x in (ok + 1, ok * 2, ok)]
    out = [torch.full((3,), 7.0), torch.full((3,), 7.0, dtype=kind)]
    with pytest.raises(InputError, match="tensor 1"):
        call(rule, *models, out=out, backend=backend)
    assert all((x == 7).all() for x in out)
    with pytest.raises(InputError, match="tensor 1"):
        call(rule, *models, out=models[0], backend=backend)
    assert torch.equal(models[0][0], ok + 1)


@pytest.mark.parametrize("rule", ["nearswap", *ON_A_BASE])
def test_complex_tensors_and_gradients_are_refused(rule):
    a, b = torch.ones(3), torch.arange(3.0)
    with pytest.raises(InputError, match=rf"{rule} of the tensor: .* has dtype torch\.complex64"):
        call(rule, *[x.to(torch.complex64) for x in (a, b, b)])
    with pytest.raises(InputError, match=f"{rule} records no gradient"):
        call(rule, a.clone().requires_grad_(), b, b)


def test_mixed_dtypes_take_the_type_of_the_base(backend):
    base, a = torch.zeros(4, dtype=torch.bfloat16), normal(4, seed=0)
    for rule in ON_A_BASE:
        assert call(rule, a, a, base, backend=backend).dtype == torch.bfloat16
    assert ops.nearswap(base, a, 0.1, backend=backend).dtype == torch.bfloat16
