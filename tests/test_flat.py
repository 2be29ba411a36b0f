"""Flat states: layout, ties, strides, binding, version counters; and interpolation between them."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from isthmus import _versions, ops
from isthmus.errors import InputError
from isthmus.flat import FlatState, Layout, canonical_keys
from isthmus.merging import lerp_states, weighted_sum_states


class Net(nn.Module):
    """Tied embeddings, a batch norm with its counter, and a 0-dim parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, tokens):
        return self.scale * self.head(self.norm(self.embed(tokens)))


def net(seed):
    torch.manual_seed(seed)
    module = Net()
    module.norm.running_mean.normal_()
    return module


TOKENS = torch.arange(7)


def test_layout_by_hand():
    state = {"b": torch.ones(3), "a": torch.ones(2, 9), "c": torch.ones(4, dtype=torch.int64), "d": torch.ones(())}
    flat = FlatState.from_state_dict(state)
    # Sorted keys; float32 tensors start at multiples of 16 elements, int64 of 8.
    assert {key: entry.offset for key, entry in flat.layout.entries.items()} == {"b": 32, "a": 0, "c": 0, "d": 48}
    assert {dtype: len(buffer) for dtype, buffer in flat.buffers.items()} == {torch.float32: 64, torch.int64: 8}
    assert list(flat) == ["b", "a", "c", "d"]
    expected = torch.zeros(64)
    expected[:18] = expected[32:35] = expected[48] = 1
    assert torch.equal(flat.buffers[torch.float32], expected)
    assert all(buffer.data_ptr() % 64 == 0 for buffer in flat.buffers.values())
    assert [len(buffer) for buffer in flat.averaged] == [64]


def test_round_trip_copies_and_keeps_order():
    state = {"z": torch.randn(3, 4).t(), "y": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)}
    state |= {
        "x": torch.tensor(3),
        "w": torch.empty(0, 2),
        "v": torch.randn(5).bfloat16(),
        "u": torch.tensor([True, False]),
    }
    state["t"] = torch.randn(3, dtype=torch.complex64).conj()
    flat = FlatState.from_state_dict(state)
    back = flat.to_state_dict()
    assert list(back) == list(state)
    for key, tensor in state.items():
        assert back[key].dtype == tensor.dtype
        assert torch.equal(back[key], tensor)
        if tensor.numel():
            assert back[key].data_ptr() != tensor.data_ptr()
    back["z"].zero_()
    assert state["z"].all()  # the source is untouched, the flat state is not
    assert not flat["z"].any()


def test_tied_tensors_are_stored_once_and_stay_tied():
    flat = FlatState.from_module(net(0))
    assert flat["head.weight"] is flat["embed.weight"]
    assert sum(
        entry.numel
        for entry in {e.offset: e for e in flat.layout.entries.values() if e.dtype == torch.float32}.values()
    ) == (35 + 7 + 4 * 5 + 1)
    untied = {key: tensor.clone() for key, tensor in net(0).state_dict().items()}
    with pytest.raises(InputError, match="tied"):
        flat.layout.check(FlatState.from_state_dict(untied).layout, name="b", expected="a")


def test_empty_tensors_and_parts_of_one_storage_are_not_tied():
    memory = torch.arange(10.0)
    flat = FlatState.from_state_dict({"a": memory[:5], "b": memory[:4], "c": torch.empty(0), "d": torch.empty(0)})
    flat["a"].zero_()
    assert flat["b"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert FlatState.from_state_dict({}).to_state_dict() == {}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["module.a", "module.b"], ["a", "b"]),
        (["_orig_mod.module.a"], ["a"]),
        (["module.a", "b"], ["module.a", "b"]),
        ([], []),
    ],
)
def test_canonical_keys(keys, expected):
    assert list(canonical_keys(keys).values()) == expected


def test_layouts_that_differ_say_how():
    layout = Layout({"w": torch.ones(2, 3), "b": torch.ones(3)})
    cases = [
        ({"w": torch.ones(2, 3)}, "'b' is missing"),
        ({"w": torch.ones(2, 3), "b": torch.ones(3), "c": torch.ones(1)}, "'c' is unexpected"),
        ({"w": torch.ones(3, 2), "b": torch.ones(3)}, r"'w' has shape \(3, 2\), expected \(2, 3\)"),
        ({"w": torch.ones(2, 3), "b": torch.ones(3).half()}, "'b' has dtype torch.float16, expected torch.float32"),
    ]
    for tensors, message in cases:
        with pytest.raises(InputError, match=message):
            layout.check(Layout(tensors), name="b", expected="a")
    assert layout == Layout({"b": torch.zeros(3), "w": torch.zeros(2, 3)})
    assert layout != Layout({"b": torch.zeros(3)})
    many = Layout({f"k{i}": torch.ones(1) for i in range(9)})
    with pytest.raises(InputError, match="and 6 more"):
        layout.check(many, name="b", expected="a")


@pytest.mark.parametrize(
    ("value", "kind"),
    [(3, "int"), (torch.ones(2).to_sparse(), "sparse"), (torch.ones(2, device="meta"), "meta")],
)
def test_entries_that_are_no_plain_tensors_are_named(value, kind):
    with pytest.raises(InputError, match=f"'extra'.*{kind}"):
        FlatState.from_state_dict({"w": torch.ones(2), "extra": value})


def test_bind_and_undo():
    module, other = net(0), FlatState.from_module(net(1))
    before = {key: value.clone() for key, value in module.state_dict().items()}
    storage = module.head.bias.data_ptr()
    parameters = list(module.parameters())
    module.eval()
    expected = module(TOKENS)
    reference = net(1).eval()(TOKENS)
    with other.bind(module):
        assert torch.equal(module(TOKENS), reference)
        assert list(map(id, module.parameters())) == list(map(id, parameters))
        other.buffers[torch.float32].zero_()
        assert not module(TOKENS).any()
    assert module.head.bias.data_ptr() == storage
    assert torch.equal(module(TOKENS), expected)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert module.head.weight is module.embed.weight
    assert not _versions._bound


def test_bind_comes_undone_after_an_error():
    module, flat = net(0), FlatState.from_module(net(1))
    storage = module.scale.data_ptr()
    with pytest.raises(RuntimeError, match="inside"), flat.bind(module):
        raise RuntimeError("inside")
    assert module.scale.data_ptr() == storage


def test_bind_to_another_architecture_is_an_error():
    with pytest.raises(InputError, match="the module Linear does not have the tensors of the flat state"):
        FlatState.from_module(net(0)).bind(nn.Linear(2, 2))


def test_a_binding_that_is_never_undone_leaves_nothing_behind():
    module = nn.Linear(3, 2)
    FlatState.from_module(module).bind(module)
    assert _versions._bound
    del module
    gc.collect()
    assert not _versions._bound


def test_writing_a_bound_buffer_is_seen_by_autograd(backend):
    module = nn.Linear(3, 2)
    flat = FlatState.from_module(module)
    with flat.bind(module):
        loss = module(torch.ones(1, 3, requires_grad=True)).pow(2).sum()
        other = flat.clone()
        lerp_states(flat, other, 0.5, out=flat, backend=backend)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        loss = module(torch.ones(1, 3, requires_grad=True)).pow(2).sum()
        flat.copy_(other)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    module(torch.ones(1, 3)).sum().backward()
    del module, flat, other
    gc.collect()
    assert not _versions._bound


def test_flat_states_made_in_inference_mode_can_be_trained_afterwards():
    with torch.inference_mode():
        flat = FlatState.from_module(nn.Linear(3, 2))
    module = nn.Linear(3, 2)
    with flat.bind(module):
        module(torch.ones(1, 3)).sum().backward()
    assert module.weight.grad is not None


def test_clone_and_copy_are_independent():
    a = FlatState.from_state_dict({"w": torch.ones(3)})
    b = a.clone()
    b["w"].zero_()
    assert a["w"].all()
    b.copy_(a)
    assert b["w"].all()
    with pytest.raises(InputError, match="'w' is missing"):
        a.copy_(FlatState.from_state_dict({"v": torch.ones(3)}))


# --- interpolation ----------------------------------------------------------------------------------------------------


def test_lerp_states(backend):
    a, b = FlatState.from_module(net(0)), FlatState.from_module(net(1))
    middle = lerp_states(a, b, 0.25, backend=backend)
    for key in a:
        if a[key].is_floating_point():
            assert torch.equal(middle[key], ops.lerp(a[key], b[key], 0.25))
    assert middle["head.weight"] is middle["embed.weight"]
    for weight, end in ((0.0, a), (1.0, b)):
        assert all(torch.equal(lerp_states(a, b, weight, backend=backend)[key], end[key]) for key in a)
    copy = a.clone()
    assert lerp_states(copy, b, 0.25, out=copy, backend=backend) is copy
    assert all(torch.equal(copy[key], middle[key]) for key in a)


def test_integers_are_never_averaged():
    a = {"w": torch.ones(2), "ids": torch.arange(77), "norm.num_batches_tracked": torch.tensor(5)}
    b = {"w": torch.zeros(2), "ids": torch.arange(77), "norm.num_batches_tracked": torch.tensor(9)}
    middle = lerp_states(FlatState.from_state_dict(a), FlatState.from_state_dict(b), 0.5)
    assert torch.equal(middle["ids"], a["ids"])
    assert middle["norm.num_batches_tracked"] == 5  # the first model's
    b["ids"] = b["ids"] + 1
    with pytest.raises(InputError, match=r"'ids' is torch.int64 and differs"):
        lerp_states(FlatState.from_state_dict(a), FlatState.from_state_dict(b), 0.5)


def test_lerp_states_of_different_models_is_an_error():
    a, b = FlatState.from_module(nn.Linear(2, 2)), FlatState.from_module(nn.Linear(2, 3))
    with pytest.raises(InputError, match=r"b does not have the tensors of a: 'bias' has shape \(3,\)"):
        lerp_states(a, b, 0.5)
    with pytest.raises(InputError, match=r"out does not have the tensors of a"):
        lerp_states(a, a, 0.5, out=b)


def test_weighted_sum_states(backend):
    a, b, c = (FlatState.from_module(net(seed)) for seed in range(3))
    total = weighted_sum_states([a, b, c], [0.5, -1.5, 2.0], backend=backend)
    for key in a:
        if a[key].is_floating_point():
            assert torch.equal(total[key], ops.weighted_sum([a[key], b[key], c[key]], [0.5, -1.5, 2.0]))
    assert weighted_sum_states([a, b], [0.5, 0.5], out=a, backend=backend) is a


def test_a_model_of_weight_one_among_weights_of_zero_is_itself_to_the_bit():
    a = FlatState.from_state_dict({"w": torch.tensor([-0.0, 1e-45, 3.0])})
    b = FlatState.from_state_dict({"w": torch.tensor([2.0, torch.inf, torch.nan])})
    total = weighted_sum_states([b, a, b], [0.0, 1.0, -0.0])
    assert torch.equal(total["w"].view(torch.int32), a["w"].view(torch.int32))


def test_integers_are_never_summed():
    a = {"w": torch.ones(2), "ids": torch.arange(77), "norm.num_batches_tracked": torch.tensor(5)}
    b = {"w": torch.zeros(2), "ids": torch.arange(77), "norm.num_batches_tracked": torch.tensor(9)}
    states = [FlatState.from_state_dict(state) for state in (a, b, b)]
    total = weighted_sum_states(states, [0.0, 2.0, 1.0])
    assert torch.equal(total["ids"], a["ids"])
    assert total["norm.num_batches_tracked"] == 5  # the first model's, whatever its weight
    states[2]["ids"][3] += 1
    with pytest.raises(InputError, match=r"'ids' is torch.int64 and differs"):
        weighted_sum_states(states, [1.0, 1.0, 0.0])


def test_sums_that_make_no_sense_are_errors():
    a, b = FlatState.from_module(nn.Linear(2, 2)), FlatState.from_module(nn.Linear(2, 3))
    with pytest.raises(InputError, match=r"states\[1\] does not have the tensors of states\[0\]"):
        weighted_sum_states([a, b], [1.0, 1.0])
    with pytest.raises(InputError, match=r"out does not have the tensors"):
        weighted_sum_states([a, a], [1.0, 1.0], out=b)
    with pytest.raises(InputError, match="2 models and 3 weights"):
        weighted_sum_states([a, a], [1.0, 1.0, 1.0])
    with pytest.raises(InputError, match="all 0"):
        weighted_sum_states([a, a], [0.0, 0.0])


dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.bool])
shapes = st.lists(st.integers(0, 5), max_size=4)


@given(st.dictionaries(st.text("ab.", min_size=1, max_size=4), st.tuples(dtypes, shapes), max_size=8))
@settings(deadline=None, max_examples=60)
def test_property_round_trip(spec):
    state = {key: (torch.rand(shape) * 9).to(dtype) for key, (dtype, shape) in spec.items()}
    flat = FlatState.from_state_dict(state)
    assert all(torch.equal(value, state[key]) for key, value in flat.to_state_dict().items())
    assert flat.layout == FlatState.from_state_dict(dict(reversed(state.items()))).layout
    spans = sorted((str(e.dtype), e.offset, e.offset + e.numel) for e in flat.layout.entries.values())
    assert all(x[0] != y[0] or x[2] <= y[1] for x, y in itertools.pairwise(spans))
