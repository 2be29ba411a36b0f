"""Everything about a GPU in one run: ``python -m benchmarks.gpu``.

Builds the CUDA extension where nvcc is found, checks every op against the CPU, then measures merges, a scan and
training, in under four minutes and with nothing to download. It ends with tables, and writes them as JSON.

``--dry-run`` goes through all of it at tiny sizes on the CPU, kernels in Triton's interpreter: it shows that the script
works, and nothing else. Needs the extra ``test``; the tools of ``peers`` take part where they are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import paper
from .card import Card, table

ROOT = Path(__file__).parents[1]
SECONDS = 230.0
BUILDING = 100.0  # seconds that the extension's compilation may take
# The parts of a run and the time, from the start, at which each ends at the latest.
ENDS = {"checks": 0.5, "ops": 0.75, "scan": 0.87, "training": 1.0}


def main(arguments: list[str] | None = None) -> int:
    """Run; the exit status is 0 if all results were right, 1 if some were not, and 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny sizes on the CPU: tries the script, measures nothing"
    )
    parser.add_argument("--output", type=Path, default=Path("build/gpu.json"), help="where to write the figures")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that the run may take")
    options = parser.parse_args(arguments)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are imported
    elif not torch.cuda.is_available():
        print(
            "There is no GPU that torch sees here: nothing is measured. Try the script with --dry-run.", file=sys.stderr
        )
        return 2
    device = torch.device("cpu" if options.dry_run else "cuda")
    card = Card(device, rounds=1 if options.dry_run else 7, seconds=options.seconds)
    found: dict[str, Any] = {}
    found["build"] = "left out: a dry run" if options.dry_run else build()
    found |= card.describe()
    print(f"{found['card']}, {found['date']}, torch {found['torch']}, triton {found['triton']}")
    print(f"CUDA extension: {found['build']}")
    for name, part in parts(card, dry=options.dry_run).items():
        card.seconds = options.seconds * ENDS[name]
        found[name] = part() if card.left > 0 else {"left_out": "no time left"}
        print(SHOW[name](found[name]), flush=True)
    found["seconds"] = options.seconds * ENDS["training"] - card.left
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(found, indent=1))
    print(f"{found['seconds']:.0f} s; all figures are in {options.output}")
    return int(bool(found["checks"].get("wrong")))


def build() -> str:
    """Compile the CUDA extension for this card where nvcc is found; says what came of it."""
    if importlib.util.find_spec("isthmus._cuda"):
        return "built already"
    if shutil.which("nvcc") is None:
        return "not built: there is no nvcc in PATH; Triton alone"
    missing = [name for name in ("scikit_build_core", "pybind11", "ninja") if importlib.util.find_spec(name) is None]
    if missing:
        return f"not built: {', '.join(missing)} is not installed; Triton alone"
    major, minor = torch.cuda.get_device_capability()
    environment = os.environ | {"ISTHMUS_CUDA": "1", "CUDAARCHS": f"{major}{minor}-real"}
    install = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", *install], env=environment, capture_output=True, text=True, timeout=BUILDING
        )
    except subprocess.TimeoutExpired:
        return f"not built within {BUILDING:.0f} s; Triton alone"
    return "built" if done.returncode == 0 else f"not built: {done.stderr.strip().splitlines()[-1:]}; Triton alone"


def parts(card: Card, *, dry: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    """What is run, in order."""
    from . import gpu_checks, gpu_networks, gpu_ops  # not before the interpreter is chosen

    backends = ["triton", *(["cuda"] if _has_cuda() and not dry else [])]
    parameters = {torch.bfloat16: 1_000_000_000, torch.float32: 200_000_000}
    if dry:
        parameters = {torch.bfloat16: 2 * gpu_ops.WIDTH}

    def checks() -> dict[str, Any]:
        dtypes = gpu_checks.DTYPES[:1] if dry else gpu_checks.DTYPES
        return gpu_checks.differing(card, backends, dtypes, length=901 if dry else gpu_checks.LENGTH)

    def scan() -> dict[str, Any]:
        if dry:
            return gpu_networks.scan(card, seconds=1, width=4, most=32, points=5, batch=16)
        return gpu_networks.scan(card, seconds=card.left / 2, width=64, most=10_000)

    def training() -> dict[str, Any]:
        if dry:
            return gpu_networks.pairs_per_hour(card, width=2, steps=2, together=2, batch=4)
        return gpu_networks.pairs_per_hour(card, width=64, steps=10)

    return {
        "checks": checks,
        "ops": lambda: {"rows": list(gpu_ops.measure(card, backends, parameters))},
        "scan": scan,
        "training": training,
    }


def _has_cuda() -> bool:
    from isthmus import _native

    load = getattr(_native, "load_cuda", None)
    return load is not None and load()[0] is not None


def show_checks(found: dict[str, Any]) -> str:
    """Of the checks what is wrong."""
    if "left_out" in found:
        return f"checks left out: {found['left_out']}\n"
    late = f", {found['late']} left out as there was no time left" if found["late"] else ""
    lines = [f"{found['made']} comparisons with the CPU, {len(found['wrong'])} wrong{late}", *found["wrong"]]
    lines += [f"without a kernel: {'; '.join(found['missing'])}"] if found["missing"] else []
    return "\n".join([*lines, ""])


def show_ops(found: dict[str, Any]) -> str:
    """The table of merges."""
    rows = [
        ["case", "dtype", "backend", "10^6 parameters", "ms", "copy GB/s", "of copy", "floor ms", "times as fast as"]
    ]
    for row in found.get("rows", []):
        start = [row["case"], row["dtype"], row["backend"]]
        if "left_out" in row:
            rows.append([*start, *[""] * 5, f"left out: {row['left_out'][:80]}"])
            continue
        count = f"{row['parameters'] / 1e6:.1f}"
        if row["parameters"] < row["wanted"] - 10_000:
            count += f" (of {row['wanted'] / 1e6:.0f}: memory)"
        others = [f"{name} {factor:.1f}" for name, factor in row["speedups"].items()]
        others += [f"{name} failed" for name in row.get("failed", {})]
        rows.append(
            [
                *start,
                count,
                f"{1e3 * row['seconds']:.2f}",
                f"{row['copy_bandwidth'] / 1e9:.0f}",
                f"{row['of_copy']:.2f}",
                f"{1e3 * row['bytes'] / paper.BANDWIDTH:.2f}",
                ", ".join(others),
            ]
        )
    return table(f"merges; floors at {paper.BANDWIDTH / 1e12} TB/s", rows)


def show_scan(found: dict[str, Any]) -> str:
    """The line on the scan."""
    if "left_out" in found:
        return f"scan left out: {found['left_out']}\n"
    return (
        f"scan of a ResNet-18: {found['points']} points on {found['images']} images, "
        f"{1e3 * found['seconds_per_point']:.1f} ms a point, {found['speedup']:.2f} times as fast as the plain loop; "
        f"losses differ by {found['distance']:.1e}\n"
    )


def show_training(found: dict[str, Any]) -> str:
    """The table of training."""
    rows = [["pairs", "precision", "ms a step", "pairs per hour", "recorded"]]
    for row in found.get("rows", []):
        if "left_out" in row:
            rows.append([row["way"], row["precision"], "", "", f"left out: {row['left_out']}"])
            continue
        rows.append(
            [
                row["way"],
                row["precision"],
                f"{1e3 * row['seconds_per_step']:.2f}",
                "" if row["pairs_per_hour"] is None else f"{row['pairs_per_hour']:.1f}",
                "yes" if row["captured"] else f"no: {row['reason'][:60]}",
            ]
        )
    length = (
        "" if "epochs" not in found else f" of {found['epochs']} epochs of {found['images']} images, branches halfway"
    )
    return table(f"training of ResNet-18 pairs{length}", rows)


SHOW = {"checks": show_checks, "ops": show_ops, "scan": show_scan, "training": show_training}

if __name__ == "__main__":
    sys.exit(main())
