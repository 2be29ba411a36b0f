"""Compile kernels ahead of time: ``python aot_run.py OUTPUT --architectures 80 90 100 [--usual]``.

Writes JSON: which kernels are launched, the variants that all calls launch, what the machine code of each consists of
(with ``--usual`` of those that usual calls launch), and that of kernels with known faults.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import aot_calls
import aot_code
import torch
from aot_probes import probes
from aot_record import Recorder, Variant, launched

from isthmus._gpu import triton as ops_on_triton

_jobs: list[tuple[Variant, int]] = []


def record() -> list[Variant]:
    """The variants that all calls ask for."""
    recorder = Recorder()
    ops_on_triton.INTERPRETED = True  # so that tensors of the CPU are taken
    torch.empty, torch.empty_like = (
        torch.zeros,
        torch.zeros_like,
    )  # what no kernel writes is 0
    for call in aot_calls.all_calls():
        recorder.call = call
        call.run()
    return list(recorder.variants.values())


def main() -> None:
    """Record, compile, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--architectures", type=int, nargs="+", default=[])
    parser.add_argument("--usual", action="store_true", help="compile only what usual calls launch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # processes are forked below
    variants = record()
    compiled = [variant for variant in variants if variant.usual or not arguments.usual]
    faulty = probes()
    _jobs[:] = [(variant, cc) for cc in arguments.architectures for variant in (*compiled, *faulty.values())]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        read = pool.map(_read, range(len(_jobs)), chunksize=1)
    found = {
        "launched": sorted(launched()),
        "variants": [variant.shown() for variant in variants],
        "compiled": [code for code, (variant, _) in zip(read, _jobs, strict=True) if variant in compiled],
        "probes": [
            code | {"probe": name}
            for code, (variant, _) in zip(read, _jobs, strict=True)
            for name, probe in faulty.items()
            if probe is variant
        ],
    }
    arguments.output.write_text(json.dumps(found))


def _read(place: int) -> dict[str, Any]:
    return aot_code.read(*_jobs[place])


if __name__ == "__main__":
    main()
