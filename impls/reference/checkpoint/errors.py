"""The errors that all readers and writers of checkpoints raise, with remedies."""

from __future__ import annotations

import errno
from pathlib import Path

#: What to do about a file that is not as it was written.
TAKE_ANOTHER = "load another checkpoint, or copy this checkpoint again from an undamaged source"
_ROOM = "free space on the disk of this path, or name another folder"
_RIGHTS = "make the path writable, or name another folder"
_NAME = "this path is a file, but must be a folder: name another folder"
#: What to do about what the system says.
REMEDIES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "save with more ranks, so that each file is smaller, or save on another file "
    "system",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: _RIGHTS,
    errno.EEXIST: _NAME,
    errno.ENOTDIR: _NAME,
    errno.ENAMETOOLONG: "name a folder with a shorter path",
}
#: File, what is wrong, and what to do: an error on its way to other ranks.
Failure = tuple[str, str, str]


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read: the file, the problem and the remedy."""

    def __init__(self, file: Path | str, what: str, remedy: str) -> None:
        self.file, self.what, self.remedy = str(file), what, remedy
        super().__init__(f"{file}: {what} - {remedy}")


class NotCommitted(CheckpointError):
    """No manifest: an interrupted save, or no checkpoint at all."""


class CheckpointWarning(UserWarning):
    """A part of a checkpoint that has no place in the system that loaded it."""


def told(error: Exception, place: Path) -> Failure:
    """The message for any ``error`` that occurred while ``place`` was used."""
    if isinstance(error, CheckpointError):
        return error.file, error.what, error.remedy
    if isinstance(error, OSError):
        what = f"this path cannot be used: {error.strerror or error}"
        remedy = REMEDIES.get(
            error.errno or 0, "check the disk of this path, or name another folder"
        )
        return str(error.filename or place), what, f"{remedy}; committed checkpoints are unchanged"
    what = f"{type(error).__name__} was raised: {error or '(no message)'}"
    return str(place), what, "read the traceback of that rank"
