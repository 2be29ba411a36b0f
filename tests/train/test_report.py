import copy
import csv
import dataclasses
import json
import math

import numpy as np
import pytest
from rich.console import Console

from isthmus.io.atomic import write_json
from isthmus.path.result import PathResult
from isthmus.train import report
from isthmus.train.results import PairRecord, Scale, SweepResult

LRS = (0.01, 0.05, 0.2, 0.4)


def make_record(scale, pair, *, ends=(0.8, 0.7), merged=0.9, examples=20, status="ok", annealed=True):
    """A pair whose test accuracies are exactly as given, whose losses are 1 - accuracy."""
    if status == "diverged":
        return PairRecord(scale, pair, 100 + pair, status, "digest", None, {}, {"train": 1.0})
    a, b = ends
    accuracy = np.array([a, merged, b])
    path = PathResult(
        alphas=np.array([0.0, 0.5, 1.0]),
        values={split: {"loss": 1 - accuracy, "accuracy": accuracy} for split in ("val", "test")},
        seconds=np.ones(3),
        ensemble={split: {"loss": 0.07, "accuracy": 0.93} for split in ("val", "test")},
        correct={"test": np.array([np.arange(examples) < round(value * examples) for value in accuracy])},
    )
    others = {"ema": {"loss": 0.08, "accuracy": 0.92}}
    if annealed:
        others |= {"annealed_a": {"loss": 0.05, "accuracy": 0.95}, "annealed_b": {"loss": 0.03, "accuracy": 0.97}}
    others = {"val": copy.deepcopy(others), "test": others}
    return PairRecord(scale, pair, 100 + pair, status, "digest", path, others, {"train": 1.5, "evaluate": 0.5})


def make_result(records, *, scales=None):
    scales = scales or [Scale(lr / (16 * 0.1), lr, 16, 0.9, 5e-4, {"noise": 0.3}) for lr in LRS]
    return SweepResult(
        {"pairs": 5}, "lr / (batch size · (1 − momentum))", tuple(scales), tuple(records), {"torch": "x"}, 1
    )


@pytest.fixture
def peaked():
    """Merged accuracies by scale .8, .9, 1, .5 with small differences between pairs: gains +.05, +.15, +.25, −.25."""
    records = [
        make_record(scale, pair, merged=merged - 0.05 * (pair == 4))
        for scale, merged in enumerate((0.8, 0.9, 1.0, 0.5))
        for pair in range(5)
    ]
    return make_result(records)


def test_summary_by_hand(peaked):
    summary = report.summarise(peaked)
    best = summary.scales[2]
    assert best.scale.lr == 0.2
    assert best.gain == pytest.approx([0.25, 0.25, 0.25, 0.25, 0.2])
    assert best.gain_median == pytest.approx(0.25)
    assert best.gain_interval[0] <= best.gain_median <= best.gain_interval[1]
    assert best.gain_over_better == pytest.approx([0.2, 0.2, 0.2, 0.2, 0.15])
    assert best.accuracy == pytest.approx(
        {"ends": 0.75, "merged": 1.0, "annealed": 0.96, "ema": 0.92, "ensemble": 0.93}
    )
    assert best.loss == pytest.approx({"ends": 0.25, "merged": 0.0, "annealed": 0.04, "ema": 0.08, "ensemble": 0.07})
    assert best.barrier == pytest.approx([0.05] * 5)  # the end of loss .3 against the mean of the ends .25
    assert summary.scales[3].barrier == pytest.approx([0.25] * 4 + [0.3])
    np.testing.assert_allclose(best.curves["accuracy"], [0.8, 1.0, 0.7])
    assert [row.gain_median > 0 for row in summary.scales] == [True, True, True, False]


def test_untrained_and_diverged_pairs_are_counted_and_left_out():
    records = [make_record(0, pair, status="ok") for pair in range(5)]
    records += [make_record(1, 0, status="diverged"), make_record(1, 1, ends=(0.1, 0.1), status="untrained")]
    records += [make_record(1, pair, merged=0.85) for pair in (2, 3, 4)]
    records += [make_record(2, pair, status="diverged") for pair in range(5)]
    summary = report.summarise(make_result(records, scales=make_result([]).scales[:3]))
    _, mixed, lost = summary.scales
    assert (mixed.untrained, mixed.diverged, mixed.pairs) == (1, 1, (2, 3, 4))
    assert mixed.gain == pytest.approx([0.1] * 3)
    assert mixed.accuracy["ends"] == pytest.approx(0.75)
    assert (lost.untrained, lost.diverged, lost.gain) == (0, 5, ())
    written = lost.to_dict()
    assert written["gain_median"] is written["gain_interval"] is written["accuracy_merged"] is None
    lines = "\n".join(report.verdicts(summary))
    assert "S = 0.0312: 1 untrained and 1 diverged pairs are left out." in lines
    assert "critical S not resolved" in lines.replace("Critical", "critical")


def test_series_are_judged_apart():
    scales = [Scale(lr, lr, 1, 0.0, decay, {}) for decay in (0.0, 0.1) for lr in (1.0, 2.0, 3.0)]
    merged = [0.8, 1.0, 0.7, 0.8, 0.9, 1.0]
    records = [make_record(i, pair, merged=merged[i]) for i in range(6) for pair in range(5)]
    summary = report.summarise(make_result(records, scales=scales))
    found = list(summary.critical.values())
    assert [(c.noise_scale, c.resolved) for c in found] == [(2.0, True), (3.0, False)]
    written = summary.to_dict()
    assert written["critical_noise_scale"] is None
    assert [c["series"].partition(",")[0] for c in written["critical"]] == ["weight decay 0", "weight decay 0.1"]


def test_results_json_has_the_documented_keys(peaked, tmp_path):
    report.write_report(report.summarise(peaked), tmp_path)
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["schema"] == report.SCHEMA
    top = "config machine seconds noise_formula critical_noise_scale critical_interval pairs"
    assert set(top.split()) <= set(content)
    assert len(content["scales"]) == 4
    keys = "noise_scale lr batch_size momentum accuracy_ends accuracy_merged accuracy_annealed accuracy_ensemble gain"
    keys += " gain_median gain_interval barrier_median untrained diverged"
    for scale in content["scales"]:
        assert set(keys.split()) <= set(scale)
        assert np.median(scale["gain"]) == pytest.approx(scale["gain_median"])
    assert content["critical_noise_scale"] == pytest.approx(0.2 / 1.6)
    low, high = content["critical_interval"]
    assert low <= content["critical_noise_scale"] <= high
    assert len(content["pairs"]) == 20
    assert content["pairs"][7]["path"]["values"]["test"]["accuracy"] == pytest.approx([0.8, 0.9, 0.7])


def test_results_csv_is_tidy(peaked, tmp_path):
    report.write_report(report.summarise(peaked), tmp_path)
    with open(tmp_path / "results.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    # 20 pairs, 2 splits: 3 alphas x 2 metrics on the path, 7 methods x 2 metrics, 5 figures x 2 metrics
    assert len(rows) == 20 * 2 * (6 + 14 + 10)
    chosen = [
        r["value"]
        for r in rows
        if (r["scale"], r["pair"], r["split"], r["method"], r["metric"]) == ("2", "4", "test", "merged", "accuracy")
    ]
    assert chosen == ["0.95"]
    curve = [
        (float(r["alpha"]), float(r["value"]))
        for r in rows
        if (r["scale"], r["pair"], r["split"], r["method"], r["metric"]) == ("1", "0", "val", "path", "accuracy")
    ]
    assert curve == [(0.0, 0.8), (0.5, 0.9), (1.0, 0.7)]


def test_figures_show_every_pair_and_are_written(peaked, tmp_path):
    summary = report.summarise(peaked)
    report.write_report(summary, tmp_path)
    for name, magic in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        for stem in ("gain", "paths"):
            assert (tmp_path / f"{stem}.{name}").read_bytes().startswith(magic)
    upper, lower = report.gain_figure(summary).axes
    dots = [line for line in upper.get_lines() if line.get_marker() == "o" and len(line.get_xdata())]
    assert [sorted(line.get_ydata()) for line in dots] == [
        pytest.approx(sorted(100 * np.array(row.gain))) for row in summary.scales
    ]
    assert upper.get_xscale() == lower.get_xscale() == "log"
    median = next(line for line in upper.get_lines() if line.get_label() == "median")
    np.testing.assert_allclose(median.get_ydata(), [5, 15, 25, -25])
    assert [line.get_label() for line in lower.get_lines()] == ["ends", "merged", "annealed"]
    loss, accuracy = report.paths_figure(summary).axes
    assert len(loss.get_lines()) == len(accuracy.get_lines()) == 4
    np.testing.assert_allclose(accuracy.get_lines()[2].get_ydata(), [80, 100, 70])


def test_figures_and_table_without_any_pair_that_counts(tmp_path):
    result = make_result([make_record(i, pair, status="diverged") for i in range(4) for pair in range(2)])
    summary = report.summarise(result)
    report.write_report(summary, tmp_path)
    assert render(summary).count("–") >= 4 * 6
    assert json.loads((tmp_path / "results.json").read_text())["critical_noise_scale"] is None


def render(summary):
    console = Console(width=130, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table(summary))
    return console.export_text()


def test_table_has_a_row_for_each_scale(peaked):
    text = render(report.summarise(peaked))
    row = next(line for line in text.splitlines() if line.split()[:1] == ["0.2"])
    cells = row.split()
    assert cells[:7] == ["0.2", "16", "0.9", "0.125", "75.0", "100.0", "+25.0"]
    assert cells[-6:] == ["+20.0", "96.0", "92.0", "93.0", "0.050", "5"]
    assert "Critical S = 0.125, 95% interval" in text
    assert "annealed ends are more accurate than the merge at 3 of 4 noise scales" in text.replace("\n", " ")


def test_methods_that_were_not_made_are_absent(tmp_path):
    result = make_result([make_record(i, pair, annealed=False) for i in range(4) for pair in range(5)])
    summary = report.summarise(result)
    assert "annealed" not in summary.scales[0].accuracy
    assert summary.scales[0].to_dict()["accuracy_annealed"] is None
    assert "The annealed ends" not in "\n".join(report.verdicts(summary))
    report.write_report(summary, tmp_path)


def test_record_survives_json(tmp_path):
    record = make_record(1, 2, examples=21)
    record.others["test"]["ema"]["loss"] = math.nan
    write_json(tmp_path / "record.json", record.to_dict())
    back = PairRecord.from_dict(json.loads((tmp_path / "record.json").read_text()))
    np.testing.assert_array_equal(back.path.correct["test"], record.path.correct["test"])
    np.testing.assert_array_equal(back.path.values["val"]["loss"], record.path.values["val"]["loss"])
    assert math.isnan(back.others["test"]["ema"].pop("loss"))
    record.others["test"]["ema"].pop("loss")
    assert dataclasses.replace(back, path=None) == dataclasses.replace(record, path=None)
    diverged = make_record(0, 0, status="diverged")
    assert PairRecord.from_dict(diverged.to_dict()) == diverged
