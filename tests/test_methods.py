"""Methods, their options and presets, and methods of one's own."""

import dataclasses

import numpy as np
import pytest
import torch

import isthmus
from isthmus import methods
from isthmus.errors import InputError


@pytest.fixture
def registry(monkeypatch):
    """Forget afterwards what a test registers."""
    monkeypatch.setattr(methods.registry, "_registered", {})


def test_available_says_what_is_needed_of_every_option():
    found = methods.available()
    expected = """linear slerp nuslerp multislerp karcher model_stock task_arithmetic ties magnitude_prune dare
        dare_ties della della_linear breadcrumbs breadcrumbs_ties nearswap sce arcee_fusion ram ram_plus passthrough
        fisher regmean"""
    assert set(found) == set(expected.split())
    for name, info in found.items():
        assert info.name == name
        assert info.meaning
        assert info.source
        assert info.presets["paper"] == {}
        for option in info.options:
            assert option.meaning
        known = {option.name for option in info.options}
        assert all(preset.keys() <= known for preset in info.presets.values())
    ties = {option.name: option for option in found["ties"].options}
    assert (ties["density"].default, ties["density"].per, ties["density"].required) == (0.2, "model", False)
    dare = {option.name: option for option in found["dare"].options}
    assert dare["density"].required


def test_names_classes_and_methods_make_the_same():
    expected = methods.Ties(density=0.3, weights=[1, 2])
    assert methods.make("ties", density=0.3, weights=[1, 2]) == expected
    assert methods.make(methods.Ties, density=0.3, weights=[1, 2]) == expected
    assert methods.make(methods.Ties(density=0.3), weights=[1, 2]) == expected
    with pytest.raises(dataclasses.FrozenInstanceError):
        expected.density = 0.5


def test_keywords_override_the_preset():
    preset = methods.make("ties", preset="mergekit", density=0.3)
    assert (preset.scope, preset.ties, preset.min_kept, preset.density) == ("tensor", "exact", 1, 0.3)
    assert preset.consensus_options() == {
        "sparsify": "magnitude",
        "scope": "tensor",
        "ties": "exact",
        "min_kept": 1,
        "rescale": "none",
        "majority_sign_method": "weighted_total",
        "zero_sign": "positive",
        "merge_func": "mean",
        "divisor": "weight",
    }
    assert methods.make("ties", preset="mergekit", scope="row").scope == "row"


@pytest.mark.parametrize(
    ("options", "merge_func", "divisor"),
    [
        ({}, "mean", "weight"),
        ({"normalize": False}, "sum", "count"),
        ({"merge_func": "max"}, "max", "count"),  # the preset's normalize gives way
        ({"divisor": "count"}, "mean", "count"),
    ],
)
def test_normalize_speaks_for_merge_func_and_divisor(options, merge_func, divisor):
    found = methods.make("ties", preset="mergekit", **options).consensus_options()
    assert (found["merge_func"], found["divisor"]) == (merge_func, divisor)


def test_normalize_and_what_it_speaks_for_are_not_both_given():
    for method in ("ties", methods.Ties()):
        with pytest.raises(InputError, match="ties got normalize= and divisor="):
            methods.make(method, normalize=True, divisor="count")


def test_what_normalize_speaks_for_replaces_that_of_a_method():
    found = methods.make(methods.make("ties", preset="mergekit"), merge_func="max")
    assert (found.normalize, found.consensus_options()["merge_func"], found.scope) == (None, "max", "tensor")
    assert methods.make(methods.Ties(merge_func="max"), density=0.5).merge_func == "max"


def test_numbers_from_arrays():
    assert methods.make("dare", density=0.5, seed=np.int64(3)).seed == 3
    assert methods.make("karcher", tolerance=torch.tensor(0.5), iterations=torch.tensor(2)).tolerance == 0.5


@pytest.mark.parametrize(
    ("name", "normalize", "rescale"),
    [
        ("ties", True, "none"),
        ("task_arithmetic", False, None),
        ("breadcrumbs", False, "none"),
        ("breadcrumbs_ties", False, "none"),
        ("dare", False, "l1"),
        ("dare_ties", False, "l1"),
        ("della_linear", False, "l1"),
        ("della", True, "l1"),
    ],
)
def test_defaults_of_the_mergekit_preset(name, normalize, rescale):
    method = methods.make(name, preset="mergekit")
    assert method.normalize is normalize
    assert getattr(method, "rescale", None) == rescale
    assert getattr(method, "density", 1.0) == 1.0
    assert method.scaling_factor == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("tise", {}), "no merge method 'tise'. Did you mean 'ties'"),
        (("TIES", {}), "no merge method 'TIES'. Did you mean 'ties'"),
        (("dare_linear", {}), "'dare_linear' is dare here"),
        ((int, {}), "no merge method <class 'int'>. The methods are"),
        ((methods.Summed, {}), "no merge method <class 'isthmus.methods.consensus.Summed'>"),
        ((methods.Summed(), {}), "no merge method <class 'isthmus.methods.consensus.Summed'>"),
        ((3, {}), "no merge method 3"),
        (("ties", {"densty": 0.1}), "ties has no option 'densty'. Did you mean 'density'"),
        (("ties", {"lambda": 0.1}), "'lambda' is called scaling_factor here"),
        (("ties", {"threshold": 0.1}), "'threshold' is called density"),
        (("ties", {"base_model": "x"}), "'base_model' is called base here"),
        (("ties", {"consensus_method": "sum"}), "'consensus_method' is called majority_sign_method"),
        (("linear", {"weight": [1]}), "'weight' is called weights here"),
        (("ties", {"int8_mask": True}), "'int8_mask': isthmus keeps no masks"),
        (("ties", {"preset": "mergkit"}), "no preset 'mergkit'. Did you mean 'mergekit'"),
        (("linear", {"preset": "peft"}), "linear has no preset 'peft'. Its presets are paper, mergekit"),
        (("linear", {"preset": ["mergekit"]}), "linear has no preset"),
        (("dare", {}), "dare has no default for density"),
        (("ties", {"normalize": "no"}), "ties has normalize='no', expected True, False or None"),
        (("linear", {"normalize": None}), "linear has normalize=None, expected True or False"),
        (("ties", {"scope": 3}), "ties has scope=3, expected a string"),
        (("dare", {"density": 0.5, "seed": 1.5}), "dare has seed=1.5, expected an integer"),
        (("karcher", {"tolerance": "x"}), "karcher has tolerance='x', expected a number"),
        ((methods.Ties(), {"preset": "peft"}), "preset='peft' was given with a Ties"),
        ((methods.Ties(), {"densty": 1}), "Did you mean 'density'"),
    ],
)
def test_mistakes_are_named(call, message):
    method, options = call
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        methods.make(method, **options)


def test_a_method_of_ones_own(registry):
    @isthmus.register_method("second")
    def second(tensors, base, weights, *, factor, shift=0.0):
        """The second model."""
        assert base is None
        assert weights == [1.0, 3.0]
        return factor * tensors[1] + shift

    info = methods.available()["second"]
    assert (info.meaning, [(o.name, o.required) for o in info.options]) == (
        "The second model.",
        [("weights", False), ("factor", True), ("shift", False)],
    )
    models = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}]
    assert isthmus.merge(models, method="second", weights=[1, 3], factor=2)["w"].tolist() == [4]
    assert isthmus.merge(models, method="second", weights=[1, 3], factor=2, shift=1)["w"].tolist() == [5]
    with pytest.raises(InputError, match="second has no default for factor"):
        isthmus.merge(models, method="second")
    with pytest.raises(InputError, match="Did you mean 'shift'"):
        isthmus.merge(models, method="second", factor=1, shfit=2)
    assert second(models[0]["w"][None].repeat(2, 1), None, [1.0, 3.0], factor=1).item() == 1  # still the function


def test_results_of_ones_own_are_checked(registry):
    @isthmus.register_method("short")
    def short(tensors, base, weights):
        return tensors[0][:1]

    with pytest.raises(InputError, match=r"'short' returned shape \(1,\) for 'w', expected a tensor of shape \(2,\)"):
        isthmus.merge([{"w": torch.ones(2)}], method="short")


def test_results_of_ones_own_are_rounded_once(registry):
    # 1 + 2⁻⁸ is halfway between two bfloat16s; with 2⁻⁴⁰ more it rounds up, but by way of float32 down to even
    value = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    isthmus.register_method("double")(lambda tensors, base, weights: value)
    isthmus.register_method("whole")(lambda tensors, base, weights: torch.tensor([3]))
    isthmus.register_method("turned")(lambda tensors, base, weights: tensors[0] * 1j)
    models = [{"w": torch.ones(1, dtype=torch.bfloat16)}]
    assert isthmus.merge(models, method="double")["w"].item() == 1 + 2.0**-7
    assert isthmus.merge(models, method="whole")["w"].item() == 3
    spinning = [{"w": torch.ones(1, dtype=torch.complex64)}]
    assert isthmus.merge(spinning, method="double")["w"].item() == value.float().item()
    assert isthmus.merge(spinning, method="turned")["w"].item() == 1j
    with pytest.raises(InputError, match=r"'turned' returned torch\.complex.* for 'w', which is torch.float32"):
        isthmus.merge([{"w": torch.ones(1)}], method="turned")


def test_names_that_are_taken(registry):
    def f(tensors, base, weights):
        return tensors[0] + 1

    def g(tensors, base, weights):
        return tensors[0] + 2

    with pytest.raises(InputError, match=r"'linear' is a method of isthmus already.*replace=True"):
        isthmus.register_method("linear")(f)
    isthmus.register_method("mine")(f)
    isthmus.register_method("mine")(f)  # the same cell of a notebook again
    with pytest.raises(InputError, match="'mine' is a registered method already"):
        isthmus.register_method("mine")(g)
    isthmus.register_method("linear", replace=True)(g)
    assert isthmus.merge([{"w": torch.ones(1)}])["w"].item() == 3


@pytest.mark.parametrize("function", [lambda tensors, base: 0, lambda tensors, base, weights, **options: 0])
def test_functions_that_cannot_be_methods(registry, function):
    with pytest.raises(InputError, match=r"'odd' needs a function f\(tensors, base, weights"):
        isthmus.register_method("odd")(function)
