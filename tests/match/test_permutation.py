"""Permutations: checked, inverted, composed, and applied to models."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from isthmus.errors import InputError
from isthmus.flat import FlatState
from isthmus.match import (
    Matching,
    PermutationSpec,
    apply,
    apply_permutation,
    compose,
    identity_permutation,
    invert,
    random_permutation,
)
from isthmus.match.permutation import beside, check_permutation, units_that_stay
from isthmus.merging import sources

seeds = st.integers(0, 2**31)


class Attention(nn.Module):
    """Three heads of four columns, without a bias: small enough to write its spec down."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(5, 12) for _ in range(3))
        self.out = nn.Linear(12, 5)

    def forward(self, x):
        query, key, value = (
            layer(x).view(len(x), 3, 4).transpose(0, 1) for layer in (self.query, self.key, self.value)
        )
        return self.out((torch.softmax(query @ key.mT, -1) @ value).transpose(0, 1).flatten(1))


def attention_spec():
    columns = {"query": ("heads", "qk"), "key": ("heads", "qk"), "value": ("heads", "v")}
    axes = {f"{name}.weight": (axis, None) for name, axis in columns.items()}
    axes |= {f"{name}.bias": (axis,) for name, axis in columns.items()}
    axes |= {"out.weight": (None, ("heads", "v")), "out.bias": (None,)}
    within = {"qk": "heads", "v": "heads"}
    return PermutationSpec.from_dict(axes, Attention().state_dict(), within=within, sizes={"heads": 3})


SPEC = attention_spec()


def drawn(seed):
    return random_permutation(SPEC, torch.Generator().manual_seed(seed))


def equal(p, q):
    return p.keys() == q.keys() and all(torch.equal(p[name], q[name]) for name in p)


def test_shapes():
    assert {name: tuple(order.shape) for name, order in identity_permutation(SPEC).items()} == {
        "heads": (3,),
        "qk": (3, 4),
        "v": (3, 4),
    }
    assert drawn(0)["qk"].sort(-1).values.tolist() == [[0, 1, 2, 3]] * 3


@given(seeds)
def test_the_inverse_undoes(seed):
    p = drawn(seed)
    assert equal(compose(SPEC, p, invert(SPEC, p)), identity_permutation(SPEC))
    assert equal(compose(SPEC, invert(SPEC, p), p), identity_permutation(SPEC))


@given(seeds, seeds)
def test_composing_is_applying_one_after_the_other(first, second):
    p, q = drawn(first), drawn(second)
    state = {key: torch.arange(tensor.numel()).view(tensor.shape) for key, tensor in Attention().state_dict().items()}
    step_by_step = apply_permutation(SPEC, q, apply_permutation(SPEC, p, state))
    at_once = apply_permutation(SPEC, compose(SPEC, p, q), state)
    assert all(torch.equal(step_by_step[key], at_once[key]) for key in state)


def test_the_function_stays():
    torch.manual_seed(0)
    model, x = Attention().double(), torch.randn(6, 5, dtype=torch.float64)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    twin = apply_permutation(SPEC, drawn(1), model)
    torch.testing.assert_close(twin(x), model(x), rtol=1e-12, atol=1e-12)
    assert not torch.equal(twin.query.weight, model.query.weight)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_every_kind_of_model_comes_back_as_its_kind(tmp_path):
    from isthmus.io import save_state

    state = {f"module.{key}": tensor for key, tensor in Attention().state_dict().items()}
    permuted = apply_permutation(SPEC, drawn(2), state)
    assert list(permuted) == list(state)
    flat = apply_permutation(SPEC, drawn(2), FlatState.from_state_dict(state))
    assert isinstance(flat, FlatState)
    save_state(tmp_path / "model.safetensors", state)
    stored = apply_permutation(SPEC, drawn(2), tmp_path / "model.safetensors")
    for key, tensor in permuted.items():
        assert torch.equal(flat[key.removeprefix("module.")], tensor)
        assert torch.equal(stored[key], tensor)


def test_tied_tensors_are_moved_once_and_stay_tied():
    embedding = torch.randn(7, 3)
    state = {"embed": embedding, "head": embedding}
    spec = PermutationSpec.from_dict({"embed": (None, "h"), "head": (None, "h")}, state)
    moved = apply_permutation(spec, {"h": torch.tensor([2, 0, 1])}, state)
    assert moved["embed"] is moved["head"]
    assert torch.equal(moved["head"], embedding[:, [2, 0, 1]])
    other = PermutationSpec.from_dict({"embed": (None, "h"), "head": (None, None)}, state)
    with pytest.raises(InputError, match=r"'embed'.*one tensor"):
        apply_permutation(other, {}, state)


def test_entries_that_are_no_tensors_are_kept():
    spec = PermutationSpec.from_dict({"w": ("h",)}, {"w": torch.zeros(2)})
    moved = apply_permutation(spec, {"h": torch.tensor([1, 0])}, {"w": torch.arange(2), "extra": "text"})
    assert moved["w"].tolist() == [1, 0]
    assert moved["extra"] == "text"


@pytest.mark.parametrize(
    ("permutation", "message"),
    [
        ({"rows": torch.arange(3)}, "'rows', which the spec does not define"),
        ({"heads": torch.arange(4)}, r"int64 tensor of shape \(3,\)"),
        ({"heads": torch.arange(3.0)}, "float32"),
        ({"heads": [0, 1, 2]}, "is list"),
        ({"heads": torch.tensor([0, 0, 2])}, "each of 0 to 2 exactly once"),
        ({"qk": torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 2]])}, "each of 0 to 3 exactly once"),
    ],
)
def test_what_is_no_permutation_is_refused(permutation, message):
    with pytest.raises(InputError, match=message):
        apply_permutation(SPEC, permutation, Attention())


def test_indices_go_where_the_tensors_are(monkeypatch):
    given = []

    def permute(tensors, indices, **_):
        given.extend(
            (x.device, one.device) for x, each in zip(tensors, indices, strict=True) for one in each if one is not None
        )
        return list(tensors)

    monkeypatch.setattr(apply.ops, "permute", permute)
    monkeypatch.setattr(sources, "plain_tensor", lambda tensor, *_: tensor.detach().to("meta"))  # as on another device
    state = {"w": torch.zeros(3, 2)}
    apply_permutation(PermutationSpec.from_dict({"w": ("h", None)}, state), {"h": torch.tensor([2, 0, 1])}, state)
    assert {tuple(map(str, devices)) for devices in given} == {("meta", "meta")}


def test_each_index_is_moved_once():
    index = torch.arange(3)
    first, second, third = beside(
        [torch.zeros(3, 3, device="meta"), torch.zeros(3), torch.zeros(2, device="meta")],
        [(index, None), (index,), None],
    )
    assert first[0].device.type == "meta"
    assert first[1] is third is None
    assert second[0] is index
    again = beside([torch.zeros(3, 3, device="meta")], [(index, index)])[0]
    assert again[0] is again[1]


def test_a_matching_will_do():
    p, model = drawn(3), Attention()
    by_dict, by_matching = apply_permutation(SPEC, p, model), apply_permutation(SPEC, Matching(p, None), model)
    assert all(torch.equal(x, by_dict.state_dict()[key]) for key, x in by_matching.state_dict().items())


def test_arguments_that_changed_places_are_named():
    with pytest.raises(InputError, match="the permutation is a Attention, expected a mapping"):
        apply_permutation(SPEC, Attention(), drawn(0))
    with pytest.raises(InputError, match="the spec is a dict, expected a PermutationSpec"):
        apply_permutation(drawn(0), SPEC, Attention())


def test_a_checked_permutation_is_a_copy():
    p = drawn(0)
    checked = check_permutation(SPEC, p)
    assert equal(checked, p)
    assert all(checked[name].data_ptr() != order.data_ptr() for name, order in p.items())


def test_units_that_stay_by_hand():
    p = identity_permutation(SPEC)
    p["heads"] = torch.tensor([0, 2, 1])
    p["qk"][0] = torch.tensor([0, 1, 3, 2])
    assert units_that_stay(SPEC, p) == {"heads": 1, "qk": 2, "v": 4}  # columns of heads that move do so too


def test_a_model_is_permuted_device_by_device(monkeypatch):
    torch.manual_seed(1)
    model = Attention()
    expected = apply_permutation(SPEC, drawn(1), model.state_dict())
    # As if every second tensor were on another device.
    monkeypatch.setattr("isthmus.ops.by_device", lambda x: [range(0, len(x), 2), range(1, len(x), 2)])
    found = apply_permutation(SPEC, drawn(1), model.state_dict())
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
