"""Communication between ranks: a small value of each for all, and an error of one that all raise.

Whatever may fail on one rank alone (its disk, its file, its memory) is done inside
:meth:`Together.all`.  So either all ranks go on or all raise, and none waits for one that is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from shardproof.comm import Mesh
from shardproof.impls.reference.checkpoint.errors import CheckpointError, Failure, told

T = TypeVar("T")


class Together:
    """The ranks of ``mesh``, which share ``place``."""

    def __init__(self, mesh: Mesh, place: Path) -> None:
        self.mesh, self.place = mesh, place

    @property
    def rank(self) -> int:
        """This rank's place in the mesh."""
        return self.mesh.ranks.index(self.mesh.rank)

    def everyone(self, value: T) -> list[T]:
        """The ``value`` of every rank, in the order of ranks; a collective call."""
        values = [value]
        for axis in reversed(self.mesh.axes):  # the innermost first, so that ranks come in order
            found = self.mesh.comm(axis).all_gather_object(values)
            values = [one for some in found for one in some]
        return values

    def all(self, action: Callable[[], T]) -> list[T]:
        """The results of ``action`` on every rank; if it raised on one, all raise. Collective.

        :raises CheckpointError: with the file and the words of the first rank that raised.
        """
        result: Any = None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must not wait
            return self.all_or_none(result, told(error, self.place), error)
        return self.all_or_none(result, None)

    def all_or_none(
        self, result: T, failure: Failure | None, cause: Exception | None = None
    ) -> list[T]:
        """The ``result`` of every rank, unless one reports a ``failure``. Collective.

        :raises CheckpointError: one does; from this rank's ``cause``, if it has one.
        """
        values = self.everyone((result, failure))
        for rank, (_, failed) in enumerate(values):
            if failed is not None:
                file, what, remedy = failed
                raise CheckpointError(file, f"{what} (rank {rank})", remedy) from cause
        return [value for value, _ in values]
