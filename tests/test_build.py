"""What a user sees when the package is built where something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def configure(build: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is not installed")
    return subprocess.run(
        [cmake, "-S", str(Path(__file__).parents[1]), "-B", str(build)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_a_build_without_a_compiler_names_the_switch(tmp_path):
    done = configure(tmp_path, CXX="/nonexistent/g++")
    assert done.returncode != 0
    message = " ".join(done.stderr.split())
    assert "isthmus: no C++ compiler was found" in message
    assert "ISTHMUS_NATIVE=0" in message


def test_cuda_that_is_asked_for_without_a_compiler_names_what_to_install(tmp_path):
    done = configure(tmp_path, ISTHMUS_CUDA="1", CUDACXX="/nonexistent/nvcc")
    assert done.returncode != 0
    message = " ".join(done.stderr.split())
    assert "no CUDA compiler was found" in message
    assert "Install the CUDA toolkit" in message


def test_a_missing_cuda_compiler_is_no_obstacle(tmp_path):
    done = configure(tmp_path, ISTHMUS_CUDA="", CUDACXX="/nonexistent/nvcc")
    assert "CUDA compiler" not in done.stderr
