"""Records in JSON files. A file is read in full, or refused.

NOTE [ Strict files ]

A file that :meth:`FileRecord.from_json` reads equals the file that was written, or an error names the place where it
differs: a missing or unknown key, a number of another type, a negative or infinite number. Records that are made in
Python are not validated: a measurement never fails for an odd number. A file may not leave out a key that has a default
in its record: the record would be another one.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from spillway.errors import UsageError

Count = Annotated[int, Field(ge=0)]
"""In a file: an integer, not below 0."""
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""In a file: a finite time, not below 0."""


class Record:
    """A value in a file. See NOTE [ Strict files ]."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)


class FileRecord(Record):
    """A record that has a file of its own: a dataclass whose field ``schema`` has the version for its default."""

    __slots__ = ()
    _remedy: ClassVar[str] = "Make it again, or give another file."
    """The last sentence of errors about a file."""

    def to_json(self) -> str:
        """As JSON, with the schema's version."""
        return _adapter(type(self)).dump_json(self, indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "The text") -> Self:
        """Read the record that :meth:`to_json` wrote.

        Args:
            text: JSON.
            source: the name of the text in errors, such as its file.

        Raises:
            UsageError: for anything else, or another version.
        """
        adapter = _adapter(cls)
        try:
            # The version comes first: a file of another version has other keys.
            version = _Version.model_validate_json(text).version
            given = json.loads(text)
            # Each kind of record has other keys.
            records: Any = FileRecord.__subclasses__()
            kinds = {frozenset(each.name for each in fields(record)): record.__name__ for record in records}
            kind = kinds.get(frozenset(given), cls.__name__)
            if kind != cls.__name__:
                raise UsageError(f"{source} has a {kind}, expected a {cls.__name__}. Give another file.")
            if version != cls._schema():
                raise UsageError(
                    f"{source} has a {cls.__name__} of version {version}, and this Spillway reads version "
                    f"{cls._schema()}. {cls._remedy}"
                )
            found: Self = adapter.validate_json(text)
            missing = _missing(adapter.dump_python(found, mode="json"), given)
            fault = next(found._faults(), None) if missing is None else (missing, "Field required")
            if fault is None:
                return found
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            fault = ".".join(map(str, first["loc"])), first["msg"]
        except UnicodeError as error:
            fault = "", f"It cannot be decoded ({error})"
        place, why = fault
        raise UsageError(
            f"{source} is not a {cls.__name__} of version {cls._schema()}: {place + ': ' if place else ''}{why}. "
            f"{cls._remedy}"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file.

        Raises:
            UsageError: if there can be no such file.
        """
        write_file(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read it from a file; raises as :meth:`from_json` does, and if there is no such file."""
        return cls.from_json(read_file(path, cls.__name__), source=os.fspath(path))

    def _faults(self) -> Iterator[tuple[str, str]]:
        """Fields that contradict each other: where, and why."""
        return iter(())

    @classmethod
    def _schema(cls) -> int:
        return int(cls.__dataclass_fields__["schema"].default)  # type: ignore[attr-defined]


def read_file(path: str | os.PathLike[str], what: str) -> bytes:
    """The content of a regular file. Other files may block for ever, as a FIFO that no process writes to."""
    _check_path("path", path)
    why: object = None
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            return Path(path).read_bytes()
        why = _kind_of(path)
    except (OSError, ValueError) as error:
        why = error
    raise UsageError(f"{os.fspath(path)!r} cannot be read ({why}). Give a file that {what}.save() wrote.")


def write_file(path: str | os.PathLike[str], text: str, *, what: str = "path") -> None:
    """Write a file that passes :func:`check_writable`; errors call its path ``what``."""
    check_writable(what, path)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _unwritable(what, path, error) from error


def check_writable(what: str, path: str | os.PathLike[str] | None) -> None:
    """Check, before hours of training and not after them, that a file can be written.

    Regular files, new names in a folder, and character devices (``/dev/null``, a terminal) can. Writing to a FIFO may
    block for ever. A link is checked by its target. Errors call the path ``what``; ``None`` stands for no file.
    """
    if path is None:
        return
    _check_path(what, path)
    real = os.path.realpath(path)
    try:
        mode = os.stat(real).st_mode
    except FileNotFoundError:
        folder = os.path.dirname(real)
        if os.path.basename(path) and os.path.isdir(folder) and os.access(folder, os.W_OK):
            return
        raise _unwritable(what, path, "no such folder, or no permission to write to it") from None
    except (OSError, ValueError) as error:
        raise _unwritable(what, path, error) from error
    if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
        raise _unwritable(what, path, _kind_of(path))
    if not os.access(real, os.W_OK):
        raise _unwritable(what, path, "it is read-only")


def _check_path(what: str, path: object) -> None:
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"{what}: got {path!r:.200}, expected the path of a file")


def _unwritable(what: str, path: str | os.PathLike[str], why: object) -> UsageError:
    return UsageError(f"{what}: {os.fspath(path)!r} cannot be written ({why}). Give the name of a file in a folder.")


def _kind_of(path: str | os.PathLike[str]) -> str:
    """A path that is there and no regular file, for messages."""
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return f"it is {kinds.get(stat.S_IFMT(os.stat(path).st_mode), 'a device')}"


_adapter: Callable[[type[Any]], TypeAdapter[Any]] = cache(TypeAdapter)  # type: ignore[assignment]
"""Making one takes longer than reading a file."""


class _Version(BaseModel, extra="ignore", strict=True):
    """The key that all versions of a file share."""

    version: int = Field(alias="schema")


def _missing(record: Any, given: Any) -> str | None:
    """The first key of a record that a file leaves out. They are alike in all else."""
    if isinstance(record, list):
        record, given = dict(enumerate(record)), dict(enumerate(given))
    elif not isinstance(record, dict):
        return None
    absent = next((key for key in record if key not in given), None)
    if absent is not None:
        return str(absent)
    below = ((key, _missing(value, given[key])) for key, value in record.items())
    return next((f"{key}.{missing}" for key, missing in below if missing is not None), None)
