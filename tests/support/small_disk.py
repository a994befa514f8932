"""A file system that is soon full, for tests of those who write."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[Path]:
    """A file system of ``kib`` KiB at the new ``folder``; skips where none can be mounted."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, capture_output=True)


def remount(folder: Path, options: str) -> None:
    """Change the file system at ``folder``: ``size=64m``, or ``ro``."""
    command = ["mount", "-o", f"remount,{options}", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
