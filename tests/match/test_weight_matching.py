"""Weight matching: planted permutations are found, limits hold, and the report tells what happened."""

import math

import pytest
import torch
import transformers
from torch import nn

from isthmus import FlatState
from isthmus.errors import InputError
from isthmus.io import save_state
from isthmus.match import (
    PermutationSpec,
    apply_permutation,
    compose,
    identity_permutation,
    random_permutation,
    weight_matching,
)
from isthmus.train.models import ResNet18

RESIDUAL = [(3, 30, 50), (30, 30, 50), (784, 128, 256)]


def plant(state, spec, seed):
    """A permutation and the state in its order."""
    planted = random_permutation(spec, torch.Generator().manual_seed(seed))
    return planted, apply_permutation(spec, planted, state)


def undone(spec, planted, found):
    whole = compose(spec, planted, found)
    return all(torch.equal(whole[name], order) for name, order in identity_permutation(spec).items())


def found_again(network, seed, restarts):
    state, spec = network
    planted, moved = plant(state, spec, seed)
    matching = weight_matching(spec, state, moved, restarts=restarts, seed=seed)
    return undone(spec, planted, matching.permutation)


@pytest.mark.parametrize("widths", [(5, 20, 20, 3), (20, 30, 40, 10), (784, 128, 128, 10), (10, 32, 32, 32, 32, 4)])
def test_a_hundred_mlps_of_a_hundred(networks, widths):
    for seed in range(100):
        torch.manual_seed(seed)
        assert found_again(networks.mlp(widths), seed, restarts=1)


def test_a_planted_order_is_found_on_all_kernels(networks, kernels):
    torch.manual_seed(0)
    state, spec = networks.mlp((5, 12, 8, 3))
    planted, moved = plant(state, spec, 0)
    matching = weight_matching(spec, state, moved, restarts=1, backend=kernels)
    assert undone(spec, planted, matching.permutation)


@pytest.mark.parametrize("sizes", RESIDUAL)
def test_a_hundred_residual_networks_of_a_hundred(networks, sizes):
    for seed in range(100):
        torch.manual_seed(seed)
        assert found_again(networks.residual(*sizes), seed, restarts=10)


@pytest.mark.parametrize("kind", ["resnet18", "transformer"])
def test_twenty_resnets_and_transformers_of_twenty(networks, kind):
    for seed in range(20):
        torch.manual_seed(seed)
        assert found_again(getattr(networks, kind)(), seed, restarts=10)


def test_outputs_do_not_change():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    spec = PermutationSpec.from_dict(
        {"0.weight": ("h1", None), "0.bias": ("h1",), "2.weight": ("h2", "h1"), "2.bias": ("h2",)}
        | {"4.weight": (None, "h2"), "4.bias": (None,)},
        model.state_dict(),
    )
    moved = apply_permutation(spec, random_permutation(spec, torch.Generator().manual_seed(1)), model)
    matching = weight_matching(spec, model, moved)
    back = apply_permutation(spec, matching.permutation, moved)
    x = torch.randn(16, 8)
    torch.testing.assert_close(back(x), model(x), rtol=1e-6, atol=1e-6)
    for one, other in zip(back.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["gpt2", "resnet"])
def test_traced_models_are_the_same_functions_again(kind):
    torch.manual_seed(0)
    if kind == "gpt2":
        config = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, **config)).eval()
        inputs = {"input_ids": torch.randint(50, (2, 9))}
    else:
        model = ResNet18(10, width=16).eval()
        inputs = {"images": torch.randn(4, 3, 16, 16)}
    spec = PermutationSpec.from_model(model, inputs)
    moved = apply_permutation(spec, random_permutation(spec, torch.Generator().manual_seed(1)), model)
    matching = weight_matching(spec, model, moved, restarts=10)
    assert matching.report.similarity == pytest.approx(1)
    with torch.no_grad():
        outputs = [one(**inputs) for one in (model, apply_permutation(spec, matching.permutation, moved))]
    before, after = outputs if kind == "resnet" else [one.logits for one in outputs]
    assert (after - before).norm() < 1e-4 * before.norm()


def test_modules_states_flat_states_and_files(networks, tmp_path):
    torch.manual_seed(0)
    state, spec = networks.mlp((4, 8, 8, 2))
    planted, moved = plant(state, spec, 0)
    save_state(tmp_path / "b.safetensors", moved)
    prefixed = {f"module.{key}": tensor for key, tensor in moved.items()}
    for b in (moved, FlatState.from_state_dict(moved), tmp_path / "b.safetensors", prefixed):
        assert undone(spec, planted, weight_matching(spec, state, b).permutation)


def test_the_report_says_what_was_reached(networks):
    torch.manual_seed(0)
    state, spec = networks.mlp((4, 8, 8, 2))
    _, moved = plant(state, spec, 0)
    report = weight_matching(spec, state, moved, restarts=2).report
    assert report.starts == (report.objective,)  # none can be better
    moving = [key for key in state if key != "2.bias"]
    square = sum(float(state[key].double().square().sum()) for key in moving)
    before = sum(float((state[key].double() * moved[key].double()).sum()) for key in moving)
    assert report.objective == pytest.approx(square)
    assert report.objective_before == pytest.approx(before)
    assert report.similarity == pytest.approx(1)
    assert report.similarity_before == pytest.approx(before / square)
    assert report.sweeps >= 2
    assert not report.already_aligned
    assert {name: group.units for name, group in report.groups.items()} == {"h1": 8, "h2": 8}
    assert all(abs(group.gap) < 1e-5 for group in report.groups.values())
    other, _ = networks.mlp((4, 8, 8, 2))
    matching = weight_matching(spec, state, other, restarts=2)
    assert len(matching.report.starts) == 2
    assert matching.report.objective == max(matching.report.starts)
    text = str(matching)
    assert "similarity" in text
    assert "best of 2 starts" in text
    assert "aligned already" not in text


def test_models_that_share_a_base_stay(networks):
    torch.manual_seed(0)
    state, spec = networks.residual(8, 16, 24)
    tuned = {key: tensor + 0.05 * tensor.std() * torch.randn_like(tensor) for key, tensor in state.items()}
    for b in (state, tuned):
        matching = weight_matching(spec, state, b, restarts=3)
        assert undone(spec, identity_permutation(spec), matching.permutation)
        assert matching.report.already_aligned
        assert all(group.fixed == group.units for group in matching.report.groups.values())
        assert "aligned already" in str(matching)


def test_what_is_given_is_not_modified(networks):
    torch.manual_seed(0)
    state, spec = networks.mlp((4, 8, 8, 2))
    _, moved = plant(state, spec, 0)
    initial = random_permutation(spec, torch.Generator().manual_seed(3))
    models = [{key: tensor.clone() for key, tensor in model.items()} for model in (state, moved)]
    kept = {name: order.clone() for name, order in initial.items()}
    random = torch.get_rng_state()
    matching = weight_matching(spec, state, moved, initial=initial, restarts=3)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(initial[name], kept[name]) for name in kept)
    assert all(order.dtype == torch.int64 for order in matching.permutation.values())
    for model, copied in zip((state, moved), models, strict=True):
        assert all(torch.equal(model[key], copied[key]) for key in copied)


def test_it_begins_where_it_is_told(networks):
    torch.manual_seed(0)
    state, spec = networks.residual(3, 30, 50)
    planted, moved = plant(state, spec, 0)
    solution = weight_matching(spec, state, moved, restarts=10).permutation
    matching = weight_matching(spec, state, moved, initial=solution)
    assert matching.report.sweeps == 1
    assert undone(spec, planted, matching.permutation)


def test_only_some_groups(networks):
    torch.manual_seed(0)
    state, spec = networks.mlp((4, 8, 8, 8, 2))
    planted = identity_permutation(spec) | {"h2": torch.randperm(8)}
    moved = apply_permutation(spec, planted, state)
    for only in ("h2", ["h2"], "*2"):
        matching = weight_matching(spec, state, moved, only=only, restarts=3)
        assert undone(spec, planted, matching.permutation)
        assert matching.report.groups["h1"].gap is None
    matching = weight_matching(spec, state, moved, only=["h1", "h3"], restarts=3)
    assert torch.equal(matching.permutation["h2"], torch.arange(8))
    with pytest.raises(InputError, match=r"the pattern 'h9', which fits none of the groups \['h1', 'h2', 'h3'\]"):
        weight_matching(spec, state, moved, only="h9")


def test_heads_without_their_columns_and_columns_without_their_heads(networks):
    torch.manual_seed(0)
    state, spec = networks.transformer(blocks=1)
    whole = random_permutation(spec, torch.Generator().manual_seed(0))
    stay = identity_permutation(spec)
    columns = stay | {name: whole[name] for name in ("0.qk", "0.v")}
    heads = stay | {"0.heads": whole["0.heads"]}
    for planted, only in ((columns, ["*.qk", "*.v"]), (heads, "*.heads")):
        moved = apply_permutation(spec, planted, state)
        matching = weight_matching(spec, state, moved, only=only)
        assert undone(spec, planted, matching.permutation)


def test_queries_that_share_values(networks):
    for seed in range(5):
        torch.manual_seed(seed)
        state, spec = networks.grouped_attention()
        assert found_again((state, spec), seed, restarts=2)
        other, _ = networks.grouped_attention()
        report = weight_matching(spec, state, other).report
        assert report.objective > report.objective_before
    for only in (["queries"], ["v"], ["heads", "v"]):
        planted = identity_permutation(spec) | {
            name: order
            for name, order in random_permutation(spec).items()
            if name in ([only] if isinstance(only, str) else only)
        }
        matching = weight_matching(spec, state, apply_permutation(spec, planted, state), only=only)
        assert undone(spec, planted, matching.permutation)


@pytest.mark.parametrize("kind", ["resnet18", "mlp"])
def test_one_result_for_any_number_of_threads(networks, same_on_threads, kind):
    torch.manual_seed(0)
    arguments = {"resnet18": (8,), "mlp": ((20, 700, 700, 5),)}[kind]  # wider than a chunk of rows, too
    (a, spec), (b, _) = (getattr(networks, kind)(*arguments) for _ in range(2))
    assert same_on_threads(lambda: [weight_matching(spec, a, b, restarts=2).permutation])


def test_sweeps_never_lose(networks):
    torch.manual_seed(0)
    (a, spec), (b, _) = networks.residual(8, 16, 24), networks.residual(8, 16, 24)
    told = []
    matching = weight_matching(spec, a, b, progress=lambda *what: told.append(what))
    objectives = [objective for _, _, objective in told]
    assert objectives == sorted(objectives)
    assert [what[:2] for what in told] == [(0, sweep) for sweep in range(1, matching.report.sweeps + 1)]
    assert objectives[-1] == matching.report.objective
    assert matching.report.objective > matching.report.objective_before


def test_a_local_optimum_cannot_be_bettered_by_one_group(networks):
    torch.manual_seed(0)
    (a, spec), (b, _) = networks.mlp((4, 5, 5, 2)), networks.mlp((4, 5, 5, 2))
    matching = weight_matching(spec, a, b)
    at = matching.permutation
    for name in spec.groups:
        for order in torch.cartesian_prod(*[torch.arange(5)] * 5):
            if len(set(order.tolist())) == 5:
                other = apply_permutation(spec, {**at, name: order}, b)
                value = sum(float((a[key] * other[key]).sum()) for key in a if key != "2.bias")
                assert value <= matching.report.objective + 1e-5


def test_a_group_on_both_axes_of_a_tensor():
    generator = torch.Generator().manual_seed(0)
    state = {"w": torch.randn(12, 12, generator=generator), "in": torch.randn(12, 4, generator=generator)}
    spec = PermutationSpec.from_dict({"w": ("h", "h"), "in": ("h", None)}, state)
    planted, moved = plant(state, spec, 1)
    told = []
    matching = weight_matching(spec, state, moved, restarts=4, progress=lambda *what: told.append(what))
    assert undone(spec, planted, matching.permutation)
    first = [objective for start, _, objective in told if start == 0]
    assert first == sorted(first)  # the linearised objective may promise more than it holds


def test_limits(networks):
    torch.manual_seed(0)
    state, spec = networks.mlp((3, 1, 1, 2))  # groups of one unit
    matching = weight_matching(spec, state, state, restarts=2)
    assert matching.report.already_aligned
    state, spec = networks.mlp((3, 6, 6, 2))
    zeros = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    for a, b in ((zeros, zeros), (state, zeros), (zeros, state)):
        report = weight_matching(spec, a, b, restarts=2).report
        assert report.similarity == report.objective == 0
        assert not report.already_aligned
        assert undone(spec, identity_permutation(spec), weight_matching(spec, a, b).permutation)
    nothing = PermutationSpec.from_dict({"w": (None,)}, {"w": torch.zeros(2)})
    assert weight_matching(nothing, {"w": torch.ones(2)}, {"w": torch.ones(2)}).permutation == {}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_names_the_tensor_and_its_groups(networks, value):
    torch.manual_seed(0)
    state, spec = networks.mlp((3, 6, 6, 2))
    broken = {key: tensor.clone() for key, tensor in state.items()}
    broken["1.weight"][2, 3] = value
    with pytest.raises(InputError, match=r"'1.weight' of b holds NaN or infinity.* the units of 'h1', 'h2'"):
        weight_matching(spec, state, broken)
    with pytest.raises(InputError, match=r"'1.weight' of a holds NaN"):
        weight_matching(spec, broken, state)


def test_only_what_is_matched_must_be_finite(networks):
    torch.manual_seed(0)
    state, spec = networks.mlp((3, 6, 7, 8, 2))
    planted = identity_permutation(spec) | {"h1": torch.randperm(6)}
    moved = apply_permutation(spec, planted, state)
    moved["3.weight"] = moved["3.weight"].clone()
    moved["3.weight"][0, 0] = math.nan
    with pytest.raises(
        InputError, match=r"'3.weight' of b holds NaN or infinity.* match other groups alone with only="
    ):
        weight_matching(spec, state, moved)
    matching = weight_matching(spec, state, moved, only="h1")
    assert undone(spec, planted, matching.permutation)
    assert matching.report.similarity == pytest.approx(1)


@pytest.mark.parametrize(
    ("scales", "dtype"),
    [
        ((1e-25, 1e-25), torch.float32),
        ((1e-30, 1e20), torch.float32),
        ((1e20, 1e20), torch.float32),
        ((1e-25, 1e-25), torch.bfloat16),
        ((1e120, 1e150), torch.float64),
        ((1e-150, 1.0), torch.float64),
    ],
)
def test_weights_of_any_scale(networks, scales, dtype):
    torch.manual_seed(0)
    state, spec = networks.residual(8, 12, 16)
    state = {key: tensor.to(dtype) for key, tensor in state.items()}
    planted, moved = plant(state, spec, 1)
    a, b = ({key: x * scale for key, x in model.items()} for model, scale in zip((state, moved), scales, strict=True))
    told = []
    found = weight_matching(spec, a, b, restarts=2, progress=lambda *what: told.append(what[2]))
    assert undone(spec, planted, found.permutation)
    assert found.report.similarity == pytest.approx(1, abs=1e-4)
    assert told[-1] == pytest.approx(found.report.starts[-1])
    plain = weight_matching(spec, state, moved, restarts=2).report
    assert found.report.objective == pytest.approx(plain.objective * scales[0] * scales[1], rel=1e-2)
    assert all(
        group.gap == pytest.approx(0, abs=1e-6 * found.report.objective) for group in found.report.groups.values()
    )


def test_norms_beyond_float64_are_named(networks):
    state, spec = networks.mlp((3, 6, 2))
    state = {key: tensor.double() for key, tensor in state.items()}
    with pytest.raises(InputError, match=r"'0.bias' of b is so large that its norm overflows in float64"):
        weight_matching(spec, state, {key: x * 1e200 for key, x in state.items()})
    with pytest.raises(InputError, match="the weights of a are so small that their squares vanish in float64"):
        weight_matching(spec, {key: x * 1e-200 for key, x in state.items()}, state)


def test_a_tied_tensor_counts_once(networks):
    torch.manual_seed(0)
    state, spec = networks.transformer(24, 3, 16, 1)
    _, moved = plant(state, spec, 1)
    assert moved["head"] is moved["wte"]
    untied = moved | {"head": moved["wte"].clone()}
    reports = [weight_matching(spec, state, one).report for one in (moved, untied)]
    assert reports[0].objective == reports[1].objective


def test_files_may_leave_out_what_is_tied(networks):
    torch.manual_seed(0)
    state, spec = networks.transformer(24, 3, 16, 1)
    planted, moved = plant(state, spec, 1)
    for lacking in ("head", "wte"):
        stored = {key: x for key, x in moved.items() if key != lacking}
        matching = weight_matching(spec, state, stored, restarts=10)
        assert undone(spec, planted, matching.permutation)
        back = apply_permutation(spec, matching.permutation, stored)
        assert back.keys() == stored.keys()
        assert all(torch.equal(back[key], state[key]) for key in back)
        flat = apply_permutation(spec, matching, FlatState.from_state_dict(stored))
        assert all(torch.equal(flat[key], state[key]) for key in back)
    neither = {key: x for key, x in moved.items() if key not in ("head", "wte")}
    with pytest.raises(InputError, match=r"b lacks 'head' of the spec \(0 keys missing in the spec, 2 in b\)"):
        weight_matching(spec, state, neither)


def test_results_are_not_the_arguments(networks):
    torch.manual_seed(0)
    state, spec = networks.mlp((3, 6, 7, 2))
    initial = random_permutation(spec)
    kept = {name: order.clone() for name, order in initial.items()}
    found = weight_matching(spec, state, state, initial=initial, only="h1").permutation
    assert torch.equal(found["h2"], kept["h2"])
    for order in found.values():
        order.zero_()
    assert all(torch.equal(order, kept[name]) for name, order in initial.items())


def test_it_begins_with_a_matching(networks):
    torch.manual_seed(0)
    (a, spec), (b, _) = networks.residual(8, 12, 16), networks.residual(8, 12, 16)
    first = weight_matching(spec, a, b, seed=3)
    again = weight_matching(spec, a, b, initial=first)
    assert all(torch.equal(order, again.permutation[name]) for name, order in first.permutation.items())


def test_wrong_arguments(networks):
    state, spec = networks.mlp((3, 6, 2))
    for wrong in ({"restarts": 0}, {"max_sweeps": 0}, {"restarts": 2.5}):
        with pytest.raises(InputError, match=r"(restarts|max_sweeps) is (0|2\.5), expected an integer of at least 1"):
            weight_matching(spec, state, state, **wrong)
    with pytest.raises(InputError, match="only= holds no pattern"):
        weight_matching(spec, state, state, only=[])
    with pytest.raises(InputError, match="the spec is a dict, expected a PermutationSpec"):
        weight_matching(state, state, spec)
    with pytest.raises(InputError, match=r"the permutation is a list, expected a mapping"):
        weight_matching(spec, state, state, initial=[])
    with pytest.raises(InputError, match=r"lacks '0.weight' of the spec"):
        weight_matching(spec, state, {key: tensor for key, tensor in state.items() if key != "0.weight"})
    with pytest.raises(InputError, match="the group 'x', which the spec does not define"):
        weight_matching(spec, state, state, initial={"x": torch.arange(6)})
