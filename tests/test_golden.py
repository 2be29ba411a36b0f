"""The presets against the output of the tools themselves: mergekit 0.1.5, PEFT 0.21.2 and the original TIES code.

``tests/data/golden`` holds a base, three models, and what each tool made of them, with a manifest of methods and
parameters. Elements are compared in units of the last place of the largest magnitude that enters them: the base's, the
models' and, should it be larger, the tool's own result. Four of them are allowed. A rule adds up at most four such
numbers, and each side rounds each partial result by at most half a unit, in an order of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import isthmus

FOLDER = Path(__file__).parent / "data" / "golden"
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())
CASES = {case["name"]: case for case in MANIFEST["cases"]}
ULPS = 4
EPSILON = torch.finfo(torch.float32).eps

PRESETS = {"mergekit 0.1.5": "mergekit", "peft 0.21.2": "peft", "ties-merging (original)": "paper"}
NAMES = {"weight": "weights", "lambda": "scaling_factor"}  # the tools' words where ours differ


def load(name):
    return load_file(FOLDER / f"{name.removesuffix('.safetensors')}.safetensors")


def difference(a, b):
    return {key: a[key] - b[key] for key in a}


def arguments(case):
    """Models, base and options of ``isthmus.merge`` for a case of the manifest."""
    models, base, params = [load(name) for name in case["inputs"]], load("base"), case["params"]
    if case["tool"].startswith("mergekit"):
        per_model, options = params["per_model"] or [{}], dict(params["global"] or {})
        options |= {name: [model[name] for model in per_model] for name in per_model[0]}
        if case["method"] == "arcee_fusion":
            base, *models = models
        elif not params["base_model"] or isinstance(params["base_model"], str):
            base = None  # a file's name: mergekit calls the first of a pair its base
    elif case["tool"].startswith("peft"):
        models, base = [difference(model, base) for model in models], None  # task vectors in, a task vector out
        options = {name: value for name, value in params.items() if name != "returns"}
    else:
        options = {
            "density": params["reset_thresh"] / 100,
            "merge_func": params["merge_func"].removeprefix("dis-"),
            "scaling_factor": params["lambda"],
        }
    return models, base, {NAMES.get(name, name): value for name, value in options.items()}


def merged(case, backend):
    models, base, options = arguments(case)
    preset = PRESETS[case["tool"]]
    return isthmus.merge(models, base=base, method=case["method"], preset=preset, backend=backend, **options)


def excess(got, want, operands):
    """|got - want| in units of the last place of the largest magnitude that enters each element."""
    scale = torch.stack([x.abs() for x in (want, *operands)]).amax(dim=0).double()
    unit = EPSILON * torch.exp2(torch.floor(torch.log2(scale.clamp(min=torch.finfo(torch.float32).tiny))))
    return (got.double() - want.double()).abs() / unit


def operands_of(case, key):
    models, base, _ = arguments(case)
    return [model[key] for model in models] + ([] if base is None else [base[key]])


@pytest.mark.parametrize("name", [name for name in CASES if name != "mk_arcee_fusion"])
def test_preset_equals_the_tool(name, backend):
    case, want = CASES[name], load(name)
    got = merged(case, backend)
    assert got.keys() == want.keys()
    for key in want:
        assert got[key].dtype == want[key].dtype
        assert got[key].shape == want[key].shape
        assert excess(got[key], want[key], operands_of(case, key)).max() <= ULPS, key


@pytest.mark.parametrize("key", load("base"))
def test_sce_has_no_element_near_the_cut(key):
    """So the comparison above covers every element: the key's values on both sides of the cut are far apart."""
    base = load("base")[key].double()
    variances = torch.stack([load(f"model{i}")[key].double() - base for i in (1, 2, 3)]).var(dim=0, correction=0)
    count = int(variances.count_nonzero() * CASES["mk_sce"]["params"]["global"]["select_topk"])
    if count:
        last, first_out = variances.flatten().sort(descending=True).values[count - 1 : count + 1]
        assert last - first_out > 2 * ULPS * EPSILON * last


def importance(model, base):
    """|θ − θ₀| · KL(softmax θ ‖ softmax θ₀) in float64, and the cut: the median and 1.5 interquartile ranges."""
    p, q = (torch.softmax(x.double(), -1) + 1e-8 for x in (model, base))
    scores = (model.double() - base.double()).abs() * (p * (p / q).log()).sum(-1, keepdim=True)
    in_order = scores.flatten().sort().values
    low, median, high = (in_order[int(q * (len(in_order) - 1))] for q in (0.25, 0.5, 0.75))
    return scores, median + 1.5 * (high - low)


def test_arcee_fusion_equals_mergekit_beyond_the_cut(backend):
    """The divergence of two nearly equal softmaxes is a sum of terms near 1 that cancel.

    So float32 knows it to some units of the last place of 1, and an element's score to as many times its |τ|. Elements
    nearer to the cut than that are base or model, by luck; all others are equal.
    """
    want, got = load("mk_arcee_fusion"), merged(CASES["mk_arcee_fusion"], backend)
    base, model = load("model1"), load("model2")
    free = 0
    for key in want:
        scores, cut = importance(model[key], base[key])
        change = (model[key] - base[key]).abs().double()
        near = (scores - cut).abs() <= ULPS * EPSILON * change
        either = torch.minimum(*(excess(got[key], x[key], [base[key], model[key]]) for x in (base, model)))
        apart = excess(got[key], want[key], [base[key], model[key]])
        assert torch.where(near, either, apart).max() <= ULPS, key
        free += int(near.sum())
    assert free <= 0.01 * sum(x.numel() for x in want.values())


def merged_task_vectors(*task_vectors, **options):
    """The merge of task vectors from a base of zeros: one float32 tensor."""
    models = [{"w": torch.tensor(task_vector, dtype=torch.float32)} for task_vector in task_vectors]
    base = {"w": torch.zeros_like(models[0]["w"])}
    return isthmus.merge(models, base=base, method=options.pop("method", "ties"), **options)["w"]


@pytest.mark.filterwarnings("ignore:entries equal to the threshold")  # one too many of ten, which is the point
@pytest.mark.parametrize(
    ("preset", "density", "kept"),
    [
        ("paper", 0.25, 3),  # the threshold is the 8th smallest of 10, and itself kept
        ("mergekit", 0.25, 2),  # int(2.5)
        ("peft", 0.25, 2),
        ("paper", 0.3, 4),  # sd-mecha keeps 4 at 0.25, from the int(7.5)-th smallest on; ours does at 0.3
    ],
)
def test_trimmed_counts_of_ten_elements(preset, density, kept):
    values = [4.0, -1.0, 10.0, -7.0, 2.0, 6.0, -9.0, 3.0, 8.0, -5.0]
    merged = merged_task_vectors(values, preset=preset, density=density)
    largest = sorted(values, key=abs)[-kept:]
    assert merged.tolist() == [x if x in largest else 0.0 for x in values]


@pytest.mark.parametrize(
    ("weights", "task_vectors", "preset", "value"),
    [
        ((0.2, 0.8), (1.0, 3.0), "mergekit", 2.6),  # (.2 · 1 + .8 · 3) / (.2 + .8)
        ((0.2, 0.8), (1.0, 3.0), "peft", 1.3),  # the same sum over the count of models
        ((0.9, 0.1), (1.0, -3.0), "mergekit", 1.0),  # the weighted vote .9 - .3 elects +
        ((0.9, 0.1), (1.0, -3.0), "peft", -0.3),  # the vote 1 - 3 elects -
    ],
)
def test_weighted_task_vectors(weights, task_vectors, preset, value):
    merged = merged_task_vectors(*([x] for x in task_vectors), weights=list(weights), preset=preset, density=1.0)
    assert merged.item() == pytest.approx(value, rel=2 * EPSILON)


@pytest.mark.parametrize("preset", ["paper", "mergekit", "peft"])
@pytest.mark.parametrize("method", ["dare", "dare_ties"])
def test_dare_at_density_0_is_the_base(method, preset, backend):
    """PEFT divides the dropped entries by the density, 0 / 0, and returns NaN throughout.

    That fault is not copied: at density 0 nothing of any task vector is left, so the merge is the base, to the bit.
    """
    base, models = load("base"), [load(f"model{i}") for i in (1, 2, 3)]
    got = isthmus.merge(models, base=base, method=method, preset=preset, density=0.0, backend=backend)
    for key, expected in base.items():
        assert torch.equal(got[key].view(torch.int32), expected.view(torch.int32)), key
