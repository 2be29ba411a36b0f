"""Who may import whom, and what importing isthmus costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import isthmus

ROOT = Path(isthmus.__file__).parent
REPOSITORY = Path(__file__).parents[1]

# module or folder -> what else of isthmus it may import; every module may import errors and _optional
ALLOWED = {
    "errors": set(),
    "_optional": set(),
    "_versions": set(),
    "_capture": {"kernels"},
    "reference": set(),
    "_native": {"_cpu"},
    "_operands": set(),
    "_gpu": {"_cuda", "_operands", "kernels", "reference"},
    "testing": set(),
    "flat": {"_versions"},
    "batches": set(),
    "norms": {"batches"},
    "preserve": {"norms"},
    "_cpp": {"_native", "_operands", "reference"},
    "_dispatch": {"_cpp", "_native", "_operands", "_versions", "reference"},
    "_library": {"_dispatch", "reference"},
    "ops": {"_dispatch", "_library", "reference", "spherical"},
    "io": set(),
    "spherical": set(),
    "methods": set(),
    "merging": {"ops", "flat", "methods", "spherical", "io", "norms", "preserve"},
    "match": {"merging", "ops", "flat", "batches", "norms", "preserve"},
    "path": {"_capture", "merging", "match", "ops", "flat", "norms", "preserve", "io"},
    "train": {"_capture", "path", "merging", "ops", "flat", "norms", "io"},
    "cli": {"train", "match", "path", "merging", "ops", "flat", "norms", "io", "_dispatch"},
    "__main__": {"cli"},
    "__init__": {"ops", "merging", "methods", "flat", "path", "train", "match"},
}


SOURCES = {".h", ".cpp", ".inl", ".cu", ".cuh"}


def house_imports(path: Path) -> set[str]:
    """The first-level modules of isthmus that a file imports."""
    package = path.relative_to(ROOT.parent).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module or "").split(".")) if node.module else base
            names = [(*module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        else:
            continue
        found |= {name[1] for name in names if name[0] == "isthmus" and len(name) > 1}
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_design(path):
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert room in ALLOWED, f"{room} has no place in the house; add it to ALLOWED"
    extra = house_imports(path) - ALLOWED[room] - {room, "errors", "_optional", "__version__"}
    assert not extra


def test_the_core_knows_neither_python_nor_torch():
    files = [p for p in (REPOSITORY / "csrc").rglob("*") if p.suffix in SOURCES and "bind" not in p.parts]
    assert {p.suffix for p in files} == SOURCES
    for path in files:
        includes = [line for line in path.read_text().splitlines() if line.lstrip().startswith("#include")]
        forbidden = ["torch", "ATen", "Python.h", "pybind"]
        forbidden += {"cpu": ["cuda"], "cuda": ["cpu/"]}.get(path.parent.name, ["cuda", "cpu/"])
        assert not [line for line in includes if any(word in line for word in forbidden)]


def test_importing_isthmus_brings_torch_and_numpy_alone():
    code = """
import sys
import torch, numpy
before = set(sys.modules)
import isthmus
new = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(sorted(new))
isthmus.lerp(torch.zeros(3), torch.ones(3), 0.5)
heavy = {"isthmus._cuda", "torch._dynamo", "triton", "torchvision", "matplotlib", "sklearn", "rich", "typer"}
heavy |= {"safetensors", "pandas"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['isthmus']\n[]\n"
