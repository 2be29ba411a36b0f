"""Scans of scaling factors: merges of task vectors, task by task."""

from __future__ import annotations

import copy
import csv
import math

import numpy as np
import pytest
import torch
from torch import nn

import isthmus
from isthmus import methods
from isthmus.errors import EvaluationError, FileError, InputError, IsthmusWarning
from isthmus.flat import FlatState
from isthmus.io import save_state
from isthmus.merging import scaled
from isthmus.merging.scaled import ScaledMerges
from isthmus.path import Evaluator, TaskArithmeticResult, scan_task_arithmetic

pytestmark = pytest.mark.usefixtures("one_thread")
CLASSIFY = {"batch_size": 8, "memory_format": torch.contiguous_format}


class Table(nn.Module):
    """Sample i is of class 1 if the i-th weight is positive, else of class 0."""

    def __init__(self, w) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float32))

    def forward(self, x):
        return torch.stack([torch.zeros_like(self.w[x]), self.w[x]], dim=1)


def samples(*indices: int, target: int = 1) -> Evaluator:
    """The samples of these indices; the right class of negative ones (~i) is 0."""
    index = torch.tensor([i if i >= 0 else ~i for i in indices])
    return Evaluator((index, torch.tensor([int(i >= 0) for i in indices])), **CLASSIFY)


BASE = [-1.0] * 6
# What the models add. Samples 0 to 2 belong to the first task, 3 to 5 to the second.
A = [2.0, 4.0, 8.0, 0.0, 0.0, -1.0]
B = [0.0, 0.0, -6.0, 2.0, 0.5, 4.0]


def added(change) -> Table:
    return Table([base + step for base, step in zip(BASE, change, strict=True)])


def scan(tasks=None, **options):
    """At λ the merge has the weights -1 + λ (2, 4, 2, 2, 0.5, 3)."""
    tasks = {"one": samples(0, 1, 2), "two": samples(3, 4, 5)} if tasks is None else tasks
    options = {"base": Table(BASE), "scaling_factors": [0, 0.3, 0.4, 0.75, 2.5], "select_on": "test"} | options
    return scan_task_arithmetic(Table(BASE), [added(A), added(B)], tasks, **options)


def test_accuracies_by_hand():
    result = scan()
    assert result.tasks == ["one", "two"]
    third = 1 / 3
    # Right where λ is above 1/2, 1/4, 1/2 and above 1/2, 2, 1/3.
    assert result.values["one"]["test"]["accuracy"] == pytest.approx(np.array([[0, third, third, 1, 1]]))
    assert result.values["two"]["test"]["accuracy"] == pytest.approx(np.array([[0, 0, third, 2 * third, 1]]))
    # The first model has all of its samples right and of the others none; the second has 3 and 5.
    assert result.fine_tuned["one"]["test"]["accuracy"] == pytest.approx(np.array([1, 0]))
    assert result.fine_tuned["two"]["test"]["accuracy"] == pytest.approx(np.array([0, 2 * third]))
    assert result.normalised()["one"] == pytest.approx(np.array([[0, third, third, 1, 1]]))
    assert result.normalised()["two"] == pytest.approx(np.array([[0, 0, 0.5, 1, 1.5]]))
    assert result.mean() == pytest.approx(np.array([[0, third / 2, 5 / 12, 1, 1.25]]))
    assert result.complete
    assert result.settings == ({},)
    assert (result.choices["method"], result.choices["preset"]) == ("task_arithmetic", "paper")
    assert result.choices["options"] == {"weights": None, "normalize": False}


def test_the_best_coefficients():
    best = scan().best
    assert (best.scaling_factor, best.options, best.selection) == (2.5, {}, "selected on test")
    assert (best.mean, best.selected_mean) == pytest.approx((1.25, 1.25))
    assert best.normalised == pytest.approx({"one": 1, "two": 1.5})
    assert best.accuracy == pytest.approx({"one": 1, "two": 1})


def test_choosing_on_one_split_and_reporting_on_another():
    """On val the first two samples are wrong for λ above 1/2, so it chooses 0.3, with which test is not at its best."""
    tasks = {
        "one": {"val": samples(1, ~0, ~2), "test": samples(0, 1, 2)},
        "two": {"val": samples(~3, ~4, 5), "test": samples(3, 4, 5)},
    }
    models = [added(A), Table([-1.0, -1.0, -1.0, -1.0, -1.0, 1.0])]
    result = scan_task_arithmetic(
        *(Table(BASE), models, tasks),
        base=Table(BASE),
        scaling_factors=[0, 0.3, 0.75],
        weights=[1.0, 2.0],
    )
    # The merge: -1 + λ (2, 4, 8, 0, 0, -1 + 4); own accuracies on val 1/3 and 1, on test 1 and 1/3.
    assert result.normalised("val")["one"] == pytest.approx(np.array([[2, 2, 1]]))
    assert result.normalised("val")["two"] == pytest.approx(np.array([[2 / 3, 2 / 3, 1]]))
    assert result.normalised("test")["one"] == pytest.approx(np.array([[0, 2 / 3, 1]]))
    assert result.normalised("test")["two"] == pytest.approx(np.array([[0, 0, 1]]))
    best = result.best
    assert best.selection == "selected on val, reported on test"
    assert best.scaling_factor == 0  # of equals the smallest
    assert best.selected_mean == pytest.approx(4 / 3)
    assert (best.mean, best.normalised) == (0, {"one": 0, "two": 0})
    assert result.mean()[0, 2] == 1  # what choosing on test would have claimed


def test_splits_that_are_missing():
    with pytest.warns(IsthmusWarning, match="no split 'val' to select coefficients on, so they are selected on 'test'"):
        result = scan(select_on="val")
    assert (result.select_on, result.best.selection) == ("test", "selected on test")
    both = {"valid": samples(0), "test": samples(1)}
    with pytest.raises(InputError, match=r"task 'one' has no split 'val'; it has valid, test"):
        scan({"one": both, "two": both}, select_on="val")
    with pytest.raises(InputError, match=r"task 'two' has no split 'valid'; it has test"):
        scan({"one": both, "two": samples(1)}, select_on="valid")
    with pytest.raises(InputError, match=r"got 2 models and 1 tasks \(one\)"):
        scan({"one": both})
    with pytest.raises(InputError, match="no values on the split 'train'"):
        result.normalised("train")


def test_settings_are_all_combinations():
    result = scan(method="ties", density=[0.5, 1.0], majority_sign_method=np.array(["total", "frequency"]))
    assert result.settings == (
        {"density": 0.5, "majority_sign_method": "total"},
        {"density": 0.5, "majority_sign_method": "frequency"},
        {"density": 1.0, "majority_sign_method": "total"},
        {"density": 1.0, "majority_sign_method": "frequency"},
    )
    assert result.values["one"]["test"]["accuracy"].shape == result.seconds.shape == (4, 5)
    assert "density" not in result.choices["options"]
    assert result.choices["options"]["scope"] == "global"
    pairs = scan(method="ties", density=[(0.5, 1.0), (1.0, 0.5)], weights=[1.0, 2.0])
    assert [setting["density"] for setting in pairs.settings] == [[0.5, 1.0], [1.0, 0.5]]


def seen_weights(**options):
    """The weights at every point, in the order of evaluation, the two fine-tuned models aside."""
    seen = []

    def see(model):
        seen.append(copy.deepcopy(model.state_dict()))
        return {"accuracy": 1.0}

    models = [sequential(seed) for seed in (1, 2)]
    scan_task_arithmetic(
        *(sequential(0), models, {"one": see, "two": lambda m: {"accuracy": 1.0}}),
        **({"base": sequential(3), "select_on": "test", "bn": "keep"} | options),
    )
    return models, seen[2:]


def sequential(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    model[1].running_mean.normal_()
    model[1].num_batches_tracked.fill_(seed)
    return model


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("task_arithmetic", {"weights": [0.5, 2.0]}),
        ("ties", {"density": [0.2, 0.6]}),
        ("ties", {"density": [0.2, 0.6], "preset": "mergekit"}),
        ("dare", {"density": [0.5], "seed": [0, 1]}),
        ("breadcrumbs_ties", {"density": [0.5], "gamma": [0.1, 0.2]}),
        ("della", {"density": [0.5]}),
        (methods.MagnitudePrune(density=0.3, scope="tensor"), {"rescale": ["none", "inverse_density", "l1"]}),
    ],
)
def test_merges_are_those_of_merge_to_the_bit(method, options):
    models, seen = seen_weights(method=method, scaling_factors=[-0.5, 0.0, 0.7, 1.0], **options)
    grids = {name: value for name, value in options.items() if isinstance(value, list) and name != "weights"}
    settings = [{}]
    for name, values in grids.items():
        settings = [setting | {name: value} for setting in settings for value in values]
    base, at = sequential(3).state_dict(), iter(seen)
    assert all(torch.equal(value, base[key]) for key, value in next(at).items())
    for setting in settings:
        for factor in (-0.5, 1.0, 0.7):  # the outermost first
            expected = isthmus.merge(
                models, base=sequential(3), method=method, scaling_factor=factor, **(options | setting)
            )
            for key, value in next(at).items():
                if key != "1.num_batches_tracked":
                    assert torch.equal(value, expected[key]), key
    assert next(at, None) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_other_dtypes_are_merged_as_by_merge(dtype):
    def state(seed):
        torch.manual_seed(seed)
        tensor = torch.randn(8, 6).to(dtype)
        return {"w": tensor, "tied": tensor, "f": torch.randn(5), "n": torch.tensor([1, 2])}

    base, models = state(0), [state(1), state(2)]
    for key in ("w", "f"):
        base[key][:2] = -0.0
        for model in models:
            model[key][:2] = -0.0  # what no model changed keeps its sign
    flat, *others = (FlatState.from_state_dict(x) for x in (base, *models))
    method = "task_arithmetic" if dtype.is_complex else "ties"
    merges = ScaledMerges(flat, others, [methods.make(method)])
    out = FlatState.zeros(flat.layout)
    for factor in (0.3, 1.0):
        merges.write(0, factor, out)
        expected = isthmus.merge(models, base=base, method=method, scaling_factor=factor)
        for key, value in expected.items():
            assert torch.equal(out[key].view(torch.uint8), value.view(torch.uint8)), key


def test_work_is_shared(monkeypatch):
    """One sweep finds the thresholds of all densities, one merge serves all factors, and one evaluation the base."""
    calls = {"find_thresholds": 0, "consensus": 0, "evaluate": 0}

    def counting(name):
        original = getattr(scaled, name)

        def call(method, rows, *args):
            calls[name] += rows.out[0].numel() == len(BASE)  # options are tried on less
            return original(method, rows, *args)

        return call

    def evaluate(model):
        calls["evaluate"] += 1
        return {"accuracy": 1.0}

    for name in ("find_thresholds", "consensus"):
        monkeypatch.setattr(scaled, name, counting(name))
    scan({"one": evaluate, "two": lambda m: {"accuracy": 1.0}}, method="ties", density=[0.1, 0.2, 0.3])
    assert calls == {"find_thresholds": 1, "consensus": 3, "evaluate": 2 + 1 + 3 * 4}
    calls["find_thresholds"] = 0
    scan(method="ties", density=[0.1, 0.2], ties=["exact", "inclusive"], zero_sign=["majority", "positive"])
    assert calls["find_thresholds"] == 2  # of two ways to rank, whatever the vote
    calls["find_thresholds"] = 0
    scan(method="dare", density=[0.1, 0.2])
    assert calls["find_thresholds"] == 0


def test_first_layers_are_combined():
    """Of every setting they are computed for the outermost factors, and for the models and the base in full."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 6, generator=generator)
    targets = torch.randint(4, (40,), generator=generator)
    models = [sequential(seed) for seed in (1, 2)]

    def found(share):
        evaluator = Evaluator((inputs, targets), share_first_layer=share, **CLASSIFY)
        return scan_task_arithmetic(
            *(sequential(0), models, {"one": evaluator, "two": lambda m: {"accuracy": 1.0}}),
            base=sequential(3),
            method="ties",
            density=[0.3, 0.7],
            scaling_factors=[-0.5, 0.0, 0.25, 1.0, 1.5],
            select_on="test",
            bn="keep",
        )

    shared, computed = found(True), found(False)
    assert shared.choices["splits"]["one/test"]["first_layer"] == "shared"
    assert computed.choices["splits"]["one/test"]["first_layer"] == "computed"
    for tables in ("values", "fine_tuned"):
        losses = [getattr(result, tables)["one"]["test"]["loss"] for result in (shared, computed)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    losses = shared.values["one"]["test"]["loss"]
    assert losses[0, 1] == losses[1, 1]
    assert len(np.unique(losses)) == losses.size - 1


def test_batch_norm_statistics_are_those_of_the_base_or_of_data():
    models, seen = seen_weights(scaling_factors=[1.0])
    expected = sequential(3)[1].running_mean + sum(m[1].running_mean - sequential(3)[1].running_mean for m in models)
    assert torch.allclose(seen[0]["1.running_mean"], expected)
    assert seen[0]["1.num_batches_tracked"] == 3
    inputs = torch.randn(50, 6)
    models, seen = seen_weights(scaling_factors=[0.0], bn="auto", bn_data=inputs)
    assert torch.allclose(seen[0]["1.running_mean"], sequential(3)[0](inputs).mean(0), atol=1e-6)


def test_how_long_statistics_took():
    models, tasks = (
        [sequential(1), sequential(2)],
        {"one": lambda m: {"accuracy": 1.0}, "two": lambda m: {"accuracy": 1}},
    )
    options = {"base": sequential(3), "scaling_factors": [0.0, 1.0], "select_on": "test"}
    result = scan_task_arithmetic(sequential(0), models, tasks, bn_data=torch.randn(50, 6), **options)
    assert result.bn_seconds.shape == result.seconds.shape == (1, 2)
    assert ((result.bn_seconds > 0) & (result.bn_seconds < result.seconds)).all()
    back = TaskArithmeticResult.from_json(result.to_json())
    assert back.bn_seconds.tolist() == result.bn_seconds.tolist()
    kept = scan_task_arithmetic(sequential(0), models, tasks, bn="keep", **options)
    assert kept.bn_seconds is None
    assert TaskArithmeticResult.from_json(kept.to_json()).bn_seconds is None


def test_sources_and_model_come_back(tmp_path):
    model, base, models = Table(BASE), Table(BASE), [added(A), added(B)]
    save_state(tmp_path / "b.safetensors", models[1].state_dict())
    before = [copy.deepcopy(m.state_dict()) for m in (model, base, models[0])]
    torch.manual_seed(1)
    random_state = torch.get_rng_state()
    sources = [models[0].state_dict(), tmp_path / "b.safetensors"]
    tasks = {"one": samples(0, 1, 2), "two": samples(3, 4, 5)}
    options = {"base": base, "scaling_factors": [0, 0.3, 0.4, 0.75, 2.5], "select_on": "test"}
    result = scan_task_arithmetic(model, sources, tasks, **options)
    assert torch.equal(torch.get_rng_state(), random_state)
    for m, state in zip((model, base, models[0]), before, strict=True):
        assert torch.equal(m.state_dict()["w"], state["w"])
    assert result.mean() == pytest.approx(scan().mean())


def test_an_error_leaves_what_was_done():
    calls = []

    def fail(model):
        calls.append(model.w[0].item())
        if len(calls) == 6:
            raise RuntimeError("broken")
        return {"accuracy": len(calls) / 10}

    with pytest.raises(
        EvaluationError, match=r"'two/test' failed at scaling factor 0\.4 with density = 0\.5.*broken"
    ) as caught:
        scan({"one": samples(0, 1, 2), "two": fail}, method="ties", density=[0.5, 1.0])
    partial = caught.value.partial
    assert not partial.complete
    # Two fine-tuned models, the base, which counts for both settings, and the outermost factors of the first.
    expected = [[0.3, 0.4, math.nan, math.nan, 0.5], [0.3, *[math.nan] * 4]]
    assert np.array_equal(partial.values["two"]["test"]["accuracy"], expected, equal_nan=True)
    assert np.array_equal(np.isnan(partial.seconds), np.isnan(expected))
    assert partial.best.scaling_factor == 2.5
    # Four merges with accuracy and loss of the first task, accuracy of the second, two normalised ones and their mean.
    assert sum(row[1] == "merged" for row in partial.rows()) == 4 * 6
    assert TaskArithmeticResult.from_json(partial.to_json()).best == partial.best

    def at_once(model):
        raise RuntimeError("broken")

    with pytest.raises(EvaluationError, match="failed at the model of task 'one'") as caught:
        scan({"one": at_once, "two": samples(0)})
    assert caught.value.partial.best is None
    with pytest.raises(InputError, match="the result has no merges"):
        caught.value.partial.plot()
    assert list(caught.value.partial.rows()) == []
    assert TaskArithmeticResult.from_json(caught.value.partial.to_json()).best is None


def test_a_checkpoint_goes_on(tmp_path):
    path = tmp_path / "checkpoint"
    first = scan(method="ties", density=[0.5, 1.0], checkpoint=path, scaling_factors=[0, 0.3, 0.4, 2.5])
    longer = scan(method="ties", density=[0.5, 1.0], checkpoint=path)
    assert np.array_equal(longer.seconds[:, [0, 2]], first.seconds[:, [0, 2]])  # 0.3 and 2.5 are the outermost
    whole = scan(method="ties", density=[0.5, 1.0])
    assert np.array_equal(longer.mean(), whole.mean())
    with pytest.raises(InputError, match="merges was"):
        scan(method="ties", density=[0.5], checkpoint=path)


def test_files_and_tables(tmp_path):
    result = scan(method="ties", density=[0.5, 1.0])
    back = TaskArithmeticResult.from_json(result.to_json(tmp_path / "result.json"))
    assert back.best == result.best
    assert back.settings == result.settings
    assert list(back.rows()) == list(result.rows())
    assert back.to_json() == result.to_json()
    assert TaskArithmeticResult.from_json(tmp_path / "result.json").choices == result.choices
    with pytest.raises(FileError, match="expected a path result"):
        isthmus.PathResult.from_json(result.to_json())
    result.to_csv(tmp_path / "result.csv")
    with (tmp_path / "result.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["density", "model", "scaling_factor", "task", "split", "metric", "value"]
    # Two models on two tasks with two metrics, then ten merges with these four numbers, two normalised and a mean.
    assert len(rows) == 8 + 10 * 7
    assert ["", "fine-tuned on two", "", "two", "test", "accuracy", "0.6666666666666666"] in rows
    mean = [row for row in rows if row[0] == "1.0" and row[2] == "0.75" and row[3] == "mean"]
    assert [row[:1] + row[1:6] for row in mean] == [
        ["1.0", "merged", "0.75", "mean", "test", "normalised accuracy"],
    ]
    assert float(mean[0][6]) == result.mean()[1, 3]


def test_data_frames():
    pandas = pytest.importorskip("pandas")
    frame = scan(method="ties", density=[0.5, 1.0]).to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["density"].dropna().unique().tolist() == [0.5, 1.0]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_figures(count):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    result = scan(method="ties", density=[0.4, 0.6, 0.8, 1.0][:count])
    axes = result.plot()
    assert len(axes) == count
    for setting, ax in enumerate(axes):
        lines = {line.get_label(): line.get_ydata() for line in ax.get_lines()}
        assert np.array_equal(lines["one"], result.normalised()["one"][setting])
        assert np.array_equal(lines["mean of tasks"], result.mean()[setting])
        assert ax.get_ylabel() == "normalised accuracy on test"
        assert ax.get_title() == f"density = {result.settings[setting]['density']}"
        assert any("selected on test" in str(label) for label in lines) == (
            result.settings[setting] == result.best.options
        )
    with pytest.raises(InputError, match="axes for"):
        result.plot([axes[0]] * (count + 1))
    assert result.plot(axes[0] if count == 1 else axes)[0] is axes[0]
    pyplot.close("all")


def test_a_model_without_accuracy_is_no_measure():
    """The first task's own model has nothing right: what is normalised by it is NaN, and nothing is best."""
    result = scan({"one": samples(~0), "two": samples(3)})
    assert np.isnan(result.normalised()["one"]).all()
    assert np.isnan(result.mean()).all()
    assert result.best is None
    assert result.normalised()["two"].tolist() == [[0, 0, 0, 1, 1]]


def test_what_cannot_be_scanned():
    """It is found before the first evaluation."""

    def never(model):
        raise AssertionError

    def scan_nothing(**options):
        scan({"one": never, "two": never}, **options)

    with pytest.raises(InputError, match=r"slerp has no scaling factor .* task_arithmetic, ties"):
        scan_nothing(method="slerp")
    with pytest.raises(InputError, match="pass scaling_factors="):
        scan_nothing(scaling_factor=0.5)
    with pytest.raises(InputError, match=r"has scaling_factor=0\.5, which the scan varies"):
        scan_nothing(method=methods.Ties(scaling_factor=0.5))
    with pytest.raises(InputError, match="ties has no option 'densities'"):
        scan_nothing(method="ties", densities=[0.1])
    with pytest.raises(InputError, match="density= is empty"):
        scan_nothing(method="ties", density=[])
    with pytest.raises(InputError, match=r"density is 2\.0"):
        scan_nothing(method="ties", density=[0.5, 2.0])
    with pytest.raises(InputError, match=r"density is 2\.0"):
        scan_nothing(method="dare", density=[0.5, 2.0])
    with pytest.raises(InputError, match="majority_sign_method"):
        scan_nothing(method="ties", majority_sign_method="most")
    for factors in ([], [math.nan], 0.5):
        with pytest.raises(InputError, match="expected a list of finite numbers"):
            scan_nothing(scaling_factors=factors)
    with pytest.raises(InputError, match="metric='loss' is a loss"):
        scan_nothing(metric="loss")
    with pytest.raises(InputError, match="a task is called 'mean'"):
        scan({"one": never, "mean": never})
    with pytest.raises(EvaluationError, match="expected 'f1' among them"):
        scan(metric="f1")
    with pytest.raises(InputError, match="model 2 does not have the tensors of the model"):
        scan_task_arithmetic(
            *(Table(BASE), [added(A), Table([1.0])], {"one": never, "two": never}),
            base=Table(BASE),
            select_on="test",
        )
    nan = added([math.nan, *A[1:]])
    with pytest.raises(InputError, match="the task vector of model 2 has NaN"):
        scan_task_arithmetic(
            *(Table(BASE), [added(A), nan], {"one": never, "two": never}),
            base=Table(BASE),
            method="ties",
            select_on="test",
        )


def test_progress_counts_models_and_merges():
    calls = []
    scan(method="ties", density=[0.5, 1.0], progress=lambda *call: calls.append(call))
    assert [call[:2] for call in calls] == [(done, 11) for done in range(1, 12)]
    assert calls[-1][2].keys() == {"one/test", "two/test"}
