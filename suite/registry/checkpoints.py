"""The suite's own checkpoints (``impls/reference/checkpoint/``), for commands, which may not import
implementations themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardproof.errors import Problem, SelectionError
from shardproof.impls.pytorch.checkpoint.folders import holds_dcp
from shardproof.impls.pytorch.checkpoint.reading import DcpCheckpoint
from shardproof.impls.pytorch.checkpoint.writing import write_dcp
from shardproof.impls.reference.checkpoint.convert import blocks, nothing_left
from shardproof.impls.reference.checkpoint.convert import convert as convert_checkpoint
from shardproof.impls.reference.checkpoint.errors import CheckpointError
from shardproof.impls.reference.checkpoint.errors import told as why_not_saved
from shardproof.impls.reference.checkpoint.reading.checkpoint import Checkpoint

__all__ = ["FORMS", "Checkpoint", "as_problem", "blocks", "convert", "opened", "told"]

FORMS = ("full", "sharded", "dcp")


@contextmanager
def told() -> Iterator[None]:
    """A checkpoint that cannot be read or written is bad input.

    :raises SelectionError: in place of the checkpoint's own error.
    """
    try:
        yield
    except CheckpointError as error:
        raise SelectionError(as_problem(error)) from None


def as_problem(error: CheckpointError) -> Problem:
    """One line for people."""
    return Problem(error.what, error.remedy, file=error.file)


@contextmanager
def opened(path: Path) -> Iterator[Checkpoint]:
    """The checkpoint ``path``, or the newest in it.

    :raises SelectionError: there is none, or what is read of it is damaged.
    """
    kind = DcpCheckpoint if holds_dcp(path) else Checkpoint
    with told(), kind.open(path) as checkpoint:
        yield checkpoint


def convert(source: Checkpoint, root: Path, form: str, ranks: int) -> Path:
    """Write ``source`` into ``root`` in another format of :data:`FORMS`; the new one's folder.

    :raises SelectionError: it is damaged, or ``root`` holds that step or another run.
    """
    with told(), nothing_left(root):
        try:
            if form == "dcp":
                return write_dcp(source, root)
            return convert_checkpoint(source, root, form, ranks)
        except OSError as error:
            raise CheckpointError(*why_not_saved(error, root)) from None
