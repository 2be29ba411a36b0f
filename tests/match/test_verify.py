"""Verification of specs: groups that change the function are found, and nothing of the user's is changed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from isthmus.errors import InputError, IsthmusWarning
from isthmus.match import PermutationSpec, verify
from isthmus.match.spec import Factor

ROW = torch.zeros(2, 6)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)  # a few units: others may all be dead
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))


def by_hand(model: nn.Module, changes: dict[str, tuple[str | None, ...]] | None = None) -> PermutationSpec:
    axes = {key: ("h", None) if tensor.dim() == 2 else ("h",) for key, tensor in model[:2].state_dict().items()}
    axes |= {"3.weight": ("g", "h"), "3.bias": ("g",), "5.weight": (None, "g"), "5.bias": (None,)}
    axes.pop("1.num_batches_tracked")
    return PermutationSpec.from_dict(axes | (changes or {}), model.state_dict())


class Lying(nn.Module):
    """Tells its units apart where a trace does not see it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = self.a(x)
        if not torch.compiler.is_exporting():
            h = h * torch.arange(8)
        return self.c(self.b(h.relu()).relu())


def test_a_right_spec_passes():
    model = mlp()
    by_hand(model).verify(model, ROW)
    PermutationSpec.from_model(model, ROW).verify(model, ROW)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"3.weight": ("g", None)}, "'h'"),
        ({"3.bias": (None,)}, "'g'"),
        ({"5.weight": (None, None)}, "'g'"),
        ({"5.bias": ("i",), "5.weight": ("i", "g")}, "'i'"),
        ({"3.weight": (None, "h"), "3.bias": (None,), "0.bias": (None,)}, "'h', 'g'"),
    ],
)
def test_a_broken_spec_is_refused(changes, wrong):
    """In a new model biases are small, gains one and statistics zero and one: a spec is wrong all the same."""
    model = mlp()
    with pytest.raises(InputError, match=f"permuting {wrong} changes the outputs of Sequential"):
        by_hand(model, changes).verify(model, ROW)


@pytest.mark.parametrize("key", ["1.weight", "1.bias", "1.running_mean", "1.running_var", "0.bias"])
def test_every_vector_counts(key):
    """A vector that is left behind is noticed, although all of its entries are equal at the start of training."""
    model = mlp()
    with torch.no_grad():
        model[0].bias.zero_()
    with pytest.raises(InputError, match="permuting 'h'"):
        by_hand(model, {key: (None,)}).verify(model, ROW)


def test_a_traced_group_that_changes_the_function_is_left_out():
    model = Lying()
    with pytest.warns(IsthmusWarning, match="permuting 'a' changes the outputs of Lying"):
        spec = PermutationSpec.from_model(model, ROW)
    assert set(spec.groups) == {"b"}
    assert spec.frozen["a.bias", 0] == "permuting it changed the outputs when it was verified"
    spec.verify(model, ROW)


def test_groups_that_are_wrong_together_alone_are_found(monkeypatch):
    """Once those that are wrong by themselves are left out."""
    axes = {key: (None, key) for key in "abcd"}
    spec = PermutationSpec.from_dict(axes, {key: torch.zeros(2, 3) for key in axes})
    model = nn.Identity()
    for key in axes:
        model.register_parameter(key, nn.Parameter(torch.ones(2, 3)))
    wrong = [{"a"}, {"b", "c"}]
    monkeypatch.setattr(verify._Probe, "changed_by", lambda self, names: any(one <= set(names) for one in wrong))
    assert verify.changing_groups(spec, model, ROW) == ["a", "b", "c", "d"]
    wrong.pop()
    assert verify.changing_groups(spec, model, ROW) == ["a"]


def test_groups_within_one_that_is_left_out_stay_too():
    axis = {"a.weight": (("heads", "columns"), None), "b.weight": (None, ("heads", "columns"))}
    state = {"a.weight": torch.zeros(6, 2), "b.weight": torch.zeros(2, 6)}
    spec = PermutationSpec.from_dict(axis, state, within={"columns": "heads"}, sizes={"heads": 2})
    assert spec.without(["heads"], "why").groups == {}
    assert list(spec.without(["columns"], "why").groups) == ["heads"]
    assert spec.without(["columns"], "why").frozen == {("a.weight", 0): "why", ("b.weight", 1): "why"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_models_are_verified_in_float64(dtype):
    """Also where the forward pass asks for float32 by name."""

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 64), nn.Linear(64, 3)

        def forward(self, x):
            h = self.a(x).to(torch.float32)
            return self.b(h.softmax(-1, dtype=torch.float32).float().to(self.b.weight.dtype))

    model = Cast().to(dtype)
    assert set(PermutationSpec.from_model(model, ROW.to(dtype)).groups) == {"a"}


def test_models_that_refuse_float64_are_verified_in_their_own_type():
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.c = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            if x.dtype == torch.float64:
                raise RuntimeError("no kernel for Double")
            return self.c(self.a(x).relu())

    model = Narrow()
    spec = PermutationSpec.from_model(model, ROW)
    assert set(spec.groups) == {"a"}
    spec.axes["c.weight"] = (((Factor(3, None),),), ((Factor(8, None),),))
    with pytest.raises(InputError, match="permuting 'a'"):
        spec.verify(model, ROW)


def test_complex_and_integer_entries():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.c = nn.Linear(6, 8), nn.Linear(8, 3)
            self.gain = nn.Parameter(torch.ones(8, dtype=torch.complex64))
            self.register_buffer("mask", torch.arange(8) > 3)

        def forward(self, x):
            return self.c((self.a(x) * self.gain).abs() * self.mask)

    spec = PermutationSpec.from_model(Mixed(), ROW)
    assert {key: spec.axes[key][0][0][0].group for key in ("gain", "mask")} == {"gain": "a", "mask": "a"}


def test_nothing_of_the_users_is_changed():
    model = mlp()
    model.train()
    model[0].eval()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    gradient = model[0].weight.grad = torch.ones(8, 6)
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    inputs = torch.rand(2, 6, generator=torch.Generator().manual_seed(0))
    kept = inputs.clone()
    spec = PermutationSpec.from_model(model, inputs)
    spec.verify(model, inputs)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert model[0].weight.grad is gradient
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])
    assert torch.equal(inputs, kept)


def test_specs_of_one_model_are_equal():
    one, other = (PermutationSpec.from_model(mlp(), ROW) for _ in range(2))
    assert (one.axes, one.groups, one.frozen) == (other.axes, other.groups, other.frozen)
    assert list(one.groups) == list(other.groups)


class TestErrors:
    def test_a_model_that_cannot_be_traced(self):
        class Branching(nn.Module):
            def forward(self, x):
                return x if x.sum() > 0 else -x

        model = nn.Sequential(nn.Linear(6, 3), Branching())
        with pytest.raises(InputError, match=r"cannot trace Sequential: the module '1' failed.*from_dict"):
            PermutationSpec.from_model(model, ROW)

    def test_inputs_that_do_not_fit(self):
        with pytest.raises(InputError, match="the module '0' failed"):
            PermutationSpec.from_model(mlp(), torch.zeros(2, 7))
        with pytest.raises(InputError, match="example_inputs is a str, expected a tensor, a tuple"):
            PermutationSpec.from_model(mlp(), "x")

    def test_outputs_without_tensors(self):
        class Text(nn.Module):
            def forward(self, x):
                return "text"

        with pytest.raises(InputError, match="returns a str without tensors"):
            PermutationSpec.from_model(Text(), ROW)

    def test_another_model(self):
        spec = PermutationSpec.from_model(mlp(), ROW)
        with pytest.raises(InputError, match=r"the model lacks '0\.bias' of the spec"):
            spec.verify(nn.Linear(6, 3), ROW)

    def test_outputs_that_are_not_finite(self):
        class Nothing(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.c = nn.Linear(6, 8), nn.Linear(8, 3)

            def forward(self, x):
                return self.c(self.a(x)) * float("nan")

        with pytest.raises(InputError, match="outputs on example_inputs are not finite"):
            PermutationSpec.from_model(Nothing(), ROW)
