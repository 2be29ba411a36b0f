"""Activation matching: the units that respond alike, whatever watches them, and limits of the moments."""

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import nn

from isthmus.errors import InputError
from isthmus.match import (
    PermutationSpec,
    activation_matching,
    apply_permutation,
    compose,
    identity_permutation,
    random_permutation,
)


def mlp(first=16, second=12):
    layers = [nn.Linear(6, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(inplace=True), nn.Linear(second, 3)]
    model = nn.Sequential(*layers)
    axes = {"0.weight": ("h1", None), "0.bias": ("h1",), "2.weight": ("h2", "h1"), "2.bias": ("h2",)}
    axes |= {"4.weight": (None, "h2"), "4.bias": (None,)}
    return model, PermutationSpec.from_dict(axes, model.state_dict())


class Convolutions(nn.Module):
    """Convolutions with BatchNorm, a residual sum, and a linear layer behind flattened feature maps."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.inner = nn.Conv2d(8, 10, 3, padding=1)
        self.back = nn.Conv2d(10, 8, 3, padding=1)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu_()
        x = x + self.back(self.inner(x).relu_())
        return self.head(x.flatten(1))


def convolutions():
    model = Convolutions()
    state = model.state_dict()
    axes = {key: ("c",) for key in state if key.startswith("norm.") and state[key].dim()}
    axes |= {"stem.weight": ("c", None, None, None), "inner.weight": ("k", "c", None, None), "inner.bias": ("k",)}
    axes |= {"back.weight": ("c", "k", None, None), "back.bias": ("c",)}
    axes |= {"head.weight": (None, ("c", 16)), "head.bias": (None,)}
    with torch.no_grad():
        for key in state:
            if key.startswith("norm.") and state[key].dim():
                state[key].uniform_(0.5, 1.5)
    return model, PermutationSpec.from_dict(axes, state)


class Attention(nn.Module):
    """Attention with separate projections, or with a module that calls none of its own."""

    def __init__(self, separate=True):
        super().__init__()
        if separate:
            self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))
        else:
            self.inside = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x):
        if hasattr(self, "inside"):
            return self.inside(x, x, x)[0]
        q, k, v = (layer(x).unflatten(-1, (3, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def attention(separate=True):
    model = Attention(separate)
    qk, v = ("heads", "qk"), ("heads", "v")
    if separate:
        axes = {f"{name}.weight": (columns, None) for name, columns in (("q", qk), ("k", qk), ("v", v))}
        axes |= {f"{name}.bias": (columns,) for name, columns in (("q", qk), ("k", qk), ("v", v))}
        axes |= {"o.weight": (None, v), "o.bias": (None,)}
    else:
        axes = {"inside.in_proj_weight": ([qk, qk, v], None), "inside.in_proj_bias": ([qk, qk, v],)}
        axes |= {"inside.out_proj.weight": (None, v), "inside.out_proj.bias": (None,)}
        with torch.no_grad():
            model.inside.in_proj_bias.normal_()
    within = {"qk": "heads", "v": "heads"}
    return model, PermutationSpec.from_dict(axes, model.state_dict(), within=within, sizes={"heads": 3})


def recovered(spec, planted, found):
    whole = compose(spec, planted, found)
    return all(torch.equal(whole[name], order) for name, order in identity_permutation(spec).items())


CASES = {"mlp": (mlp, (6,)), "convolutions": (convolutions, (2, 4, 4)), "attention": (attention, (5, 12))}


@pytest.mark.parametrize("method", ["correlation", "inner_product"])
@pytest.mark.parametrize("case", CASES)
def test_planted_permutations_are_found(case, method):
    torch.manual_seed(0)
    maker, shape = CASES[case]
    model, spec = maker()
    planted = random_permutation(spec)
    moved = apply_permutation(spec, planted, model)
    data = torch.randn(200, *shape)
    if method == "inner_product" and case == "mlp":
        data = data.abs()  # no unit is dead
    matching = activation_matching(spec, model, model, moved, data, method=method, batch_size=64)
    if method == "correlation":
        assert recovered(spec, planted, matching.permutation)
    outputs = apply_permutation(spec, matching.permutation, moved).eval()(data)
    torch.testing.assert_close(outputs, model.eval()(data), rtol=1e-4, atol=1e-4)
    assert {group.by for group in matching.report.groups.values()} == {"activations"}
    assert method.replace("_", " ") in str(matching)


def test_the_order_is_that_of_all_samples_at_once():
    torch.manual_seed(0)
    (a, spec), (b, _) = mlp(), mlp()
    data = 50 + torch.randn(300, 6)  # large means would cancel in E[xy] - E[x] E[y] of float32
    batches = [(batch, None) for batch in data.split([100, 1, 150, 49])]
    matching = activation_matching(spec, a, a, b, batches)
    hidden = []
    for model in (a, b):
        model = model.double()
        first = model[:2](data.double())
        hidden.append((first, model[:4](data.double())))
    for x, y, name in zip(*hidden, ("h1", "h2"), strict=True):
        correlation = torch.corrcoef(torch.cat((x, y), 1).T)[: x.shape[1], x.shape[1] :].nan_to_num(0).detach()
        best = torch.from_numpy(linear_sum_assignment(correlation.numpy(), maximize=True)[1])
        reached = correlation.gather(1, matching.permutation[name][:, None]).sum()
        torch.testing.assert_close(reached, correlation.gather(1, best[:, None]).sum())


def test_dead_units_correlate_with_nothing():
    torch.manual_seed(0)
    model, spec = mlp()
    with torch.no_grad():
        model[0].bias[3] = model[0].bias[7] = -1000
    planted = random_permutation(spec)
    matching = activation_matching(spec, model, model, apply_permutation(spec, planted, model), torch.randn(100, 6))
    found = compose(spec, planted, matching.permutation)["h1"]
    assert {int(found[3]), int(found[7])} == {3, 7}
    assert torch.equal(found.sort().values, torch.arange(16))


def test_what_no_layer_shows_is_matched_by_weights():
    torch.manual_seed(0)
    model, spec = attention(separate=False)
    planted = random_permutation(spec)
    moved = apply_permutation(spec, planted, model)
    matching = activation_matching(spec, model, model, moved, torch.randn(50, 5, 12))
    assert recovered(spec, planted, matching.permutation)
    assert {group.by for group in matching.report.groups.values()} == {"weights"}


def test_only_some_groups():
    torch.manual_seed(0)
    model, spec = mlp()
    planted = random_permutation(spec)
    moved = apply_permutation(spec, planted, model)
    matching = activation_matching(spec, model, model, moved, torch.randn(200, 6), only="h2")
    assert torch.equal(matching.permutation["h1"], torch.arange(16))
    assert torch.equal(planted["h2"][matching.permutation["h2"]], torch.arange(12))
    assert matching.report.groups["h1"].by is None


@pytest.mark.parametrize("method", ["correlation", "inner_product"])
def test_one_result_for_any_number_of_threads(same_on_threads, method):
    torch.manual_seed(0)
    (a, spec), (b, _) = mlp(700, 700), mlp(700, 700)
    data = torch.randn(600, 6)
    assert same_on_threads(lambda: [activation_matching(spec, a, a, b, data, method=method).permutation])


def test_batches_of_named_arguments():
    class Named(nn.Module):
        def __init__(self, network):
            super().__init__()
            self.network = network

        def forward(self, *, x):
            return self.network(x)

    torch.manual_seed(0)
    (a, spec), (b, _) = mlp(), mlp()
    named = PermutationSpec(spec.groups, {f"network.{key}": axes for key, axes in spec.axes.items()})
    data = torch.randn(200, 6)
    plain = activation_matching(spec, a, a, b, data)
    for batches in ([{"x": data}], [({"x": data}, None)]):
        found = activation_matching(named, Named(a), Named(a), Named(b), batches)
        assert all(torch.equal(order, found.permutation[name]) for name, order in plain.permutation.items())


def test_nothing_is_left_behind():
    torch.manual_seed(0)
    model, spec = convolutions()
    model.train()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    data, random = torch.randn(20, 2, 4, 4), torch.get_rng_state()
    activation_matching(spec, model, model, state, data)
    assert torch.equal(random, torch.get_rng_state())
    assert model.training
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_errors():
    torch.manual_seed(0)
    model, spec = mlp()
    with pytest.raises(InputError, match='expected "correlation" or "inner_product"'):
        activation_matching(spec, model, model, model, torch.randn(4, 6), method="cka")
    with pytest.raises(InputError, match="holds no batch"):
        activation_matching(spec, model, model, model, [])
    with pytest.raises(InputError, match="batch_size is 0"):
        activation_matching(spec, model, model, model, torch.randn(4, 6), batch_size=0)
    with pytest.raises(InputError, match=r"the inputs of '2' in a hold NaN or infinity, so that the units of 'h1'"):
        activation_matching(spec, model, model, model, torch.full((4, 6), torch.inf))
