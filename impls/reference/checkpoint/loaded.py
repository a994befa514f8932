"""What a load gives back: what is gone on with, and what had no place here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardproof.impls.reference.checkpoint.contents import DATA
from shardproof.impls.reference.checkpoint.manifest import About
from shardproof.impls.reference.checkpoint.root import Branch


@dataclass(frozen=True)
class Loaded:
    """What was loaded: the checkpoint, what is gone on with, and what had no place here.

    ``left_out`` are names; ``notes`` are sentences, of these and of hyperparameters that differ.
    ``bytes_read``: of this rank, data and metadata, each byte once (what was verified comes from
    the system's cache when it is read again).
    """

    folder: Path
    branch: Branch
    about: About
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    bytes_read: int

    @property
    def extra(self) -> dict[str, Any]:
        """As it was given to ``save``."""
        data = {DATA: dict(self.about.data)} if self.about.data else {}
        return {**self.about.extra, **data}
