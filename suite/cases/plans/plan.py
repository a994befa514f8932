"""What a plan of a case adds to its runs, before them and after them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from shardproof.case import Case
from shardproof.cases.launcher import Launcher
from shardproof.evidence.assembled import Evidence
from shardproof.launch.ranks import RankOutcome


@dataclass(frozen=True)
class Place:
    """Where a case runs: what starts its ranks, and the folder of cached oracles."""

    launcher: Launcher
    cache: Path


class Plan(ABC):
    """A plan, without state."""

    @abstractmethod
    def is_in(self, case: Case) -> bool:
        """Whether ``case`` has one."""

    def first(self, case: Case, place: Place) -> Case:
        """``case`` as its first run has it."""
        return case

    def after(self, evidence: Evidence, place: Place) -> list[RankOutcome]:
        """Put the runs beside ``evidence`` of the first one.

        How ranks ended on which the planned fault fell; empty: it fell on those of the first run.
        """
        return []

    def after_fault(self, case: Case, place: Place) -> Evidence | None:
        """Evidence of what is left where a fault ended the first run; ``None``: there is none."""
        return None
