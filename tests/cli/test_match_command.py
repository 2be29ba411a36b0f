"""The command ``isthmus match``, and ``isthmus scan --align``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from isthmus.cli.app import app
from isthmus.io import load_metadata, load_state, save_state
from isthmus.match import PermutationSpec, apply_permutation, random_permutation, weight_matching
from isthmus.path import PathResult
from isthmus.path.line_walk import LineWalk
from isthmus.train import MLP

FACTORY = """
from torch import nn
from isthmus.train import MLP

def model(data=None):
    return MLP(64, [12, 9], 10)

def number():
    return 3
"""


def run(*arguments):
    """Exit code, standard output and standard error of the command; other exceptions than its own come through."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def planted():
    """A model, the same in another order, and their spec."""
    torch.manual_seed(0)
    a = MLP(64, [12, 9], 10)
    spec = PermutationSpec.from_model(a, torch.zeros(2, 64))
    return a, apply_permutation(spec, random_permutation(spec, torch.Generator().manual_seed(1)), a), spec


@pytest.fixture(autouse=True)
def in_a_folder(planted, tmp_path, monkeypatch):
    """With the two files and the factories, and nothing else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr("warnings.showwarning", None)  # the command sets it; this puts it back
    a, b, _ = planted
    save_state("a.safetensors", a.state_dict())
    save_state("b.safetensors", b.state_dict(), {"note": "kept"})
    Path("own.py").write_text(FACTORY)
    yield
    sys.modules.pop("own", None)


def test_b_comes_out_in_the_order_of_a(planted):
    a, b, spec = planted
    code, out, err = run(
        *("match", "a.safetensors", "b.safetensors", "--model", "own:model", "--shape", "64", "--restarts", 2),
        *("--output", "moved.safetensors", "--permutation", "order.safetensors"),
    )
    assert (code, err) == (0, "")
    moved = load_state("moved.safetensors")
    assert all(torch.equal(value, a.state_dict()[key]) for key, value in moved.items())
    assert load_metadata("moved.safetensors")["note"] == "kept"
    order = load_state("order.safetensors")
    expected = weight_matching(spec, a, b, restarts=2).permutation
    assert order.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in order.items())
    assert str(spec) in out
    assert "weight matching: similarity" in out
    assert out.splitlines()[-2:] == ["moved.safetensors", "order.safetensors"]


def test_starts_and_their_seed():
    torch.manual_seed(5)
    save_state("b.safetensors", MLP(64, [12, 9], 10).state_dict())  # nothing that a start could find for certain
    command = ("match", "a.safetensors", "b.safetensors", "--model", "own:model", "--shape", "64", "--restarts", 3)
    code, out, _ = run(*command, "--seed", 7, "--permutation", "order.safetensors")
    assert code == 0
    assert "best of 3 starts" in out
    a, b = load_state("a.safetensors"), load_state("b.safetensors")
    spec = PermutationSpec.from_model(MLP(64, [12, 9], 10), torch.zeros(2, 64))
    expected = weight_matching(spec, a, b, restarts=3, seed=7).permutation
    assert all(torch.equal(order, expected[name]) for name, order in load_state("order.safetensors").items())


def test_a_data_set_shows_the_shape_of_inputs(planted):
    code, out, _ = run("match", "a.safetensors", "b.safetensors", "--model", "own:model", "--data", "digits")
    assert code == 0
    assert out.splitlines()[-1] == "matched.safetensors"
    assert torch.equal(load_state("matched.safetensors")["1.weight"], planted[0].state_dict()["1.weight"])


def test_only_some_groups_are_matched(planted):
    _, b, spec = planted
    chosen, kept = spec.groups
    command = ("match", "a.safetensors", "b.safetensors", "--model", "own:model", "--shape", "64")
    assert run(*command, "--only", chosen, "--permutation", "order.safetensors")[0] == 0
    order = load_state("order.safetensors")
    assert torch.equal(order[kept], torch.arange(len(order[kept])))
    assert not torch.equal(order[chosen], torch.arange(len(order[chosen])))
    assert torch.equal(load_state("matched.safetensors")["5.weight"], b.state_dict()["5.weight"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --data, or --shape"),
        (["--shape", "64", "--data", "digits"], "give --data, or --shape"),
        (["--shape", "8,x"], "--shape is '8,x', expected positive lengths"),
        (["--shape", "0"], "expected positive lengths"),
        (["--shape", "64", "--only", "nothing*"], "nothing*"),
        (["--shape", "64", "--model", "own:number"], "'own:number' is a int, expected a torch.nn.Module"),
        (["--shape", "64", "--model", "mlp"], "there is no model 'mlp'"),
        (["--shape", "64", "--output", "missing/b.safetensors"], "could not write"),
    ],
)
def test_what_cannot_be_done_is_named(arguments, message):
    if "--model" not in arguments:
        arguments = [*arguments, "--model", "own:model"]
    code, _, err = run("match", "a.safetensors", "b.safetensors", *arguments)
    assert code == 1
    assert message in err


def test_a_file_of_another_model_is_named(planted):
    save_state("b.safetensors", {"w": torch.zeros(3)})
    code, _, err = run("match", "a.safetensors", "b.safetensors", "--model", "own:model", "--shape", "64")
    assert code == 1
    assert "b (b.safetensors) lacks '1.bias' of the spec" in err


class TestScan:
    def test_the_line_before_and_after(self, planted):
        files = ["a.safetensors", "b.safetensors", "--model", "own:model", "--data", "digits", "--points", 5]
        code, out, err = run("scan", *files, "--align", "--bn", "keep")
        assert (code, err.strip()) == (0, "")
        result = PathResult.from_json(Path("isthmus-scan/path.json"))
        assert result.distances["l2"] == 0
        assert result.naive.distances["l2"] > 0
        assert re.search(r"b is in the order of a: \d+ of 21 units in 2 groups move, similarity 0\.\d+ before", out)
        assert "test: linear barrier of the loss" in out
        assert Path("isthmus-scan/path.png").read_bytes().startswith(b"\x89PNG")
        assert Path("isthmus-scan/path.csv").read_text().startswith("line,split,alpha,metric,value")
        assert json.loads(Path("isthmus-scan/path.json").read_text())["naive"]["kind"] == "path result"

    def test_an_interrupted_scan_says_where_its_points_are(self, monkeypatch):
        walk = LineWalk.write

        def stop(self, point, out):
            if point not in (0.0, 0.5, 1.0) and not Path("calm").exists():
                raise KeyboardInterrupt
            walk(self, point, out)

        monkeypatch.setattr(LineWalk, "write", stop)
        command = ["scan", "a.safetensors", "b.safetensors", "--model", "own:model", "--data", "digits", "--points", 5]
        command += ["--align", "--bn", "keep", "--checkpoint", "kept"]
        code, _, err = run(*command)
        assert code == 130
        assert "3 points are kept in isthmus-scan/path.json and kept.aligned; run the same command again" in err
        assert len(Path("kept.aligned").read_text().splitlines()) == 4
        Path("calm").touch()
        assert run(*command)[0] == 0
        assert [len(Path(name).read_text().splitlines()) for name in ("kept.aligned", "kept")] == [6, 6]

    def test_a_plane_is_not_aligned(self):
        code, _, err = run("scan", "a.safetensors", "b.safetensors", "--plane", "--align")
        assert code == 1
        assert "--align scans two lines" in err
