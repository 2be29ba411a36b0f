"""Results: to files and back, to tables and figures."""

from __future__ import annotations

import csv
import json
import math
import sys

import matplotlib as mpl
import numpy as np
import pytest

from isthmus.errors import DependencyError, FileError, InputError
from isthmus.path import PathResult

mpl.use("agg")


def result(**fields) -> PathResult:
    losses, accuracies = np.array([1.0, math.nan, 3.0]), np.array([0.5, 0.25, 1 / 3])
    content = {
        "alphas": np.array([0.0, 0.5, 1.0]),
        "values": {"val": {"loss": losses, "accuracy": accuracies}, "test": {"loss": losses * 2}},
        "seconds": np.array([0.1, 0.2, 0.3]),
        "distances": {"l2": 2.0, "cosine": math.nan, "relative": math.inf},
        "disagreement": {"val": 0.25},
        "ensemble": {"val": {"loss": 0.5, "accuracy": 0.75}},
        "cka": {"val": -0.1},
        "correct": {"val": np.random.default_rng(0).random((3, 19)) > 0.5},
        "choices": {"bn": "keep", "dtypes": ["float32"]},
        "versions": {"isthmus": "0"},
    }
    return PathResult(**{**content, **fields})


def test_json_and_back():
    original = result()
    text = original.to_json()
    back = PathResult.from_json(text)
    assert back.to_json() == text
    for name in ("alphas", "seconds"):
        assert np.array_equal(getattr(back, name), getattr(original, name))
    assert np.array_equal(back.values["val"]["loss"], original.values["val"]["loss"], equal_nan=True)
    assert np.array_equal(back.correct["val"], original.correct["val"])
    assert back.correct["val"].dtype == np.bool_
    assert (back.higher_is_better, back.complete, back.choices) == (("accuracy",), True, original.choices)
    assert math.isnan(back.distances["cosine"])
    assert back.distances["relative"] == math.inf


def test_json_is_strict_and_versioned():
    content = json.loads(result().to_json(), parse_constant=pytest.fail)
    assert content["schema"] == 1
    assert content["values"]["val"]["loss"] == [1, "nan", 3]
    assert content["summary"]["val"]["accuracy"]["gain"] == 0.25 - (0.5 + 1 / 3) / 2
    assert content["summary"]["test"]["loss"]["barrier"] == "nan"
    assert content["correct"]["val"]["samples"] == 19


def test_json_file(tmp_path):
    text = result().to_json(tmp_path / "path.json")
    assert (tmp_path / "path.json").read_text() == text + "\n"
    assert PathResult.from_json(tmp_path / "path.json").to_json() == text
    assert PathResult.from_json(str(tmp_path / "path.json")).to_json() == text


def test_an_empty_result_survives():
    empty = result(alphas=np.array([]), values={}, seconds=np.array([]), correct={}, complete=False)
    back = PathResult.from_json(empty.to_json())
    assert (back.alphas.shape, back.summary, back.complete) == ((0,), {}, False)


def test_missing_points_leave_nan():
    one = result(alphas=np.array([0.0]), values={"val": {"loss": np.array([1.0])}}, complete=False)
    figures = one.summary["val"]["loss"]
    assert figures.ends[0] == 1
    assert all(
        math.isnan(x) for x in (figures.ends[1], figures.merged, figures.gain, figures.barrier, figures.integral)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 2}', "schema 1, got 2"),
        ("{}", "got None"),
        ('{"schema": 1}', "damaged"),
        ('{"schema": 1, "alphas": ["x"]}', "damaged"),
        ('{"schema"', "truncated"),
    ],
)
def test_what_is_not_a_result_is_named(text, message):
    with pytest.raises(FileError, match=message):
        PathResult.from_json(text)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(FileError, match=r"missing\.json"):
        PathResult.from_json(tmp_path / "missing.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(FileError, match="a JSON list"):
        PathResult.from_json(tmp_path / "list.json")
    with pytest.raises(FileError):
        result().to_json(tmp_path / "no folder" / "path.json")


def test_csv_is_the_tidy_table(tmp_path):
    result().to_csv(tmp_path / "path.csv")
    with (tmp_path / "path.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["split", "alpha", "metric", "value"]
    assert len(rows) == 1 + 9
    assert rows[1:3] == [["val", "0.0", "loss", "1.0"], ["val", "0.5", "loss", "nan"]]
    assert float(rows[6][3]) == 1 / 3


def test_frame_is_the_tidy_table():
    pandas = pytest.importorskip("pandas")
    frame = result().to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == ["split", "alpha", "metric", "value"]
    assert len(frame) == 9


def test_frame_without_pandas_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(DependencyError, match="pandas"):
        result().to_frame()


class TestPlot:
    def test_a_panel_per_metric_with_values_chord_and_gain(self):
        loss, accuracy = result().plot()
        assert (loss.get_ylabel(), accuracy.get_ylabel()) == ("loss (nats)", "accuracy")
        curve, chord, barrier, gain = accuracy.lines
        assert curve.get_ydata().tolist() == [0.5, 0.25, 1 / 3]
        assert list(chord.get_ydata()) == [0.5, 1 / 3]
        middle = (0.5 + 1 / 3) / 2
        assert list(barrier.get_ydata()) == pytest.approx([middle, 0.25])
        assert list(gain.get_ydata()) == pytest.approx([middle, 0.25])
        assert len(loss.lines) == 4  # two splits with NaN barriers and gains: curve and chord each
        assert [text.get_text() for text in accuracy.get_legend().get_texts()] == ["val: gain -0.167, barrier 0.167"]

    def test_own_axes(self):
        axes = mpl.figure.Figure().subplots(1, 2)
        assert result().plot(axes) == list(axes)
        single = mpl.figure.Figure().subplots()
        assert result().plot(single, metrics=["accuracy"]) == [single]
        assert single.get_ylabel() == "accuracy"

    def test_one_split(self):
        (loss,) = result().plot(split="test")
        assert [text.get_text() for text in loss.get_legend().get_texts()] == ["test: gain +nan, barrier nan"]
        assert loss.lines[0].get_ydata()[[0, 2]].tolist() == [2, 6]

    def test_what_cannot_be_drawn_is_named(self):
        with pytest.raises(InputError, match="'f1'; it has loss, accuracy"):
            result().plot(metrics=["f1"])
        with pytest.raises(InputError, match="got 1 axes for the metrics loss, accuracy"):
            result().plot(mpl.figure.Figure().subplots(), metrics=["loss", "accuracy"])
        with pytest.raises(InputError, match="no split 'train'; it has val, test"):
            result().plot(split="train")
        for split in (None, "val"):
            with pytest.raises(InputError, match="the result has no points"):
                result(values={}).plot(split=split)
