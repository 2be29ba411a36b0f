"""Peak memory of a merge beyond its inputs and its output, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from isthmus import _native

NUMEL = 30_000_000
ALLOWED = 64e6  # bytes, and 2 % of one model

SCRIPT = """
import sys
import torch
import isthmus

kind, preset, numel = sys.argv[1], sys.argv[2], int(sys.argv[3])
dtype = torch.bfloat16 if kind == "bf16" else torch.float32

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def model(seed, numel):
    generator = torch.Generator().manual_seed(seed)
    sizes = {"a": numel // 2, "b": numel // 3, "c": numel - numel // 2 - numel // 3}
    return {key: torch.empty(size, dtype=dtype).normal_(generator=generator) for key, size in sizes.items()}

def models(numel):
    made = [model(seed, numel) for seed in range(5)]
    if kind == "cancelling":  # every vote is zero: the second pair undoes the first
        for key, base in made[0].items():
            base.zero_()
            for k in (0, 1):
                made[3 + k][key].copy_(made[1 + k][key]).neg_()
    elif kind == "ties":  # every magnitude is equal, the hardest for a search of the threshold
        for key, base in made[0].items():
            base.zero_()
            for other in made[1:]:
                other[key].sign_()
    return made

def merge(base, *others):
    return isthmus.merge(others, base=base, method="ties", preset=preset, density=0.2)

merge(*models(1000))  # libraries are loaded and threads started
inputs = models(numel)
before = status("VmRSS:")
merged = merge(*inputs)
output = sum(tensor.nbytes for tensor in merged.values())
print(status("VmHWM:") - before - output, output)
"""


@pytest.mark.parametrize(
    ("kind", "preset"),
    [("random", "paper"), ("cancelling", "paper"), ("ties", "paper"), ("bf16", "paper"), ("random", "mergekit")],
)
def test_ties_of_four_models_needs_little_memory(kind, preset):
    if not Path("/proc/self/status").exists():
        pytest.skip("reads the peak from /proc/self/status, which only Linux has")
    if _native.load_cpu()[0] is None:
        pytest.skip("the bound is the compiled backend's")
    script = [sys.executable, "-c", SCRIPT, kind, preset, str(NUMEL)]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    beyond, output = map(int, done.stdout.split())
    assert output == NUMEL * (2 if kind == "bf16" else 4)
    assert beyond <= 0.02 * output + ALLOWED, f"{beyond / 1e6:.0f} MB beyond an output of {output / 1e6:.0f} MB"
