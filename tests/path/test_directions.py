"""Random directions and their scale, and the principal directions of a trajectory."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from isthmus.errors import InputError
from isthmus.flat import FlatState
from isthmus.path import random_directions
from isthmus.path.directions import dot, norm, parameter_keys, principal_directions


class Net(nn.Module):
    """A layer of each kind that has filters, a norm with its buffers, and tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.up = nn.ConvTranspose2d(4, 6, 2, groups=2)
        self.norm = nn.BatchNorm2d(6)
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    model = Net().double()
    model.norm.running_mean.normal_()
    return model


def direction(model: nn.Module, **options) -> FlatState:
    return random_directions(model, **options)[0]


def everything(state: FlatState, model: nn.Module) -> torch.Tensor:
    """The direction over all parameters, each once, as one vector."""
    return torch.cat([state[key].double().flatten() for key in parameter_keys(model)])


def test_parameters_are_counted_once():
    assert parameter_keys(net()) == [
        *("scale", "conv.weight", "conv.bias", "up.weight", "up.bias"),
        *("norm.weight", "norm.bias", "embed.weight", "head.bias"),
    ]
    assert parameter_keys(nn.DataParallel(nn.Linear(2, 2))) == ["weight", "bias"]


class TestNormalization:
    def test_each_filter_has_the_norm_of_the_models(self):
        model = net()
        found = direction(model)

        def check(got, expected):
            assert torch.allclose(got, expected, rtol=1e-12, atol=0)

        for key in ("conv.weight", "embed.weight"):  # along the first axis
            flat, expected = found[key].flatten(1), model.state_dict()[key].flatten(1)
            check(flat.norm(dim=1), expected.norm(dim=1))
        up, expected = (
            found["up.weight"],
            model.up.weight.detach(),
        )  # inputs 0 and 1 make outputs 0, 1 and 2; 2 and 3 the rest
        for inputs in (slice(0, 2), slice(2, 4)):
            for output in range(3):
                check(up[inputs, output].norm(), expected[inputs, output].norm())
        for key in ("conv.bias", "norm.weight", "scale"):  # a vector is one filter
            check(found[key].norm(), model.state_dict()[key].norm())

    def test_rows_of_a_linear_layer_by_hand(self):
        model = nn.Linear(2, 3, bias=False)
        model.weight.data = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 2.0]])
        drawn = direction(model, normalization="none")["weight"].double()
        found = direction(model)["weight"].double()
        assert torch.allclose(found[0], drawn[0] * 5 / drawn[0].norm(), rtol=1e-6)
        assert found[1].tolist() == [0, 0]  # a filter of norm 0
        assert torch.allclose(found[2], drawn[2] * 2 / drawn[2].norm(), rtol=1e-6)

    def test_layers_and_models(self):
        model = net()
        layers, whole = direction(model, normalization="layer"), direction(model, normalization="model")
        drawn = direction(model, normalization="none")
        for key in parameter_keys(model):
            own = model.state_dict()[key]
            assert layers[key].norm().item() == pytest.approx(own.norm().item(), rel=1e-12)
        factor = norm(FlatState.from_module(model), parameter_keys(model)) / norm(drawn, parameter_keys(model))
        assert torch.allclose(everything(whole, model), everything(drawn, model) * factor, rtol=1e-12)
        assert not torch.allclose(everything(layers, model), everything(whole, model), rtol=0.01)

    def test_without_one_the_entries_are_standard_normal(self):
        entries = direction(nn.Linear(300, 300), normalization="none")["weight"]
        assert abs(entries.mean()) < 5 / 300
        assert abs(entries.std() - 1) < 5 / 300
        assert abs((entries.abs() < 1).double().mean() - math.erf(math.sqrt(0.5))) < 5 / 300

    @pytest.mark.parametrize("normalization", ["filter", "layer"])
    def test_a_tensor_of_norm_zero_gets_no_direction(self, normalization):
        model = nn.Linear(3, 2)
        nn.init.zeros_(model.bias)
        found = direction(model, normalization=normalization)
        assert found["bias"].tolist() == [0, 0]
        assert not everything(found, model).isnan().any()

    def test_columns_of_the_transposed_linear_layer(self):
        layer_type = type("Conv1D", (nn.Module,), {"__module__": "transformers.pytorch_utils"})
        model = nn.Sequential(layer_type())
        model[0].weight = nn.Parameter(torch.tensor([[3.0, 1.0, 0.0], [4.0, 1.0, 0.0]]))
        found = direction(model)["0.weight"]
        assert torch.allclose(found.norm(dim=0), torch.tensor([5.0, math.sqrt(2), 0.0]))

    def test_complex_parameters(self):
        model = nn.Linear(3, 2, dtype=torch.complex64)
        found = direction(model)
        assert torch.allclose(found["weight"].norm(dim=1), model.weight.norm(dim=1))
        assert found["weight"].imag.abs().min() > 0

    def test_narrow_parameters_are_drawn_in_full(self):
        wide, narrow = nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()
        expected = direction(wide, normalization="none")["weight"].bfloat16()
        assert torch.equal(direction(narrow, normalization="none")["weight"], expected)


class TestDraws:
    def test_the_seed_decides(self):
        model = net()
        first, again, other = (direction(model, seed=seed) for seed in (3, 3, 4))
        assert torch.equal(everything(first, model), everything(again, model))
        cosine = dot(first, other, parameter_keys(model)) / norm(first, parameter_keys(model)) ** 2
        assert abs(cosine) < 0.5

    def test_random_states_and_the_model_are_untouched(self):
        model = net()
        before, state = FlatState.from_module(model), torch.get_rng_state()
        random_directions(model, 2)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(FlatState.from_module(model)[key], before[key]) for key in before)

    def test_more_directions_or_exclusions_do_not_change_the_others(self):
        model = net()
        one, two = direction(model), random_directions(model, 2)
        assert torch.equal(everything(one, model), everything(two[0], model))
        part = direction(model, exclude="conv.*")
        assert torch.equal(part["embed.weight"], one["embed.weight"])

    def test_buffers_do_not_move(self):
        model = net()
        model.norm.num_batches_tracked.fill_(7)
        found = direction(model)
        assert found["norm.running_mean"].tolist() == found["norm.running_var"].tolist() == [0] * 6
        assert found["norm.num_batches_tracked"] == 7  # integers are the model's

    def test_exclusions(self):
        model = net()
        found = direction(model, exclude="1d")
        moving = {key for key in parameter_keys(model) if found[key].norm() > 0}
        assert moving == {"conv.weight", "up.weight", "embed.weight"}
        found = direction(model, exclude=["1d", "up.*"])
        assert {key for key in parameter_keys(model) if found[key].norm() > 0} == {"conv.weight", "embed.weight"}
        with pytest.raises(InputError, match=r"'bias' matches no parameter"):
            direction(model, exclude=["bias"])

    def test_what_makes_no_direction_is_named(self):
        with pytest.raises(InputError, match="'filters' is unknown"):
            direction(net(), normalization="filters")
        for seed in (-1, 1.5, True, 2**63):
            with pytest.raises(InputError, match="seed="):
                direction(net(), seed=seed)
        with pytest.raises(InputError, match="direction 1 is zero everywhere"):
            direction(nn.Linear(2, 1), exclude="*")
        zeros = nn.Linear(2, 1)
        nn.init.zeros_(zeros.weight), nn.init.zeros_(zeros.bias)
        with pytest.raises(InputError, match="none has a norm"):
            direction(zeros)
        with pytest.raises(InputError, match="direction 2 is zero everywhere"):
            random_directions(nn.Linear(1, 1, bias=False), 2, normalization="none")


class TestOrthogonality:
    @pytest.mark.parametrize("normalization", ["filter", "layer", "model", "none"])
    def test_three_directions_are_at_right_angles_at_their_scale(self, normalization):
        model = net()
        keys = parameter_keys(model)
        found = random_directions(model, 3, normalization=normalization)
        for i in range(3):
            for j in range(i):
                cosine = dot(found[i], found[j], keys) / (norm(found[i], keys) * norm(found[j], keys))
                assert abs(cosine) < 1e-14
        if normalization == "filter":
            for state in found:
                got, expected = state["conv.weight"].flatten(1).norm(dim=1), model.conv.weight.flatten(1).norm(dim=1)
                assert torch.allclose(got, expected, rtol=1e-12)
        if normalization == "model":
            for state in found:
                assert norm(state, keys) == pytest.approx(norm(FlatState.from_module(model), keys), rel=1e-12)

    def test_float32(self):
        model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10))
        keys = parameter_keys(model)
        first, second = random_directions(model, 2)
        assert abs(dot(first, second, keys)) < 5e-7 * norm(first, keys) * norm(second, keys)
        raw = random_directions(model, 2, orthogonal=False)[1]
        assert abs(dot(first, raw, keys)) > 1e-5 * norm(first, keys) * norm(raw, keys)

    def test_where_filters_cannot_turn_their_norms_are_kept(self):
        model = nn.Linear(1, 8, bias=False).double()
        _, second = random_directions(model, 2)
        assert torch.allclose(second["weight"].abs(), model.weight.abs(), rtol=1e-12)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    zeros=st.integers(0, 5),
    seed=st.integers(0, 2**63 - 1),
    normalization=st.sampled_from(["filter", "layer", "model"]),
)
@settings(max_examples=40, deadline=None)
def test_property_directions_are_as_long_as_the_model(sizes, zeros, seed, normalization):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))).double()
    model[0].weight.data[:zeros] = 0
    keys = parameter_keys(model)
    found = direction(model, seed=seed, normalization=normalization)
    assert norm(found, keys) == pytest.approx(norm(FlatState.from_module(model), keys), rel=1e-12)


def trajectory(count: int, size: int = 12, seed: int = 0) -> tuple[list[FlatState], np.ndarray]:
    """A random walk that begins in large steps, and its points as rows."""
    generator = np.random.default_rng(seed)
    points = np.cumsum(generator.normal(size=(count, size)) / np.arange(1, count + 1)[:, None], axis=0)
    states = [
        FlatState.from_state_dict({"a": torch.tensor(p[:5]), "b": torch.tensor(p[5:]).reshape(-1, 1)}) for p in points
    ]
    return states, points


class TestPrincipalDirections:
    @pytest.mark.parametrize("center", [True, False])
    def test_against_the_singular_value_decomposition(self, center):
        states, points = trajectory(9)
        found = principal_directions(states, ["a", "b"], 3, center=center)
        rows = points[:-1] - points[-1]
        centred = rows - rows.mean(0) if center else rows
        _, singular, axes = np.linalg.svd(centred)
        for k, state in enumerate(found.directions):
            got = np.concatenate([state["a"].numpy(), state["b"].numpy().ravel()])
            assert abs(got @ axes[k]) == pytest.approx(1, abs=1e-12)
            assert np.linalg.norm(got) == pytest.approx(1, abs=1e-12)
            assert np.allclose(found.coordinates[:-1, k], rows @ got, atol=1e-12)
            farthest = np.abs(found.coordinates[:, k]).argmax()
            assert found.coordinates[farthest, k] > 0
        assert np.allclose(found.explained, singular[:3] ** 2 / (singular**2).sum(), rtol=1e-10)
        off = np.linalg.norm(rows - rows @ axes[:3].T @ axes[:3], axis=1)
        assert np.allclose(found.off, [*off, 0], atol=1e-7)
        assert found.coordinates[-1].tolist() == [0, 0, 0]

    def test_a_plane_by_hand(self):
        """Steps of 4 and 3 at right angles, not centred: eigenvalues of [[16, 0], [0, 9]]."""
        points = ([4.0, 0.0, 1.0], [0.0, -3.0, 1.0], [0.0, 0.0, 1.0])
        states = [FlatState.from_state_dict({"w": torch.tensor(p, dtype=torch.float64)}) for p in points]
        found = principal_directions(states, ["w"], center=False)
        assert np.allclose(found.coordinates, [[4, 0], [0, 3], [0, 0]], atol=1e-15)
        assert np.allclose(found.explained, [16 / 25, 9 / 25])
        assert found.off.tolist() == pytest.approx([0, 0, 0], abs=1e-7)
        assert torch.allclose(found.directions[1]["w"], torch.tensor([0.0, -1.0, 0.0], dtype=torch.float64))

    def test_large_tensors_are_taken_in_parts(self, monkeypatch):
        states, _ = trajectory(6)
        whole = principal_directions(states, ["a", "b"])
        monkeypatch.setattr("isthmus.path.directions.CHUNK", 2)
        parts = principal_directions(states, ["a", "b"])
        assert np.allclose(parts.coordinates, whole.coordinates, rtol=1e-12)

    def test_other_entries_do_not_count(self):
        states, _ = trajectory(6)
        found = principal_directions(states, ["a"])
        assert found.directions[0]["b"].abs().max() == 0
        assert found.directions[0]["a"].norm() == pytest.approx(1)

    def test_what_spans_no_plane_is_named(self):
        states = [FlatState.from_state_dict({"w": torch.tensor([float(i), 2.0 * i])}) for i in range(5)]
        with pytest.raises(InputError, match="do not span 2 dimensions"):
            principal_directions(states, ["w"])
        with pytest.raises(InputError, match=r"\(there are 1 besides the last\)"):
            principal_directions(states[:2], ["w"], center=False)
        with pytest.raises(InputError, match=r"\(there are 2 besides the last, and taking off their mean costs one\)"):
            principal_directions(states[:3], ["w"])
        with pytest.raises(InputError, match="do not span"):
            principal_directions([states[1]] * 4, ["w"])
