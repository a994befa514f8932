"""What a plan of a case adds to its runs, before them and after them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from shardproof.case import Case
from shardproof.cases.launcher import Launcher
from shardproof.evidence.assembled import Evidence
from shardproof.launch.ranks import RankOutcome


class Plan(ABC):
    """A plan, without state."""

    @abstractmethod
    def is_in(self, case: Case) -> bool:
        """Whether ``case`` has one."""

    def first(self, case: Case, launcher: Launcher) -> Case:
        """``case`` as its first run has it."""
        return case

    def after(self, evidence: Evidence, launcher: Launcher) -> list[RankOutcome]:
        """Put the runs beside ``evidence`` of the first one.

        How ranks ended on which the planned fault fell; empty: it fell on those of the first run.
        """
        return []

    def after_fault(self, case: Case, launcher: Launcher) -> Evidence | None:
        """Evidence of what is left where a fault ended the first run; ``None``: there is none."""
        return None
