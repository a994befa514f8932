"""Files that a reader finds whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

#: A file system that is full, over quota, read-only, or failing.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def write_whole(path: Path, data: str | bytes | Iterable[bytes], *, durable: bool = False) -> None:
    """Put ``data`` (text as UTF-8, bytes, or pieces of bytes) into the file ``path``.

    A reader sees the old file or the whole new one.  ``durable``: the bytes are on disk when this
    returns, so that they also survive a power cut.

    :raises OSError: it cannot be written; its ``filename`` is ``path``, and the old file is left.
    """
    pieces = (
        [data.encode()] if isinstance(data, str) else [data] if isinstance(data, bytes) else data
    )
    # Beside it, because a rename is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(pieces)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        temporary.unlink(missing_ok=True)
