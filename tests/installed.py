"""Run by hand in an environment that holds an installed wheel, torch and numpy alone: does it work there?"""

from __future__ import annotations

import statistics
import subprocess
import sys

import torch

import isthmus
from isthmus import _dispatch
from isthmus.kernels import table


def seconds(code: str) -> float:
    """What ``code`` takes by its own clock, in a process of its own."""
    timed = f"import time; import torch; start = time.perf_counter(); {code}; print(time.perf_counter() - start)"
    return float(subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True).stdout)


result = isthmus.lerp(torch.zeros(4), torch.ones(4), 0.25)
if result.tolist() != [0.25] * 4:
    sys.exit(f"isthmus.lerp gave {result}")
if not next(row for row in _dispatch.describe() if row.name == "cpp").chosen:
    sys.exit("the installed wheel does not use its compiled extension")
if (
    table.make(
        [[16, 32]], [5], dtype=torch.float32, out_dtype=torch.float32, block=4, device=torch.device("cpu")
    ).blocks
    != 2
):
    sys.exit("the installed wheel's package of kernels does not make tables")
command = subprocess.run([sys.executable, "-m", "isthmus", "info"], capture_output=True, text=True)
if command.returncode != 1 or "isthmus[lab]" not in command.stderr:
    sys.exit(f"without typer, the command must name the extra that brings it; it said {command.stderr!r}")
added = statistics.median(seconds("import isthmus") for _ in range(5))
print(f"{isthmus.__file__}: lerp runs; import isthmus adds {added:.3f} s to importing torch")
