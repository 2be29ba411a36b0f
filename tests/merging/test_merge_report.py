"""What a report says of a merge."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import isthmus
from isthmus.io import save_state


def test_ties_by_hand(tmp_path):
    base = {"a": torch.zeros(3), "b": torch.zeros(2), "n": torch.tensor(1)}
    one = {"a": torch.tensor([5.0, -4.0, 1.0]), "b": torch.tensor([3.0, 0.0]), "n": torch.tensor(1)}
    two = {"a": torch.tensor([-6.0, -2.0, 0.0]), "b": torch.tensor([7.0, 1.0]), "n": torch.tensor(1)}
    merged, report = isthmus.merge(
        [one, two],
        base=base,
        method="ties",
        density=0.6,
        ties="exact",
        return_report=True,
    )
    # kept 3 of 5: of the first 5, −4 and 3, of the second 7, −6 and −2. Votes: −1, −6 and 0, 10 and 0.
    assert (merged["a"].tolist(), merged["b"].tolist()) == ([-6, -3, 0], [5, 0])
    a, b = report.entries["a"], report.entries["b"]
    assert (a.kept, b.kept) == ([2, 2], [1, 1])
    assert (a.positive, a.negative, a.cancelled, a.conflicts) == (0, 2, 0, 1)
    assert (b.positive, b.negative, b.cancelled, b.conflicts) == (1, 0, 0, 0)
    assert report.thresholds == [3, 2]
    assert a.thresholds is None
    assert a.norms.base == 0
    assert a.norms.models == a.norms.task_vectors == pytest.approx([math.sqrt(42), math.sqrt(40)])
    assert a.norms.merged == pytest.approx(math.sqrt(45))
    assert report.entries["n"].rule == "equal in all"
    assert (report.method, report.preset, report.options["density"]) == ("ties", "paper", 0.6)
    assert (report.models, report.base) == (["model 1", "model 2"], "the base")
    assert report.version == isthmus.__version__
    report.to_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == report.to_dict()


def test_counting_changes_no_value():
    torch.manual_seed(0)
    base, one, two = ({"a": torch.randn(40), "b": torch.randn(3, 7)} for _ in range(3))
    for method, options in {
        "ties": {"preset": "mergekit", "density": [0.3, 0.6]},
        "breadcrumbs": {"density": 0.4, "gamma": 0.1},
        "dare_ties": {"density": 0.4},
        "della": {"density": 0.4, "preset": "mergekit"},
        "task_arithmetic": {},
    }.items():
        common = {"base": base, "method": method, **options}
        merged, report = isthmus.merge([one, two], return_report=True, **common)
        assert isthmus.diff(merged, isthmus.merge([one, two], **common)).equal
        assert all(entry.kept is not None for entry in report.entries.values())


def test_thresholds_of_tensors_ranked_by_themselves():
    base, model = (
        {"a": torch.zeros(2), "b": torch.zeros(2)},
        {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([8.0, 9.0])},
    )
    _, report = isthmus.merge(
        [model], base=base, method="magnitude_prune", scope="tensor", ties="exact", density=0.5, return_report=True
    )
    assert report.thresholds is None
    assert [report.entries[key].thresholds for key in "ab"] == [[2], [9]]


def test_reports_of_parts_are_the_whole():
    base, model = {"a": torch.zeros(4), "b": torch.zeros(4)}, {"a": torch.arange(4.0), "b": torch.arange(4.0)}
    options = {"base": base, "method": "breadcrumbs", "density": 0.5, "return_report": True}
    _, whole = isthmus.merge([model], **options)
    _, parts = isthmus.merge([model], progress=lambda done, total: None, **options)
    assert whole == parts


def test_files_ties_dtypes_and_rules(tmp_path):
    weight = nn.Parameter(torch.ones(2))
    first = {"module.b": weight, "module.a": weight, "module.e": torch.empty(0), "module.s": torch.ones(1)}
    second = {"b": torch.ones(2).half(), "a": torch.ones(2).half(), "e": torch.empty(0), "s": torch.ones(5)}
    save_state(tmp_path / "second.safetensors", second)
    _, report = isthmus.merge(
        [first, tmp_path / "second.safetensors"], skip="s", dtype=torch.float16, return_report=True
    )
    assert report.prefixes == {"model 1": "module."}
    assert report.models == ["model 1", f"model 2 ({tmp_path / 'second.safetensors'})"]
    assert list(report.entries) == ["a", "e", "s"]
    assert report.entries["a"].aliases == ["b"]
    assert [report.entries[key].rule for key in "aes"] == ["merged", "empty", "skipped"]
    assert report.dtype_changes["a"] == ["float32", "float16", "float16"]
    assert report.entries["a"].norms.task_vectors is None
    _, report = isthmus.merge([second, second], return_report=True)
    assert report.dtype_changes == {}
    assert report.backend == isthmus.ops.choose_backend("auto", torch.device("cpu"))


def test_options_are_those_that_were_used():
    base, model = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    for normalize, merge_func, divisor in ((True, "mean", "weight"), (False, "sum", "count"), (None, "mean", "count")):
        _, report = isthmus.merge([model], base=base, method="ties", density=1, normalize=normalize, return_report=True)
        options = report.options
        assert (options["normalize"], options["merge_func"], options["divisor"]) == (normalize, merge_func, divisor)


def test_options_of_any_kind_are_written(tmp_path):
    models = [{"w": torch.ones(1, 2)}, {"w": torch.zeros(1, 2)}]
    _, report = isthmus.merge(
        models,
        method="fisher",
        fishers=[{"w": torch.ones(1, 2)}] * 2,
        weights=torch.tensor([1.0, 2.0]),
        return_report=True,
    )
    report.to_json(tmp_path / "report.json")
    assert report.options["weights"] == [1, 2]
    assert report.options["fishers"] == ["1 tensors", "1 tensors"]
    for weights, written in ({"w": np.array([1.0, 2.0])}, {"w": [1, 2]}), (range(1, 3), [1, 2]), (np.float32(2), 2):
        _, report = isthmus.merge(models, weights=weights, return_report=True)
        report.to_json(tmp_path / "report.json")
        assert report.options["weights"] == written


def test_norms_are_those_of_the_inputs_although_one_is_written_to():
    module = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(3)
    other = {"weight": torch.ones(1, 2)}
    report = isthmus.merge_into(module, [module, other], base=other, return_report=True)
    norms = report.entries["weight"].norms
    assert norms.models == pytest.approx([math.sqrt(18), math.sqrt(2)])
    assert norms.task_vectors == pytest.approx([math.sqrt(8), 0])
    assert norms.merged == pytest.approx(math.sqrt(8))


def test_a_report_changes_nothing_of_what_is_rescaled():
    """Half of the entries survive, and count twice."""
    base, models = {"w": torch.zeros(4)}, [{"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}]
    options = {"base": base, "method": "ties", "density": 0.5, "ties": "exact", "rescale": "inverse_density"}
    merged, report = isthmus.merge(models, return_report=True, **options)
    assert merged["w"].tolist() == isthmus.merge(models, **options)["w"].tolist() == [0, 0, 6, 8]
    assert report.entries["w"].kept == [2]
