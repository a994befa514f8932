"""Every plan.  Not in the package itself: ranks import parts of it that plans of a leader need."""

from __future__ import annotations

from shardproof.case import Case
from shardproof.cases.plans.checkpoint import Checkpoint
from shardproof.cases.plans.plan import Plan
from shardproof.cases.plans.relation import Relation

#: In the order in which their runs are made.
_ALL: tuple[Plan, ...] = (Relation(), Checkpoint())


def plans_of(case: Case) -> list[Plan]:
    """The plans that ``case`` has."""
    return [plan for plan in _ALL if plan.is_in(case)]
