"""Loading among members that come and go: their number may be another one than at the save."""

from __future__ import annotations

from collections.abc import Iterator

from shardproof.impls.reference.checkpoint.checkpointing import Checkpointing
from shardproof.impls.reference.checkpoint.loading import Loading


class Joining(Loading):
    """What members saved goes on in any number of them: generators as well, by rank."""

    @property
    def has_same_ranks(self) -> bool:
        """Whether what is a rank's own goes by its number, also where there are more or fewer."""
        is_ours = self.checkpoint.manifest.about.strategy == self.system.strategy
        return is_ours or super().has_same_ranks

    def open(self, name: str) -> None:
        """Who joins draws on as the first member."""
        super().open(name)
        if self.rank >= self.checkpoint.manifest.about.world:
            self.contents.rank = 0

    def notes(self) -> Iterator[str]:
        """Nothing of a learning rate that follows the members."""
        follows = self.system.chosen.batch == "local"  # type: ignore[attr-defined]
        return (note for note in super().notes() if not (follows and note.startswith("lr was ")))


class MembersCheckpoints(Checkpointing):
    """Saves as all; loads as members do."""

    loading_type: type[Loading] = Joining
