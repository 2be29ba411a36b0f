"""The script that measures a GPU, tried on the CPU, and the pages that quote it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import gpu, paper
from benchmarks.card import Card

ROOT = Path(__file__).parents[1]


def run(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_dry_run_goes_through_everything(tmp_path):
    pytest.importorskip("triton")
    output = tmp_path / "figures" / "gpu.json"
    done = run("--dry-run", "--output", str(output), "--seconds", "600")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    assert found["card"].startswith("not a GPU")
    assert found["torch"] == torch.__version__
    assert found["checks"]["wrong"] == []
    assert found["checks"]["made"] >= 20
    assert {row["case"] for row in found["ops"]["rows"]} >= {"lerp", "TIES of 4 and a base", "permute", "slerp"}
    assert [row for row in found["ops"]["rows"] if "left_out" in row or row.get("failed")] == []
    assert found["scan"]["distance"] < 1e-5
    assert ["pairs_per_hour" in row for row in found["training"]["rows"]] == [True] * 6  # noise may leave it empty
    for part in (found["card"], "TIES of 4 and a base", "published steps", "scan of a ResNet-18", "pairs per hour"):
        assert part in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so():
    done = run()
    assert done.returncode == 2
    assert "no GPU" in done.stderr
    assert done.stdout == ""


def test_what_there_is_no_time_for_is_said():
    card = Card(torch.device("cpu"), rounds=1, seconds=-1.0)
    from benchmarks import gpu_checks, gpu_ops

    found = gpu_checks.differing(card, ["cpp", "reference"], length=7)
    assert (found["made"], found["wrong"]) == (0, [])
    assert found["late"] > 100
    assert "no time left" in gpu.show_checks(found)
    rows = list(gpu_ops.measure(card, ["cpp"], {torch.float32: gpu_ops.WIDTH}))
    assert {row["left_out"] for row in rows} == {"no time left"}
    assert "no time left" in gpu.show_ops({"rows": rows})


def test_a_wrong_result_is_found():
    from benchmarks import gpu_checks

    right = torch.tensor([1.0, -0.0, 3.0])
    assert gpu_checks._fault(right, right.clone(), None) == ""
    assert gpu_checks._fault(right, torch.tensor([1.0, 0.0, 3.0]), None) == "1 of 3 elements differ"
    assert gpu_checks._fault([right], [right + 1e-3], 1e-6).startswith("relative distance")
    assert gpu_checks._fault([right], [right + 1e-3], 1e-3) == ""


def test_traffic_by_hand():
    """A lerp of 10^9 bf16 parameters moves 6 GB; TIES of 4 and a base reads 5 tensors twice and writes one."""
    assert paper.lerp().bytes(2) == 6
    assert paper.lerp().floor(2) == pytest.approx(6e9 / 4.3e12)
    assert paper.ties(4) == (2, 10, 1)
    assert paper.ties(8, based=False).bytes(4) == 68


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert paper.table() in page
