"""The runs that a plan adds to a case, before and after its own; the plan of a relation."""

from __future__ import annotations

from abc import ABC, abstractmethod

from shardproof import registry
from shardproof.case import Case
from shardproof.cases.launcher import Launcher
from shardproof.cases.training import beside, without_oracle
from shardproof.checks import relations
from shardproof.contract import Refused
from shardproof.evidence.assembled import Beside, Evidence
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
        """Attach the further runs to ``evidence`` of the first one.

        How ranks ended on which the planned fault fell; empty: it fell on those of the first run.
        """
        return []

    def after_fault(self, case: Case, launcher: Launcher) -> Evidence | None:
        """Evidence of what is left where a fault ended the first run; ``None``: there is none."""
        return None


class Relation(Plan):
    """One more run, derived from the first by a relation and compared with it
    (``checks/relations.py``).
    """

    def is_in(self, case: Case) -> bool:
        """Whether the check is asked."""
        return "relations" in case.checks

    def after(self, evidence: Evidence, launcher: Launcher) -> list[RankOutcome]:
        """Run the derived case, or say why there is none."""
        try:
            case, skip = relations.derive(evidence)
        except (Refused, registry.BrokenImplementation) as error:
            found = Beside(problem=f"the second run cannot be made: {error}")
        else:
            found = Beside(skip=skip)
            if case is not None:
                what = "the second run"
                found, _ = beside(launcher, case, "derived", what, without_oracle(evidence))
        evidence.beside["relation"] = found
        return []
