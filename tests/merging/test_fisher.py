"""Fisher-weighted averaging and the estimate of Fishers, against values worked out by hand and loops in float64."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.nn import functional

from isthmus.errors import InputError
from isthmus.merging import merge
from isthmus.merging.fisher import BLOCK, fisher_average, fisher_diagonal


def average(models, fishers, weights=None, *, dtypes=None, keys=None, epsilon=1e-6, normalize_fishers=False):
    """Merge tensors by key into new ones; unless given, weights are 1 and dtypes those of the first model."""
    dtypes = dtypes or {key: value.dtype for key, value in models[0].items()}
    out = {key: torch.empty_like(value, dtype=dtypes[key]) for key, value in models[0].items()}
    written = fisher_average(
        models,
        fishers,
        dict.fromkeys(models[0], weights or [1.0] * len(models)),
        out,
        epsilon=epsilon,
        normalize_fishers=normalize_fishers,
        keys=keys or models[0].keys(),
    )
    return {key: out[key] for key in written}


def one(*values, dtype=torch.float64):
    """One state dict for each value, of the single key "w"."""
    return [{"w": torch.tensor(value, dtype=dtype)} for value in values]


def test_by_hand():
    # (1 · 2 + 3 · 10) / (1 + 3) = 8
    assert average(one(2.0, 10.0), one(1.0, 3.0), epsilon=0)["w"].item() == 8
    # with ε = 1: (2 · 2 + 4 · 10) / 6
    assert average(one(2.0, 10.0), one(1.0, 3.0), epsilon=1)["w"].item() == pytest.approx(44 / 6, rel=1e-15)
    # weights 3 and 1 undo the Fishers
    assert average(one(2.0, 10.0), one(1.0, 3.0), [3.0, 1.0], epsilon=0)["w"].item() == 6


def test_each_element_has_its_own_weights():
    merged = average(one([0.0, 0.0, 0.0], [1.0, 1.0, 1.0]), one([1.0, 0.0, 5.0], [1.0, 2.0, 0.0]), epsilon=0)
    assert merged["w"].tolist() == [0.5, 1.0, 0.0]


def test_normalised_fishers_by_hand():
    # norms over both keys: √(3² + 4²) = 5 and √(40² + 30²) = 50; so c is (.6, .8) and (.8, .6)
    models = [{"a": torch.tensor(0.0), "b": torch.tensor(0.0)}, {"a": torch.tensor(1.0), "b": torch.tensor(1.0)}]
    fishers = [
        {"a": torch.tensor(3.0), "b": torch.tensor(4.0), "left out": torch.tensor(1e9)},
        {"a": torch.tensor(40.0), "b": torch.tensor(30.0), "left out": torch.tensor(0.0)},
    ]
    merged = average(models, fishers, epsilon=0, normalize_fishers=True, keys={"a", "b", "left out"})
    assert merged["a"].item() == pytest.approx(4 / 7, rel=1e-7)
    assert merged["b"].item() == pytest.approx(3 / 7, rel=1e-7)
    assert merged.keys() == {"a", "b"}


def test_where_all_fishers_are_zero_the_weights_decide():
    models, zeros = one([1.0, 4.0], [3.0, 8.0]), one([0.0, 0.0], [0.0, 1.0])
    assert average(models, zeros, [3.0, 1.0], epsilon=0)["w"].tolist() == [1.5, 8.0]
    tiny = average(models, zeros, [3.0, 1.0], epsilon=1e-12)["w"]  # the limit that it is
    assert tiny.tolist() == pytest.approx([1.5, 8.0], rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_a_model_with_itself_is_itself(dtype):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=random, dtype=torch.float64).to(dtype)
    fishers = [{"w": torch.rand(1000, generator=random) ** 9} for _ in range(5)]
    merged = average([{"w": x}] * 5, fishers, [0.1, 1.0, 7.0, 0.3, 0.0])["w"]
    assert torch.equal(merged, x)
    assert merged.data_ptr() != x.data_ptr()


def test_only_model_with_a_fisher_gives_its_own_values():
    random = torch.Generator().manual_seed(0)
    models = [{"w": 1e9 * torch.randn(1000, generator=random, dtype=torch.float64)} for _ in range(3)]
    fishers = [{"w": torch.full((1000,), value)} for value in (0.0, 1e-20, 0.0)]
    assert torch.equal(average(models, fishers, epsilon=0)["w"], models[1]["w"])


@given(
    st.lists(
        st.tuples(
            st.floats(-1e3, 1e3, width=32),
            st.floats(0, 1e3, width=32, allow_subnormal=False),
            st.floats(0.125, 8, width=32),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_is_the_exact_rational_value_rounded(rows):
    x, f, w = (list(column) for column in zip(*rows, strict=True))
    merged = average(one(*x, dtype=torch.float32), one(*f), w, epsilon=0.5)["w"]
    c = [Fraction(weight) * (Fraction(fisher) + Fraction(1, 2)) for weight, fisher in zip(w, f, strict=True)]
    exact = sum(a * Fraction(b) for a, b in zip(c, x, strict=True)) / sum(c)
    # float64 errors of a few 2⁻⁵³ of the largest value, then one rounding to float32
    bound = 20 * 2.0**-53 * max(map(abs, x)) + 2.0**-24 * abs(float(exact)) + 2.0**-150
    assert abs(Fraction(merged.item()) - exact) <= Fraction(bound)
    assert min(x) <= merged.item() <= max(x)


def test_rounded_once_to_the_output_dtype():
    # the mean 1 + 2⁻⁸ + 2⁻³⁰ lies above half way between two bfloat16; by way of float32 it would be rounded down
    x = 1 + 2.0**-8 + 2.0**-30
    merged = average(one(x, x), one(1.0, 1.0), dtypes={"w": torch.bfloat16})["w"]
    assert merged.dtype == torch.bfloat16
    assert merged.item() == 1 + 2.0**-7


def test_blocks_strides_and_empty_tensors():
    random = torch.Generator().manual_seed(0)
    shape = (2, BLOCK - 3)  # no multiple of a block
    models = [{"w": torch.randn(shape, generator=random).T, "e": torch.zeros(0, 3)} for _ in range(2)]
    fishers = [{"w": torch.rand(shape, generator=random).T, "e": torch.zeros(0, 3)} for _ in range(2)]
    merged = average(models, fishers)
    f, g = (fisher["w"].double() + 1e-6 for fisher in fishers)
    expected = (f * models[0]["w"] + g * models[1]["w"]) / (f + g)
    torch.testing.assert_close(merged["w"].double(), expected, rtol=2.0**-24, atol=1e-15)
    assert merged["e"].shape == (0, 3)


def test_out_may_be_an_input_and_of_any_strides():
    random = torch.Generator().manual_seed(0)
    for lay in (torch.Tensor.contiguous, lambda x: x.to(memory_format=torch.channels_last)):
        models = [{"w": lay(torch.randn(2, 3, 4, 5, generator=random))} for _ in range(2)]
        fishers = [{"w": torch.rand(2, 3, 4, 5, generator=random)} for _ in range(2)]
        expected = average(models, fishers)["w"]
        assert fisher_average(
            models, fishers, {"w": [1.0, 1.0]}, models[1], epsilon=1e-6, normalize_fishers=False, keys={"w"}
        ) == ["w"]
        assert torch.equal(models[1]["w"], expected)


def test_nan_propagates_and_prefixes_are_stripped():
    fishers = [{"module.w": torch.tensor([1.0, 1.0])}] * 2
    assert torch.equal(average(one([1.0, 2.0], [math.nan, 4.0]), fishers)["w"].isnan(), torch.tensor([True, False]))


def test_only_keys_with_fishers_come_back():
    models = [{"w": torch.tensor(1.0), "running_mean": torch.tensor(1.0)}] * 2
    assert average(models, one(1.0, 2.0)).keys() == {"w"}


@pytest.mark.parametrize(
    ("fishers", "options", "message"),
    [
        (None, {}, "fishers is a NoneType, expected a list of one mapping per model; isthmus.fisher_diagonal makes"),
        ({"w": torch.ones(2)}, {}, "fishers is a dict"),
        (one([1.0, 1.0]), {}, "1 mappings and there are 2 models"),
        ([{"w": torch.ones(2)}, torch.ones(2)], {}, r"fishers\[1\] is a Tensor"),
        ([{"w": torch.ones(2)}, {}], {}, r"fishers\[1\] lacks the key 'w', which fishers\[0\] has"),
        ([{}, {"w": torch.ones(2)}], {}, r"fishers\[0\] lacks the key 'w', which fishers\[1\] has"),
        ([{"v": torch.ones(2)}] * 2, {}, r"fishers\[0\] has the key 'v', which the models do not have"),
        ([{"w": torch.ones(2, dtype=torch.int64)}] * 2, {}, r"fishers\[0\]\['w'\] is a torch.int64"),
        ([{"w": [1.0, 1.0]}] * 2, {}, r"fishers\[0\]\['w'\] is a list"),
        (one([1.0], [1.0]), {}, r"fishers\[0\]\['w'\] has shape \(1,\), expected \(2,\)"),
        (one([1.0, 1.0], [1.0, -1.0]), {}, r"fishers\[1\]\['w'\] has a negative, infinite or NaN element"),
        (one([1.0, math.nan], [1.0, 1.0]), {}, r"fishers\[0\]\['w'\] has a negative, infinite or NaN element"),
        (one([1.0, 1.0], [math.inf, 1.0]), {}, r"fishers\[1\]\['w'\] has a negative, infinite or NaN element"),
        (one([1.0, 1.0], [0.0, 0.0]), {"normalize_fishers": True}, r"fishers\[1\] is zero in all entries"),
        (one([1.0, 1.0], [1.0, 1.0]), {"epsilon": -1e-6}, "epsilon is -1e-06"),
        (one([1.0, 1.0], [1.0, 1.0]), {"epsilon": math.nan}, "epsilon is nan"),
        (one([1.0, 1.0], [1.0, 1.0]), {"weights": [1.0, -1.0]}, "the weights for 'w' are"),
        (one([1.0, 1.0], [1.0, 1.0]), {"weights": [0.0, 0.0]}, "the weights 0.0, 0.0 sum to zero"),
    ],
)
def test_bad_input(fishers, options, message):
    with pytest.raises(InputError, match=message):
        average(one([1.0, 2.0], [3.0, 4.0]), fishers, **options)


# --- whole models


def test_merge_averages_what_has_no_fisher_and_keeps_ties_and_integers():
    a, b = ({"tied": torch.full((2,), v), "mean": torch.tensor(v), "count": torch.tensor(5)} for v in (1.0, 4.0))
    a["alias"], b["alias"] = a["tied"], b["tied"]
    fishers = [{"tied": torch.tensor([1.0, 0.0])}, {"tied": torch.tensor([3.0, 1.0])}]
    for fisher in fishers:
        fisher["alias"] = fisher["tied"]
    merged, report = merge([a, b], method="fisher", fishers=fishers, weights=[3, 1], epsilon=0, return_report=True)
    assert merged["tied"].tolist() == [2.5, 4.0]  # c = (3 · 1, 1 · 3) and (0, 1)
    assert merged["alias"] is merged["tied"]
    assert merged["mean"].item() == 1.75
    assert merged["count"].item() == 5
    json.dumps(report.to_dict())


def test_merge_of_estimated_fishers(data):
    models = [seeded(lambda: nn.Linear(3, 3)), nn.Linear(3, 3)]
    fishers = [fisher_diagonal(model, [data[0]]) for model in models]
    merged = merge(models, method="fisher", fishers=fishers, preset="fusionbench")
    c = [(fisher["bias"] + 1e-6) / math.hypot(fisher["bias"].norm(), fisher["weight"].norm()) for fisher in fishers]
    expected = sum(x * model.bias.detach() for x, model in zip(c, models, strict=True)) / sum(c)
    torch.testing.assert_close(merged["bias"], expected.float())
    with pytest.raises(InputError, match="fishers"):
        merge(models, method="fisher")
    with pytest.raises(InputError, match=r"fishers\[0\] has the key 'wieght', which the models do not have"):
        merge(models, method="fisher", fishers=[{"wieght": torch.ones(3, 3)}] * 2)


# --- the estimate


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


@pytest.fixture
def net():
    return seeded(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    )


@pytest.fixture
def data():
    random = torch.Generator().manual_seed(1)
    return torch.randn(10, 3, generator=random), torch.randint(3, (10,), generator=random)


def looped(module, samples, weights):
    """Σ weight · (∇ cross-entropy)² over (input, label) pairs, one backward pass each."""
    parameters = dict(module.named_parameters())
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    for (x, y), weight in zip(samples, weights, strict=True):
        loss = functional.cross_entropy(module(x[None]), y[None])
        for name, gradient in zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True):
            total[name] += weight * gradient.double().square()
    return total


def test_estimate_by_hand():
    # one weight, inputs 1 and 3, targets 0: gradients of ½ (w x)² at w = 2 are 2 and 18, F = (4 + 324) / 2
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, 2.0)
    batch = (torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1))
    fisher = fisher_diagonal(module, [batch], lambda out, target: (out - target) ** 2 / 2, labels="given")
    assert fisher["weight"].tolist() == [[164.0]]
    assert fisher["weight"].dtype == torch.float64


def test_given_labels_agree_with_a_loop(net, data):
    x, y = data
    fisher = fisher_diagonal(net, zip(x.split(4), y.split(4), strict=True), labels="given")
    expected = looped(net.eval(), zip(x, y, strict=True), [1 / 10] * 10)
    assert fisher.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(fisher[key], value, rtol=1e-4, atol=1e-10)


def test_expected_labels_agree_with_a_loop(net, data):
    x, _ = data
    fisher = fisher_diagonal(net, x.split(4), labels="expected")
    probabilities = net.eval()(x).double().softmax(1).detach()
    pairs = [(sample, torch.tensor(label)) for sample in x for label in range(3)]
    expected = looped(net, pairs, (probabilities / 10).flatten().tolist())
    for key, value in expected.items():
        torch.testing.assert_close(fisher[key], value, rtol=1e-4, atol=1e-10)


def test_sampled_labels_tend_to_the_expectation(net, data):
    x, _ = data
    exact = fisher_diagonal(net, [x], labels="expected")
    copies = x.repeat(400, 1)
    drawn = fisher_diagonal(net, copies.split(1000), seed=3)
    for key, value in exact.items():
        torch.testing.assert_close(drawn[key], value, rtol=0.15, atol=0.02 * float(value.max()))
    again = fisher_diagonal(net, copies.split(1000), seed=3)
    other = fisher_diagonal(net, copies.split(1000), seed=4)
    assert all(torch.equal(drawn[key], again[key]) for key in drawn)
    assert not torch.equal(drawn["0.weight"], other["0.weight"])


def test_single_gradients_are_squared_not_their_mean():
    # two samples whose gradients cancel: of the batch the gradient is 0, of each sample 1
    module = nn.Linear(1, 1, bias=False)
    batch = (torch.tensor([[1.0], [-1.0]]), torch.zeros(2))
    fisher = fisher_diagonal(module, [batch], lambda out, _: out, labels="given")
    assert fisher["weight"].item() == 1


def test_the_module_and_random_states_are_left_alone(net, data):
    net.train()
    net[0].weight.requires_grad_(False)
    net[4].bias.grad = torch.ones(3)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    random = torch.get_rng_state()
    fisher = fisher_diagonal(net, [data[0]])
    assert fisher["0.weight"].max() > 0  # frozen parameters have a Fisher too
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(layer.training for layer in net.modules())
    assert net[4].bias.grad.tolist() == [1, 1, 1]
    assert net[4].weight.grad is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_modes_come_back_after_an_error(net, data, error):
    def batches():
        yield data[0]
        torch.rand(1)
        raise error

    net.train()
    net[1].eval()
    random = torch.get_rng_state()
    with pytest.raises(error):
        fisher_diagonal(net, batches())
    assert [layer.training for layer in net] == [True, False, True, True, True]
    assert torch.equal(torch.get_rng_state(), random)


class Wrapped(nn.Module):
    """Keys as DistributedDataParallel has them."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)
        self.outer = nn.Linear(2, 2, bias=False)
        self.outer.weight = self.inner.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.outer(self.inner(x)) * self.scale


def test_tied_and_unused_parameters_and_prefixes(data):
    module = seeded(Tied)
    x = data[0][:, :2]
    fisher = fisher_diagonal(Wrapped(module), [x], labels="expected")
    assert fisher.keys() == {"inner.weight", "outer.weight", "unused"}
    assert fisher["inner.weight"] is fisher["outer.weight"]
    assert fisher["unused"].tolist() == [0, 0, 0]
    probabilities = module(x).double().softmax(1).detach()
    expected = torch.zeros(2, 2, dtype=torch.float64)
    for sample, p in zip(x, probabilities, strict=True):
        for label in range(2):
            loss = functional.cross_entropy(module(sample[None]), torch.tensor([label]))
            expected += p[label] / 10 * torch.autograd.grad(loss, module.inner.weight)[0].double().square()
    torch.testing.assert_close(fisher["inner.weight"], expected, rtol=1e-4, atol=1e-10)


def test_many_parameters_are_taken_in_parts(net, data, monkeypatch):
    x, y = data
    whole = fisher_diagonal(net, [(x, y)], labels="given")
    monkeypatch.setattr("isthmus.merging.fisher.GRADIENTS", 3 * sum(p.numel() for p in net.parameters()))
    parts = fisher_diagonal(net, [(x, y)], labels="given")
    for key, value in whole.items():
        torch.testing.assert_close(parts[key], value, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        ([], {}, "hold no sample"),
        (torch.ones(2, 3), {}, "batches is a tensor, expected an iterable of batches"),
        ([{"x": torch.ones(2, 3)}], {}, "batch 0 is a dict"),
        ([torch.ones(2, 3), "text"], {}, "batch 1 is a str"),
        ([torch.ones(2, 3)], {"labels": "given"}, "batch 0 does not have one target for each of its 2 inputs"),
        ([(torch.ones(2, 3), torch.ones(1))], {"labels": "given"}, "batch 0 does not have one target for each"),
        ([torch.ones(2, 3)], {"labels": "true"}, "labels is 'true', expected one of 'sampled', 'expected', 'given'"),
        ([torch.ones(2, 3)], {"loss": functional.cross_entropy}, 'a loss needs labels="given"'),
        ([torch.full((2, 3), math.inf)], {}, "logits are not finite"),
        ([(torch.full((2, 3), math.nan), torch.zeros(2, dtype=torch.int64))], {"labels": "given"}, "is not finite"),
    ],
)
def test_bad_batches(net, batches, options, message):
    with pytest.raises(InputError, match=message):
        fisher_diagonal(net, batches, **options)


def test_outputs_that_are_no_logits():
    with pytest.raises(InputError, match=r"shape \(2, 4, 3\), expected logits"):
        fisher_diagonal(nn.Linear(3, 3), [torch.ones(2, 4, 3)])
