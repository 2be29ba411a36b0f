"""How tests of kernels reach a GPU, tried with the CPU in its place; and what is special to memory of a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import gpu_checks
from benchmarks.card import Card
from on_card import OnCard

from isthmus import _native, ops

ROOT = Path(__file__).parents[1]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


class Doubling:
    """Stands in for kernels: notes what it is given."""

    NAME = "doubling"

    def double(self, columns, outputs, *, factor):
        self.given = columns
        for x, out in zip(columns, outputs, strict=True):
            out.copy_(x.resolve_conj() * 2)
        return [columns[0].sum()], factor


def test_memory_goes_and_comes_back():
    whole = torch.arange(40.0)
    x, transposed = whole[3:9], whole[10:16].view(2, 3).t()
    outputs = [whole[20:26], torch.zeros(3, 2)]
    kernels = Doubling()
    factor = torch.ones(1)
    (total,), same = OnCard(kernels, "cpu").double([x, transposed], outputs, factor=factor)
    assert total == x.sum()
    assert same is factor
    assert outputs[0].tolist() == (2 * x).tolist()
    assert outputs[1].tolist() == (2 * transposed).tolist()
    first, second = kernels.given
    assert (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
    )
    assert (first.storage_offset(), second.stride()) == (3, (1, 3))
    assert OnCard(kernels, "cpu").NAME == "doubling"


def test_conjugated_and_empty_tensors_go_too():
    x, out = torch.tensor([1 + 2j]).conj(), torch.zeros(1, dtype=torch.complex64)
    nothing = torch.zeros(0)
    OnCard(Doubling(), "cpu").double([x, nothing], [out, nothing.clone()], factor=torch.ones(1))
    assert out.tolist() == [2 - 4j]


def test_ops_run_through_it(monkeypatch):
    """As they do on a GPU, in place too; here the interpreter runs the kernels."""
    module, reason = _native.load_triton()
    if module is None or not module.INTERPRETED:
        pytest.skip(reason)
    card = OnCard(module, "cpu")
    monkeypatch.setattr(_native, "triton", lambda: card)
    a, b = torch.randn(2, 5003)
    expected = ops.lerp(a, b, 0.3)
    assert torch.equal(ops.lerp(a, b, 0.3, backend="triton"), expected)
    assert torch.equal(ops.consensus([a, b], density=0.3, backend="triton"), ops.consensus([a, b], density=0.3))
    ops.lerp(a, b, 0.3, out=a, backend="triton")
    assert torch.equal(a, expected)


@on_gpu
def test_tensors_of_a_gpu_give_what_those_of_the_cpu_do(monkeypatch):
    modules = {"triton": _native.load_triton()[0], "cuda": _native.load_cuda()[0]}
    backends = [name for name, module in modules.items() if module is not None]
    for name in backends:  # the modules themselves, which take tensors of a GPU alone
        monkeypatch.setattr(_native, name, lambda module=modules[name]: module)
    found = gpu_checks.differing(Card(torch.device("cuda"), rounds=1, seconds=600), backends)
    assert found["wrong"] == []
    assert found["made"] >= 50
    assert found["late"] == 0


@on_gpu
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer_finds_nothing(tool):
    code = (
        "import torch\n"
        "from benchmarks import gpu_checks\n"
        "from benchmarks.card import Card\n"
        "card = Card(torch.device('cuda'), rounds=1, seconds=600)\n"
        "found = gpu_checks.differing(card, ['triton'], [torch.bfloat16, torch.float32], length=5003)\n"
        "assert not found['wrong'], found\n"
    )
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else overruns stay within the cache's blocks
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
