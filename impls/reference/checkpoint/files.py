"""The file layer: every disk operation of a checkpoint, as eight methods.

A test replaces it by a recorder, which replays every prefix of the operations and loses what was
not synced (``tests/support/lossy_disk.py``).  What may be lost, after POSIX:

    write             until ``sync`` of that file
    create, rename,   until ``sync_folder`` of the folder that holds the name: a name is part of
    unlink, folders   the folder, not of the file
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

#: Bytes of one call to the system.
_BLOCK = 64 << 20


class FileLayer:
    """The real disk.  Every method raises :class:`OSError` with the path in ``filename``."""

    def create(self, path: Path) -> int:
        """Create a new file, open for writing; fail if it exists."""
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)

    def write(self, path: Path, file: int, data: memoryview) -> None:
        """Append ``data`` (bytes) to the open ``file`` at ``path``."""
        while data:
            try:
                data = data[os.write(file, data[:_BLOCK]) :]
            except OSError as error:
                error.filename = str(path)
                raise

    def sync(self, path: Path, file: int) -> None:
        """Return when the bytes of ``file`` would survive a power cut."""
        try:
            os.fsync(file)
        except OSError as error:
            error.filename = str(path)
            raise

    def close(self, file: int) -> None:
        """Close it."""
        os.close(file)

    def make_folder(self, path: Path) -> None:
        """Create a new folder; fail if it exists."""
        path.mkdir()

    def sync_folder(self, path: Path) -> None:
        """Return when the names in ``path`` would survive a power cut."""
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def rename(self, old: Path, new: Path) -> None:
        """Rename the file atomically."""
        old.rename(new)

    def unlink(self, path: Path) -> None:
        """Remove the file's name."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    # ------------------------------------------------------------------------- made of the above

    def write_file(self, path: Path, blocks: Iterable[memoryview]) -> None:
        """Write and sync a new file of ``blocks``; its name needs :meth:`sync_folder`."""
        file = self.create(path)
        try:
            for block in blocks:
                self.write(path, file, block)
            self.sync(path, file)
        finally:
            self.close(file)

    def make_folders(self, path: Path) -> None:
        """Create and sync ``path`` and its missing parents."""
        if path.is_dir():
            return
        self.make_folders(path.parent)
        try:
            self.make_folder(path)
        except FileExistsError:
            if not path.is_dir():  # else another rank or job made it just now
                raise
        self.sync_folder(path.parent)

    def remove_all(self, path: Path, first: str = "") -> None:
        """Remove the folder ``path`` and its files; ``first`` is removed first and synced."""
        names = sorted(path.iterdir(), key=lambda file: file.name != first)
        for file in names:
            self.unlink(file)
            if file.name == first:
                self.sync_folder(path)
        self.remove_folder(path)
