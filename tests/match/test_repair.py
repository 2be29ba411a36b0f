"""REPAIR: layers of a merged model get the statistics between their ends', and nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

import isthmus
from isthmus import norms
from isthmus.errors import InputError, IsthmusWarning
from isthmus.io import save_state
from isthmus.match import PermutationSpec, Repaired, apply_permutation, repair, weight_matching

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12, bias=False), nn.ReLU(), nn.Linear(12, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 1, 6)),
        nn.Conv2d(1, 6, (1, 3)),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(6, 8, (1, 3), groups=2, bias=False),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, (1, 3), groups=4, padding=(0, 1)),
        nn.Flatten(2, 3),
        nn.Conv1d(8, 5, 2, bias=False),
        nn.Flatten(),
        nn.Linear(25, 4),
    )


class Recurring(nn.Module):
    """One layer called twice on data, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(functional.relu(self.layer(x[:, :3])) + functional.relu(self.layer(x[:, 3:])))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(functional.relu(self.first(x)))


class Odd(nn.Linear):
    """Not quite a linear layer."""

    def forward(self, x):
        return super().forward(x).square()


def parametrised() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3))


def odd() -> nn.Module:
    return nn.Sequential(Odd(6, 8), nn.Linear(8, 3))


def single() -> nn.Module:
    return nn.Linear(6, 3)


MODELS = [mlp, convolutional, Recurring, Tied, parametrised, odd, single]


def samples(n: int = 150, seed: int = 9) -> torch.Tensor:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 1


def models(make, alpha: float = 0.5) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Two models of their own in float64, and the one between them."""
    ends = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        ends.append(make().double())
    merged = copy.deepcopy(ends[0])
    merged.load_state_dict(isthmus.merge(ends, method="linear", weights=[1 - alpha, alpha]))
    return merged, *ends


def moments(model: nn.Module, inputs: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Mean and deviation per unit of what each layer returns, or what wraps it, by its original name."""
    outputs: dict[str, list[torch.Tensor]] = {}
    handles = []
    wrapped = {id(module.layer) for module in model.modules() if isinstance(module, Repaired)}
    for name, layer in model.named_modules():
        if isinstance(layer, (*LAYERS, Repaired)) and id(layer) not in wrapped:
            units = -1 if isinstance(layer.layer if isinstance(layer, Repaired) else layer, nn.Linear) else 1

            def hook(_layer, _args, output, name=name, units=units):
                outputs.setdefault(name, []).append(output.movedim(units, -1).flatten(0, -2).clone())

            handles.append(layer.register_forward_hook(hook))
    with torch.no_grad():
        model.eval()(inputs)
    for handle in handles:
        handle.remove()
    joined = {name: torch.cat(parts) for name, parts in outputs.items()}
    return {name: (rows.mean(0), rows.std(0, correction=0)) for name, rows in joined.items()}


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("alpha", [0.5, 0.2])
def test_every_layer_has_the_goal_statistics(make, alpha):
    merged, a, b = models(make, alpha)
    found = moments(repair(merged, a, b, samples(), alpha=alpha, outputs=True, batch_size=47), samples())
    first, second, before = (moments(model, samples()) for model in (a, b, merged))
    assert found.keys() == first.keys()
    for name, (mean, deviation) in found.items():
        goals = [(1 - alpha) * x + alpha * y for x, y in zip(first[name], second[name], strict=True)]
        torch.testing.assert_close((mean, deviation), tuple(goals), rtol=1e-9, atol=1e-9)
        assert not torch.allclose(deviation, before[name][1], rtol=1e-3)  # there was something to do


def test_the_function_of_a_linear_layer_by_hand():
    """Ends 2x and -6x + 4 over x = -1, 1 have deviations 2 and 6 and means 0 and 4; between them lies -2x + 2."""
    merged, a, b = (nn.Linear(1, 1) for _ in range(3))
    for layer, (weight, bias) in zip((a, b, merged), ((2, 0), (-6, 4), (-2, 2)), strict=True):
        nn.init.constant_(layer.weight, weight)
        nn.init.constant_(layer.bias, bias)
    fixed = repair(merged, a, b, torch.tensor([[-1.0], [1.0]]), outputs=True)
    assert (fixed.weight.item(), fixed.bias.item()) == (-4, 2)
    quarter = repair(merged, a, b, torch.tensor([[-1.0], [1.0]]), alpha=0.25, outputs=True)
    assert (quarter.weight.item(), quarter.bias.item()) == (-3, 1)


def test_the_correction_is_folded_and_missing_biases_appear():
    merged, a, b = models(mlp)
    fixed = repair(merged, a, b, samples())
    assert not any(isinstance(module, Repaired) for module in fixed.modules())
    assert fixed.state_dict().keys() - merged.state_dict().keys() == {"2.bias"}
    assert fixed[2].bias.requires_grad
    assert fixed[2].bias.dtype == torch.float64


def test_what_cannot_be_folded_is_wrapped():
    for make, names in ((Tied, {"first", "second"}), (parametrised, {"0"}), (odd, {"0"})):
        merged, a, b = models(make)
        fixed = repair(merged, a, b, samples(), outputs=True)
        assert {name for name, module in fixed.named_modules() if isinstance(module, Repaired)} == names
    assert fixed.training
    assert all(module.training for module in fixed.modules())


def test_tied_weights_stay_tied():
    merged, a, b = models(Tied)
    fixed = repair(merged, a, b, samples(), outputs=True)
    assert fixed.first.layer.weight is fixed.second.layer.weight
    assert torch.equal(fixed.first.layer.weight, merged.first.weight)


def test_a_hook_that_changes_outputs_stays_between_layer_and_correction():
    merged, a, b = models(mlp)
    for model in (merged, a, b):
        model[0].register_forward_hook(lambda _layer, _args, output: output.square())
    fixed = repair(merged, a, b, samples())
    assert isinstance(fixed[0], Repaired)
    goals = [moments(model, samples())["0"] for model in (a, b)]
    outputs = fixed[0](samples())
    torch.testing.assert_close(outputs.std(0, correction=0), (goals[0][1] + goals[1][1]) / 2)


def test_the_batch_size_and_the_form_of_the_data_change_nothing(tmp_path):
    merged, a, b = models(mlp)
    expected = repair(merged, a, b, samples())
    loader = DataLoader(TensorDataset(samples(), torch.zeros(150)), batch_size=31, shuffle=True)
    files = []
    for name, model in (("a", a), ("b", b)):
        files.append(tmp_path / f"{name}.safetensors")
        save_state(files[-1], model.state_dict())
    for sources, data, size in (
        ((a, b), samples(), 7),
        ((a.state_dict(), isthmus.FlatState.from_module(b)), iter(samples().split(11)), 256),
        (files, loader, 256),
    ):
        found = repair(merged, *sources, data, batch_size=size).state_dict()
        for key, value in expected.state_dict().items():
            torch.testing.assert_close(found[key], value)


@pytest.mark.parametrize("make", [mlp, Tied])
def test_weights_that_were_merged_are_taken_with_the_module_of_an_end(make, tmp_path):
    merged, a, b = models(make)
    a.eval()
    expected = repair(merged, a, b, samples()).state_dict()
    weights = isthmus.merge([a, b], method="linear")
    save_state(tmp_path / "merged.safetensors", weights)
    before = [copy.deepcopy(state) for state in (weights, a.state_dict(), b.state_dict())]
    for given, first, second in (
        (weights, a, b),
        (weights, a.state_dict(), b),
        (isthmus.FlatState.from_state_dict(weights), a, b),
        (tmp_path / "merged.safetensors", nn.DataParallel(a), b),
    ):
        fixed = repair(given, first, second, samples())
        assert fixed.training == (first is not a)
        found = {key.removeprefix("module."): value for key, value in fixed.state_dict().items()}
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, expected[key]) for key, value in found.items())
    for state, saved in zip((weights, a.state_dict(), b.state_dict()), before, strict=True):
        assert all(torch.equal(value, saved[key]) for key, value in state.items())


def test_from_a_spec_to_a_repaired_merge_in_a_few_lines():
    model, a, b = models(mlp)
    data = samples()
    spec = PermutationSpec.from_model(model, data[:2])
    m = weight_matching(spec, a, b, restarts=4, seed=0)
    b2 = apply_permutation(spec, m.permutation, b)
    merged = isthmus.merge([a, b2], method="linear")
    fixed = repair(merged, a, b2, data)
    assert isinstance(fixed, nn.Sequential)
    found, first, second = (moments(net, data) for net in (fixed, a, b2))
    for name in ("0", "2"):
        torch.testing.assert_close(found[name][1], (first[name][1] + second[name][1]) / 2)


def test_weights_alone_are_refused_with_what_to_do():
    merged, a, b = models(mlp)
    with pytest.raises(InputError, match=r"none of merged, a and b is a module.*model\.load_state_dict\(merged\)"):
        repair(merged.state_dict(), a.state_dict(), b.state_dict(), samples())
    wrong = {key: value for key, value in merged.state_dict().items() if key != "0.bias"}
    with pytest.raises(InputError, match=r"merged does not have the tensors of the model: '0\.bias' is missing"):
        repair(wrong, a, b, samples())
    with pytest.raises(InputError, match="merged is a int, expected a module"):
        repair(3, a, b, samples())


@pytest.mark.parametrize("alpha", [-0.1, 1.5, float("nan")])
def test_beyond_the_ends_there_is_no_goal(alpha):
    merged, a, b = models(mlp)
    with pytest.raises(InputError, match=r"alpha is .*, expected a number from 0 to 1"):
        repair(merged, a, b, samples(), alpha=alpha)


def test_models_modes_and_random_states_are_left_alone():
    def make():
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))

    merged, a, b = models(make)
    merged[2].eval()
    before = [copy.deepcopy(model.state_dict()) for model in (merged, a, b)]
    state = torch.get_rng_state()
    loader = DataLoader(TensorDataset(samples()), batch_size=32, shuffle=True)
    fixed = repair(merged, a, b, loader)
    assert torch.equal(torch.get_rng_state(), state)
    for model, saved in zip((merged, a, b), before, strict=True):
        assert all(torch.equal(value, saved[key]) for key, value in model.state_dict().items())
        assert not any(module._forward_hooks for module in (*model.modules(), *fixed.modules()))
    assert [module.training for module in merged] == [module.training for module in fixed] == [True, True, False, True]
    assert not any(
        first.data_ptr() == second.data_ptr()
        for first in fixed.state_dict().values()
        for second in merged.state_dict().values()
    )


def test_a_constant_unit_is_shifted_alone():
    merged, a, b = (nn.Linear(2, 2) for _ in range(3))
    with torch.no_grad():
        merged.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
        merged.bias.copy_(torch.tensor([1 / 3, 0.0]))
        for layer in (a, b):
            layer.weight.zero_()
            layer.bias.fill_(7)
    inputs = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    fixed = repair(merged, a, b, inputs, outputs=True)
    assert torch.equal(fixed.weight, torch.zeros(2, 2))  # the other unit's goal is a constant
    assert torch.equal(fixed.bias, torch.full((2,), 7.0))
    dead = copy.deepcopy(merged)
    nn.init.zeros_(dead.weight)
    fixed = repair(dead, merged, merged, inputs, outputs=True)
    assert torch.equal(fixed.weight, dead.weight)
    assert fixed.bias.isfinite().all()


def test_half_precision_is_corrected_in_float64():
    merged, a, b = (model.bfloat16() for model in models(mlp))
    fixed = repair(merged, a, b, samples().bfloat16(), outputs=True)
    assert {value.dtype for value in fixed.state_dict().values()} == {torch.bfloat16}
    found, first, second = (moments(model.double(), samples()) for model in (fixed, a, b))
    for name, (_, deviation) in found.items():
        torch.testing.assert_close(deviation, (first[name][1] + second[name][1]) / 2, rtol=0.05, atol=0.0)


class TestBatchNorm:
    def test_layers_in_front_are_left_to_the_statistics(self):
        def make():
            return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

        merged, a, b = models(make)
        for model in (a, b):
            norms.reset_statistics(model, samples())
        fixed = repair(merged, a, b, samples(), outputs=True)
        reset = copy.deepcopy(merged)
        norms.reset_statistics(reset, samples())
        for key in ("0.weight", "1.running_mean", "1.running_var", "1.weight"):
            assert torch.equal(fixed.state_dict()[key], reset.state_dict()[key])
        found, first, second = (moments(model, samples())["3"] for model in (fixed, a, b))
        for value, x, y in zip(found, first, second, strict=True):
            torch.testing.assert_close(value, (x + y) / 2)

    def test_statistics_behind_a_corrected_layer_are_estimated_again(self):
        def make():
            first = [nn.Linear(6, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8)]
            return nn.Sequential(*first, nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.BatchNorm1d(4))

        merged, a, b = models(make)
        for model in (a, b):
            norms.reset_statistics(model, samples())
        fixed = repair(merged, a, b, samples(), outputs=True, batch_size=150)
        found, first, second = (moments(model, samples()) for model in (fixed, a, b))
        for name in ("0", "6"):
            for value, x, y in zip(found[name], first[name], second[name], strict=True):
                torch.testing.assert_close(value, (x + y) / 2)
        assert torch.equal(fixed[3].weight, merged[3].weight)
        again = copy.deepcopy(fixed)
        norms.reset_statistics(again, samples(), 150)
        for key, value in again.state_dict().items():
            torch.testing.assert_close(fixed.state_dict()[key], value)

    def test_the_statistics_of_the_ends_count_not_those_of_the_merged_model(self):
        def make():
            return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))

        merged, a, b = models(make)
        a[0].running_mean.fill_(3)
        repaired = repair(merged, a, b, samples(), outputs=True)
        found, first, second = (moments(model, samples())["1"] for model in (repaired, a, b))
        torch.testing.assert_close(found[0], (first[0] + second[0]) / 2)


def test_layers_that_make_the_outputs_are_left_alone():
    class Returning(nn.Module):
        """Two heads, of which the model returns one as it is, and a hidden layer in between."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.hidden, self.second = nn.Linear(6, 2), nn.Linear(6, 8), nn.Linear(8, 2)

        def forward(self, x):
            return {"first": self.first(x), "second": self.second(self.hidden(x).relu()).log_softmax(1)}

    merged, a, b = models(Returning)
    fixed = repair(merged, a, b, samples())
    for name, kept in (("first", True), ("hidden", False), ("second", True)):
        assert torch.equal(getattr(fixed, name).weight, getattr(merged, name).weight) == kept


def test_a_language_model_from_hugging_face():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=13, n_positions=6, use_cache=False)
    ends = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        ends.append(transformers.GPT2LMHeadModel(config).double())
    merged = copy.deepcopy(ends[0])
    merged.load_state_dict(isthmus.merge(ends, method="linear"))
    tokens = torch.randint(13, (40, 6), generator=torch.Generator().manual_seed(2))
    fixed = repair(merged, *ends, tokens, batch_size=16)
    assert fixed.state_dict().keys() == merged.state_dict().keys()  # all is folded
    name = "transformer.h.1.mlp.c_proj"
    outputs = []
    for model in (*ends, fixed):
        model.eval().get_submodule(name).register_forward_hook(lambda _layer, _args, output: outputs.append(output))
        with torch.no_grad():
            model(tokens)
    first, second, found = (rows.flatten(0, 1).std(0, correction=0) for rows in outputs)
    torch.testing.assert_close(found, (first + second) / 2)


class Keywords(nn.Module):
    """A model whose arguments have names only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.hidden = nn.Linear(8, 4)

    def forward(self, *, left, right):
        return self.last(self.norm(self.hidden(functional.relu(self.first(left) + right)).relu()))


@pytest.mark.parametrize("targets", [False, True])
def test_batches_of_arguments_by_name(targets):
    merged, a, b = models(Keywords)
    batches = [{"left": rows[:, :3], "right": rows[:, 3:4]} for rows in samples().split(40)]
    fixed = repair(merged, a, b, [(batch, torch.zeros(40)) for batch in batches] if targets else batches)
    deviations = []
    for model in (a, b, fixed):
        outputs = []
        model.eval().hidden.register_forward_hook(lambda _layer, _args, output, outputs=outputs: outputs.append(output))
        with torch.no_grad():
            for batch in batches:
                model(**batch)
        deviations.append(torch.cat(outputs).std(0, correction=0))
    torch.testing.assert_close(deviations[2], (deviations[0] + deviations[1]) / 2)
    assert fixed.norm.num_batches_tracked == 4
    with pytest.raises(InputError, match="one batch goes in a list"):
        repair(merged, a, b, batches[0])
    with pytest.raises(InputError, match="fewer than two examples"):
        repair(merged, a, b, [{"left": samples(1)[:, :3], "right": samples(1)[:, 3:4]}])


def test_layers_that_are_not_called_are_named():
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 4)

        def forward(self, x):
            return self.head(self.attention(x[:, None], x[:, None], x[:, None])[0]).log_softmax(-1)

    merged, a, b = models(Attending)
    with pytest.warns(IsthmusWarning, match=r"'attention\.out_proj' are not called"):
        fixed = repair(merged, a, b, samples(), outputs=True)
    assert torch.equal(fixed.attention.out_proj.weight, merged.attention.out_proj.weight)
    assert not torch.equal(fixed.head.weight, merged.head.weight)


def test_what_cannot_be_repaired_is_refused():
    merged, a, b = models(mlp)
    with pytest.raises(InputError, match=r"'2\.weight' is missing"):
        repair(merged, {key: value for key, value in a.state_dict().items() if key != "2.weight"}, b, samples())
    with pytest.raises(InputError, match="at least two examples"):
        repair(merged, a, b, samples(1))
    with pytest.raises(InputError, match="fewer than two examples"):
        repair(merged, a, b, [])
    with pytest.raises(InputError, match="nothing to repair"):
        repair(single(), single(), single(), samples().float())
    nn.init.constant_(b[0].bias, float("inf"))
    with pytest.raises(InputError, match="outputs of the layer '0' of model b are not finite"):
        repair(merged, a, b, samples())
