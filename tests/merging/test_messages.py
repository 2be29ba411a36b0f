"""What errors and warnings of a merge call the models, and where warnings point."""

from __future__ import annotations

import math

import pytest
import torch

import isthmus
from isthmus import methods, ops
from isthmus.errors import InputError, IsthmusWarning
from isthmus.io import save_state

RANKED = ["ties", "magnitude_prune", "breadcrumbs", "breadcrumbs_ties", "della", "della_linear"]
OTHERS = ["slerp", "nuslerp", "multislerp", "karcher", "model_stock", "sce", "arcee_fusion", "ram", "ram_plus"]
BASED = [*RANKED, "nuslerp", "multislerp", "model_stock", "sce", "arcee_fusion", "ram", "ram_plus"]
ONE_MODEL = ["arcee_fusion"]


def model(*values):
    return {"a": torch.arange(1.0, 4.0), "w": torch.tensor(values)}


def merge(method, models, base, **options):
    if method in RANKED:
        options["density"] = 0.5
    models = models[-1:] if method in ONE_MODEL else models
    return isthmus.merge(models, base=base if method in BASED else None, method=method, **options)


@pytest.mark.parametrize("method", [*RANKED, *OTHERS])
def test_errors_call_models_as_the_merge_does(method, tmp_path):
    good, bad = model(1.0, 2.0, 4.0), model(1.0, math.nan, 4.0)
    name = "model 1" if method in ONE_MODEL else "model 2"
    with pytest.raises(InputError, match=rf"{name}( less the base)?( holds NaN.*| has NaN or infinite entries in 'w')"):
        merge(method, [good, bad], model(0.0, 1.0, 2.0))
    path = tmp_path / "bad.safetensors"
    save_state(path, bad)
    with pytest.raises(InputError, match=rf"{name} \(.*bad\.safetensors\)"):
        merge(method, [good, path], model(0.0, 1.0, 2.0))


@pytest.mark.parametrize("method", ["sce", "arcee_fusion", "ram", "ram_plus"])
def test_errors_call_the_base_as_the_merge_does(method):
    with pytest.raises(InputError, match=r"of w: the base holds NaN"):
        merge(method, [model(1.0, 2.0, 3.0), model(1.0, 2.0, 4.0)], model(1.0, math.nan, 2.0))


def test_errors_call_both_ends_as_the_merge_does():
    first, second = ({"w": torch.ones(3, dtype=torch.complex64)} for _ in range(2))
    with pytest.raises(InputError, match=r"nearswap of w: model 1 has dtype torch\.complex64"):
        isthmus.merge([first, second], method="nearswap", t=0.1)


def test_names_of_a_merge_end_with_it():
    with pytest.raises(InputError, match="model 1"):
        isthmus.merge([model(1.0, math.nan, 3.0)], method="ties")
    with pytest.raises(InputError, match=r"^tensors\[0\] has NaN"):
        ops.thresholds([torch.tensor([1.0, math.nan, 3.0])], 0.5)


def test_a_method_of_ones_own_calls_its_tensors_as_the_ops_do():
    class Own(methods.Registered):
        name, source = "own", "here"
        function = staticmethod(lambda tensors, base, weights: ops.consensus(tensors[1:], density=0.5))

    with pytest.raises(InputError, match=r"^tensors\[0\] has NaN"):
        isthmus.merge(
            [model(1.0, 2.0, 3.0), model(1.0, math.nan, 3.0)], method=Own
        )  # the second model's is its tensors[0]


@pytest.mark.filterwarnings("default::isthmus.errors.IsthmusWarning")
@pytest.mark.parametrize("reporting", [False, True])
def test_the_warning_of_ties_names_the_model_and_points_here(reporting):
    distinct, equal = {"w": torch.arange(100.0)}, {"w": torch.ones(100)}
    with pytest.warns(IsthmusWarning, match="100 entries of model 2 survive where 21 were asked for") as caught:
        isthmus.merge([distinct, equal], method="ties", density=0.2, return_report=reporting)
    with pytest.warns(IsthmusWarning, match=r"100 entries of tensors\[1\] survive") as more:
        ops.consensus([distinct["w"], equal["w"]], density=0.2)
    with pytest.warns(IsthmusWarning, match=r"100 entries of tensors\[0\] survive") as still_more:
        ops.thresholds([equal["w"]], 0.2)
    assert [one.filename for one in (*caught, *more, *still_more)] == [__file__] * 3
