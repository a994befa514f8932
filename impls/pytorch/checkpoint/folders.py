"""The checkpoints in a root: folders named after their steps, if committed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

#: The last file of a checkpoint, which is renamed into place: torch's, or that of one file.
DCP, FULL = ".metadata", "checkpoint.pt"
_NAME = re.compile(r"step-(\d{8,})")


def folder(root: Path, step: int) -> Path:
    """The folder of the checkpoint after ``step`` steps."""
    return root / f"step-{step:08}"


def committed(root: Path) -> list[Path]:
    """The checkpoints in ``root``, the newest first."""
    named = [(m, path) for path in root.iterdir() if (m := _NAME.fullmatch(path.name))]
    found = sorted(((int(match[1]), path) for match, path in named), reverse=True)
    return [path for _, path in found if is_committed(path)]


def is_committed(path: Path) -> bool:
    """Whether ``path`` is a checkpoint; a link never is, because it may point anywhere."""
    return not path.is_symlink() and any((path / name).is_file() for name in (DCP, FULL))


def find(path: Path) -> Path:
    """The checkpoint ``path``, or the newest of the root ``path``.

    :raises FileNotFoundError: there is none.
    """
    if is_committed(path):
        return path
    found = committed(path) if path.is_dir() else []
    if not found:
        raise FileNotFoundError(
            f"{path}: no checkpoint at this path, because neither {DCP} nor {FULL} exists - give "
            "the path of a checkpoint folder, or of its parent folder"
        )
    return found[0]


def retire(root: Path, keep: int) -> None:
    """Remove checkpoints older than the newest ``keep`` of ``root``."""
    kept = committed(root)[:keep]
    if len(kept) < keep:
        return
    for path in root.iterdir():
        if _NAME.fullmatch(path.name) and path.name < kept[-1].name:
            shutil.rmtree(path)


def holds_dcp(path: Path) -> bool:
    """Whether ``path`` is a folder of ``torch.distributed.checkpoint``, or contains one of a
    step.
    """
    if not path.is_dir():
        return False
    inside = (one for one in path.iterdir() if _NAME.fullmatch(one.name))
    return any((one / DCP).is_file() for one in (path, *inside) if not one.is_symlink())
