"""The checkpoints of one system: pending saves, the loaded state, and the branch of the next
save.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.impls.reference.checkpoint.asynchronous import AsynchronousSharded
from shardproof.impls.reference.checkpoint.contents import Contents
from shardproof.impls.reference.checkpoint.full import Full
from shardproof.impls.reference.checkpoint.loading import Loaded, Loading
from shardproof.impls.reference.checkpoint.root import Branch
from shardproof.impls.reference.checkpoint.saver import Saver
from shardproof.impls.reference.checkpoint.sharded import Sharded

if TYPE_CHECKING:
    from shardproof.impls.reference.engine.engine import Engine


class Checkpointing:
    """Save and load ``system`` as its option ``checkpoint`` says."""

    # What saves, one for each format, and what reads.
    full_type: type[Saver] = Full
    sharded_type: type[Saver] = Sharded
    asynchronous_type: type[Saver] = AsynchronousSharded
    contents_type: type[Contents] = Contents
    loading_type: type[Loading] = Loading

    def __init__(self, system: Engine) -> None:
        self.system = system
        self.savers: dict[Path, Saver] = {}
        #: What the last load took, and what it left out.
        self.loaded: Loaded | None = None
        self.run: str | None = None

    def save(self, path: Path, extra: Mapping[str, Any]) -> Saver:
        """Start a save into the root ``path``.

        :raises CheckpointError: nothing is committed.
        """
        saver = self.savers.get(path)
        if saver is None:
            chosen = self.system.checkpoints
            kind: type[Saver] = getattr(self, f"{chosen.format}_type")
            saver = kind(path, self.system.mesh, chosen.keep, self.branch(path))
            self.savers[path] = saver
        saver.save(self.contents_type(self.system).state(extra))
        self.run = saver.root.branch.run
        return saver

    def branch(self, root: Path) -> Branch | None:
        """The branch that a save into ``root`` continues: that of the load, or a new one for
        another root.
        """
        if self.loaded is not None and root.resolve() == self.loaded.folder.parent.resolve():
            return self.loaded.branch
        return Branch(self.run) if self.run else None

    def load(self, path: Path) -> Mapping[str, Any]:
        """Load from ``path`` and return the saved ``extra``.

        :raises CheckpointError: the checkpoint is damaged, or is of another model.
        """
        self.finish_saves()
        self.loaded = self.loading_type(self.system, path).run()
        self.run = self.loaded.branch.run
        return self.loaded.extra

    def finish_copies(self) -> None:
        """Wait until pending saves have copied the tensors that are about to change."""
        for saver in self.savers.values():
            saver.before_update()

    def finish_saves(self) -> None:
        """Wait for all pending saves."""
        while self.savers:
            self.savers.popitem()[1].wait()

    def abort(self) -> None:
        """Abandon pending saves."""
        for saver in self.savers.values():
            saver.abort()
