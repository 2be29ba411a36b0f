"""Write a file whole or not at all."""

from __future__ import annotations

import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from isthmus.errors import FileError


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``path``; what is written there becomes ``path`` at a clean exit.

    The data reach the disk before the name does, so that after a crash ``path`` is the old file or the new one. After
    an error or an interrupt the temporary file is removed and ``path`` is as before. The folder must exist.

    Raises:
        FileError: the file could not be written: no such folder, no permission, disk full.
    """
    final = Path(path)
    temporary = final.with_name(f".{final.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        temporary.touch(exist_ok=False)
        mode = stat.S_IMODE(temporary.stat().st_mode)  # what the user's umask gives; some writers use another mode
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, final)
        _sync_folder(final.parent)
    except FileError:
        raise
    except OSError as error:
        raise FileError(
            f"could not write {final}: {error}. Check that the folder exists, that it may be written to, and that the "
            "disk has room; nothing was left under this name that was not there before."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | os.PathLike[str], value: object) -> None:
    """Write ``value`` as indented JSON, atomically.

    JSON has no numbers for NaN and infinity: they are written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``, which
    ``float()`` reads back.

    Raises:
        FileError: the file could not be written.
        TypeError: ``value`` holds something other than mappings, lists, tuples, strings, numbers, booleans and None.
    """
    text = json.dumps(_finite(value), indent=2, allow_nan=False)
    with atomic_write(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read_json(path: str | os.PathLike[str]) -> object:
    """Read a JSON file.

    Raises:
        FileError: the file is missing, unreadable or not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"could not read {path}: {error}. Check the path.") from error
    except ValueError as error:
        raise FileError(f"{path} is not a JSON file ({error}); it may be truncated. Write it again.") from error


def _finite(value: object) -> object:
    """``value`` with every non-finite float replaced by its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _sync_folder(folder: Path) -> None:
    """Bring a renaming in ``folder`` to the disk, on systems that can open a folder."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
