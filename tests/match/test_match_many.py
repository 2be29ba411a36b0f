"""Several models in one order: planted orders are found, maps are consistent, and the step is the best one."""

import itertools

import numpy as np
import pytest
import torch

from isthmus.errors import InputError
from isthmus.match import (
    PermutationSpec,
    apply_permutation,
    compose,
    identity_permutation,
    match_many,
    random_permutation,
    weight_matching,
)
from isthmus.match.many import _argmax, _matrices, _mixed

METHODS = ["frank_wolfe", "mean"]


def plant(state, spec, count):
    """So many copies in random orders, the first as it is."""
    planted = [identity_permutation(spec), *(random_permutation(spec) for _ in range(count - 1))]
    return planted, [apply_permutation(spec, one, state) for one in planted]


def undone(spec, planted, found):
    stay = identity_permutation(spec)
    wholes = [compose(spec, one, back) for one, back in zip(planted, found, strict=True)]
    return all(torch.equal(whole[name], order) for whole in wholes for name, order in stay.items())


def sum_of_pairs(models, keys):
    return sum(
        float((x[key].double() * y[key].double()).sum()) for x, y in itertools.combinations(models, 2) for key in keys
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["mlp", "residual", "transformer"])
def test_planted_orders_are_found(networks, method, kind):
    torch.manual_seed(0)
    arguments = {"mlp": ((5, 12, 12, 3),), "residual": (8, 12, 16), "transformer": (24, 3, 16, 1)}[kind]
    state, spec = getattr(networks, kind)(*arguments)
    planted, models = plant(state, spec, 4)
    matching = match_many(spec, models, method=method, restarts=2)
    assert undone(spec, planted, matching.permutations)
    assert matching.report.similarity == pytest.approx(1)
    assert matching.report.similarity_before < 0.9


@pytest.mark.parametrize("method", METHODS)
def test_the_report_says_what_was_reached(networks, method):
    torch.manual_seed(0)
    networks_of_three = [networks.mlp((5, 8, 8, 3)) for _ in range(3)]
    spec = networks_of_three[0][1]
    models = [state for state, _ in networks_of_three]
    told = []
    matching = match_many(spec, models, method=method, restarts=3, progress=lambda *what: told.append(what))
    moved = [apply_permutation(spec, one, x) for one, x in zip(matching.permutations, models, strict=True)]
    keys = [key for key in models[0] if key != "2.bias"]
    report = matching.report
    assert report.objective == pytest.approx(sum_of_pairs(moved, keys))
    assert report.objective == pytest.approx(max(report.starts))
    assert report.objective_before == pytest.approx(sum_of_pairs(models, keys))
    assert report.objective > report.objective_before
    assert report.fixed[0] == 1
    assert len(report.starts) == 3
    for start in range(3):
        objectives = [value for number, _, value in told if number == start]
        assert objectives == sorted(objectives)
    assert "3 models" in str(matching)
    assert "best of 3 starts" in str(matching)


def test_no_model_gains_alone(networks):
    torch.manual_seed(0)
    made = [networks.mlp((5, 8, 8, 3)) for _ in range(3)]
    spec, models = made[0][1], [state for state, _ in made]
    matching = match_many(spec, models)
    moved = [apply_permutation(spec, one, x) for one, x in zip(matching.permutations, models, strict=True)]
    for number, model in enumerate(moved):
        others = [x for other, x in enumerate(moved) if other != number]
        mean = {key: sum(x[key] for x in others) / 2 for key in model}
        assert weight_matching(spec, mean, model).report.already_aligned


def test_two_models_are_matched_as_by_weights(networks):
    torch.manual_seed(0)
    (a, spec), (b, _) = networks.mlp((5, 8, 8, 3)), networks.mlp((5, 8, 8, 3))
    pair = weight_matching(spec, a, b, restarts=5).report
    many = match_many(spec, [a, b], restarts=5).report
    assert many.objective == pytest.approx(pair.objective, rel=0.05)
    assert many.similarity == pytest.approx(many.objective / pair.objective * pair.similarity)


@pytest.mark.parametrize("method", METHODS)
def test_models_that_share_a_base_stay(networks, method):
    torch.manual_seed(0)
    state, spec = networks.residual(8, 16, 24)
    models = [state, *({k: t + 0.05 * t.std() * torch.randn_like(t) for k, t in state.items()} for _ in range(2))]
    matching = match_many(spec, models, method=method)
    assert matching.report.already_aligned
    assert undone(spec, [identity_permutation(spec)] * 3, matching.permutations)
    assert "aligned already" in str(matching)


def test_only_some_groups(networks):
    torch.manual_seed(0)
    made = [networks.mlp((5, 8, 8, 8, 3)) for _ in range(3)]
    matching = match_many(made[0][1], [state for state, _ in made], only="h2", restarts=3)
    for one in matching.permutations:
        assert torch.equal(one["h1"], torch.arange(8))
        assert torch.equal(one["h3"], torch.arange(8))
    assert matching.report.fixed[1] < 1


def test_queries_that_share_values(networks):
    torch.manual_seed(0)
    state, spec = networks.grouped_attention()
    planted, models = plant(state, spec, 3)
    matching = match_many(spec, models, restarts=2)
    assert undone(spec, planted, matching.permutations)
    assert matching.report.method == "mean"
    with pytest.raises(InputError, match=r"the groups \['v', 'queries'\] are in one product .* use method=\"mean\""):
        match_many(spec, models, method="frank_wolfe")


@pytest.mark.parametrize("scale", [1e-28, 1e24])
@pytest.mark.parametrize("method", METHODS)
def test_weights_of_any_scale(networks, method, scale):
    torch.manual_seed(0)
    state, spec = networks.mlp((5, 12, 12, 3))
    planted, models = plant(state, spec, 3)
    told = []
    matching = match_many(
        spec,
        [{key: x * scale for key, x in one.items()} for one in models],
        method=method,
        restarts=2,
        progress=lambda *what: told.append(what),
    )
    assert undone(spec, planted, matching.permutations)
    assert matching.report.similarity == pytest.approx(1)
    plain = match_many(spec, models, method=method, restarts=2).report
    assert matching.report.objective == pytest.approx(plain.objective * scale**2)
    assert matching.report.starts == pytest.approx([value * scale**2 for value in plain.starts])
    assert told[-1][2] == pytest.approx(matching.report.starts[-1])


def test_matrices_of_permutations_permute(networks):
    torch.manual_seed(0)
    state, spec = networks.transformer(24, 3, 16, 1)
    permutation = random_permutation(spec)
    moved, matrices = apply_permutation(spec, permutation, state), _matrices(spec, permutation)
    for key in spec.axes:
        torch.testing.assert_close(_mixed(spec, key, state[key], matrices), moved[key])


def test_a_group_on_both_axes_of_a_tensor():
    torch.manual_seed(0)
    state = {"w": torch.randn(8, 8), "in": torch.randn(8, 4)}
    spec = PermutationSpec.from_dict({"w": ("h", "h"), "in": ("h", None)}, state)
    planted, models = plant(state, spec, 3)
    assert undone(spec, planted, match_many(spec, models, restarts=4).permutations)


@pytest.mark.parametrize(
    ("coefficients", "best"),
    [([0, 1, -1], 0.5), ([0, -1, 0.5], 0), ([0, 1, 1], 1), ([0, 0, 0], 0), ([1, -1, 5.0, -4, 0], 0.71713)],
)
def test_the_step_is_where_the_polynomial_is_highest(coefficients, best):
    nodes = np.linspace(0, 1, len(coefficients))
    values = np.polynomial.Polynomial(coefficients)(nodes)
    assert _argmax(nodes, values) == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_one_result_for_any_number_of_threads(networks, same_on_threads, method):
    torch.manual_seed(0)
    made = [networks.mlp((20, 700, 30, 5)) for _ in range(3)]  # wider than a chunk of rows
    spec, models = made[0][1], [state for state, _ in made]
    assert same_on_threads(lambda: match_many(spec, models, method=method, max_sweeps=1).permutations)


def test_errors(networks):
    state, spec = networks.mlp((3, 6, 2))
    with pytest.raises(InputError, match="got 1 models, expected at least two"):
        match_many(spec, [state])
    with pytest.raises(InputError, match='expected "auto", "frank_wolfe" or "mean"'):
        match_many(spec, [state, state], method="median")
    with pytest.raises(InputError, match="restarts is 0, expected an integer of at least 1"):
        match_many(spec, [state, state], restarts=0)
    for wrong, name in (
        ({"a": state, "b": state}, "dict"),
        ("a.safetensors", "str"),
        (torch.nn.Sequential(), "Sequential"),
    ):
        with pytest.raises(InputError, match=f"models is a {name}, expected several models, in a list"):
            match_many(spec, wrong)
    broken = {key: torch.full_like(tensor, torch.nan) for key, tensor in state.items()}
    with pytest.raises(InputError, match=r"'0.bias' of model 3 holds NaN or infinity.* 'h1'"):
        match_many(spec, [state, state, broken])
