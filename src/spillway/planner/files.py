"""Records in files, as JSON: read to the last key, or refused.

NOTE [ Strict files ]

What is read is what was written, or an error says where it is not: a key that is missing or unknown, a number of
another type, below zero or not finite. Records that are made here are not looked at: a measurement never fails for an
odd figure. A key that has a default in its record may not be left out of a file either: it would be another record.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from spillway.errors import UsageError

Count = Annotated[int, Field(ge=0)]
"""In a file: a whole number, not below 0."""
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""In a file: a finite time, not below 0."""


class Record:
    """A value in a file. See NOTE [ Strict files ]."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)


class FileRecord(Record):
    """A record that has a file of its own: a dataclass whose field ``schema`` has the version for its default."""

    __slots__ = ()

    def to_json(self) -> str:
        """As JSON, with the schema's version."""
        return TypeAdapter(type(self)).dump_json(self, indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The record that :meth:`to_json` wrote.

        Raises:
            UsageError: for anything else.
        """
        what, schema, adapter = cls.__name__.lower(), cls._schema(), TypeAdapter(cls)
        try:
            # The version comes first, so that a file of another one is told by it.
            version = _Version.model_validate_json(text).version
            if version != schema:
                raise UsageError(
                    f"{what}: got version {version}, expected {schema}; make it anew, or give the file of a {what}, if "
                    f"this is none"
                )
            found = adapter.validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise cls._is_none(".".join(map(str, first["loc"])) or "the file", first["msg"]) from None
        except UnicodeError as error:
            raise cls._is_none("the file", f"no text that can be encoded: {error}") from None
        missing = _missing(adapter.dump_python(found, mode="json"), json.loads(text))
        if missing is not None:
            raise cls._is_none(missing, "Field required")
        found._check()
        return found

    def save(self, path: str | Path) -> None:
        """Write it to a file.

        Raises:
            UsageError: if there can be no such file.
        """
        write_file(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read it from a file; raises as :meth:`from_json` does, and where there is no such file."""
        return cls.from_json(read_file(path, cls.__name__))

    def _check(self) -> None:
        """Raise for fields that contradict each other."""

    @classmethod
    def _schema(cls) -> int:
        return int(cls.__dataclass_fields__["schema"].default)  # type: ignore[attr-defined]

    @classmethod
    def _is_none(cls, place: str, why: str) -> UsageError:
        """The error for a file that is no such record: where in it, and why."""
        what = cls.__name__.lower()
        return UsageError(
            f"{what}: got JSON that is none ({place}: {why}), expected what to_json() of a spillway {what} writes, "
            f"version {cls._schema()}; make it anew"
        )


def read_file(path: str | os.PathLike[str], what: str) -> bytes:
    """What is in a regular file. Reading anything else may block for ever: a FIFO that no process writes to.

    Raises:
        UsageError: if there is no such file.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UsageError(f"path: got {_kind_of(path)}, expected a regular file that {what}.save() wrote")
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"path: got {os.fspath(path)!r} ({error}), expected a file that {what}.save() wrote"
        ) from error


def write_file(path: str | os.PathLike[str], text: str, *, what: str = "path") -> None:
    """Write a file; errors call its path ``what``.

    Raises:
        UsageError: if there can be no such file: see :func:`check_writable`.
    """
    check_writable(what, path)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"{what}: got {os.fspath(path)!r} ({error}), expected a file that can be written") from error


def check_writable(what: str, path: str | os.PathLike[str] | None) -> None:
    """Check, before hours of training and not after them, that a file can be written.

    A regular file, a new name in a folder, and a character device (``/dev/null``, a terminal) can. Writing to a FIFO
    may block for ever. A link is checked by the file that it names. Errors call the path ``what``; ``None`` stands for
    no file.

    Raises:
        UsageError: if there can be no such file.
    """
    if path is None:
        return
    real = os.path.realpath(path)
    try:
        mode = os.stat(real).st_mode
    except FileNotFoundError:
        folder = os.path.dirname(real)
        if os.path.basename(path) and os.path.isdir(folder) and os.access(folder, os.W_OK):
            return
        raise UsageError(
            f"{what}: got {os.fspath(path)!r}, expected the name of a file in a folder that can be written to"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{what}: got {os.fspath(path)!r} ({error}), expected a file that can be written") from error
    if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
        raise UsageError(f"{what}: got {_kind_of(path)}, expected the name of a regular file")
    if not os.access(real, os.W_OK):
        raise UsageError(f"{what}: got {os.fspath(path)!r}, which is read-only, expected a file that can be written")


def _kind_of(path: str | os.PathLike[str]) -> str:
    """A path that is there and no regular file, for messages."""
    mode = os.stat(path).st_mode
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return f"{os.fspath(path)!r}, which is {kinds.get(stat.S_IFMT(mode), 'a device')}"


class _Version(BaseModel, extra="ignore", strict=True):
    """All that must be in a file of any version."""

    version: int = Field(alias="schema")


def _missing(record: Any, given: Any) -> str | None:
    """The first key of a record that was not given. They are alike in all else."""
    if isinstance(record, dict):
        pairs = list(record.items())
        for key, _ in pairs:
            if key not in given:
                return str(key)
    elif isinstance(record, list):
        pairs = list(enumerate(record))
    else:
        return None
    for key, value in pairs:
        below = _missing(value, given[key])
        if below is not None:
            return f"{key}.{below}"
    return None
