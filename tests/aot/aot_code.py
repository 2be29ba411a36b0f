"""Compile recorded variants for an architecture and read their machine code."""

from __future__ import annotations

import collections
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from aot_record import WARP, Variant
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

PTX = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*(?:\.[\w:]+)+)\s", re.MULTILINE)
SASS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)", re.MULTILINE)
PLACE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
USAGE = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")


def read(variant: Variant, architecture: int) -> dict[str, Any]:
    """Compile, and tell the instructions (name -> how often), registers and memory of a thread, and shared memory."""
    function, signature, constants, attributes = variant.parts
    compiled = triton.compile(
        ASTSource(function, signature, constants, attributes),
        target=GPUTarget("cuda", architecture, WARP),
        options=variant.options,
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        sass, usage = (_cuobjdump(file.name, what) for what in ("-sass", "--dump-resource-usage"))
    memory = {name.lower(): int(value) for name, value in USAGE.findall(usage)}
    return variant.shown() | {
        "architecture": architecture,
        "ptx": collections.Counter(PTX.findall(compiled.asm["ptx"])),
        "sass": collections.Counter(SASS.findall(sass)),
        "registers": memory["reg"],
        "spilled": memory["stack"] + memory["local"],  # bytes
        "spills_in_loops": _spills_in_loops(sass),
        "shared": compiled.metadata.shared,
    }


def _spills_in_loops(sass: str) -> int:
    """How many instructions within loops access what registers did not hold."""
    code = [(int(place, 16), text) for place, text in PLACE.findall(sass)]
    branches = [
        (int(found[1], 16), place) for place, text in code if (found := re.search(r"\bBRA.*0x([0-9a-f]+)", text))
    ]
    loops = [(start, end) for start, end in branches if start < end]
    local = [place for place, text in code if re.search(r"\b(LDL|STL)\b", text)]
    return sum(any(start <= place <= end for start, end in loops) for place in local)


def _cuobjdump(path: str, what: str) -> str:
    command = [knobs.nvidia.cuobjdump.path, what, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
