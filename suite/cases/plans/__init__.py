"""Plans of a case in addition to its training: relations to another run, and checkpoints.

Each is an object with hooks for before and after the first run, called by the leader.  Ranks import
nothing from here: what they do by a plan is in ``cases/saving.py`` and ``cases/membership.py``.
"""

from __future__ import annotations

from shardproof.case import Case
from shardproof.cases.plans.checkpoint import Checkpoint
from shardproof.cases.plans.plan import Plan, Relation

#: In the order in which their runs are made.
_ALL: tuple[Plan, ...] = (Relation(), Checkpoint())


def plans_of(case: Case) -> list[Plan]:
    """The plans that ``case`` has."""
    return [plan for plan in _ALL if plan.is_in(case)]
