"""What is done in one case: its ranks are run, its oracle is trained, its evidence is made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardproof.case import Case

if TYPE_CHECKING:
    from shardproof.cases.launcher import Launcher
    from shardproof.evidence.assembled import Evidence
    from shardproof.evidence.records import RankRecord
    from shardproof.launch.outcome import RankOutcome
    from shardproof.launch.rank_process import Program
    from shardproof.oracle.truth import Truth

#: The world of a leg, and its program, made from the records of the leg before (the first: none).
Leg = tuple[int, "Callable[[Sequence[RankRecord]], Program]"]


@dataclass
class Left:
    """How ranks ended, and the records of each leg of the run; no records where a rank broke."""

    outcomes: list[RankOutcome]
    legs: list[list[RankRecord]] = field(default_factory=list)


class Work(ABC):
    """The work of one case."""

    @property
    def no_oracle_because(self) -> str:
        """Why no oracle can be trained; empty: one can, or none is needed."""
        return ""

    @abstractmethod
    def run(self, case: Case, launcher: Launcher) -> Left:
        """Run the ranks of ``case``, which is as plans want the first run."""

    @abstractmethod
    def train_oracle(self, left: Left, cache: Path) -> Truth:
        """What the records are compared with; oracles that several cases share lie in ``cache``."""

    @abstractmethod
    def evidence(self, left: Left, truth: Truth) -> Evidence:
        """What the checks look at."""
