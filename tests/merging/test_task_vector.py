"""Task vectors: exact arithmetic of coefficients, values computed when asked for."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import isthmus
from isthmus import TaskVector
from isthmus.errors import FileError, InputError
from isthmus.io import save_state


def net(seed, classes=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, classes))


def vector(*values, base=(1.0, 2.0)):
    return TaskVector({"w": torch.tensor(base)}, {"w": torch.tensor(values)})


def test_by_hand():
    tau, other = vector(4.0, 2.0), vector(1.0, 6.0)
    assert tau["w"].tolist() == [3, 0]
    assert (0.5 * tau + other * 2 - tau / 4)["w"].tolist() == [0.75, 8]
    assert (-tau)["w"].tolist() == [-3, 0]
    assert sum([tau, other])["w"].tolist() == [3, 4]
    assert (tau.norm(), other.norm(), (tau + other).norm()) == (3, 4, 5)
    assert (tau.dot(other), tau.cosine(other), tau.cosine(tau + other)) == (0, 0, pytest.approx(0.6))
    assert tau.cosine(-tau) == -1
    assert (tau + other).apply_to({"w": torch.tensor([10.0, 20.0])})["w"].tolist() == [13, 24]
    assert repr(0.5 * tau) == "TaskVector(0.5 · (the model − the base), 1 tensors)"
    with pytest.raises(KeyError):
        tau["v"]
    assert (list(tau), "w" in tau, "v" in tau) == (["w"], True, False)
    assert (np.float32(0.5) * tau)["w"].tolist() == [1.5, 0]


def test_coefficients_cancel_exactly():
    base, a, b = net(1), net(2), net(3)
    tau, other = TaskVector(base, a), TaskVector(base, b)
    zero = tau - tau
    assert zero.norm() == 0
    assert math.isnan(zero.cosine(tau))
    assert isthmus.diff(zero.apply_to(base), base).equal
    back = ((tau + other) * 2 - 2 * other) / 2
    for key, value in tau.state_dict().items():
        assert torch.equal(back[key], value)


def test_task_vectors_that_are_gone_are_not_mistaken_for_new_ones():
    total = 0
    for value in (2.0, 3.0, 4.0):
        total = total + vector(value, 2.0)  # each is freed, so that the next may be at its address
    assert total["w"].tolist() == [1 + 2 + 3, 0]


def test_applied_to_its_base_it_is_task_arithmetic(backend):
    base, a, b = net(1).bfloat16(), net(2), net(3)
    tau = 0.4 * (TaskVector(base, a) + TaskVector(base, b)) - 0.7 * TaskVector(base, b)
    # the third came last and is a term of its own, although of the same model
    expected = isthmus.merge([a, b, b], base=base, method="task_arithmetic", weights=[0.4, 0.4, -0.7], backend=backend)
    result = tau.apply_to(base, backend=backend)
    assert isthmus.diff(result, {**expected, "1.num_batches_tracked": base[1].num_batches_tracked}).equal
    assert list(result) == list(base.state_dict())
    copy = {key: value.clone() for key, value in base.state_dict().items()}  # another base with the same values
    assert isthmus.diff(tau.apply_to(copy, backend=backend), result).equal


def test_integers_are_those_of_the_base_it_is_applied_to():
    state = {"w": torch.ones(2), "ids": torch.arange(3), "1.num_batches_tracked": torch.tensor(4)}
    tau = TaskVector(state, {**state, "1.num_batches_tracked": torch.tensor(9)})
    other = {"w": torch.zeros(2), "ids": torch.arange(3) + 1, "1.num_batches_tracked": torch.tensor(5)}
    applied = tau.apply_to(other)
    assert applied["ids"].tolist() == [1, 2, 3]
    assert applied["1.num_batches_tracked"].item() == 5
    assert applied["ids"].data_ptr() != other["ids"].data_ptr()
    assert tau.keys == ["w"]
    with pytest.raises(InputError, match=r"'ids' is torch.int64 and differs"):
        TaskVector(state, {**state, "ids": torch.arange(3) + 1})


def test_nothing_is_modified_or_shared():
    base, model = net(1), net(2)
    before = [{key: value.clone() for key, value in m.state_dict().items()} for m in (base, model)]
    tau = TaskVector(base, model)
    applied = (tau * 0.5).apply_to(base)
    for value in (*applied.values(), *tau.state_dict().values()):
        value.zero_()
    assert isthmus.diff(base, before[0]).equal
    assert isthmus.diff(model, before[1]).equal
    assert tau.norm() > 0


def test_ties_stay(tmp_path):
    weight = nn.Parameter(torch.ones(2))
    base = {"b": weight, "a": weight, "c": torch.zeros(1)}
    model = {"b": torch.full((2,), 3.0), "a": torch.full((2,), 3.0), "c": torch.ones(1)}
    tau = TaskVector(base, model)
    assert tau.keys == ["a", "c"]
    assert list(tau) == ["b", "a", "c"]
    state = tau.state_dict()
    assert state["a"] is state["b"]
    assert tau["b"].tolist() == [2, 2]
    assert tau.norm() == 3  # 4 + 4 + 1: once
    applied = tau.apply_to(base)
    assert applied["a"] is applied["b"]
    tau.save(tmp_path / "tau.safetensors")
    loaded = TaskVector.load(tmp_path / "tau.safetensors")
    assert (loaded.norm(), (loaded - tau).norm()) == (3, 0)
    assert isthmus.diff(loaded.apply_to(base), applied).equal
    untied = {key: value.clone() for key, value in base.items()}
    with pytest.raises(InputError, match="different tensors or ties: 'b'"):
        tau + TaskVector(untied, model)
    assert isthmus.diff(tau.apply_to(untied), {**applied, "b": applied["b"].clone()}).equal


def test_saved_and_loaded(tmp_path):
    base, model = net(1).half(), net(2)
    tau = 0.3 * TaskVector(base, model)
    tau.save(tmp_path / "tau.safetensors")
    loaded = TaskVector.load(tmp_path / "tau.safetensors")
    for key, value in tau.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(loaded[key], value)
    assert isthmus.diff(loaded.apply_to(base), tau.apply_to(base)).equal
    assert (loaded + tau).norm() == pytest.approx(2 * tau.norm())
    with pytest.raises(FileError):
        TaskVector.load(tmp_path / "none.safetensors")


def test_from_files_and_complex(tmp_path):
    save_state(tmp_path / "a.safetensors", {"w": torch.tensor([1.0 + 2j, 0j])})
    tau = TaskVector({"w": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "a.safetensors")
    assert tau.norm() == pytest.approx(math.sqrt(5))
    assert tau.dot(2 * tau) == pytest.approx(10)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda tau: tau + TaskVector(net(1, 7), net(2, 7)), "different tensors or ties: '2.bias', '2.weight'"),
        (lambda tau: tau.dot(TaskVector(net(1, 7), net(2, 7))), "different tensors or ties: '2.bias', '2.weight'"),
        (lambda tau: tau.apply_to(net(1, 7)), r"'2.weight' has shape \(3, 5\) in the task vector and \(7, 5\) in the"),
        (lambda tau: tau.apply_to({"w": torch.ones(1)}), "the base lacks|the task vector has '0.weight'"),
        (lambda tau: tau / 0, "cannot be divided by 0"),
        (lambda tau: tau * math.nan, "cannot be multiplied by nan"),
        (lambda tau: TaskVector(net(1), net(2, 7)), r"'2.bias' has shape \(7,\) in the model and \(3,\) in the base"),
    ],
)
def test_mistakes_are_named(action, message):
    with pytest.raises(InputError, match=message):
        action(TaskVector(net(1), net(2)))


@pytest.mark.parametrize("other", [1, "x", None])
def test_only_task_vectors_are_added(other):
    tau = vector(1.0, 1.0)
    with pytest.raises(TypeError):
        tau + other
    with pytest.raises(TypeError):
        tau - other


numbers = st.floats(-100, 100, width=32)


@settings(max_examples=60, deadline=None)
@given(st.lists(numbers, min_size=3, max_size=3), st.lists(numbers, min_size=3, max_size=3), numbers, numbers)
def test_linearity(x, y, c, d):
    tau, other = vector(*x, base=(0.0, 0.0, 0.0)), vector(*y, base=(0.0, 0.0, 0.0))
    exact = c * tau["w"].double() + d * other["w"].double()
    scale = abs(c) * tau["w"].double().abs() + abs(d) * other["w"].double().abs()
    combined = (c * tau + d * other)["w"].double()
    assert ((combined - exact).abs() <= 2**-22 * scale + 1e-30).all()
    assert torch.equal(((c * tau + d * other) - d * other)["w"], (c * tau)["w"])


def test_a_task_vector_is_applied_device_by_device(monkeypatch):
    base, a, b = net(1), net(2), net(3)
    tau = 0.4 * TaskVector(base, a) - 0.7 * TaskVector(base, b)
    expected = tau.apply_to(base)
    # As if every second tensor were on another device.
    monkeypatch.setattr("isthmus.ops.by_device", lambda x: [range(0, len(x), 2), range(1, len(x), 2)])
    assert isthmus.diff(tau.apply_to(base), expected).equal
