"""``isthmus diff``."""

import pytest
import torch
from typer.testing import CliRunner

from isthmus.cli.app import app
from isthmus.io import save_state


def run(*arguments):
    """Exit code, standard output and standard error of the command."""
    result = CliRunner().invoke(app, ["diff", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def files(tmp_path):
    """Write state dicts as files a and b."""

    def write(*states):
        paths = [tmp_path / f"{name}.safetensors" for name in "ab"]
        for path, state in zip(paths, states, strict=True):
            save_state(path, state)
        return paths

    return write


def test_equal_files(files):
    assert run(*files({"x": torch.ones(2)}, {"x": torch.ones(2)})) == (0, "1 tensors are equal.\n", "")


def test_different_files(files):
    a = {"x": torch.ones(4), "[same]": torch.ones(1), "shape": torch.ones(2), "gone": torch.ones(1)}
    b = {"x": torch.tensor([1.0, 1.0, 1.0, 1 + 2.0**-22]), "[same]": torch.ones(1), "shape": torch.ones(3)}
    code, out, _ = run(*files(a, b))
    assert code == 1
    row = next(line for line in out.splitlines() if " x " in line)
    assert "1 of 4" in row
    assert "float32 [4]" in row
    assert "2.384e-07" in row
    assert [cell.strip() for cell in row.split("│")][-4] == "2"  # ulp
    assert "float32 [3]" in out
    assert "[same]" not in out
    assert "only in a: gone" in out
    assert "1 tensors are equal, 2 differ, 1 are in one only." in out


def test_trouble_is_no_difference(files, tmp_path):
    path, _ = files({"x": torch.ones(2)}, {})
    code, out, error = run(path, tmp_path / "none.safetensors")
    assert (code, out) == (2, "")
    assert error.startswith("error: there is no file")
