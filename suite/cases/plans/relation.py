"""The second run that a relation derives from the first (``checks/relations.py``)."""

from __future__ import annotations

from shardproof import registry
from shardproof.case import Case
from shardproof.cases.launcher import Launcher
from shardproof.cases.plans.plan import Plan
from shardproof.cases.training import beside, without_oracle
from shardproof.checks import relations
from shardproof.contract import Refused
from shardproof.evidence.assembled import Beside, Evidence
from shardproof.launch.ranks import RankOutcome


class Relation(Plan):
    """One more run, which is compared with the first."""

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
