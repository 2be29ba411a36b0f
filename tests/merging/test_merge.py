"""Whole models in, a whole model out: values by hand, limits, and what must not happen."""

import importlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import isthmus
from isthmus import methods
from isthmus.errors import InputError, IsthmusWarning
from isthmus.flat import FlatState
from isthmus.io import save_state

MODULE = importlib.import_module("isthmus.merging.merge")  # a function of its name hides it


def tensors(*values, dtype=torch.float32):
    return [{"w": torch.tensor(value, dtype=dtype)} for value in values]


def net(seed, classes=3):
    torch.manual_seed(seed)
    trunk = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))
    model = nn.ModuleDict({"trunk": trunk, "head": nn.Linear(5, classes)})
    with torch.no_grad():
        trunk[1].running_mean.normal_()
        trunk[1].num_batches_tracked.fill_(seed)
    return model


OPTIONS = {
    "magnitude_prune": {"density": 0.5},
    "dare": {"density": 0.5},
    "dare_ties": {"density": 0.5},
    "della": {"density": 0.5},
    "della_linear": {"density": 0.5},
    "breadcrumbs": {"density": 0.5},
    "breadcrumbs_ties": {"density": 0.5},
    "nearswap": {"t": 0.1},
}
DATA = {"fisher": "fishers", "regmean": "grams"}  # methods that need data about the models, tested elsewhere
METHODS = [name for name in methods.available() if name not in DATA]


def arguments(name, models, base):
    """Models, base and options such that the method can run."""
    most = methods.available()[name].models[1]
    return models[:most], base if methods.available()[name].base != "unused" else None, OPTIONS.get(name, {})


# Values


def test_weights_of_a_model_with_itself(backend):
    model = net(1)
    merged = isthmus.merge([model, model], weights=[0.1, 1.0], backend=backend)
    for key, value in model.state_dict().items():
        assert torch.equal(merged[key], value), key
    raw = isthmus.merge([model, model], weights=[0.1, 1.0], normalize=False, backend=backend)
    for key, value in model.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(raw[key].double(), 1.1 * value.double(), rtol=2e-7, atol=0)


def test_weights_that_sum_to_zero(backend):
    a, b = tensors([3.0, 5.0], [1.0, 7.0])
    with pytest.raises(InputError, match=r"linear of 'w': the weights 1\.0, -1\.0 sum to zero"):
        isthmus.merge([a, b], weights=[1, -1], backend=backend)
    assert isthmus.merge([a, b], weights=[1, -1], normalize=False, backend=backend)["w"].tolist() == [2, -2]


@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "nuslerp", "multislerp", "karcher"])
def test_weights_that_sum_to_zero_for_one_key_are_found_before_any_work(method):
    target, options = net(4), {} if method in ("nuslerp", "karcher") else {"normalize": True}
    weights = {"trunk.2.weight": [1, -1], "*": 1}
    with pytest.raises(InputError, match=f"{method} of 'trunk.2.weight': the weights 1.0, -1.0 sum to zero"):
        isthmus.merge_into(
            target,
            [net(1), net(2)],
            base=net(3),
            method=method,
            weights=weights,
            progress=lambda *done: None,
            **options,
        )
    assert isthmus.diff(target, net(4)).equal


def test_many_half_precision_models_do_not_overflow(backend):
    models = [{"w": torch.full((5,), 500.0, dtype=torch.float16)}] * 300
    assert isthmus.merge(models, backend=backend)["w"].tolist() == [500] * 5
    assert isthmus.merge(models, weights=1 / 300, normalize=False, backend=backend)["w"].tolist() == [500] * 5


def test_a_bfloat16_base_and_small_float32_deltas_are_rounded_once(backend):
    base = {"w": torch.ones(1, dtype=torch.bfloat16)}
    step = 2.0**-7  # between 1 and its neighbour in bfloat16
    models = tensors([1 + 0.3 * step], [1 + 0.3 * step])
    merged = isthmus.merge(models, base=base, method="task_arithmetic", backend=backend)["w"]
    assert merged.dtype == torch.bfloat16
    assert merged.item() == 1 + step  # .6 of a step in all; each alone would be rounded away
    wide = isthmus.merge(models, base=base, method="task_arithmetic", dtype=torch.float32, backend=backend)["w"]
    assert wide.item() == pytest.approx(1 + 0.6 * step, abs=1e-7)


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("linear", {"weights": [1, 3]}, [3.0, 2.0]),
        ("linear", {"weights": {"w": [1, 3]}}, [3.0, 2.0]),
        ("linear", {"weights": torch.tensor([1.0, 3.0])}, [3.0, 2.0]),
        ("linear", {"weights": [("w", np.array([1, 3]))]}, [3.0, 2.0]),
        ("linear", {"weights": [{"w": 1}, 3]}, [3.0, 2.0]),
        ("task_arithmetic", {"weights": [1, 0.5]}, [1.5, 2.0]),
        ("task_arithmetic", {"weights": [1, 0.5], "scaling_factor": 2}, [2.0, 2.0]),
        ("task_arithmetic", {"weights": [1, 3], "normalize": True}, [3.0, 2.0]),
        ("ties", {"density": 1, "weights": [0.2, 0.8]}, [1 + 0.8 * 3, 2.0]),  # 2 elects +, 3 alone agrees
        ("passthrough", {"scaling_factor": 3}, [0.0, 6.0]),
        ("slerp", {"t": 1}, [4.0, 2.0]),
        ("nearswap", {"t": 1}, [1.0, 2.0]),
    ],
)
def test_small_values(method, options, expected, backend):
    # base (1, 2), models (0, 2) and (4, 2): task vectors (−1, 0) and (3, 0)
    base, *models = tensors([1.0, 2.0], [0.0, 2.0], [4.0, 2.0])
    models, base, _ = arguments(method, models, base)
    merged = isthmus.merge(models, base=base, method=method, backend=backend, **options)["w"]
    assert merged.tolist() == pytest.approx(expected, rel=2e-7)


def test_total_and_weighted_votes_differ():
    base, *models = tensors([0.0], [3.0], [-1.0])
    options = {"base": base, "method": "ties", "density": 1, "weights": [0.2, 0.8], "divisor": "weight"}
    assert isthmus.merge(models, **options)["w"].item() == pytest.approx(3)
    assert isthmus.merge(models, majority_sign_method="weighted_total", **options)["w"].item() == pytest.approx(-1)


def test_scope_over_the_model_or_over_each_tensor():
    base = {"a": torch.zeros(4), "b": torch.zeros(4)}
    model = {"a": torch.ones(4), "b": torch.full((4,), 100.0)}
    options = {"base": base, "method": "magnitude_prune", "density": 0.5, "ties": "exact"}
    whole = isthmus.merge([model], **options)
    assert (whole["a"].tolist(), whole["b"].tolist()) == ([0] * 4, [100] * 4)
    each = isthmus.merge([model], scope="tensor", **options)
    assert (each["a"].tolist(), each["b"].tolist()) == ([1, 1, 0, 0], [100, 100, 0, 0])


def test_dare_keeps_all_nothing_or_scales(backend):
    base, model = {"w": torch.full((1000,), 0.1)}, {"w": torch.full((1000,), 0.7)}
    common = {"base": base, "method": "dare", "backend": backend}
    assert torch.equal(isthmus.merge([model], density=0, **common)["w"], base["w"])
    zeros = {"w": torch.zeros(1000)}
    ones = isthmus.merge([{"w": torch.ones(1000)}], **{**common, "base": zeros}, density=0.25)["w"]
    assert set(ones.tolist()) == {0.0, 4.0}
    assert abs((ones == 4).float().mean().item() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 1000)


def test_masks_depend_on_model_name_and_seed_alone():
    base, ones = {"a": torch.zeros(4000), "b": torch.zeros(4000)}, {"a": torch.ones(4000), "b": torch.ones(4000)}

    def mask(position, key, seed=0):
        weights = [float(i == position) for i in range(2)]
        merged = isthmus.merge([ones, ones], base=base, method="dare", density=0.3, weights=weights, seed=seed)
        return merged[key] != 0

    expected, error = 0.3**2 + 0.7**2, 4 * math.sqrt(0.58 * 0.42 / 4000)
    assert torch.equal(mask(0, "a"), mask(0, "a"))
    for other in (mask(1, "a"), mask(0, "b"), mask(0, "a", seed=1)):
        assert abs((mask(0, "a") == other).float().mean().item() - expected) < error


def test_a_registered_or_plain_name_and_a_method_agree():
    a, b = net(1), net(2)
    assert isthmus.diff(
        isthmus.merge([a, b], method=methods.Slerp(t=0.3)), isthmus.merge([a, b], method="slerp", t=0.3)
    ).equal


@pytest.mark.parametrize(("name", "argument"), DATA.items())
def test_methods_that_use_data_average_what_has_none(name, argument):
    a, b = tensors([0.0, 2.0], [4.0, 2.0])
    merged = isthmus.merge([a, b], method=name, weights=[1, 3], **{argument: [{}, {}]})
    assert merged["w"].tolist() == [3, 2]


def test_fisher_and_regmean_reach_their_rules():
    a, b = ({"w": torch.tensor([[1.0, 2.0]])}, {"w": torch.tensor([[3.0, 6.0]])})
    fishers = [{"w": torch.tensor([[1.0, 0.0]])}, {"w": torch.tensor([[3.0, 1.0]])}]
    merged = isthmus.merge([a, b], method="fisher", fishers=fishers, epsilon=0)["w"]
    assert merged.tolist() == [[2.5, 6.0]]  # (1·1 + 3·3)/4, and the second alone
    grams = [{"w": torch.eye(2)}, {"w": 3 * torch.eye(2)}]
    assert isthmus.merge([a, b], method="regmean", grams=grams)["w"].tolist() == [[2.5, 5.0]]  # as weights 1 and 3


# Entries


def test_integers_stay_themselves_at_any_weight():
    state = {"w": torch.rand(3), "position_ids": torch.arange(77), "mask": torch.tensor([True, False])}
    for alpha in (0.0, 0.3, 1.0, -2.0):
        merged = isthmus.merge([state, dict(state)], weights=[1 - alpha, alpha])
        assert merged["position_ids"].dtype == torch.int64
        assert torch.equal(merged["position_ids"], torch.arange(77))
        assert torch.equal(merged["mask"], state["mask"])


def test_counters_are_the_first_models():
    base, a, b = net(1), net(2), net(3)
    for given_base in (None, base):
        merged = isthmus.merge([a, b], base=given_base)
        assert merged["trunk.1.num_batches_tracked"].item() == 2
        assert torch.equal(
            merged["trunk.1.running_mean"],
            isthmus.lerp(a["trunk"][1].running_mean, b["trunk"][1].running_mean, 0.5),
        )


def test_heads_of_different_size_are_skipped():
    a, b = net(1, classes=10), net(2, classes=43)
    merged = isthmus.merge([a, b], skip="head.*")
    assert torch.equal(merged["head.weight"], a["head"].weight)
    assert torch.equal(merged["trunk.0.bias"], isthmus.lerp(a["trunk"][0].bias, b["trunk"][0].bias, 0.5).detach())
    with pytest.raises(InputError) as error:
        isthmus.merge([a, b])
    assert "'head.weight' has shape (43, 5) in model 2 and (10, 5) in model 1" in str(error.value)
    assert "'head.bias' has shape (43,) in model 2 and (10,) in model 1" in str(error.value)
    assert "skip=" in str(error.value)


def test_skipped_keys_may_be_missing_anywhere():
    a, b = {"w": torch.ones(1), "x": torch.ones(2)}, {"w": torch.zeros(1), "y": torch.ones(2)}
    merged, report = isthmus.merge([a, b], skip=["x", "y"], return_report=True)
    assert {key: value.tolist() for key, value in merged.items()} == {"w": [0.5], "x": [1, 1]}
    assert merged["x"].data_ptr() != a["x"].data_ptr()
    assert report.entries["x"].dtypes == ["float32"]


def test_only_some_keys():
    a, b = net(1), net(2)
    merged = isthmus.merge([a, b], only=["head.*", "trunk.2.*"], skip="*.bias")
    mixed = [key for key in merged if not torch.equal(merged[key], a.state_dict()[key])]
    assert mixed == ["trunk.2.weight", "head.weight"]
    with_base = isthmus.merge([a, b], base=net(3), method="ties", only="head.*")
    assert torch.equal(with_base["trunk.0.weight"], net(3)["trunk"][0].weight)


def test_options_by_pattern():
    a, b = net(1), net(2)
    merged = isthmus.merge([a, b], method="slerp", t=[("trunk.*", 0), ("*", 1)])
    for key, value in merged.items():
        assert torch.equal(value, (a if key.startswith("trunk") else b).state_dict()[key]) or "num_batches" in key
    merged = isthmus.merge([a, b], weights=[{"head.*": 1, "*": 0}, {"head.*": 0, "*": 1}])
    for key, value in merged.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, (b if key.startswith("trunk") else a).state_dict()[key])
    base = {"a": torch.zeros(4), "b": torch.zeros(4)}
    model = {"a": torch.arange(1.0, 5), "b": torch.arange(1.0, 5)}
    merged = isthmus.merge(
        [model], base=base, method="magnitude_prune", scope="tensor", ties="exact", density={"a": 0.25, "*": 0.5}
    )
    assert (merged["a"].tolist(), merged["b"].tolist()) == ([0, 0, 0, 4], [0, 0, 3, 4])


def test_prefixes_are_stripped_and_reported():
    a, b = net(1), net(2)
    wrapped = {f"module._orig_mod.{key}": value for key, value in b.state_dict().items()}
    merged, report = isthmus.merge([a, wrapped], return_report=True)
    assert isthmus.diff(merged, isthmus.merge([a, b])).equal
    assert report.prefixes == {"model 2": "module._orig_mod."}


class Tied(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.decode = nn.Linear(4, 3, bias=False)
        self.encode = nn.Linear(4, 3, bias=False)
        self.encode.weight = self.decode.weight


def test_ties_are_merged_once_and_stay():
    a, b = Tied(1), Tied(2)
    merged = isthmus.merge([a, b])
    assert list(merged) == ["decode.weight", "encode.weight"]
    assert merged["decode.weight"] is merged["encode.weight"]
    untied = {key: value.clone() for key, value in b.state_dict().items()}  # as a file has them
    assert torch.equal(isthmus.merge([a, untied])["decode.weight"], merged["decode.weight"])
    untied["encode.weight"][0, 0] += 1
    with pytest.raises(
        InputError, match=r"'encode.weight' is tied to 'decode.weight' in model 1, but model 2 has diff"
    ):
        isthmus.merge([a, untied])
    with pytest.raises(InputError, match=r"'decode.weight' and 'encode.weight' are one tied tensor"):
        isthmus.merge([a, b], skip="decode.*")
    both = isthmus.merge([untied, {key: value.clone() for key, value in a.state_dict().items()}])
    assert not torch.equal(both["decode.weight"], both["encode.weight"])


def test_tied_values_may_be_nan():
    weight = torch.tensor([math.nan, 1.0])
    merged = isthmus.merge([{"a": weight, "b": weight}, {"a": weight.clone(), "b": weight.clone()}])
    assert merged["a"] is merged["b"]


def test_inference_tensors():
    with torch.inference_mode():
        models = tensors([1.0], [3.0])
        inside = isthmus.merge(models)
    assert inside["w"].item() == isthmus.merge(models)["w"].item() == 2


def test_a_tied_tensor_counts_once_where_elements_are_ranked():
    tied = torch.tensor([1.0, 2.0])
    base = {"a": torch.zeros(2), "z": torch.zeros(2)}
    base["b"] = base["a"]
    model = {"a": tied, "b": tied, "z": torch.tensor([3.0, 4.0])}
    merged = isthmus.merge([model], base=base, method="magnitude_prune", density=0.75, ties="exact")
    assert (merged["a"].tolist(), merged["z"].tolist()) == ([0, 2], [3, 4])  # 3 of 4; of 6 it would be 4


def test_tensors_of_all_kinds():
    torch.manual_seed(0)
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    state = {
        "scalar": torch.tensor(2.0),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(4, 3).t(),
        "expanded": torch.randn(1, 3).expand(2, 3),
        "image": image,
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
    }
    other = {key: value + 1 for key, value in state.items()}
    merged = isthmus.merge([state, other], weights=[3, 1])
    for key, value in state.items():
        assert merged[key].shape == value.shape
        torch.testing.assert_close(merged[key], (value + 0.25).resolve_conj())
    assert merged["image"].is_contiguous(memory_format=torch.channels_last)
    merged = isthmus.merge([other], base=state, method="ties", density=1, skip="complex")
    for key in ("scalar", "transposed", "image"):
        torch.testing.assert_close(merged[key], other[key])
    with pytest.raises(InputError, match="'complex' is complex"):
        isthmus.merge([other], base=state, method="ties", density=1)


def test_dtypes_are_mixed_and_the_first_ones_or_the_bases_are_kept():
    half, single = tensors([1.0, 2.0], dtype=torch.float16)[0], tensors([3.0, 2.0])[0]
    assert isthmus.merge([half, single])["w"].dtype == torch.float16
    assert isthmus.merge([single, half])["w"].dtype == torch.float32
    assert isthmus.merge([half, single], base=single)["w"].dtype == torch.float32
    assert isthmus.merge([half, single])["w"].tolist() == [2, 2]


def test_dtype_of_the_output_is_rounded_once():
    # 1 + 2⁻⁸ is halfway between two bfloat16s; with 2⁻⁴⁰ more it rounds up, but by way of float32 down to even
    value = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    state = {
        "merged": value,
        "skipped": value.clone(),
        "count": torch.tensor(3),
        "z": torch.ones(1, dtype=torch.complex64),
    }
    merged = isthmus.merge([state, state], dtype=torch.bfloat16, skip="skipped")
    assert merged["merged"].dtype == merged["skipped"].dtype == torch.bfloat16
    assert merged["merged"].item() == merged["skipped"].item() == 1 + 2.0**-7
    assert (merged["count"].dtype, merged["z"].dtype) == (torch.int64, torch.complex64)
    odd = {"w": torch.ones(1), "scales": torch.ones(1).to(torch.float8_e5m2)}
    merged = isthmus.merge([odd], skip="scales")
    assert (merged["scales"].dtype, merged["scales"].float().item()) == (torch.float8_e5m2, 1)
    assert isthmus.merge([odd], skip="scales", dtype=torch.float16)["scales"].item() == 1
    with pytest.raises(InputError, match=r"dtype=torch.int8 is not a dtype of results"):
        isthmus.merge([state], dtype=torch.int8)


def test_every_kind_of_source(tmp_path):
    models = [net(seed) for seed in (1, 2, 3)]
    expected = isthmus.merge(models[:2], base=models[2], method="ties")
    paths = []
    for index, model in enumerate(models):
        paths.append(tmp_path / f"{index}.safetensors")
        save_state(paths[-1], model.state_dict())
    assert isthmus.diff(isthmus.merge(paths[:2], base=str(paths[2]), method="ties"), expected).equal
    flat = [FlatState.from_module(model) for model in models]
    assert isthmus.diff(isthmus.merge(flat[:2], base=models[2].state_dict(), method="ties"), expected).equal
    assert list(expected) == list(models[2].state_dict())
    with pytest.raises(InputError, match=r"model 2 \(.*1.safetensors\) lacks 'extra'"):
        isthmus.merge([{**models[0].state_dict(), "extra": torch.ones(1)}, paths[1]])


# What must not happen


@pytest.mark.parametrize("name", METHODS)
def test_inputs_stay_and_outputs_are_their_own(name):
    models, base, options = arguments(name, [net(1), net(2)], net(3))
    everything = [*models, *([] if base is None else [base])]
    before = [{key: value.clone() for key, value in model.state_dict().items()} for model in everything]
    versions = [[value._version for value in model.state_dict().values()] for model in everything]
    merged = isthmus.merge(models, base=base, method=name, **options)
    for model, copy, version in zip(everything, before, versions, strict=True):
        assert isthmus.diff(model, copy).equal
        assert [value._version for value in model.state_dict().values()] == version
    theirs = {value.untyped_storage().data_ptr() for model in everything for value in model.state_dict().values()}
    assert theirs.isdisjoint(value.untyped_storage().data_ptr() for value in merged.values())
    assert not any(value.requires_grad for value in merged.values())


@pytest.mark.parametrize("name", METHODS)
def test_parts_are_the_whole(name, monkeypatch):
    models, base, options = arguments(name, [net(1), net(2)], net(3))
    whole = isthmus.merge(models, base=base, method=name, **options)
    monkeypatch.setattr(MODULE, "PART", 10)
    calls = []
    parts = isthmus.merge(models, base=base, method=name, progress=lambda *done: calls.append(done), **options)
    assert isthmus.diff(whole, parts).equal
    assert calls[-1] == (10, 10)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert (len(calls) == 1) == (name in ("ties", "magnitude_prune", "dare_ties", "della"))  # counts of whole models


def alternate(tensors):
    """As if every second tensor were on another device."""
    return [places for places in (range(0, len(tensors), 2), range(1, len(tensors), 2)) if places]


@pytest.mark.parametrize("name", METHODS)
def test_a_merge_takes_the_devices_one_by_one(name, monkeypatch):
    models, base, options = arguments(name, [net(1), net(2)], net(3))
    whole, report = isthmus.merge(models, base=base, method=name, return_report=True, **options)
    monkeypatch.setattr("isthmus.ops.by_device", alternate)
    calls = []
    parts, by_part = isthmus.merge(
        models, base=base, method=name, return_report=True, progress=lambda *done: calls.append(done), **options
    )
    assert isthmus.diff(whole, parts).equal
    assert by_part.to_dict() == report.to_dict()
    assert len(calls) == (1 if name in ("ties", "magnitude_prune", "dare_ties", "della") else 2)


@pytest.mark.parametrize(
    ("name", "other"), [("ties", "; move them to one, or choose scope='tensor'"), ("dare_ties", "; move them to one")]
)
def test_what_is_taken_over_all_tensors_is_on_one_device(name, other):
    base = net(3)
    task = MODULE._prepare([net(1), net(2)], base, name, None, None, None, None, None, "auto", OPTIONS.get(name, {}))
    key = task.entries.merged[0]
    lead = task.lead._replace(tensors={**task.lead.tensors, key: task.lead.tensors[key].to("meta")})
    with pytest.raises(InputError, match=f"those of the base are on cpu and meta, expected one device{other}"):
        replace(task, lead=lead).run({}, None, False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("method", ["linear", "multislerp"])
def test_a_model_on_the_host_and_a_gpu(method):
    models = [net(1), net(2)]
    expected = isthmus.merge(models, method=method)
    for model in models:
        model["head"].cuda()
    found = isthmus.merge(models, method=method)
    assert {str(value.device) for value in found.values()} == {"cpu", "cuda:0"}
    assert isthmus.diff(expected, {key: value.cpu() for key, value in found.items()}).equal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": []}, "linear got 0 models, expected at least 1"),
        ({"models": net(1)}, "models is a ModuleDict, expected a list of models"),
        ({"models": "a.safetensors"}, "models is a str, expected a list"),
        ({"models": [3]}, "model 1 is a int, expected a module, a state dict"),
        ({"method": "slerp", "models": [net(1)] * 3}, "slerp got 3 models, expected exactly 2"),
        ({"method": "ties"}, "ties combines task vectors, and base= is not given"),
        ({"method": "sce"}, "sce combines task vectors, and base= is not given"),
        ({"weights": [1]}, "weights has 1 values and there are 2 models"),
        ({"models": FlatState.from_module(net(1))}, "models is a FlatState, expected a list"),
        ({"models": [{1: torch.ones(2)}]}, "model 1 has the key 1, a int, expected names of tensors"),
        ({"weights": "heavy"}, "weights has the value 'heavy', expected a number, one per model, or either by pattern"),
        (
            {"method": "slerp", "t": [0.1, 0.2]},
            r"t has the value \[0.1, 0.2\], expected a number, or numbers by pattern",
        ),
        ({"weights": {"head.*": 1, "*": 2}, "skip": "head.*"}, r"'head\.\*', which matches no key that is merged"),
        ({"weights": {"trunk.*": 1}}, "no pattern of weights matches the key 'head.bias'"),
        ({"weights": {"tronk.*": 1, "*": 2}}, r"weights has the pattern 'tronk\.\*', which matches no key.*'trunk\."),
        ({"skip": "haed.*"}, r"skip has the pattern 'haed\.\*', which matches no key of the models.*'head\."),
        ({"only": [3]}, "only has the pattern 3, a int, expected a string"),
        ({"method": "slerp", "weights": [1, 2]}, "slerp has no option 'weights'"),
        ({"method": "slerp", "scope": "row"}, "slerp has scope='row', expected 'tensor' or 'global'"),
        ({"seeds": [1, 2]}, "linear has no option 'seed'"),
        ({"backend": "metal"}, "'metal' is not a backend"),
    ],
)
def test_mistakes_are_named(options, message):
    options = {"models": [net(1), net(2)], **options}
    with pytest.raises(InputError, match=message):
        isthmus.merge(**options)


def test_a_backend_asked_for_by_name_is_there_or_an_error():
    a = {"w": torch.ones(2)}
    for method, options in (("fisher", {"fishers": [a]}), ("regmean", {"grams": [{}]}), ("nearswap", {"t": 1})):
        models = [a, a] if method == "nearswap" else [a]
        with pytest.raises(InputError, match="'metal' is not a backend"):
            isthmus.merge(models, method=method, backend="metal", **options)


def test_models_and_seeds_from_any_iterable():
    models = [net(1), net(2)]
    assert isthmus.diff(isthmus.merge(model for model in models), isthmus.merge(models)).equal
    options = {"base": net(3), "method": "dare", "density": 0.5}
    for seeds in (range(2), iter([0, 1]), torch.tensor([0, 1])):
        assert list(isthmus.merge(models, seeds=seeds, **options).merged) == [0, 1]
    for seeds in (3, ["x"], [0.5]):
        with pytest.raises(InputError, match="expected a list of integers"):
            isthmus.merge(models, seeds=seeds, **options)


def test_keys_kinds_and_integers_that_differ_are_all_listed():
    a = {"w": torch.ones(2), "x": torch.ones(2), "n": torch.ones(2), "z": torch.ones(1)}
    b = {"w": torch.ones(3), "y": torch.ones(2), "n": torch.ones(2, dtype=torch.int64), "z": torch.ones(1) + 0j}
    with pytest.raises(InputError) as error:
        isthmus.merge([a, b])
    for part in (
        "'w' has shape (3,) in model 2 and (2,) in model 1",
        "model 2 lacks 'x', which model 1 has",
        "model 2 has 'y', which model 1 lacks",
        "'n' is torch.int64 in model 2 and torch.float32 in model 1",
        "'z' is torch.complex64 in model 2 and torch.float32 in model 1",
    ):
        assert part in str(error.value)
    with pytest.raises(InputError, match=r"'n' is torch.int64 and differs between the base and model 1; integer"):
        isthmus.merge([{"n": torch.tensor(1)}], base={"n": torch.tensor(2)})


class Strange(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (torch.ones(2).as_subclass(Strange), "Strange"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse"),
        ([1.0], "list"),
        (torch.ones(2).to(torch.float8_e5m2), "float8"),
    ],
)
def test_tensors_that_cannot_be_merged_are_named(value, kind):
    with pytest.raises(InputError, match=f"'w' of model 1.*{kind}"):
        isthmus.merge([{"w": value}, {"w": value}])


def test_selection_names_the_key_of_nan_and_sums_let_it_through():
    base, model = {"a": torch.zeros(2), "b": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.tensor([1.0, math.nan])}
    with pytest.raises(InputError, match="'b'"):
        isthmus.merge([model], base=base, method="ties")
    assert isthmus.merge([model], base=base, method="task_arithmetic")["b"].isnan().tolist() == [False, True]
    with pytest.raises(InputError, match="slerp of b"):
        isthmus.merge([base, model], method="slerp")


def test_task_vectors_are_merged_without_a_base():
    a, b = tensors([1.0, -3.0], [3.0, 1.0])
    assert isthmus.merge([a, b], method="task_arithmetic", weights=[1, 2])["w"].tolist() == [7, -1]
    assert isthmus.merge([a, b], method="ties", density=1)["w"].tolist() == [2, -3]


# Seeds


def test_seeds_repeat_a_merge_and_report_the_spread():
    base, model = {"w": torch.zeros(400)}, {"w": torch.ones(400)}
    result = isthmus.merge([model], base=base, method="dare", density=0.25, seeds=[3, 5, 8])
    assert list(result.merged) == [3, 5, 8]
    for seed, state in result.merged.items():
        assert torch.equal(state["w"], isthmus.merge([model], base=base, method="dare", density=0.25, seed=seed)["w"])
    stacked = torch.stack([state["w"] for state in result.merged.values()]).double()
    spread = result.spread["w"]
    assert spread.mean_norm == pytest.approx(stacked.mean(0).norm().item())
    assert spread.deviation_norm == pytest.approx(stacked.std(0).norm().item())
    one, reports = isthmus.merge([model], base=base, method="dare", density=0.25, seeds=[3], return_report=True)
    assert one.spread["w"].deviation_norm == 0
    assert reports[3].options["seed"] == 3
    for seeds in ([], [1, 1]):
        with pytest.raises(InputError, match="expected at least one seed, each once"):
            isthmus.merge([model], base=base, method="dare", density=0.25, seeds=seeds)
    with pytest.raises(InputError, match="leave seed out"):
        isthmus.merge([model], base=base, method="dare", density=0.25, seeds=[1], seed=2)


class Counting(nn.Linear):
    """A layer with a state that is no tensor."""

    def __init__(self, steps):
        super().__init__(2, 2)
        self.steps = steps

    def get_extra_state(self):
        return {"steps": self.steps}

    def set_extra_state(self, state):
        self.steps = state["steps"]


def test_entries_that_are_no_tensors_are_refused_by_name_or_skipped():
    first, second, base = (nn.Sequential(Counting([step]), nn.Linear(2, 1)) for step in (1, 2, 3))
    key = "0._extra_state"
    with pytest.raises(InputError, match=rf"'{key}' of model 1 is a dict.*'{key}' of model 2 is a dict.*skip="):
        isthmus.merge([first, second])
    with pytest.raises(InputError, match=f"'{key}' of the base is a dict, expected a tensor"):
        isthmus.merge([first, second], base=base, skip="1.weight")
    merged, report = isthmus.merge([first, second], skip="*._extra_state", return_report=True)
    assert list(merged) == list(first.state_dict())
    assert merged[key] == {"steps": [1]}
    assert merged[key]["steps"] is not first[0].steps
    assert key not in report.entries
    mean = torch.stack([first[0].weight, second[0].weight]).mean(0)
    assert torch.allclose(merged["0.weight"], mean)
    assert isthmus.merge([first, second], base=base, skip=key)[key] == {"steps": [3]}
    assert isthmus.merge([first, second], only="1.*")[key] == {"steps": [1]}
    missing, tensor = second.state_dict(), {**second.state_dict(), key: torch.ones(1)}
    del missing[key]
    for other in (missing, tensor):
        assert isthmus.merge([first, other], skip=key)[key] == {"steps": [1]}
        with pytest.raises(InputError, match=f"'{key}' of model 1 is a dict, expected a tensor"):
            isthmus.merge([first, other])
    assert key not in isthmus.merge([missing, first], skip=key)
    base.load_state_dict(merged)
    assert base[0].steps == [1]
    isthmus.merge_into(second, [first, second], skip=key)
    assert second[0].steps == [2]
    assert torch.allclose(second[0].weight, mean)
    with pytest.raises(InputError, match=f"'{key}' of the module Sequential is a dict"):
        isthmus.merge_into(second, [missing, missing])


@pytest.mark.parametrize("read", [isthmus.diff, isthmus.TaskVector, lambda a, b: isthmus.greedy_soup([a, b], id)])
def test_entries_that_are_no_tensors_are_refused_elsewhere(read):
    with pytest.raises(InputError, match=r"'_extra_state' of .* is a dict, expected a tensor"):
        read(Counting(1), Counting(2))


# Into a module


@pytest.mark.parametrize("name", METHODS)
def test_merge_into_writes_what_merge_returns(name):
    models, base, options = arguments(name, [net(1), net(2)], net(3))
    expected = isthmus.merge(models, base=base, method=name, **options)
    target = net(4)
    parameters = list(target.parameters())
    assert isthmus.merge_into(target, models, base=base, method=name, **options) is None
    assert isthmus.diff(target, expected).equal
    assert all(x is y for x, y in zip(parameters, target.parameters(), strict=True))
    if base is not None:
        target = net(3)
        isthmus.merge_into(target, models, base=target, method=name, **options)
        assert isthmus.diff(target, expected).equal
    isthmus.merge_into(models[0], models, base=base, method=name, **options)  # one of its own inputs
    assert isthmus.diff(models[0], expected).equal


def test_merge_into_leaves_what_is_skipped_and_keeps_ties_and_dtypes():
    target = net(4, classes=7).half()
    head = target["head"].weight.clone()
    report = isthmus.merge_into(target, [net(1), net(2)], skip="head.*", return_report=True)
    assert torch.equal(target["head"].weight, head)
    assert target["trunk"][0].weight.dtype == torch.float16
    assert report.entries["trunk.0.weight"].dtype == "float16"
    merged = isthmus.merge([net(1), net(2)], dtype=torch.float16)
    assert torch.equal(target["trunk"][0].weight, merged["trunk.0.weight"])
    assert target["trunk"][1].num_batches_tracked.item() == 1
    tied = Tied(3)
    isthmus.merge_into(tied, [Tied(1), Tied(2)])
    assert tied.encode.weight is tied.decode.weight
    assert torch.equal(tied.encode.weight, isthmus.merge([Tied(1), Tied(2)])["encode.weight"])


def test_a_backward_pass_through_overwritten_weights_is_an_error():
    target = nn.Linear(3, 1, bias=False)
    output = (target(torch.ones(1, 3, requires_grad=True)) ** 2).sum()
    isthmus.merge_into(target, [nn.Linear(3, 1, bias=False)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_merge_into_a_module_bound_to_a_flat_state():
    flat, target = FlatState.from_module(net(4)), net(5)
    with flat.bind(target):
        isthmus.merge_into(target, [net(1), net(2)])
        assert torch.equal(flat["head.weight"], isthmus.merge([net(1), net(2)])["head.weight"])


class First(methods.Registered):
    """A method of one's own that need not be registered."""

    name, source = "first", "here"
    function = staticmethod(lambda tensors, base, weights: tensors[0])


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("linear", {}),
        ("sce", {}),
        (First, {}),
        ("fisher", {"fishers": [{"v": torch.ones(4, 4)}] * 2}),
        ("regmean", {"grams": [{"v": torch.eye(4)}] * 2}),
    ],
)
@pytest.mark.parametrize("progress", [None, lambda done, total: None])
def test_a_tensor_that_is_read_under_another_key_is_not_written(method, options, progress):
    target, other = (nn.ParameterDict({key: torch.randn(4, 4) for key in "vw"}) for _ in range(2))
    before = {key: value.detach().clone() for key, value in target.items()}
    crossed = {"v": target["w"].detach(), "w": target["v"].detach()}
    options = {"method": method, "base": other if method == "sce" else None, "progress": progress, **options}
    with pytest.raises(InputError, match=r"'[vw]' of the module ParameterDict and '[vw]' of model 2 overlap in memory"):
        isthmus.merge_into(target, [other, crossed], **options)
    turned = {"v": other["v"], "w": target["w"].detach().t()}
    with pytest.raises(InputError, match="'w' of the module ParameterDict and 'w' of model 1 overlap in memory"):
        isthmus.merge_into(target, [turned, other], **options)
    assert isthmus.diff(target, before).equal
    isthmus.merge_into(target, [target, other], **options)


def test_only_modules_are_written_to(tmp_path):
    path = tmp_path / "a.safetensors"
    save_state(path, net(1).state_dict())
    for target in (path, net(1).state_dict()):
        with pytest.raises(InputError, match="to write to, expected a module; merge returns a new state dict"):
            isthmus.merge_into(target, [net(1), net(2)])


def test_a_failed_merge_leaves_the_module():
    target, before = net(4), net(4)
    with pytest.raises(InputError):
        isthmus.merge_into(target, [net(1), net(2, classes=9)])
    assert isthmus.diff(target, before).equal


@pytest.mark.parametrize("method", ["sce", "arcee_fusion", "ram", "ram_plus", "ties", "slerp", "model_stock"])
def test_a_nan_in_the_last_tensor_leaves_the_module(method):
    target, before = net(4), net(4)
    models = [net(1)] if method == "arcee_fusion" else [net(1), net(2)]
    with torch.no_grad():
        models[-1]["trunk"][2].weight[-1, -1] = math.nan
    with pytest.raises(InputError, match=r"trunk\.2\.weight"):
        isthmus.merge_into(target, models, base=net(3), method=method)
    assert isthmus.diff(target, before).equal


# Properties

values = st.floats(-1e3, 1e3, width=32)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(values, min_size=3, max_size=3), min_size=1, max_size=5),
    st.lists(st.floats(0.1, 10), min_size=5, max_size=5),
)
def test_an_average_lies_between_its_models_and_does_not_depend_on_the_weights_scale(rows, weights):
    models = tensors(*rows)
    chosen = weights[: len(rows)]
    merged = isthmus.merge(models, weights=chosen)["w"]
    stacked = torch.stack([model["w"] for model in models])
    slack = 1e-5 * stacked.abs().max()
    assert ((stacked.min(0).values - slack <= merged) & (merged <= stacked.max(0).values + slack)).all()
    doubled = isthmus.merge(models, weights=[4 * weight for weight in chosen])["w"]
    assert torch.equal(merged, doubled)  # a power of two changes no rounding


@settings(max_examples=50, deadline=None)
@given(st.permutations(["a", "b", "c", "d"]), st.integers(1, 15))
def test_the_order_of_keys_changes_no_value(order, kept):
    generator = torch.Generator().manual_seed(kept)
    model = {key: torch.randint(-3, 4, (4,), generator=generator).float() for key in "abcd"}
    base = {key: torch.zeros(4) for key in order}
    merged = isthmus.merge(
        [{key: model[key] for key in order}], base=base, method="magnitude_prune", density=kept / 16, ties="exact"
    )
    assert list(merged) == list(order)
    expected = isthmus.merge(
        [model], base={key: base[key] for key in "abcd"}, method="magnitude_prune", density=kept / 16, ties="exact"
    )
    assert all(torch.equal(merged[key], expected[key]) for key in order)


@pytest.mark.filterwarnings("default::isthmus.errors.IsthmusWarning")
def test_many_equal_magnitudes_are_warned_of():
    base, model = {"w": torch.zeros(100)}, {"w": torch.ones(100)}
    with pytest.warns(IsthmusWarning, match="exact"):
        merged = isthmus.merge([model], base=base, method="magnitude_prune", density=0.2)
    assert merged["w"].sum() == 100
