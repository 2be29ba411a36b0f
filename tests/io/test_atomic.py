from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import FileError
from isthmus.io import atomic_write, read_json, write_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def test_new_file_replaces_old_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "result.txt"
    target.write_text("old")
    with atomic_write(target) as temporary:
        assert temporary.parent == tmp_path
        temporary.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["result.txt"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_error_in_the_middle_keeps_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "result.txt"
    target.write_text("old")
    with pytest.raises(error), atomic_write(target) as temporary:  # noqa: PT012
        temporary.write_text("half")
        raise error
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.txt"]


def test_os_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"no-folder.*No such file"), atomic_write(tmp_path / "no-folder" / "x"):
        pass
    with pytest.raises(FileError, match=r"x\.txt.*disk is full"), atomic_write(tmp_path / "x.txt"):
        raise OSError(28, "disk is full")
    assert os.listdir(tmp_path) == []


def test_file_has_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    with atomic_write(tmp_path / "atomic") as temporary:
        temporary.unlink()
        temporary.touch(mode=0o600)
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_kill_while_writing_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from isthmus.io.atomic import atomic_write\n"
        "with atomic_write(sys.argv[1]) as temporary:\n"
        "    temporary.write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    target = tmp_path / "result.txt"
    done = subprocess.run([sys.executable, "-c", program, str(target)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not target.exists()


@given(value=JSON)
def test_json_comes_back(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    path = tmp_path_factory.mktemp("json") / "value.json"
    write_json(path, value)
    assert read_json(path) == value


def test_non_finite_numbers_are_written_as_their_names(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json(path, {"a": [float("nan"), float("inf")], "b": (-float("inf"), 1.5)})
    assert json.loads(path.read_text()) == {"a": ["nan", "inf"], "b": ["-inf", 1.5]}


def test_unknown_values_are_refused_before_writing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_json(tmp_path / "value.json", {"a": object()})
    assert os.listdir(tmp_path) == []


def test_unreadable_json_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none\.json"):
        read_json(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"a": 1')
    with pytest.raises(FileError, match=r"half\.json is not a JSON file"):
        read_json(tmp_path / "half.json")
