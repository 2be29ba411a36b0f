"""What the results of all scans share: the ways out to JSON, CSV and data frames, and back."""

from __future__ import annotations

import csv
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from isthmus._optional import optional
from isthmus.errors import FileError


class Recorded(ABC):
    """A result that goes to files and tables and comes back.

    A kind of result says what it consists of (``content``), how it is made of that (``from_content``) and what its tidy
    table has (``rows``).

    Attributes:
        KIND: what error messages and files call this kind of result.
        SCHEMA: the version of its format.
        COLUMNS: the header of its tidy table.
    """

    KIND: ClassVar[str]
    SCHEMA: ClassVar[int]
    COLUMNS: ClassVar[tuple[str, ...]]

    @abstractmethod
    def content(self) -> dict[str, Any]:
        """Name -> mappings, sequences, arrays, strings, numbers, booleans and None: all that ``from_content`` needs."""

    @classmethod
    @abstractmethod
    def from_content(cls, content: Mapping[str, Any]) -> Self:
        """The result with this content, as JSON has it; see ``array`` and ``floats``. What is not needed is ignored."""

    @abstractmethod
    def rows(self) -> Iterator[tuple[Any, ...]]:
        """The tidy table, row by row; its columns are ``columns``."""

    def columns(self) -> tuple[str, ...]:
        """The header of the tidy table: ``COLUMNS``, unless it depends on what was scanned."""
        return self.COLUMNS

    def to_dict(self) -> dict[str, Any]:
        """Everything, as mappings, lists, strings, numbers and booleans that JSON knows.

        ``kind`` names the kind of result and ``schema`` counts the versions of its format. NaN and infinities are the
        strings "nan", "inf" and "-inf", which ``float`` reads.
        """
        content = {"kind": self.KIND, "schema": self.SCHEMA, **self.content()}
        return {key: jsonable(value) for key, value in content.items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The result that ``to_dict`` described.

        Raises:
            FileError: the content is not that of such a result, or of another schema.
        """
        kind = content.get("kind", cls.KIND)  # files of the first versions name none
        if kind != cls.KIND or content.get("schema") != cls.SCHEMA:
            raise FileError(
                f"expected a {cls.KIND} of schema {cls.SCHEMA}, got "
                + (f"a {kind}; " if kind != cls.KIND else f"{content.get('schema')!r}; ")
                + "read it with the class, and the version of isthmus, that wrote it."
            )
        try:
            return cls.from_content(content)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FileError(f"the {cls.KIND} is damaged ({type(error).__name__}: {error}); scan again.") from error

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """``to_dict`` as JSON text, written to ``path`` too if one is given, whole or not at all.

        Raises:
            FileError: the file could not be written.
        """
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        if path is not None:
            from isthmus.io import atomic_write

            with atomic_write(path) as temporary:
                temporary.write_text(text + "\n", encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> Self:
        """Read what ``to_json`` wrote: a file, or its text.

        Raises:
            FileError: the file is missing or unreadable, or not such a result.
        """
        text = source if isinstance(source, str) and source.lstrip().startswith("{") else None
        try:
            content = json.loads(Path(source).read_text(encoding="utf-8") if text is None else text)
        except OSError as error:
            raise FileError(f"cannot read the {cls.KIND} {os.fspath(source)!r}: {error.strerror}.") from error
        except ValueError as error:
            raise FileError(f"the {cls.KIND} is not JSON ({error}); is the file truncated?") from error
        if not isinstance(content, dict):
            raise FileError(f"expected a {cls.KIND}, got a JSON {type(content).__name__}.")
        return cls.from_dict(content)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the tidy table with its header, whole or not at all; numbers in their shortest exact form.

        Raises:
            FileError: the file could not be written.
        """
        from isthmus.io import atomic_write

        with atomic_write(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([self.columns(), *self.rows()])

    def to_frame(self) -> Any:
        """The tidy table as a ``pandas.DataFrame``.

        Raises:
            DependencyError: pandas is not installed.
        """
        pandas = optional("pandas", extra="lab", purpose=f"{type(self).__name__}.to_frame")
        return pandas.DataFrame.from_records(list(self.rows()), columns=list(self.columns()))


def jsonable(value: Any) -> Any:
    """``value`` as JSON knows it.

    Arrays and tuples are lists, NumPy's numbers are Python's, and NaN and infinities strings that ``float`` reads.
    """
    if isinstance(value, np.ndarray | np.generic):
        return jsonable(value.tolist())
    if isinstance(value, Mapping):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def array(numbers: Any) -> NDArray[np.float64]:
    """Numbers as ``jsonable`` leaves them, in lists of any depth, as an array."""
    return np.array(_numbers(numbers), dtype=np.float64)


def floats(mapping: Mapping[str, float | str]) -> dict[str, float]:
    """A mapping to numbers as ``jsonable`` leaves them."""
    return {key: float(value) for key, value in mapping.items()}


def _numbers(value: Any) -> Any:
    return [_numbers(item) for item in value] if isinstance(value, list) else float(value)
