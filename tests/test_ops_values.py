"""Values worked out by hand, limit values, and equality to the bit between backends."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus import _native, ops, reference
from isthmus.testing import FLOATS, awkward, lerp_error_bound, same_bits

LENGTHS = [0, 1, 17, 4097, 1_000_003]
WEIGHTS = [0.0, 0.25, 0.3, 0.5, 0.7, 1.0, -0.5, 1.5]


def tensor(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def test_lerp_by_hand(backend):
    a, b = tensor(0.0, 1.0, -2.0, 8.0), tensor(1.0, 3.0, 2.0, -8.0)
    assert ops.lerp(a, b, 0.25, backend=backend).tolist() == [0.25, 1.5, -1.0, 4.0]
    assert ops.lerp(a, b, 0.75, backend=backend).tolist() == [0.75, 2.5, 1.0, -4.0]
    assert ops.lerp(a, b, 2.0, backend=backend).tolist() == [2.0, 5.0, 6.0, -24.0]
    assert ops.lerp(a, b, -1.0, backend=backend).tolist() == [-1.0, -1.0, -6.0, 24.0]


def test_weighted_sum_by_hand(backend):
    tensors = [tensor(1.0, 2.0), tensor(10.0, 20.0), tensor(100.0, -200.0)]
    assert ops.weighted_sum(tensors, [1.0, 0.5, 0.25], backend=backend).tolist() == [31.0, -38.0]
    assert ops.weighted_sum(tensors[:1], [3.0], backend=backend).tolist() == [3.0, 6.0]


def test_weighted_sum_is_a_left_fold_from_its_first_term(backend):
    # From the left (2^24 + 1) rounds to 2^24 twice; from the right the ones would add up to 2 first.
    tensors = [tensor(2.0**24), tensor(1.0), tensor(1.0)]
    assert ops.weighted_sum(tensors, [1.0, 1.0, 1.0], backend=backend).item() == 2.0**24
    assert ops.weighted_sum(tensors[::-1], [1.0, 1.0, 1.0], backend=backend).item() == 2.0**24 + 2
    # A sum that began at +0 would lose the sign.
    assert ops.weighted_sum([tensor(-0.0)], [1.0], backend=backend).signbit().item()


def test_weighted_sum_of_more_models_than_are_read_in_step(backend):
    tensors = [torch.full((5,), float(k)) for k in range(300)]
    assert ops.weighted_sum(tensors, [1.0] * 300, backend=backend).tolist() == [44850.0] * 5
    halves = [torch.full((5,), 500.0, dtype=torch.float16)] * 300
    # Exactly 292.96875, between the float16 values 292.75 and 293.
    assert ops.weighted_sum(halves, [1 / 512] * 300, backend=backend).tolist() == [293.0] * 5


def test_multiplication_and_addition_round_separately(backend):
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24 rounds to 1 + 2^-11; a fused operation would keep the last term.
    x = tensor(1 + 2**-12)
    total = ops.weighted_sum([tensor(-(1 + 2**-11)), x], [1.0, 1 + 2**-12], backend=backend)
    assert total.item() == 0.0


@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_lerp_copies_at_both_ends(backend, dtype, weight):
    a, b = awkward(1003, dtype, seed=0), awkward(1003, dtype, seed=1)
    assert same_bits(ops.lerp(a, b, weight, backend=backend), b if weight else a)


def test_infinities_and_nan_propagate(backend):
    inf, nan = float("inf"), float("nan")
    a, b = tensor(inf, 1.0, nan, -inf, inf), tensor(1.0, -inf, 1.0, inf, inf)
    assert str(ops.lerp(a, b, 0.25, backend=backend).tolist()) == "[nan, -inf, nan, nan, nan]"
    assert str(ops.weighted_sum([a, b], [1.0, 1.0], backend=backend).tolist()) == "[inf, -inf, nan, nan, inf]"


def test_float64_is_rounded_once_to_16_bits(backend):
    # Half of a bf16 unit above 1 and a little more: through float32 the little would be lost and the tie go to even.
    value = tensor(1 + 2**-8 + 2**-40, dtype=torch.float64)
    out = torch.empty(1, dtype=torch.bfloat16)
    assert ops.lerp(value, value, 0.0, out=out, backend=backend).item() == 1 + 2**-7
    half = tensor(1 + 2**-11 + 2**-40, dtype=torch.float64)
    out = torch.empty(1, dtype=torch.float16)
    assert ops.lerp(half, half, 0.0, out=out, backend=backend).item() == 1 + 2**-10


def test_mixed_dtypes_are_promoted_and_rounded_once_to_the_first(backend):
    a, b = tensor(1.0, dtype=torch.bfloat16), tensor(1.0078125 + 2**-9, dtype=torch.float32)
    result = ops.lerp(a, b, 0.5, backend=backend)
    assert result.dtype == torch.bfloat16
    assert result.item() == 1.0078125  # 1.0048828125 lies above the middle of 1 and its successor
    assert ops.lerp(a, tensor(3.0, dtype=torch.float16), 0.5, backend=backend).item() == 2.0


@pytest.mark.parametrize("dtype", FLOATS)
def test_error_budget_against_float64(backend, dtype):
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(4099, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    for weight in (0.1, 0.45, 0.5, 0.9):
        if dtype == torch.float64:
            continue  # the reference itself
        exact = reference.lerp(a.double(), b.double(), weight)
        error = (ops.lerp(a, b, weight, backend=backend).double() - exact).abs()
        assert (error <= lerp_error_bound(a, b, weight)).all()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_lerp_bits_equal_the_reference(backend, threads, dtype, length):
    a, b = awkward(length, dtype, seed=1), awkward(length, dtype, seed=2)
    for weight in WEIGHTS if length < 10_000 else [0.3, 0.7]:
        expected = reference.lerp(a, b, weight)
        assert same_bits(ops.lerp(a, b, weight, backend=backend), expected), weight


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_weighted_sum_bits_equal_the_reference(backend, threads, dtype, length):
    tensors = [awkward(length, dtype, seed=k) for k in range(11)]
    for count in (1, 2, 8, 9, 11) if length < 10_000 else (4,):
        weights = [0.37 * k - 1.1 for k in range(count)]
        expected = reference.weighted_sum(tensors[:count], weights)
        assert same_bits(ops.weighted_sum(tensors[:count], weights, backend=backend), expected), count


@pytest.mark.parametrize(("first", "second", "result"), list(itertools.product(FLOATS, repeat=3)))
def test_bits_of_mixed_dtypes_equal_the_reference(backend, first, second, result):
    a, b, out = awkward(1001, first, seed=1), awkward(1001, second, seed=2), torch.empty(1001, dtype=result)
    assert same_bits(ops.lerp(a, b, 0.3, out=out, backend=backend), reference.lerp(a, b, 0.3, dtype=result))
    expected = reference.weighted_sum([a, b, a], [0.3, -1.7, 2.0], dtype=result)
    assert same_bits(ops.weighted_sum([a, b, a], [0.3, -1.7, 2.0], out=out, backend=backend), expected)


@pytest.mark.parametrize("offset", range(1, 18, 4))
@pytest.mark.parametrize("dtype", FLOATS)
def test_any_alignment(backend, dtype, offset):
    memory = awkward(3 * 5000, dtype, seed=4)
    a, b = memory[offset : offset + 4500], memory[5001 : 5001 + 4500]
    out = torch.zeros(6000, dtype=dtype)
    ops.lerp(a, b, 0.6, out=out[offset + 2 : offset + 4502], backend=backend)
    assert same_bits(out[offset + 2 : offset + 4502], reference.lerp(a, b, 0.6))
    assert not out[: offset + 2].any()
    assert not out[offset + 4502 :].any()


@pytest.mark.parametrize("dtype", FLOATS)
def test_outputs_that_bypass_the_caches(backend, threads, dtype):
    count = (16 << 20) // dtype.itemsize + 133  # bytes of output above the threshold for streaming stores
    a, b = (torch.linspace(-1, s, count, dtype=torch.float64).to(dtype) for s in (3, -7))
    memory = torch.zeros(count + 3, dtype=dtype)
    out = memory[3:]  # not at the start of a cache line
    assert same_bits(ops.lerp(a, b, 0.3, out=out, backend=backend), reference.lerp(a, b, 0.3))
    assert not memory[:3].any()
    assert same_bits(
        ops.weighted_sum([a, b], [2.0, -1.0], out=out, backend=backend), reference.weighted_sum([a, b], [2, -1])
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_value_survives_widening_and_narrowing(backend, dtype):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    assert same_bits(ops.weighted_sum([x], [1.0], backend=backend), x)
    out = torch.empty_like(x, dtype=torch.float32)
    assert same_bits(ops.lerp(x, x, 0.0, out=out, backend=backend), x.float())


@pytest.mark.parametrize("source", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrowing_rounds_to_nearest_even(backend, dtype, source):
    # Every finite 16-bit value, the middle to its successor, and the float32 values beside the middle.
    exact = torch.arange(0, 2**15).to(torch.int16).view(dtype).double()
    exact = exact[exact.isfinite()]
    middle = (exact[:-1] + exact[1:]) / 2
    above, below = (torch.nextafter(middle.float(), torch.tensor(s)).to(source) for s in (float("inf"), -float("inf")))
    bits = torch.arange(len(middle)).to(torch.int16)
    for value, expected in [(middle.to(source), bits + bits % 2), (above, bits + 1), (below, bits)]:
        out = torch.empty(len(middle), dtype=dtype)
        ops.lerp(value, value, 0.0, out=out, backend=backend)
        assert torch.equal(out.view(torch.int16), expected.to(torch.int16))


finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=40), st.floats(-2, 2))
@settings(deadline=None, max_examples=200)
def test_property_cpp_equals_reference(pairs, weight):
    a, b = (torch.tensor(column, dtype=torch.float32) for column in zip(*pairs, strict=True))
    assert same_bits(ops.lerp(a, b, weight, backend="cpp"), reference.lerp(a, b, weight))
    weights = [weight, 1 - weight]
    assert same_bits(ops.weighted_sum([a, b], weights, backend="cpp"), reference.weighted_sum([a, b], weights))


@given(st.lists(finite, min_size=1, max_size=40), st.floats(0, 1))
@settings(deadline=None, max_examples=100)
def test_property_a_model_with_itself_is_itself(values, weight):
    a = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(ops.lerp(a, a, weight), a)  # in value: -0 + w (-0 - -0) is +0


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("isa", ["base", "v3", "v4"])
def test_flushing_subnormals_in_one_thread_changes_nothing(isa):
    code = """
        import torch
        from isthmus import ops, reference
        from isthmus.testing import same_bits
        torch.set_num_threads(2)
        tiny = torch.full((1_000_003,), 1e-39)
        expected = [reference.lerp(tiny, -tiny, 0.3), reference.weighted_sum([tiny, tiny], [0.5, 0.25])]
        assert expected[0][0] != 0 and expected[1][0] != 0
        half = torch.full((1_000_003,), 6e-8, dtype=torch.float16)
        wide = reference.lerp(half, half, 0.0, dtype=torch.float32)
        assert torch.set_flush_denormal(True)
        assert (tiny * 0.5)[0] == 0  # this thread flushes
        got = [ops.lerp(tiny, -tiny, 0.3), ops.weighted_sum([tiny, tiny], [0.5, 0.25])]
        assert (tiny * 0.5)[0] == 0  # and still does
        got_wide = ops.lerp(half, half, 0.0, out=torch.empty_like(wide))
        torch.set_flush_denormal(False)
        assert all(same_bits(x, y) for x, y in zip(got, expected)) and same_bits(got_wide, wide)
        print("same")
    """
    if not dict(_native.cpu().instruction_sets()).get(isa):
        pytest.skip(f"instruction set {isa} is not supported by this processor")
    done = run_python(code, ISTHMUS_ISA=isa)
    assert done.stdout == "same\n", done.stderr


def test_a_fork_after_a_threaded_call_neither_hangs_nor_differs():
    code = """
        import os, torch
        from isthmus import ops
        torch.set_num_threads(2)
        a, b = torch.randn(3_000_000), torch.randn(3_000_000)
        before = ops.lerp(a, b, 0.3)
        child = os.fork()
        if child == 0:
            after = ops.lerp(a, b, 0.3)  # compared by numpy: torch's own threads would hang in a child
            os._exit(0 if (before.numpy() == after.numpy()).all() else 1)
        _, status = os.waitpid(child, 0)
        assert torch.equal(ops.lerp(a, b, 0.3), before)
        print(os.waitstatus_to_exitcode(status))
    """
    done = run_python(code)
    assert done.stdout == "0\n", done.stderr


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    count = 2**31 + 4097
    a = torch.zeros(count, dtype=torch.bfloat16)
    a[-4097:] = torch.arange(4097) % 256
    a[2**31 - 1] = 3
    out = ops.lerp(a, a, 0.0)
    assert out[2**31 - 1] == 3
    assert torch.equal(out[-4097:], a[-4097:])
    total = ops.weighted_sum([a, a], [1.0, 1.0], out=out)
    assert torch.equal(total[-4097:].float(), 2 * a[-4097:].float())
    assert total[: 2**31 - 1].count_nonzero() == 0
