"""Comparing two models tensor by tensor."""

import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import isthmus
from isthmus.errors import FileError, InputError
from isthmus.io import save_state

MODULE = importlib.import_module("isthmus.merging.diff")  # a function of its name hides it


def compare(a, b):
    return isthmus.diff({"w": a}, {"w": b}).tensors["w"]


def test_by_hand():
    found = compare(torch.tensor([3.0, 4.0, 0.0]), torch.tensor([3.0, 4.0 + 2.0**-20, 1.0]))
    assert (found.changed, found.numel, found.max_abs) == (2, 3, 1)
    assert found.norms == pytest.approx((5, math.sqrt(26 + 2.0**-17 + 2.0**-40)))
    assert found.distance == pytest.approx(math.sqrt(1 + 2.0**-40))
    assert found.relative == pytest.approx(math.sqrt(1 + 2.0**-40) / 5)
    assert compare(torch.tensor([4.0]), torch.tensor([4.0 + 2.0**-20])).max_ulp == 2  # 4 to 8 in steps of 2⁻²¹
    assert not found.equal


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_neighbours_are_one_ulp_apart(dtype):
    for value in (1.0, 2.0, -3.0, 0.0, 1e-30 if dtype != torch.float16 else 6e-8):
        a = torch.tensor([value], dtype=dtype)
        if dtype in (torch.float64, torch.float32):
            b = torch.nextafter(a, torch.tensor([math.inf], dtype=dtype))
        else:
            bits = a.view(torch.int16)
            b = torch.where(a < 0, bits - 1, bits + 1).view(dtype)
        assert compare(a, b).max_ulp == 1, value
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # the least subnormal
    assert compare(torch.tensor([-tiny], dtype=dtype), torch.tensor([tiny], dtype=dtype)).max_ulp == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_from_the_least_number_to_the_largest(dtype):
    largest = torch.finfo(dtype).max
    bits = {torch.float64: 0x7FEF_FFFF_FFFF_FFFF, torch.float32: 0x7F7F_FFFF, torch.float16: 0x7BFF}[dtype]
    ends = torch.tensor([1.0, -largest], dtype=dtype), torch.tensor([1.0, largest], dtype=dtype)
    assert compare(*ends).max_ulp == compare(*reversed(ends)).max_ulp == 2 * bits


def test_equal_as_numbers():
    a = torch.tensor([math.nan, 0.0, math.inf, 1.0])
    found = compare(a, torch.tensor([math.nan, -0.0, math.inf, 1.0]))
    assert found.equal
    assert (found.changed, found.max_abs, found.max_ulp, found.relative) == (0, 0, 0, 0)


def test_a_lone_nan():
    found = compare(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]))
    assert (found.changed, found.max_abs, found.max_ulp, found.relative) == (1, math.inf, None, math.inf)


def test_zero_against_something():
    assert compare(torch.zeros(2), torch.ones(2)).relative == math.inf
    assert compare(torch.ones(2), torch.zeros(2)).relative == 1


def test_integers_booleans_and_large_integers():
    found = compare(torch.tensor([1, 2**60]), torch.tensor([4, 2**60 + 1]))
    assert (found.changed, found.max_abs, found.max_ulp) == (2, 3, None)
    assert compare(torch.tensor([True, False]), torch.tensor([True, True])).changed == 1


def test_dtypes_are_compared_in_the_coarser():
    found = compare(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    assert (found.changed, found.max_ulp, found.dtypes) == (0, 0, ("float32", "bfloat16"))
    assert not found.equal  # the dtypes differ
    found = compare(torch.tensor([1 + 2.0**-7 + 2.0**-20]), torch.tensor([1.0], dtype=torch.bfloat16))
    assert (found.changed, found.max_ulp) == (1, 1)
    assert compare(torch.tensor([1]), torch.tensor([1.5])).max_abs == 0.5


def test_complex_parts_count_one_each():
    found = compare(torch.tensor([1 + 2j, 3j]), torch.tensor([1 - 2j, 3j]))
    assert (found.changed, found.numel, found.max_abs) == (1, 4, 4)
    assert compare(torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j])).equal
    assert compare(torch.tensor([1 + 0j]), torch.tensor([1.0])).changed == 0


def test_shapes_and_keys():
    a = {"x": torch.ones(2), "y": torch.ones(2), "module.a": torch.ones(1)}
    b = {"x": torch.ones(1, 2), "z": torch.ones(2), "module.a": torch.ones(1)}
    found = isthmus.diff(a, b)
    assert (found.only_a, found.only_b) == (("y",), ("z",))
    assert found.tensors["x"].shapes == ((2,), (1, 2))
    assert not found.tensors["x"].equal
    assert all(map(math.isnan, found.tensors["x"].norms))
    assert found.tensors["module.a"].equal
    assert not found.equal
    assert not isthmus.diff({"w": torch.ones(1)}, {}).equal
    assert found.to_dict()["tensors"]["x"]["changed"] == 2


def test_sources_prefixes_scalars_and_empty(tmp_path):
    model = nn.BatchNorm1d(3)
    save_state(tmp_path / "a.safetensors", model.state_dict())
    assert isthmus.diff(model, tmp_path / "a.safetensors").equal
    wrapped = {f"module.{key}": value for key, value in model.state_dict().items()}
    assert isthmus.diff(wrapped, model).equal
    small = {"empty": torch.empty(0, 2), "scalar": torch.tensor(1.0)}
    assert isthmus.diff(small, dict(small)).equal
    with pytest.raises(FileError):
        isthmus.diff(model, tmp_path / "b.safetensors")
    with pytest.raises(InputError, match="b is a int"):
        isthmus.diff(model, 3)


def test_blocks_are_the_whole(monkeypatch):
    torch.manual_seed(0)
    a, b = torch.randn(7, 5).t(), torch.randn(5, 7)
    whole = compare(a, b)
    monkeypatch.setattr(MODULE, "BLOCK", 4)
    parts = compare(a, b)
    assert (parts.changed, parts.max_abs, parts.max_ulp) == (whole.changed, whole.max_abs, whole.max_ulp)
    assert parts.relative == pytest.approx(whole.relative, rel=1e-14)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_ulps_count_representable_numbers(values):
    a = torch.tensor(values)
    b = a
    for _ in range(3):
        b = torch.nextafter(b, torch.full_like(b, -math.inf))
    found = compare(a, b)
    finite = b.isfinite().all()
    assert found.changed == len(values)
    assert found.max_ulp == 3 or not finite
    assert found == compare(a, b)
