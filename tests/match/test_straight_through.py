"""Straight-through refinement: the loss of the midpoint falls, and nothing of the user's changes."""

import pytest
import torch
from torch import nn

from isthmus.errors import InputError
from isthmus.match import (
    PermutationSpec,
    apply_permutation,
    identity_permutation,
    random_permutation,
    straight_through,
    weight_matching,
)


def network(seed, norm):
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 24), nn.BatchNorm1d(24) if norm else nn.Identity(), nn.ReLU(), nn.Linear(24, 3)]
    return nn.Sequential(*layers)


def spec_of(model):
    state = model.state_dict()
    axes = {key: ("h",) for key in state if key.startswith("1.") and state[key].dim()}
    axes |= {"0.weight": ("h", None), "0.bias": ("h",), "3.weight": (None, "h"), "3.bias": (None,)}
    return PermutationSpec.from_dict(axes, state)


def blobs(examples=240):
    generator = torch.Generator().manual_seed(7)
    targets = torch.arange(examples) % 3
    centres = 2 * torch.randn(3, 4, generator=generator)
    return centres[targets] + torch.randn(examples, 4, generator=generator), targets


def trained(seed, norm, data):
    model = network(seed, norm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
    return model


def midpoint_loss(a, b, data):
    middle = network(0, any(isinstance(layer, nn.BatchNorm1d) for layer in a))
    other = b.state_dict()
    middle.load_state_dict({key: (x + other[key]) / 2 for key, x in a.state_dict().items()})
    middle.eval()
    for layer in middle:
        layer.train(isinstance(layer, nn.BatchNorm1d))
    with torch.no_grad():
        return float(nn.functional.cross_entropy(middle(data[0]), data[1]))


@pytest.mark.parametrize("norm", [False, True])
def test_the_loss_of_the_midpoint_does_not_rise(norm):
    data = blobs()
    a, b = trained(1, norm, data), trained(2, norm, data)
    spec = spec_of(a)
    initial = random_permutation(spec, torch.Generator().manual_seed(0))
    matching = straight_through(spec, a, a, b, [data], initial=initial, epochs=10, learning_rate=0.5)
    before, after = (midpoint_loss(a, apply_permutation(spec, one, b), data) for one in (initial, matching.permutation))
    assert after < before
    assert matching.report.starts == (matching.report.objective,)
    assert "starts" not in str(matching)
    assert {group.by for group in matching.report.groups.values()} == {"loss"}


def test_a_solution_stays_and_nothing_else_changes():
    data = blobs()
    a = trained(1, True, data)
    spec = spec_of(a)
    planted = random_permutation(spec, torch.Generator().manual_seed(0))
    b = apply_permutation(spec, planted, a)
    initial = weight_matching(spec, a, b).permutation
    kept = {name: order.clone() for name, order in initial.items()}
    states = [{key: x.clone() for key, x in model.state_dict().items()} for model in (a, b)]
    random = torch.get_rng_state()
    matching = straight_through(spec, a, a, b, [data], initial=initial)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(matching.permutation["h"], kept["h"])
    assert torch.equal(initial["h"], kept["h"])
    for model, state in zip((a, b), states, strict=True):
        assert model.training
        assert all(parameter.grad is not None for parameter in a.parameters())
        assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())


def test_it_begins_with_a_matching_by_weights():
    data = blobs()
    a = trained(1, False, data)
    spec = spec_of(a)
    b = apply_permutation(spec, random_permutation(spec, torch.Generator().manual_seed(0)), a)
    matching = straight_through(spec, a, a, b, [data])
    assert matching.report.similarity == pytest.approx(1)


class Named(nn.Module):
    """A network whose argument has a name that must be given."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, *, x):
        return self.network(x)


def test_batches_of_named_arguments():
    inputs, targets = blobs()
    a, b = network(1, False), network(2, False)
    spec = spec_of(a)
    named = PermutationSpec(spec.groups, {f"network.{key}": axes for key, axes in spec.axes.items()})
    plain = straight_through(spec, a, a, b, [(inputs, targets)], epochs=3, learning_rate=0.5)
    other = straight_through(
        named, Named(a), Named(a), Named(b), [({"x": inputs}, targets)], epochs=3, learning_rate=0.5
    )
    assert torch.equal(plain.permutation["h"], other.permutation["h"])


def test_it_begins_with_a_matching_itself():
    data = blobs()
    a, b = network(1, False), network(2, False)
    spec = spec_of(a)
    initial = weight_matching(spec, a, b)
    by_matching, by_dict = (
        straight_through(spec, a, a, b, [data], initial=one) for one in (initial, initial.permutation)
    )
    assert torch.equal(by_matching.permutation["h"], by_dict.permutation["h"])


def test_data_that_run_out_are_refused():
    data = blobs()
    a = network(0, False)
    for wrong, name in (((one for one in [data]), "generator"), (data[0], "Tensor"), ({"x": data[0]}, "dict")):
        with pytest.raises(InputError, match=rf"data is a {name}, expected batches \(inputs, targets\)"):
            straight_through(spec_of(a), a, a, a, wrong)
    with pytest.raises(InputError, match="a batch of type Tensor without targets"):
        straight_through(spec_of(a), a, a, a, [data[0]])


def test_errors():
    data = blobs()
    a = network(0, False)
    spec = spec_of(a)
    with pytest.raises(InputError, match="holds no batch"):
        straight_through(spec, a, a, a, [])
    with pytest.raises(InputError, match="epochs is 0"):
        straight_through(spec, a, a, a, [data], epochs=0)
    with pytest.raises(InputError, match="the loss of the midpoint is NaN or infinite"):
        straight_through(spec, a, a, a, [(data[0] * torch.nan, data[1])], initial=identity_permutation(spec))
