"""Opening untrusted files: only regular ones of bounded size, never a link."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from shardproof.impls.reference.checkpoint.errors import TAKE_ANOTHER, CheckpointError
from shardproof.impls.reference.checkpoint.reading.guarded_json import MOST_BYTES


def open_regular(path: Path) -> int:
    """``path``, open for reading.

    :raises CheckpointError: missing, a link, which may lead anywhere, or no regular file.
    """
    try:
        # Not blocking: a named pipe would wait for its writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(path, flags)
    except FileNotFoundError:
        raise CheckpointError(path, "this file is missing", TAKE_ANOTHER) from None
    except (OSError, ValueError) as error:  # a link is ELOOP
        why = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(path, f"this file cannot be opened: {why}", TAKE_ANOTHER) from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointError(path, "this path is not a regular file", TAKE_ANOTHER)
    return file


def size_of(path: Path) -> int:
    """Bytes of a file.

    :raises CheckpointError: as :func:`open_regular`.
    """
    file = open_regular(path)
    try:
        return os.fstat(file).st_size
    finally:
        os.close(file)


def read_small(path: Path) -> bytes:
    """Read a whole JSON file.

    :raises CheckpointError: as :func:`open_regular`, or it is over :data:`MOST_BYTES`.
    """
    file = open_regular(path)
    try:
        if os.fstat(file).st_size > MOST_BYTES:
            raise CheckpointError(path, f"the file has more than {MOST_BYTES} bytes", TAKE_ANOTHER)
        return exactly(file, path, 0, os.fstat(file).st_size)
    finally:
        os.close(file)


def read_into(view: memoryview, file: int, path: Path, begin: int) -> None:
    """Fill ``view`` with the bytes from ``begin`` on.

    :raises CheckpointError: the file ends before, or cannot be read.
    """
    while view:
        try:
            count = os.preadv(file, [view], begin)
        except OSError as error:
            what = f"the file cannot be read at byte {begin}: {error.strerror}"
            raise CheckpointError(path, what, TAKE_ANOTHER) from None
        if not count:
            what = f"the file ends at byte {begin}, before byte {begin + len(view)}"
            raise CheckpointError(path, what, TAKE_ANOTHER)
        view, begin = view[count:], begin + count


def exactly(file: int, path: Path, begin: int, end: int) -> bytes:
    """Read bytes ``begin`` to ``end``.

    :raises CheckpointError: the file ends before, or cannot be read.
    """
    data = bytearray(end - begin)
    read_into(memoryview(data), file, path, begin)
    return bytes(data)
