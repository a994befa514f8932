"""JSON from an untrusted writer, read within bounds of time and memory.

``json`` alone takes any size (a list of empty lists grows 20-fold in memory), keeps the last of two
equal keys, and follows any nesting until the interpreter stops it.  Here bytes and values are
counted before anything is parsed: every value but the first stands after ``,``, ``[``, ``{`` or
``:``, so these characters bound how many there are.

A file of ours ends with its own checksum, so that one flipped bit anywhere in it shows::

    {... ,
    "crc32": 1234567890}
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardproof.impls.reference.checkpoint.errors import TAKE_ANOTHER, CheckpointError

#: At most so many bytes and values are parsed: under 150 MiB of memory, whatever they are.
MOST_BYTES = 8 << 20
MOST_VALUES = 250_000
SMALLER = f"to save, use more ranks or fewer tensors; to load, {TAKE_ANOTHER}"
#: What stands between a file's fields and their checksum.
SEAL = b',\n"crc32": '


def seal(fields: Mapping[str, Any]) -> bytes:
    """Non-empty ``fields`` as JSON that ends with its checksum.

    :raises TypeError: a value that JSON has no form for.
    """
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items())
    body = ("{" + ",\n".join(lines)).encode()
    return body + SEAL + str(zlib.crc32(body)).encode() + b"}\n"


def unseal(data: bytes, file: Path) -> dict[str, Any]:
    """The fields that were given to :func:`seal`.

    :raises CheckpointError: changed since, or no such file.
    """
    body, mark, rest = data.rpartition(SEAL)
    if not mark or rest != str(zlib.crc32(body)).encode() + b"}\n":
        what = (
            "the file does not match the checksum at its end: it was cut off, or changed since "
            "it was written"
        )
        raise CheckpointError(file, what, TAKE_ANOTHER)
    return parse(body + b"}", file)


def require_bounds(data: bytes, file: Path) -> None:
    """Refuse fields beyond the reader's bounds before they are written.

    :raises CheckpointError: too many bytes or values.
    """
    if len(data) > MOST_BYTES:
        what = f"the file has {len(data)} bytes of JSON, but at most {MOST_BYTES} are allowed"
        raise CheckpointError(file, what, SMALLER)
    if sum(map(data.count, (b",", b"[", b"{", b":"))) > 2 * MOST_VALUES:
        what = f"the file has more than {MOST_VALUES} values of JSON"
        raise CheckpointError(file, what, SMALLER)


def parse(data: bytes, file: Path) -> dict[str, Any]:
    """Parse ``data`` as a mapping.

    :raises CheckpointError: too much of it, nested too deeply, a name twice, or no mapping.
    """
    require_bounds(data, file)
    try:
        found = json.loads(data, object_pairs_hook=_unique)
    except RecursionError:
        raise CheckpointError(
            file, "the JSON of this file is nested too deeply", TAKE_ANOTHER
        ) from None
    except ValueError as error:  # UnicodeDecodeError is one
        raise CheckpointError(
            file, f"this file is not valid JSON: {str(error)[:200]}", TAKE_ANOTHER
        ) from None
    if not isinstance(found, dict):
        raise CheckpointError(file, "the JSON of this file is not a mapping", TAKE_ANOTHER)
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = max(Counter(name for name, _ in pairs).items(), key=lambda item: item[1])[0]
        raise ValueError(f"the key {twice[:80]!r} occurs twice in one mapping")
    return found


class Fields:
    """A JSON mapping with typed access to fields; errors name file and field."""

    def __init__(self, data: object, file: Path, place: str = "") -> None:
        self.file, self.place = file, place
        if not isinstance(data, dict):
            raise self.wrong("", "a mapping", data)
        self.data: dict[str, Any] = data

    def wrong(self, name: str, wanted: str, value: object) -> CheckpointError:
        """The error that field ``name`` should be ``wanted``."""
        where = f"{self.place}{name}" or "the content"
        what = f"{where} must be {wanted}, not {repr(value)[:80]}"
        return CheckpointError(self.file, what, TAKE_ANOTHER)

    def text(self, name: str, most: int = 1000) -> str:
        """A text of at most ``most`` characters."""
        value = self.data.get(name)
        if not isinstance(value, str) or len(value) > most:
            raise self.wrong(name, f"a string of at most {most} characters", value)
        return value

    def number(self, name: str, most: int = 1 << 62) -> int:
        """A whole number from 0 to ``most``."""
        value = self.data.get(name)
        if type(value) is not int or not 0 <= value <= most:
            raise self.wrong(name, f"a whole number from 0 to {most}", value)
        return value

    def numbers(self, name: str, most: int = 1 << 62) -> tuple[int, ...]:
        """A list of whole numbers from 0 to ``most``, at most 64 of them."""
        value = self.items(name)
        if len(value) > 64 or any(type(v) is not int or not 0 <= v <= most for v in value):
            raise self.wrong(name, f"a list of at most 64 whole numbers from 0 to {most}", value)
        return tuple(value)

    def items(self, name: str) -> list[Any]:
        """A list."""
        value = self.data.get(name)
        if not isinstance(value, list):
            raise self.wrong(name, "a list", value)
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """A mapping."""
        value = self.data.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, "a mapping", value)
        return value
