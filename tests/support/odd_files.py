"""Files that are no regular files."""

from __future__ import annotations

import os
from pathlib import Path

KINDS = ("pipe", "device", "folder")


def make(kind: str, path: Path) -> Path:
    """Make such a file at ``path``: reading it would block, or never end."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return path
