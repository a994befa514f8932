"""Loading for elastic members, whose number may differ from that at the save."""

from __future__ import annotations

from collections.abc import Iterator

from shardproof.impls.reference.checkpoint.checkpointing import Checkpointing
from shardproof.impls.reference.checkpoint.loading import Loading


class Joining(Loading):
    """Resume the state of members in any number of them, including generators by rank."""

    @property
    def has_same_ranks(self) -> bool:
        """Whether per-rank state is assigned by number, even with more or fewer ranks."""
        is_ours = self.checkpoint.manifest.about.strategy == self.system.strategy
        return is_ours or super().has_same_ranks

    def open(self, name: str) -> None:
        """Open the checkpoint; a joining member uses the first member's generators."""
        super().open(name)
        if self.rank >= self.checkpoint.manifest.about.world:
            self.contents.rank = 0

    def notes(self) -> Iterator[str]:
        """Report nothing about a learning rate that follows the members."""
        follows = self.system.chosen.batch == "local"  # type: ignore[attr-defined]
        return (note for note in super().notes() if not (follows and note.startswith("lr was ")))


class MembersCheckpoints(Checkpointing):
    """Save as usual; load for any number of members."""

    loading_type: type[Loading] = Joining
