"""What every reader and writer of checkpoints raises."""

from __future__ import annotations

from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read: the file, what is wrong, and what to do."""

    def __init__(self, file: Path | str, what: str, remedy: str) -> None:
        self.file, self.what, self.remedy = str(file), what, remedy
        super().__init__(f"{file}: {what} - {remedy}")


class NotCommitted(CheckpointError):
    """No manifest: a save that was cut short, or no checkpoint at all."""


#: What to do about a file that is not as it was written.
TAKE_ANOTHER = "load another checkpoint, or copy this one again from where it is whole"
