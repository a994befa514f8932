"""Files that a reader finds whole or not at all, and the stored form of dataclasses."""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import math
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, ClassVar, Self, TypeVar

import pydantic_core
import pydantic_core.core_schema

from shardproof.errors import Problem, SelectionError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

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
MOST_BYTES, MOST_LINE, _PART = 1 << 30, 64 << 20, 1 << 20

#: Type -> what reads and writes its stored form.
_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def damage_of(error: Exception, file: Path, line: int | None = None, name: str = "") -> Problem:
    """The problem of a file of a run that ``error`` was raised of; ``name``: what of it."""
    what = f"is damaged: {name}{type(error).__name__} {error}"
    return Problem(what, "run `shardproof verify` to list every change", None, str(file), line)


def open_input(path: Path) -> BinaryIO:
    """``path`` for reading, if it is a regular file: a pipe or ``/dev/zero`` may never end.

    :raises SelectionError: it is none.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # before it is opened: that waits for a pipe's writer
        remedy = "name a regular file, or copy the contents into one"
        raise SelectionError(Problem("is not a regular file", remedy, file=str(path)))
    return path.open("rb")


def read_input(path: Path, most: int = MOST_BYTES) -> bytes:
    """All bytes of :func:`open_input`.

    :raises SelectionError: as there, or it has more than ``most``.
    """
    data = bytearray()
    with open_input(path) as file:
        # In parts, for `read(n)` reserves n bytes whatever the file has.
        while len(data) <= most and (part := file.read(min(_PART, most + 1 - len(data)))):
            data += part
    if len(data) > most:
        raise SelectionError(
            Problem(f"exceeds {most >> 20} MiB", "name another file", file=str(path))
        )
    return bytes(data)


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of :func:`open_input`, with their ends.

    :raises SelectionError: as there, or one is longer than :data:`MOST_LINE`.
    """
    with open_input(path) as file:
        while line := file.readline(MOST_LINE + 1):
            if len(line) > MOST_LINE:
                what = f"has a line of more than {MOST_LINE >> 20} MiB"
                raise SelectionError(Problem(what, "copy the whole run again", file=str(path)))
            yield line


def why_not_writable(path: Path) -> str:
    """Why :func:`write_whole` could not write ``path``, with its folder made; empty: it could."""
    try:
        target = path.resolve()
        if target.is_dir():
            return os.strerror(errno.EISDIR)
        if target.is_fifo():
            return "is a pipe, which may never have a reader"
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
    """Read what :func:`fast_json` wrote.

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

    Tensors stay as they are, for files of :mod:`shardproof.tensor_bytes`.  A field whose type JSON
    has no form for is annotated with its :class:`Form`.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "arbitrary_types_allowed": True,
    }

    def to_dict(self) -> dict[str, Any]:
        """The stored form; :meth:`from_dict` reads it."""
        data: dict[str, Any] = to_plain(self)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The instance that :meth:`to_dict` described.

        :raises TypeError: ``data`` has other fields, lacks one without a default, or has one that
            cannot be converted to its type.
        """
        return from_plain(cls, data)


class SparselyStored(Stored):
    """Of its fields, those that are ``None`` by default and stayed so are not stored."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The stored form."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        whole = super().to_dict()
        return {n: v for n, v in whole.items() if v is not None or defaults[n] is not None}


@dataclasses.dataclass(frozen=True)
class Form:
    """Annotates a type with its stored form: ``read`` makes the value of it, ``write`` the form.

    ``check`` raises a ValueError at a value that cannot be.
    """

    read: Callable[[Any], Any] | None = None
    write: Callable[[Any], Any] | None = None
    check: Callable[[Any], None] | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """The schema that pydantic asks of an annotation."""
        core = pydantic_core.core_schema
        schema: Any = core.no_info_plain_validator_function(self.read) if self.read else None
        schema = schema or handler(source)
        if (check := self.check) is not None:
            schema = core.no_info_after_validator_function(lambda v: check(v) or v, schema)
        if self.write:
            schema["serialization"] = core.plain_serializer_function_ser_schema(self.write)
        return schema


#: Stored as ``"numerator/denominator"``.
Exact = Annotated[Fraction, Form(Fraction, lambda value: f"{value.numerator}/{value.denominator}")]


def _number(value: Any) -> float:
    if type(value) in (int, float) or value in ("nan", "inf", "-inf"):
        return float(value)
    raise ValueError("Input should be a number")


#: Infinity and NaN, which JSON lacks, are stored as text.
Number = Annotated[float, Form(_number)]


def to_plain(value: Any, kind: Any = None) -> Any:
    """The stored form of ``value``; ``kind``: its type, where that is no dataclass."""
    return _adapter(kind or type(value)).dump_python(value, warnings=False)


def from_plain(kind: type[T], data: Any) -> T:
    """The value of type ``kind`` whose stored form is ``data``.

    :raises TypeError: ``data`` is no stored form of ``kind``.
    """
    with _one_line():
        value: T = _adapter(kind).validate_python(data)
        return value


def from_others(kind: type[T], data: Any) -> T:
    """As :func:`from_plain`, of what others may have written: no value is converted to its type.

    :raises TypeError: also where a number is given as text, say.
    """
    try:
        text = pydantic_core.to_json(data, inf_nan_mode="constants")
    except ValueError:  # half a surrogate pair, say
        text = json.dumps(standard(data)).encode()
    with _one_line():
        value: T = _adapter(kind).validate_json(text, strict=True)
        return value


def standard(value: Any) -> Any:
    """``value`` as JSON has it; numbers that are not finite become ``"nan"`` or ``"inf"``."""
    if isinstance(value, Mapping):
        return {str(key): standard(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [standard(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def learn_forms() -> None:
    """Work out the forms of all stored classes imported so far, before a process is forked."""
    kinds = [Stored]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if dataclasses.is_dataclass(kind):
            _adapter(kind)


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        from pydantic import TypeAdapter

        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except pydantic_core.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise TypeError(f"{place}: {first['msg']}, not {first['input']!r:.80}") from None
