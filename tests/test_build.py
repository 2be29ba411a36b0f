"""What a user sees when the package is built where something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def test_a_build_without_a_compiler_names_the_switch(tmp_path):
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is not installed")
    done = subprocess.run(
        [cmake, "-S", str(Path(__file__).parents[1]), "-B", str(tmp_path)],
        env={**os.environ, "CXX": "/nonexistent/g++"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    message = " ".join(done.stderr.split())
    assert "isthmus: no C++ compiler was found" in message
    assert "ISTHMUS_NATIVE=0" in message
