"""The part that the three formats share: a root, a mesh, and the end of a save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from shardproof.comm import Mesh
from shardproof.impls.reference.checkpoint.agreement import Agreed, State, agree
from shardproof.impls.reference.checkpoint.files import FileLayer
from shardproof.impls.reference.checkpoint.manifest import About, Listed, Manifest
from shardproof.impls.reference.checkpoint.root import Branch, Root
from shardproof.impls.reference.checkpoint.together import Together


class Saver:
    """Save the checkpoints of one run in ``root``, a folder that all ranks share.

    The newest ``keep`` stay.  ``branch`` says what is gone on with; without it, a run begins.
    """

    kind: ClassVar[str]
    agreed: Agreed | None = None
    layer_type: type[FileLayer] = FileLayer
    root_type: type[Root] = Root

    def __init__(
        self,
        root: Path,
        mesh: Mesh,
        keep: int = 2,
        branch: Branch | None = None,
        layer: FileLayer | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self.keep, self.layer = keep, layer or self.layer_type()
        self.together = Together(mesh, root)
        self.root = self.root_type(self.layer, root, branch or Branch())

    @property
    def rank(self) -> int:
        """This rank's place in the mesh."""
        return self.together.rank

    def save(self, state: State) -> Path:
        """Save; a collective call. Return the folder of the checkpoint.

        :raises CheckpointError: on all ranks, if one cannot; nothing is committed.
        """
        raise NotImplementedError

    def before_update(self) -> None:
        """Prepare for a change of the saved tensors."""

    def wait(self) -> None:
        """Return when all saves are committed; a collective call."""

    def abort(self) -> None:
        """Abandon pending saves without waiting for any rank."""

    def agree(self, state: State, from_rank0: bool = False) -> Agreed:
        """Agree on which rank writes what into which folder (agreement.py); a collective call."""
        last, self.agreed = self.agreed, None  # of one that fails nothing is left
        self.agreed = agree(self.together, self.root, state, last, from_rank0)
        return self.agreed

    def commit(self, agreed: Agreed, about: About, listed: Sequence[Listed | None]) -> None:
        """Write the manifest for the files ``listed``, on rank 0."""
        files = tuple(one for one in listed if one is not None)
        branch = self.root.branch
        manifest = Manifest(self.kind, agreed.id, branch.run, self.root.standing(), about, files)
        self.root.commit(agreed.folder, manifest, self.keep)

    def commit_everywhere(
        self, agreed: Agreed, about: About, listed: Sequence[Listed | None]
    ) -> None:
        """Commit on rank 0; all ranks return when it is done, or raise. Collective."""
        self.together.all(lambda: None if self.rank else self.commit(agreed, about, listed))

    @contextmanager
    def abandoned_if_it_fails(self) -> Iterator[None]:
        """On an error, let rank 0 remove the attempt: on a full disk its space is needed."""
        try:
            yield
        except BaseException:
            if self.rank == 0:
                with suppress(OSError):  # the first error is the one to tell
                    self.root.abandon()
            raise
