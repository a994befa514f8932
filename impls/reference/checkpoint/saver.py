"""What the three formats share: a root, a mesh, words between ranks, and the end of a save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shardproof.comm import Mesh
from shardproof.impls.reference.checkpoint.commit import abandon, commit
from shardproof.impls.reference.checkpoint.errors import CheckpointError
from shardproof.impls.reference.checkpoint.files import FileLayer
from shardproof.impls.reference.checkpoint.manifest import About, Listed, Manifest

if TYPE_CHECKING:
    from shardproof.impls.reference.checkpoint.agreement import Agreed, State


class Saver:
    """Saves the checkpoints of one run in ``root``, a folder that all ranks share.

    The newest ``keep`` stay.  ``run`` names the run that is gone on with (that of the manifest that
    was loaded); a new one gets a name.
    """

    kind: ClassVar[str]
    layer_type: type[FileLayer] = FileLayer

    def __init__(
        self,
        root: Path,
        mesh: Mesh,
        keep: int = 2,
        run: str | None = None,
        layer: FileLayer | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self.root, self.mesh, self.keep, self.run = root, mesh, keep, run
        self.layer = layer or self.layer_type()

    @property
    def rank(self) -> int:
        """This rank's place in the mesh."""
        return self.mesh.ranks.index(self.mesh.rank)

    def save(self, state: State) -> Path:
        """Save; a collective call.  The folder of the checkpoint.

        :raises CheckpointError: on all ranks, if one cannot; nothing is committed.
        """
        raise NotImplementedError

    def wait(self) -> None:
        """Return when all that was saved is committed; a collective call."""

    # --------------------------------------------------------------------- words between ranks

    def everyone(self, value: Any) -> list[Any]:
        """The ``value`` of every rank, in the order of ranks; a collective call."""
        values = [value]
        for axis in reversed(self.mesh.axes):  # the innermost first, so that ranks come in order
            found = self.mesh.comm(axis).all_gather_object(values)
            values = [one for some in found for one in some]
        return values

    def together(self, action: Callable[[], Any]) -> list[Any]:
        """What ``action`` returned on every rank; if it raised on one, all raise.  Collective.

        :raises CheckpointError: with the file and the words of the first rank that raised.
        """
        result, failure = None, None
        try:
            result = action()
        except (CheckpointError, OSError) as error:
            failure = told(error)
        return self.all_or_none(result, failure)

    def all_or_none(self, result: Any, failure: tuple[str, str, str] | None) -> list[Any]:
        """The ``result`` of every rank, unless one tells a ``failure``.  Collective.

        :raises CheckpointError: one does.
        """
        values = self.everyone((result, failure))
        for rank, (_, failed) in enumerate(values):
            if failed is not None:
                file, what, remedy = failed
                raise CheckpointError(file, f"{what} (rank {rank})", remedy)
        return [value for value, _ in values]

    # ------------------------------------------------------------------------ the end of a save

    def commit(self, agreed: Agreed, about: About, listed: Sequence[Listed | None]) -> None:
        """Write the manifest over the files ``listed``, on rank 0."""
        files = tuple(one for one in listed if one is not None)
        assert self.run is not None
        manifest = Manifest(self.kind, agreed.id, self.run, about, files)
        commit(self.layer, agreed.folder, manifest, self.keep)

    def commit_everywhere(
        self, agreed: Agreed, about: About, listed: Sequence[Listed | None]
    ) -> None:
        """The same; all ranks return when it is done, or raise.  Collective."""
        self.together(lambda: None if self.rank else self.commit(agreed, about, listed))

    @contextmanager
    def abandoned_if_it_fails(self, agreed: Agreed) -> Iterator[None]:
        """An attempt that fails is removed by rank 0: on a full disk its room is needed."""
        try:
            yield
        except CheckpointError:
            if self.rank == 0:
                with suppress(OSError):  # the first error is the one to tell
                    abandon(self.layer, agreed.folder)
            raise


def told(error: CheckpointError | OSError) -> tuple[str, str, str]:
    """File, what and remedy of an error while saving."""
    if isinstance(error, CheckpointError):
        return error.file, error.what, error.remedy
    remedy = "make room there or name another folder; the last committed checkpoint is untouched"
    return str(error.filename), f"cannot be written: {error.strerror or error}", remedy
