"""The saved tensor that a piece is read from: its own, or one of equal value in another precision.

    piece of dtype T          read from, the first that there is
    a parameter               itself or its master, saved as T; then as what T is rounded from
    a frozen parameter        then itself, saved in the dtype that it is computed with
    a master                  itself or its parameter, saved as T
    a buffer                  itself, saved as T or as what the policy rounds to T
    other optimizer state     itself, saved as T

A strategy that keeps whole parameters has only the rounded value of a frozen one, and no master.
All else of another dtype is refused: it would be another value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardproof.contract import Piece
from shardproof.impls.reference.checkpoint.data_file import DTYPES
from shardproof.impls.reference.checkpoint.errors import CheckpointError
from shardproof.impls.reference.checkpoint.reading.checkpoint import Checkpoint, Name
from shardproof.impls.reference.engine.masters import SLOT as MASTER

if TYPE_CHECKING:
    from shardproof.impls.reference.engine.engine import Engine

NOUNS = {
    "parameters": "the parameter",
    "optimizer": "optimizer state",
    "buffers": "the buffer",
    "extra": "the reducer's state",
    "rng": "the generator",
}


@dataclass(frozen=True)
class Sources:
    """The sources in ``checkpoint`` for the pieces of ``system``."""

    system: Engine
    checkpoint: Checkpoint

    def of(self, kind: str, piece: Piece) -> Name:
        """The saved name that ``piece`` is read from.

        :raises CheckpointError: it was not saved, or with another dtype.
        """
        own, wanted = (kind, piece.name), piece.tensor.dtype
        names = [own]
        if kind == "parameters":
            names.append(("optimizer", f"{piece.name}.{MASTER}"))
        elif piece.name.endswith(f".{MASTER}"):
            names.append(("parameters", piece.name.removesuffix(f".{MASTER}")))
        there = {n: self.dtype(n) for n in names if n in self.checkpoint.copies}
        for dtype in (wanted, *self.rounded(kind, piece)):
            for name, saved in there.items():
                if saved == dtype:
                    return name
        if own in there:
            what = f"{NOUNS[kind]} {piece.name!r} was saved as {there[own]}, but is {wanted} here"
            raise self.refusal(what, "use the precision with which the checkpoint was saved")
        what = f"{NOUNS[kind]} {piece.name!r} was not saved"
        if (first := self.checkpoint.manifest.about.aliases.get(piece.name)) is not None:
            what += f"; when the checkpoint was saved, it was tied to {first!r}"
        raise self.refusal(what, "load into a new instance of the same model before its first step")

    def dtype(self, name: Name) -> torch.dtype:
        """The saved dtype."""
        return DTYPES[self.checkpoint.entries(name)[0].dtype]

    def rounded(self, kind: str, piece: Piece) -> Iterator[torch.dtype]:
        """Other dtypes in which the value of ``piece`` may have been saved."""
        policy, wanted, own = self.system.precision, piece.tensor.dtype, (kind, piece.name)
        if kind == "parameters":
            built = self.system.built[piece.name]
            computed = policy.compute(built)
            if computed == wanted:
                yield built
            if piece.name in self.system.frozen:
                yield computed
        elif kind == "buffers" and policy.buffers == wanted and own in self.checkpoint.copies:
            yield self.dtype(own)

    def refusal(self, what: str, remedy: str) -> CheckpointError:
        """An error that names the checkpoint."""
        return CheckpointError(self.checkpoint.folder, what, remedy)
