"""Files that a reader finds whole or not at all, and the stored form of dataclasses."""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import os
import stat
import tempfile
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, BinaryIO, Self, TypeVar

import pydantic_core

from shardproof.errors import Problem, SelectionError

T = TypeVar("T")

#: What :meth:`Stored.from_dict` raises of damaged JSON.
DAMAGE = (LookupError, TypeError, AttributeError, ValueError, RecursionError)

#: A file system that is full, or over quota.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: One that is that, read-only, failing, or closed to this user; no file.
UNWRITABLE = (
    *(*FULL, errno.EROFS, errno.EIO, errno.ESTALE),
    *(errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP),
)
#: Bytes of a file that is read at once, and of one line.
MOST_BYTES, MOST_LINE = 1 << 30, 64 << 20


def open_input(path: Path) -> BinaryIO:
    """``path`` for reading, if it is a regular file: a pipe or ``/dev/zero`` may never end.

    :raises SelectionError: it is none.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # before it is opened: that waits for a pipe's writer
        remedy = "name a file, or copy what it holds into one"
        raise SelectionError(Problem("is no regular file", remedy, file=str(path)))
    return path.open("rb")


def read_input(path: Path, most: int = MOST_BYTES) -> bytes:
    """All bytes of :func:`open_input`.

    :raises SelectionError: as there, or it has more than ``most``.
    """
    with open_input(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise SelectionError(Problem(f"is over {most >> 20} MiB", "name another", file=str(path)))
    return data


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of :func:`open_input`, with their ends.

    :raises SelectionError: as there, or one is longer than :data:`MOST_LINE`.
    """
    with open_input(path) as file:
        while line := file.readline(MOST_LINE + 1):
            if len(line) > MOST_LINE:
                what = f"has a line of over {MOST_LINE >> 20} MiB"
                raise SelectionError(Problem(what, "take a whole copy", file=str(path)))
            yield line


def why_not_writable(path: Path) -> str:
    """Why :func:`write_whole` could not write ``path``, with its folder made; empty: it could."""
    try:
        target = path.resolve()
        if target.is_dir():
            return os.strerror(errno.EISDIR)
        if target.is_fifo():
            return "is a pipe, and whoever is to read it may never come"
        if not target.exists() or target.is_file():
            place = next(parent for parent in target.parents if parent.exists())
            tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def fast_json(value: Any) -> bytes:
    """``value`` as JSON, ten times faster than by ``json``; what JSON has no form for, as text."""
    try:
        return pydantic_core.to_json(value, inf_nan_mode="constants", fallback=str)
    except (ValueError, TypeError, RecursionError):  # a text that is no Unicode, say
        return json.dumps(value, default=str).encode()


def read_fast_json(data: bytes) -> Any:
    """What :func:`fast_json` wrote.

    :raises ValueError: no JSON.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # it would look through all that is being read, again and again
    try:
        return pydantic_core.from_json(data)
    except ValueError:
        return json.loads(data)
    finally:
        if was_enabled:
            gc.enable()


def write_whole(path: Path, data: str | bytes | Iterable[bytes]) -> None:
    """Put ``data`` (text as UTF-8, bytes, or pieces of bytes) into the file ``path``.

    A reader sees the old file or the whole new one, through links as well; a device gets the bytes,
    and the file takes the place of a named pipe, which nobody might read.

    :raises OSError: it cannot be written; its ``filename`` is ``path``, and the old file is left.
    """
    if isinstance(data, str):
        data = data.encode("utf-8", "backslashreplace")  # half a surrogate pair has no UTF-8
    target = path.resolve()
    known = target.is_file() or target.is_dir() or target.is_fifo()
    is_special = target.exists() and not known
    # Beside it, because a rename is atomic within one file system only.
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with (target if is_special else temporary).open("wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
        if not is_special:
            temporary.replace(target)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        with suppress(OSError):  # it has its name now, or the first error is the one to tell
            temporary.unlink()


# ------------------------------------------------------------------------------ the stored form


class Stored:
    """A dataclass that is stored as JSON: a mapping of all its fields, nested ones as well.

    Tuples become lists, frozensets sorted lists, fractions ``"numerator/denominator"``; tensors
    stay as they are, for files of :mod:`shardproof.tensor_bytes`.  Reading goes by the annotations.
    """

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The stored form; :meth:`from_dict` reads it."""
        return _by_field(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The instance that :meth:`to_dict` described.

        :raises TypeError: ``data`` has other fields, or lacks one without a default.
        """
        instance: Self = _made(cls, data)
        return instance


class SparselyStored(Stored):
    """Of its fields, those that are ``None`` by default and stayed so are not stored."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The stored form."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        whole = super().to_dict()
        return {n: v for n, v in whole.items() if v is not None or defaults[n] is not None}


def to_plain(value: Any) -> Any:
    """The stored form of ``value``, which may hold dataclasses."""
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is tuple or kind is list:
        return [v if type(v) in _AS_THEY_ARE else to_plain(v) for v in value]
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {k: v if type(v) in _AS_THEY_ARE else to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [v if type(v) in _AS_THEY_ARE else to_plain(v) for v in value]
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Fraction):
        return f"{value.numerator}/{value.denominator}"
    return _by_field(value) if dataclasses.is_dataclass(value) else value


def from_plain(kind: type[T], data: Any) -> T:
    """The value of type ``kind`` whose stored form is ``data``."""
    value: T = _reader(kind)(data)  # type: ignore[arg-type]  # types are hashable
    return value


def read_annotations() -> None:
    """Read those of every stored class that is imported, so that no forked process has to."""
    kinds = [Stored]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if dataclasses.is_dataclass(kind):
            field_names(kind)
            _readers(kind)


def require_types(value: Any) -> None:
    """Ask whether the fields of a dataclass, read from what others wrote, are as annotated.

    :raises TypeError: one is not.
    """
    kind: Any = type(value)
    for name, fits in _fitting(kind).items():
        if not fits(getattr(value, name)):
            raise TypeError(f"{name} is {getattr(value, name)!r:.80}")


Fits = Callable[[Any], bool]


@cache
def _fitting(kind: type) -> dict[str, Fits]:
    """What tells for each field of a dataclass whether a value is as annotated."""
    return {name: _fits(hint) for name, hint in _hints(kind).items()}


@cache
def _fits(kind: Any) -> Fits:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (UnionType, typing.Union):
        either = [_fits(part) for part in parts]
        return lambda value: any(fits(value) for fits in either)
    if origin is typing.Literal:
        return lambda value: isinstance(value, str)
    if dataclasses.is_dataclass(kind):
        return lambda value: (
            isinstance(value, typing.cast(type, kind))
            and all(
                fits(getattr(value, name))
                for name, fits in _fitting(typing.cast(type, kind)).items()
            )
        )
    if isinstance(origin, type) and issubclass(origin, Mapping):
        of_values = _fits(parts[1])
        return lambda value: isinstance(value, Mapping) and all(map(of_values, value.values()))
    if isinstance(origin, type) and issubclass(origin, Collection):
        item = _fits(parts[0])
        return lambda value: isinstance(value, tuple | list | frozenset) and all(map(item, value))
    if kind is float:  # what is not finite is text in JSON
        return lambda value: type(value) in (int, float) or value in ("nan", "inf", "-inf")
    return lambda value: kind not in _AS_THEY_ARE or type(value) is kind


@cache
def _hints(kind: Any) -> dict[str, Any]:
    # torch is not imported for the sake of an annotation.
    hints = typing.get_type_hints(kind, localns={"Tensor": Any})
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


_AS_THEY_ARE = frozenset((str, int, float, bool, NoneType))

Reader = Callable[[Any], Any]


def _by_field(value: Any) -> dict[str, Any]:
    names, held = field_names(type(value)), value.__getattribute__  # type: ignore[arg-type]
    items = [(name, held(name)) for name in names]
    return {n: v if type(v) in _AS_THEY_ARE else to_plain(v) for n, v in items}


@cache
def field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _made(kind: Any, data: Mapping[str, Any]) -> Any:
    readers = _readers(kind)
    return kind(**{n: readers[n](v) if n in readers else v for n, v in data.items()})


@cache
def _readers(kind: Any) -> dict[str, Reader]:
    """A reader for each field of a dataclass that is not stored as it is."""
    readers = {name: _reader(hint) for name, hint in _hints(kind).items()}
    return {name: reader for name, reader in readers.items() if reader is not _same}


@cache
def _reader(kind: Any) -> Reader:
    """What makes a value of type ``kind`` of its stored form."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (UnionType, typing.Union):
        readers = [reader for reader in map(_reader, parts) if reader is not _same]
        return _optional(readers[0]) if readers else _same
    if hasattr(kind, "from_dict"):
        reader: Reader = kind.from_dict
        return reader
    if dataclasses.is_dataclass(kind):
        return partial(_made, kind)
    if origin is frozenset or kind is Fraction:
        return origin or Fraction
    if not isinstance(origin, type) or not issubclass(origin, Collection):
        return _same
    if issubclass(origin, Mapping):
        return _mapping(_reader(parts[1]))
    part = _reader(parts[0]) if origin is not tuple or parts[1:] == (...,) else _same
    return _items(part, tuple if origin is tuple else list)


def _same(data: Any) -> Any:
    return data


def _optional(reader: Reader) -> Reader:
    return lambda data: None if data is None else reader(data)


def _mapping(reader: Reader) -> Reader:
    if reader is _same:
        return _same
    return lambda data: {key: reader(item) for key, item in data.items()}


def _items(reader: Reader, kind: type) -> Reader:
    if reader is _same:
        return _same if kind is list else kind
    return lambda data: kind(map(reader, data))
