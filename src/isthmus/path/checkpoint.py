"""Checkpoints: a file that finished points of a scan are appended to, and that an interrupted scan goes on from."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from isthmus.errors import FileError, InputError

from .files import floats, jsonable

KIND = "checkpoint of a scan"
SCHEMA = 1
SYNC_SECONDS = 1.0  # bringing every line to the disk would cost more than a quick point


class Finished(NamedTuple):
    """What was found at one point: split -> metric -> value, and the time that it and its BatchNorm statistics took."""

    values: dict[str, dict[str, float]]
    seconds: float
    bn_seconds: float | None


class Checkpoint:
    """The finished points of one scan in a file of JSON lines.

    The first line has what decides a scan's values (``settings``), each other line one point, numbers in their shortest
    exact form, NaN and infinities as strings. A line is handed to the system at once, so that an error or interrupt
    loses no finished point, and reaches the disk within a second or at the end, in case the machine fails.

    Attributes:
        path: the file.
        found: point -> what the file had of it when it was opened.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        """Open the file, or make it if it is missing or empty.

        A last line that is cut off, as a crash leaves it, is dropped.

        Args:
            path: the file; its folder must exist.
            settings: what decides the values, as nested mappings of what JSON knows.

        Raises:
            InputError: the file belongs to a scan of other settings; the message lists what differs.
            FileError: the file is no checkpoint, is damaged, or cannot be read or written.
        """
        self.path = Path(path)
        self.found: dict[Hashable, Finished] = {}
        header = {"kind": KIND, "schema": SCHEMA, "settings": json.loads(_line(settings))}
        try:
            content = self.path.read_bytes() if self.path.exists() else b""
            intact = self._read(content, header) if content else 0
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            if not content:
                self._write(_line(header))
                os.fsync(self._file)
            elif intact < len(content):
                os.ftruncate(self._file, intact)
        except OSError as error:
            raise self._failed(error) from error
        self._synced = time.monotonic()

    def append(self, point: Hashable, finished: Finished) -> None:
        """Add one point.

        Raises:
            FileError: the line could not be written.
        """
        try:
            self._write(_line({"point": point, **finished._asdict()}))
            if time.monotonic() - self._synced > SYNC_SECONDS:
                os.fsync(self._file)
                self._synced = time.monotonic()
        except OSError as error:
            raise self._failed(error) from error

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)

    def _write(self, line: bytes) -> None:
        if os.write(self._file, line) < len(line):
            raise OSError("the disk is full")

    def _read(self, content: bytes, header: Mapping[str, Any]) -> int:
        """Fill ``found``; the number of bytes up to the end of the last intact line."""
        *lines, cut_off = content.split(b"\n")
        self._check(lines[0] if lines else b"", header)
        for number, line in enumerate(lines[1:], start=2):
            try:
                point, finished = _parsed(line)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                if number == len(lines):
                    return len(content) - len(cut_off) - len(line) - 1
                raise FileError(
                    f"line {number} of the checkpoint {self.path} is damaged ({type(error).__name__}: {error}). "
                    "Remove this line to have its point evaluated again, or give another file."
                ) from error
            self.found[point] = finished
        return len(content) - len(cut_off)

    def _check(self, line: bytes, header: Mapping[str, Any]) -> None:
        """Refuse a file whose first line is not the header of this scan."""
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.get("kind") != KIND:
            raise FileError(
                f"{self.path} is no checkpoint of a scan, and is left as it is. Give the name of a file that a scan "
                "made as its checkpoint, or of one that does not exist yet."
            )
        if found.get("schema") != SCHEMA:
            raise FileError(
                f"the checkpoint {self.path} has schema {found.get('schema')!r}, expected {SCHEMA}. Go on with the "
                "version of isthmus that wrote it, or give another file."
            )
        if different := list(_differences(found.get("settings"), header["settings"])):
            shown = "; ".join(different[:5]) + (f"; and {len(different) - 5} more" if len(different) > 5 else "")
            raise InputError(
                f"the checkpoint {self.path} belongs to another scan: {shown}. Scan with the same models, data and "
                "settings to go on, or give another file to begin anew."
            )

    def _failed(self, error: OSError) -> FileError:
        if isinstance(error, FileError):
            return error
        return FileError(
            f"could not read or write the checkpoint {self.path}: {error.strerror or error}. Check that its folder "
            "exists, that it may be written to, and that the disk has room."
        )


def _line(value: object) -> bytes:
    return json.dumps(jsonable(value), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _parsed(line: bytes) -> tuple[Hashable, Finished]:
    entry = json.loads(line)
    values = {split: floats(metrics) for split, metrics in entry["values"].items()}
    bn_seconds = None if entry["bn_seconds"] is None else float(entry["bn_seconds"])
    return _point(entry["point"]), Finished(values, float(entry["seconds"]), bn_seconds)


def _point(value: Any) -> Hashable:
    """A point as the walk has it: JSON knows no tuples."""
    return tuple(_point(item) for item in value) if isinstance(value, list) else value


def _differences(found: Any, expected: Any, path: str = "") -> Iterator[str]:
    """What differs between two nested mappings, by dotted path."""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        for key in [*expected, *(key for key in found if key not in expected)]:
            yield from _differences(found.get(key), expected.get(key), f"{path}.{key}" if path else key)
    elif found != expected:
        yield f"{path or 'settings'} was {_short(found)} and is {_short(expected)}"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:18]}...{text[-6:]}"
