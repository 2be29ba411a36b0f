"""The command ``isthmus scan``: planes, adaptive scans, splits and checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from isthmus.cli.app import app
from isthmus.io import load_state, save_state
from isthmus.path import Evaluator, scan_line
from isthmus.train import Pair, TrainConfig, build_model, load_data
from isthmus.train.sweep import SweepConfig, run_sweep

TINY = TrainConfig(model_options={"widths": [8]}, batch_size=32, steps=12, branch_step=4, min_accuracy=0)


def run(*arguments):
    """Exit code, standard output and standard error of the command; other exceptions than its own come through."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def found(name="path"):
    return json.loads(Path(f"isthmus-scan/{name}.json").read_text())


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr("warnings.showwarning", None)  # the command sets it; this puts it back


@pytest.fixture(scope="module")
def pair_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    run_sweep(SweepConfig(TINY, pairs=1, points=3), folder)
    return folder / "pairs/scale00/pair00"


def test_the_plane_of_a_pair(pair_folder, tmp_path):
    code, out, err = run("scan", pair_folder, "--plane", "--points", 5)
    assert (code, err.strip()) == (0, "")
    plane = found("plane")
    assert (plane["x"], plane["y"]) == ([-0.5, 0, 0.5, 1, 1.5], [-0.5, 0, 0.5, 1, 1.5])
    assert plane["models"] == {"base": [0, 0], "a": [1, 0], "b": [0, 1]}
    record = json.loads((pair_folder / "record.json").read_text())["path"]
    for split in ("val", "test"):  # the ends of the pair's path lie at (1, 0) and (0, 1)
        ends = [record["values"][split]["loss"][end] for end in (0, -1)]
        grid = plane["values"][split]["loss"]
        assert [grid[1][3], grid[3][1]] == pytest.approx(ends, rel=1e-5)
        assert plane["model_values"][split]["loss"][1:] == pytest.approx(ends, rel=1e-5)
    assert (tmp_path / "isthmus-scan/plane.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "isthmus-scan/plane.csv").read_text().startswith("split,x,y,metric,value")
    places = [(row, column) for row in range(5) for column in range(5)]
    row, column = min(places, key=lambda place: plane["values"]["val"]["loss"][place[0]][place[1]])
    chosen = f"{plane['values']['test']['loss'][row][column]:.4f}"  # on val, reported on test
    (line,) = (line for line in out.splitlines() if "test" in line and "loss" in line)
    assert line.split()[-3:] == [chosen, f"{plane['x'][column]:.2f}", f"{plane['y'][row]:.2f}"]


def test_the_plane_of_two_files_needs_their_base(pair_folder):
    files = [pair_folder / "a.safetensors", pair_folder / "b.safetensors"]
    options = ["--model", "narrow:model", "--data", "digits", "--plane", "--points", 2]
    Path("narrow.py").write_text(
        "from isthmus.train import MLP\ndef model(data):\n    return MLP(64, [8], 10, norm='layer')\n"
    )
    code, _, err = run("scan", *files, *options)
    assert code == 1
    assert "give --base" in err
    assert run("scan", *files, *options, "--base", pair_folder / "trunk.safetensors")[0] == 0
    assert found("plane")["models"]["base"] == [0, 0]


def test_a_base_gives_the_cosine_of_task_vectors(pair_folder):
    base = load_state(pair_folder / "a.safetensors")
    save_state("base.safetensors", {key: torch.zeros_like(value) for key, value in base.items()})
    assert run("scan", pair_folder, "--points", 3)[0] == 0
    trunk = found()["distances"]["task_cosine"]
    assert run("scan", pair_folder, "--points", 3, "--base", "base.safetensors")[0] == 0
    assert found()["distances"]["task_cosine"] == pytest.approx(found()["distances"]["cosine"])
    assert found()["distances"]["task_cosine"] != trunk


def test_adaptive_points(pair_folder):
    code, out, _ = run("scan", pair_folder, "--adaptive", "--tol", "0.005")
    assert code == 0
    told = found()["choices"]["adaptive"]
    assert told["tol"] == 0.005
    assert told["points"] == len(found()["alphas"])
    assert f"{told['points']} points; the loss barriers are known to about {told['bound']:.2g}" in out


def test_splits_are_chosen(pair_folder):
    assert run("scan", pair_folder, "--points", 3, "--splits", "train, test")[0] == 0
    values = found()["values"]
    assert list(values) == ["train", "test"]
    data = load_data("digits")
    pair = Pair.load(pair_folder)
    model = build_model(pair.config.model, data, **pair.config.model_options)
    expected = scan_line(model, pair.a, pair.b, Evaluator(data.parts["train"]), 3)
    assert values["train"]["loss"] == pytest.approx(expected.values["data"]["loss"].tolist(), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--splits", "train,tset"], "--splits has 'tset', expected some of train, val, test, which digits has"),
        (["--adaptive", "--points", 5], "leave out --plane and --points, or --adaptive"),
        (["--adaptive", "--plane"], "leave out --plane and --points, or --adaptive"),
        (["--adaptive", "--tol", 0], "tol=0.0, expected a positive number"),
    ],
)
def test_what_cannot_be_done_is_named(pair_folder, arguments, message):
    code, _, err = run("scan", pair_folder, *arguments)
    assert code == 1
    assert message in err


@pytest.mark.parametrize(("plane", "name"), [([], "path"), (["--plane"], "plane")])
def test_an_interrupted_scan_goes_on_from_its_checkpoint(pair_folder, plane, name):
    Path("stopping.py").write_text(
        "import os\nfrom isthmus.train import MLP\n"
        "class Model(MLP):\n"
        "    calls = 0\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        if self.calls == 15 and not os.path.exists('calm'):\n            raise KeyboardInterrupt\n"
        "        return super().forward(x)\n"
        "def model(data):\n    return Model(64, [8], 10, norm='layer')\n"
    )
    command = ["scan", pair_folder, "--model", "stopping:model", *plane, "--points", 7, "--checkpoint", "kept"]
    code, _, err = run(*command)
    assert code == 130
    first = found(name)
    assert not first["complete"]
    assert f"isthmus-scan/{name}.json and kept; run the same command again to go on" in err
    before = Path("kept").read_text()
    assert len(before.splitlines()) > 2
    Path("calm").touch()
    assert run(*command)[0] == 0
    assert found(name)["complete"]
    after = Path("kept").read_text()
    assert after.startswith(before)
    assert len(after.splitlines()) == 1 + (7 if name == "path" else 49 + 3)
    assert run(*command[:-1], "kept", "--bn", "keep")[0] == 0
    code, _, err = run(*command, "--dtype", "bf16")
    assert code == 1
    assert "the checkpoint kept belongs to another scan" in err
