"""RegMean and the collection of Gram matrices, against values worked out by hand and least squares in float64."""

from __future__ import annotations

import json
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.nn import functional

from isthmus.errors import InputError, IsthmusWarning
from isthmus.merging import merge
from isthmus.merging.regmean import collect_grams, regmean


def regress(models, grams, weights=None, *, dtypes=None, keys=None, off_diagonal=0.9):
    """Merge tensors by key into new ones; unless given, weights are 1 and dtypes those of the first model."""
    dtypes = dtypes or {key: value.dtype for key, value in models[0].items()}
    out = {key: torch.empty_like(value, dtype=dtypes[key]).detach() for key, value in models[0].items()}
    written = regmean(
        models,
        grams,
        dict.fromkeys(models[0], weights or [1.0] * len(models)),
        out,
        off_diagonal=off_diagonal,
        keys=keys or models[0].keys(),
    )
    return {key: out[key] for key in written}


def one(*values, dtype=torch.float64):
    """One mapping for each value, of the single key "w"."""
    return [{"w": torch.tensor(value, dtype=dtype)} for value in values]


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def test_by_hand_least_squares():
    # G₁ + G₂ = [[3, 1], [1, 2]], its inverse [[2, −1], [−1, 3]] / 5
    grams = one([[2.0, 1.0], [1.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]])
    merged = regress(one([[1.0, 0.0]], [[0.0, 5.0]]), grams, off_diagonal=1)["w"]
    # right side G₁ (1, 0) + G₂ (0, 5) = (2, 1) + (0, 5) = (2, 6); solution ((4 − 6) / 5, (−2 + 18) / 5)
    torch.testing.assert_close(merged, torch.tensor([[-0.4, 3.2]], dtype=torch.float64), rtol=1e-14, atol=0)


def test_by_hand_with_scaled_off_diagonals():
    # α = ½: G₁ becomes [[2, ½], [½, 1]]; sum [[3, ½], [½, 2]], determinant 5.75; right side (2, ½) + (0, 5) = (2, 5.5)
    grams = one([[2.0, 1.0], [1.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]])
    merged = regress(one([[1.0, 0.0]], [[0.0, 5.0]]), grams, off_diagonal=0.5)["w"]
    expected = torch.tensor([[(4 - 2.75) / 5.75, (-1 + 16.5) / 5.75]], dtype=torch.float64)
    torch.testing.assert_close(merged, expected, rtol=1e-14, atol=0)


def test_without_off_diagonals_each_feature_is_a_weighted_mean():
    # feature 0: (2 · 1 + 1 · 4) / 3, feature 1: (1 · 2 + 3 · 6) / 4
    grams = one([[2.0, 1.0], [1.0, 1.0]], [[1.0, -1.0], [-1.0, 3.0]])
    merged = regress(one([[1.0, 2.0]], [[4.0, 6.0]]), grams, off_diagonal=0)["w"]
    torch.testing.assert_close(merged, torch.tensor([[2.0, 5.0]], dtype=torch.float64), rtol=1e-15, atol=0)


def test_weights_scale_the_gram_matrices():
    models, grams = one([[1.0]], [[4.0]]), one([[1.0]], [[1.0]])
    assert regress(models, grams, [2.0, 1.0])["w"].item() == 2
    assert torch.equal(regress(models, grams, [2.0, 1.0])["w"], regress(models, one([[2.0]], [[1.0]]))["w"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_linear_models_it_is_the_least_squares_fit_to_their_union(dtype):
    # each model fits its own data perfectly; the merge is the best fit of both data sets together
    random = np.random.default_rng(0)
    x = [random.standard_normal((30, 4)) * [1, 3, 0.1, 1], random.standard_normal((20, 4))]
    w = [random.standard_normal((2, 4)), random.standard_normal((2, 4))]
    fitted, *_ = np.linalg.lstsq(np.vstack(x), np.vstack([a @ b.T for a, b in zip(x, w, strict=True)]), rcond=None)
    layers = [nn.Linear(4, 2, bias=False, dtype=torch.float64) for _ in w]
    grams = []
    for layer, inputs, weight in zip(layers, x, w, strict=True):
        layer.weight.data = torch.from_numpy(weight)
        grams.append(collect_grams(layer, torch.from_numpy(inputs).split(7)))
    models = [{"weight": torch.from_numpy(weight).to(dtype)} for weight in w]
    merged = regress(models, grams, off_diagonal=1)["weight"]
    assert merged.dtype == dtype
    torch.testing.assert_close(
        merged.double(), torch.from_numpy(fitted.T), rtol=1e-11 if dtype == torch.float64 else 1e-5, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("off_diagonal", [0, 0.95, 1])
def test_a_model_with_itself_is_itself(dtype, off_diagonal):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(5, 8, generator=random, dtype=torch.float64).to(dtype)
    inputs = [torch.randn(3, 8, generator=random) for _ in range(3)]  # too few for full rank
    grams = [{"w": rows.T @ rows} for rows in inputs]
    merged = regress([{"w": x}] * 3, grams, [0.1, 1.0, 7.0], off_diagonal=off_diagonal)["w"]
    assert torch.equal(merged, x)
    assert merged.data_ptr() != x.data_ptr()


def test_directions_without_inputs_keep_the_mean():
    # only the first feature was ever seen, by the first model alone
    grams = one([[4.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]])
    models = one([[1.0, 2.0]], [[3.0, 6.0]])
    for off_diagonal in (0, 0.95, 1):
        merged = regress(models, grams, off_diagonal=off_diagonal)["w"][0].tolist()
        assert merged == [pytest.approx(1, rel=1e-15), 4]
        weighted = regress(models, grams, [3.0, 1.0], off_diagonal=off_diagonal)["w"][0].tolist()
        assert weighted == [pytest.approx(1, rel=1e-15), 3]
    assert regress(models, one([[0.0, 0.0]] * 2, [[0.0, 0.0]] * 2))["w"].tolist() == [[2.0, 4.0]]


@pytest.mark.parametrize("gram_dtype", [torch.float64, torch.float32])
def test_singular_systems_are_solved_nearest_to_the_mean(gram_dtype):
    # both models saw x = (1, 1) alone: w · x must be the mean of 1 + 2 and 3 + 6, and w₀ − w₁ stays the mean's, −2
    grams = [{"w": torch.ones(2, 2, dtype=gram_dtype)}] * 2
    merged = regress(one([[1.0, 2.0]], [[3.0, 6.0]]), grams, off_diagonal=1)["w"]
    torch.testing.assert_close(merged, torch.tensor([[2.0, 4.0]], dtype=torch.float64), rtol=1e-12, atol=0)
    # the second saw it three times as often: w · x = (3 + 3 · 9) / 4 = 7.5
    grams = [{"w": torch.ones(2, 2, dtype=gram_dtype)}, {"w": 3 * torch.ones(2, 2, dtype=gram_dtype)}]
    merged = regress(one([[1.0, 2.0]], [[3.0, 6.0]]), grams, off_diagonal=1)["w"]
    torch.testing.assert_close(merged, torch.tensor([[2.75, 4.75]], dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("gram_dtype", [torch.float64, torch.float32])
def test_rank_deficient_systems_satisfy_the_normal_equations(gram_dtype):
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(6, 40, generator=random, dtype=torch.float64) for _ in range(2)]  # rank 12 of 40
    grams = [{"w": (rows.T @ rows).to(gram_dtype)} for rows in inputs]
    models = [{"w": torch.randn(3, 40, generator=random, dtype=torch.float64)} for _ in range(2)]
    merged = regress(models, grams, off_diagonal=1)["w"]
    # twelve equations in forty unknowns: the merge can reproduce both models on the inputs that they saw
    tolerance = 1e-9 if gram_dtype == torch.float64 else 1e-2
    for rows, model in zip(inputs, models, strict=True):
        torch.testing.assert_close(rows @ merged.T, rows @ model["w"].T, rtol=tolerance, atol=tolerance)
    mean = (models[0]["w"] + models[1]["w"]) / 2
    assert (merged - mean).norm() < (models[0]["w"] - mean).norm()  # and does not run off where it is free


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 9), st.floats(0, 1))
def test_solves_its_equation(seed, size, count, rows, off_diagonal):
    random = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(rows, size, generator=random, dtype=torch.float64) for _ in range(count)]
    models = [{"w": torch.randn(2, size, generator=random, dtype=torch.float64)} for _ in range(count)]
    weights = (torch.rand(count, generator=random) + 0.1).tolist()
    merged = regress(models, [{"w": x.T @ x} for x in inputs], weights, off_diagonal=off_diagonal)["w"]
    scaled = [
        w * (off_diagonal * x.T @ x + (1 - off_diagonal) * (x.T @ x).diag().diag())
        for w, x in zip(weights, inputs, strict=True)
    ]
    right = sum(g @ model["w"].T for g, model in zip(scaled, models, strict=True))
    torch.testing.assert_close(sum(scaled) @ merged.T, right, rtol=1e-6, atol=1e-6)
    assert torch.isfinite(merged).all()


def test_units_of_the_inputs_do_not_matter():
    # inputs a million times larger in one feature, weights a million times smaller: the same function
    random = torch.Generator().manual_seed(0)
    unit = torch.tensor([1.0, 1e6, 1.0], dtype=torch.float64)
    inputs = [torch.randn(2, 3, generator=random, dtype=torch.float64) for _ in range(2)]
    models = [{"w": torch.randn(2, 3, generator=random, dtype=torch.float64)} for _ in range(2)]
    for off_diagonal in (0.95, 1):
        plain = regress(models, [{"w": x.T @ x} for x in inputs], off_diagonal=off_diagonal)["w"]
        scaled = [{"w": model["w"] / unit} for model in models]
        other = regress(scaled, [{"w": (x * unit).T @ (x * unit)} for x in inputs], off_diagonal=off_diagonal)["w"]
        torch.testing.assert_close(other * unit, plain, rtol=1e-9, atol=0)


def test_rounded_once_to_the_output_dtype():
    x = 1 + 2.0**-8 + 2.0**-30  # by way of float32 it would be rounded down
    merged = regress(one([[x]], [[x]]), one([[1.0]], [[2.0]]), dtypes={"w": torch.bfloat16})["w"]
    assert merged.dtype == torch.bfloat16
    assert merged.item() == 1 + 2.0**-7


def test_convolutions_are_matrices_and_other_keys_do_not_come_back():
    random = torch.Generator().manual_seed(0)
    models = [{"w": torch.randn(3, 2, 2, 1, generator=random), "bias": torch.zeros(3)} for _ in range(2)]
    grams = [{"module.w": torch.eye(4)}, {"module.w": 3 * torch.eye(4)}]
    merged = regress(models, grams)
    assert merged.keys() == {"w"}
    torch.testing.assert_close(merged["w"], (models[0]["w"] + 3 * models[1]["w"]) / 4)


def test_squares_that_underflow():
    # the second feature's inputs are 1e-30, whose square is 0 in float32
    grams = [{"w": torch.tensor([[1.0, 1e-30], [1e-30, 0.0]])}] * 2
    merged = regress(one([[1.0, 2.0]], [[3.0, 6.0]]), grams)["w"]
    torch.testing.assert_close(merged, torch.tensor([[2.0, 4.0]], dtype=torch.float64), rtol=1e-12, atol=0)


def test_out_may_be_an_input_and_of_any_strides():
    random = torch.Generator().manual_seed(0)
    for lay in (torch.Tensor.contiguous, lambda x: x.to(memory_format=torch.channels_last)):
        models = [{"w": lay(torch.randn(2, 3, 4, 1, generator=random))} for _ in range(2)]
        inputs = [torch.randn(20, 12, generator=random) for _ in range(2)]
        grams = [{"w": x.T @ x} for x in inputs]
        expected = regress(models, grams)["w"]
        assert regmean(models, grams, {"w": [1.0, 1.0]}, models[1], off_diagonal=0.9, keys={"w"}) == ["w"]
        assert torch.equal(models[1]["w"], expected)


def test_empty_layers():
    models = [{"a": torch.zeros(0, 2), "b": torch.zeros(3, 0)}] * 2
    merged = regress(models, [{"a": torch.eye(2), "b": torch.zeros(0, 0)}] * 2)
    assert (merged["a"].shape, merged["b"].shape) == ((0, 2), (3, 0))


@pytest.mark.parametrize(
    ("grams", "options", "message"),
    [
        (None, {}, "grams is a NoneType, expected a list of one mapping per model; isthmus.collect_grams makes"),
        (one([[1.0, 0.0], [0.0, 1.0]]), {}, "1 mappings and there are 2 models"),
        ([{"w": torch.eye(3)}] * 2, {}, r"grams\[0\]\['w'\] has shape \(3, 3\), expected .* whose shape is \(1, 2\)"),
        ([{"w": torch.ones(2)}] * 2, {}, r"grams\[0\]\['w'\] has shape \(2,\)"),
        ([{"w": torch.ones(2, 3)}] * 2, {}, r"grams\[0\]\['w'\] has shape \(2, 3\)"),
        ([{"w": torch.eye(2)}, {"w": math.nan * torch.eye(2)}], {}, r"grams\[1\]\['w'\] has an infinite or NaN"),
        (one([[1.0, 0.5], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]]), {}, r"grams\[0\]\['w'\] is not a Gram matrix"),
        (one([[1.0, 0.0], [0.0, -1.0]], [[1.0, 0.0], [0.0, 1.0]]), {}, r"grams\[0\]\['w'\] is not a Gram matrix"),
        (one([[1.0, 0.0], [0.0, 1.0]], [[1.0, 2.0], [2.0, 1.0]]), {}, r"grams\[1\]\['w'\] is not a Gram matrix"),
        (one([[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [1.0, 0.0]]), {}, r"grams\[1\]\['w'\] is not a Gram matrix"),
        ([{"w": torch.eye(2)}] * 2, {"off_diagonal": 1.1}, "off_diagonal is 1.1, expected a number from 0 to 1"),
        ([{"w": torch.eye(2)}] * 2, {"off_diagonal": math.nan}, "off_diagonal is nan"),
        ([{"w": torch.eye(2)}] * 2, {"weights": [2.0, -1.0]}, "the weights for 'w' are"),
    ],
)
def test_bad_input(grams, options, message):
    with pytest.raises(InputError, match=message):
        regress(one([[1.0, 2.0]], [[3.0, 4.0]]), grams, **options)


def test_indefinite_matrices_are_found():
    # every 2×2 minor is that of a Gram matrix, but (1, 1, 1) G (1, 1, 1)ᵀ = 3 − 6 · .9 < 0
    gram = torch.full((3, 3), -0.9) + 1.9 * torch.eye(3)
    with pytest.raises(InputError, match="the Gram matrices for 'w' are not positive semidefinite"):
        regress(one([[1.0, 2.0, 3.0]], [[3.0, 4.0, 5.0]]), [{"w": gram}] * 2, off_diagonal=1)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1j])
def test_weights_that_cannot_be_regressed(value):
    models = [{"w": torch.tensor([[1.0, 2.0]])}, {"w": torch.tensor([[1.0, value]])}]
    with pytest.raises(InputError, match=r"models\[1\]\['w'\] is complex, or has an infinite or NaN element"):
        regress(models, [{"w": torch.eye(2)}] * 2)


# --- whole models


def test_merge_of_collected_grams_keeps_what_each_model_does_and_averages_the_rest():
    random = torch.Generator().manual_seed(0)
    models = [
        seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))),
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
    ]
    inputs = [
        torch.randn(2, 4, generator=random),
        torch.randn(1, 4, generator=random),
    ]  # three equations, four unknowns
    grams = [collect_grams(model, [x]) for model, x in zip(models, inputs, strict=True)]
    merged, report = merge(models, method="regmean", grams=grams, off_diagonal=1, return_report=True)
    for model, x in zip(models, inputs, strict=True):
        torch.testing.assert_close(x @ merged["0.weight"].T, x @ model[0].weight.detach().T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(merged["0.bias"], (models[0][0].bias + models[1][0].bias).detach() / 2)
    json.dumps(report.to_dict())
    with pytest.raises(InputError, match="grams"):
        merge(models, method="regmean")


def test_presets():
    grams = one([[2.0, 1.0], [1.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]])
    models = one([[1.0, 0.0]], [[0.0, 5.0]])
    for preset, off_diagonal in (("paper", 0.9), ("fusionbench", 0.95)):
        merged = merge(models, method="regmean", preset=preset, grams=grams)["w"]
        assert torch.equal(merged, regress(models, grams, off_diagonal=off_diagonal)["w"])


# --- Gram matrices from a module


def test_grams_by_hand():
    layer = nn.Linear(2, 1)
    grams = collect_grams(layer, [torch.tensor([[1.0, 2.0]]), (torch.tensor([[3.0, 4.0], [0.0, 1.0]]), "labels")])
    assert grams.keys() == {"weight"}
    assert grams["weight"].dtype == torch.float64
    assert grams["weight"].tolist() == [[10.0, 14.0], [14.0, 21.0]]


def test_inner_layers_see_what_the_layers_before_make_in_evaluation_mode():
    net = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.ReLU(), nn.Linear(4, 2)))
    x = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0))  # positions are rows like examples
    grams = collect_grams(net, [x])
    hidden = net[0](x).relu().detach().double().reshape(10, 4)
    assert grams.keys() == {"0.weight", "3.weight"}
    torch.testing.assert_close(grams["3.weight"], hidden.T @ hidden)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
        nn.Conv2d(2, 3, 3, padding="same"),
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        nn.Conv1d(2, 3, 3, stride=2, padding=1),
    ],
    ids=["strides", "same", "circular", "1d"],
)
def test_gram_of_a_convolution_gives_the_squared_norm_of_its_output(layer, monkeypatch):
    layer = layer.double()
    x = torch.randn((4, 2, 7) if isinstance(layer, nn.Conv1d) else (4, 2, 7, 6), dtype=torch.float64)
    gram = collect_grams(layer, [x])["weight"]
    rows = layer.weight.detach().flatten(1)
    outputs = (layer(x) - layer.bias.view(-1, *[1] * (x.dim() - 2))).transpose(0, 1).flatten(1).detach()
    torch.testing.assert_close(rows @ gram @ rows.T, outputs @ outputs.T)
    monkeypatch.setattr("isthmus.merging.regmean.BLOCK", 1)  # one example at a time
    torch.testing.assert_close(collect_grams(layer, [x])["weight"], gram)
    torch.testing.assert_close(collect_grams(layer, x.split(1))["weight"], gram)
    single = nn.Sequential(nn.Flatten(0, 1), layer)  # an example without an axis of examples
    torch.testing.assert_close(collect_grams(single, x.split(1))["1.weight"], gram)


def test_merging_convolutions_keeps_both_functions_on_their_own_inputs():
    # model i sees channel i alone, so that the merge can behave like each on its own data
    random = torch.Generator().manual_seed(0)
    convs = [seeded(lambda: nn.Conv2d(2, 3, 3)), nn.Conv2d(2, 3, 3)]
    inputs = []
    for channel in range(2):
        x = torch.zeros(8, 2, 6, 6)
        x[:, channel] = torch.randn(8, 6, 6, generator=random)
        inputs.append(x)
    grams = [collect_grams(conv, [x]) for conv, x in zip(convs, inputs, strict=True)]
    merged = regress([{"weight": conv.weight} for conv in convs], grams)["weight"]
    assert not merged.requires_grad
    for conv, x in zip(convs, inputs, strict=True):
        torch.testing.assert_close(
            functional.conv2d(x, merged), functional.conv2d(x, conv.weight), rtol=1e-4, atol=1e-5
        )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.grouped = nn.Conv1d(3, 3, 1, groups=3)
        self.idle = nn.Linear(3, 3)

    def forward(self, tokens):
        x = self.second(input=self.first(self.first(self.embedding(tokens))))
        return self.head(self.grouped(x.mT).mT)


def test_shared_grouped_and_idle_layers():
    net = seeded(Net)
    with pytest.warns(IsthmusWarning, match="'idle.weight' have no Gram matrix: their layers were not called"):
        grams = collect_grams(net, [torch.tensor([[0, 1, 2], [3, 4, 0]])])
    assert grams.keys() == {"first.weight", "second.weight"}
    assert grams["first.weight"] is grams["second.weight"]
    x = net.embedding.weight[[0, 1, 2, 3, 4, 0]].detach()
    y = net.first(x).detach()
    z = net.first(y).detach()
    torch.testing.assert_close(grams["first.weight"], sum(rows.double().T @ rows.double() for rows in (x, y, z)))


def test_reparametrised_layers_have_none():
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert collect_grams(net, [torch.ones(1, 2)]).keys() == {"1.weight"}


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_the_module_and_random_states_are_left_alone(error):
    net = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)))
    net[1].eval()
    net[0].weight.grad = torch.ones(4, 3)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    random = torch.get_rng_state()

    def batches():
        torch.rand(1)
        yield torch.ones(4, 3)
        if error:
            raise error

    if error:
        with pytest.raises(error):
            collect_grams(net, batches())
    else:
        collect_grams(net, batches())
    assert torch.equal(torch.get_rng_state(), random)
    assert [layer.training for layer in net] == [True, False, True, True]
    assert all(not layer._forward_pre_hooks for layer in net)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert torch.equal(net[0].weight.grad, torch.ones(4, 3))
    assert net[3].weight.grad is None


@pytest.mark.parametrize(
    ("module", "batches", "message"),
    [
        (nn.ReLU(), [torch.ones(1, 2)], "ReLU has no linear layer or convolution"),
        (nn.Linear(2, 1), [], "hold no sample"),
        (nn.Linear(2, 1), torch.ones(1, 2), "batches is a tensor"),
        (nn.Linear(2, 1), [{"x": torch.ones(1, 2)}], "batch 0 is a dict"),
        (nn.Linear(2, 1), [torch.tensor([[1.0, math.inf]])], "inputs of the layer of 'weight' are not finite"),
    ],
)
def test_bad_collections(module, batches, message):
    with pytest.raises(InputError, match=message):
        collect_grams(module, batches)
