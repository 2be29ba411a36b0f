"""The machine code of the CUDA extension, where it was compiled: wide accesses, and nothing fused or approximated."""

from __future__ import annotations

import collections
import functools
import re
import subprocess
from pathlib import Path

import pytest

import isthmus

triton = pytest.importorskip("triton")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]

# A float32 division is IEEE: MUFU.RCP is refined by five FFMA, and FCHK sends what these do not serve to a slower
# routine that stands once in a kernel. That one, and the division of 64-bit integers, have FFMA and MUFU.RCP of their
# own.
REFINEMENTS = 5
ROUTINE_FFMA = 12
ROUTINE_RCP = 3


@functools.cache
def kernels(architecture):
    """How often each instruction stands in each kernel of the rules."""
    extension = next(Path(isthmus.__file__).parent.glob("_cuda.*.so"), None)
    if extension is None:
        pytest.skip("the CUDA extension was not built")
    if not CUOBJDUMP.exists():
        pytest.skip("triton has no cuobjdump")
    done = subprocess.run(
        [CUOBJDUMP, "-sass", "-arch", architecture, extension], capture_output=True, text=True, check=True
    )
    found: dict[str, collections.Counter[str]] = {}
    counts: collections.Counter[str] = collections.Counter()
    for line in done.stdout.splitlines():
        if name := re.search(r"Function : (\S+)", line):
            counts = found.setdefault(name[1], collections.Counter())
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line):
            counts[instruction[1]] += 1
    return found


def those(architecture, word):
    found = {name: counts for name, counts in kernels(architecture).items() if word in name}
    assert found
    return found.items()


def total(counts, prefix, part=""):
    return sum(n for name, n in counts.items() if name.startswith(prefix) and part in name)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("word", ["lerp_kernel", "weighted_sum_kernel", "consensus_kernel"])
def test_accesses_are_of_16_bytes(architecture, word):
    for name, counts in those(architecture, word):
        assert total(counts, "LDG.E", "128") >= 2, name
        assert total(counts, "STG.E", "128") >= 1, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("word", ["lerp_kernel", "weighted_sum_kernel"])
def test_nothing_is_fused_or_divided(architecture, word):
    for name, counts in those(architecture, word):
        assert not total(counts, "FFMA") + total(counts, "DFMA") + total(counts, "MUFU"), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_consensus_fuses_in_ieee_divisions_alone(architecture):
    for name, counts in those(architecture, "consensus_kernel"):
        if "IdL" in name:  # float64 divides by DFMA, with no FCHK to count
            continue
        divisions = total(counts, "FCHK")
        assert divisions > 0, name
        assert total(counts, "FFMA") <= REFINEMENTS * divisions + ROUTINE_FFMA, name
        assert total(counts, "MUFU.RCP") - total(counts, "MUFU.RCP64H") <= divisions + ROUTINE_RCP, name
