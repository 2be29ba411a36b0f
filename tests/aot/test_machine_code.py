"""Triton kernels compiled ahead of time, and what their machine code consists of.

The ordinary tests compile what usual calls launch, for sm_90; ``make test-gpu-compile`` compiles every variant for all
three architectures.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton")

ARCHITECTURES = (80, 90, 100)
LIMIT = 200  # variants of all kernels together
TO_THE_BIT = ("elementwise", "consensus", "select", "permute")  # modules that promise the reference's bits
# Kernels bound by bandwidth: whether they write as many elements as they read of an input, and how many accesses to
# single elements there are for each in whole blocks: what has a mask is there once more, and what is read again.
STREAMING = {
    "elementwise._lerp": (True, 1),
    "elementwise._weighted_sum": (True, 1),
    "consensus._consensus": (True, 1),
    "select._sweep": (False, 2),
    "reductions._gram": (False, 1),
    "reductions._l1": (False, 1),
}

# What the compiler makes of a division that rounds to nearest, in float32 and float64; checked on a kernel that has
# nothing else to fuse.
DIVISION = {"FFMA": lambda code: 5 * code["FCHK"] + 9 * (code["FCHK"] > 0) + max(code["MUFU.RCP64H"] - 1, 0)}
DIVISION["DFMA"] = lambda code: 7 * code["MUFU.RCP64H"] + 3 * (code["MUFU.RCP64H"] > 0)


def compile_ahead(folder, *arguments):
    """Run the compiler in a process without the interpreter, in which kernels cannot be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    output = folder / "found.json"
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("aot_run.py"), output, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text())


@pytest.fixture(
    scope="module", params=["usual", pytest.param("all", marks=pytest.mark.gpu_compile)], ids=["usual", "all"]
)
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ahead")
    if request.param == "all":
        return compile_ahead(folder, "--architectures", *map(str, ARCHITECTURES))
    return compile_ahead(folder, "--architectures", "90", "--usual")


def name_of(code):
    constants = ", ".join(f"{name}={value}" for name, value in code["constants"].items())
    return f"{code['kernel']}({constants}) for sm_{code['architecture']}, launched by {code['call']}"


def inexact(code):
    """What in the code may give other bits than the operations that were written down."""
    # Operations without a rounding mode may be contracted by the assembler.
    suspect = r"fma\.|(add|sub|mul)\.f(32|64)|.*\.(full|approx|ftz)\b"
    faults = [name for name in code["ptx"] if re.match(suspect, name)]
    sass = Counter(code["sass"])
    for kind, of_divisions in DIVISION.items():
        count = sum(sass[name] for name in (kind, f"{kind}2"))  # of one number and of two
        if count > of_divisions(sass):
            faults.append(f"{count} {kind}, of which divisions are {of_divisions(sass)}")
    return faults


def narrow_accesses(code, *, writes, masked=1):
    """What shows that whole blocks are not all read and written by 16 bytes: as many again are not whole."""
    faults = []
    for kind in ("LDG", "STG") if writes else ("LDG",):
        wide = narrow = 0
        for name, count in code["sass"].items():
            operation, *parts = name.split(".")
            if operation == kind:
                wide += count * 16 * ("128" in parts)
                narrow += count * 2 * ("U16" in parts)  # of others, accesses to tables cannot be told apart
        if wide == 0 or narrow > masked * wide:
            faults.append(f"{kind}: {wide} bytes by 16 and {narrow} by 2")
    return faults


def test_no_kernel_is_forgotten(found):
    assert {variant["kernel"] for variant in found["variants"]} == set(found["launched"])


def test_there_are_few_variants(found):
    kernels = Counter(variant["kernel"] for variant in found["variants"])
    assert sum(kernels.values()) < LIMIT, kernels


def test_code_that_promises_bits_fuses_and_approximates_nothing(found):
    exact = [code for code in found["compiled"] if code["kernel"].split(".")[0] in TO_THE_BIT]
    assert exact
    assert {name_of(code): inexact(code) for code in exact if inexact(code)} == {}


def test_products_of_float32_are_not_rounded_to_tensorfloat(found):
    faults = {
        name_of(code): name
        for code in found["compiled"]
        for name in (*code["ptx"], *code["sass"])
        if re.search(r"tf32", name, re.IGNORECASE)
    }
    assert faults == {}


def test_whole_blocks_are_moved_by_16_bytes(found):
    checked, faults = set(), {}
    for code in found["compiled"]:
        if code["kernel"] in STREAMING and code["constants"]["aligned"] == "True":
            checked.add(code["kernel"])
            writes, masked = STREAMING[code["kernel"]]
            fault = narrow_accesses(code, writes=writes, masked=masked)
            if fault:
                faults[name_of(code)] = fault
    assert checked >= {"elementwise._lerp", "elementwise._weighted_sum", "consensus._consensus", "select._sweep"}
    assert faults == {}


def spills(code):
    """Whether loops keep more than registers hold: of a thousand instructions, more than one goes to memory for that.

    What is put aside before a loop and fetched after it costs nothing.
    """
    return 1000 * code["spills_in_loops"] > sum(code["sass"].values())


def test_loops_of_usual_kernels_spill_nothing(found):
    usual = [code for code in found["compiled"] if code["usual"]]
    assert {name_of(code): code["spills_in_loops"] for code in usual if spills(code)} == {}


def test_faults_are_found(found):
    """A kernel that is compiled with fusion, divides approximately, moves single elements, or spills, is found out."""
    for architecture in {code["architecture"] for code in found["probes"]}:
        probes = {code["probe"]: code for code in found["probes"] if code["architecture"] == architecture}
        assert inexact(probes["exact"]) == []
        assert any(name.startswith("fma.") for name in inexact(probes["fused"]))
        assert any("FFMA" in name for name in inexact(probes["fused"]))
        assert any(name.startswith("div.full") for name in inexact(probes["approximate"]))
        assert narrow_accesses(probes["exact"], writes=True) == []
        assert len(narrow_accesses(probes["straggling"], writes=True)) == 2
        assert spills(probes["spilling"])
        assert not spills(probes["exact"])
