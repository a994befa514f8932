"""Kinds of workload: one that trains a model, and those that train none, each with a folder.

    calls     calls of one collective operation, judged one by one     check ``collectives``
    samples   workload ``epochs``: a sampler shares a data set out     check ``data``
    votes     ranks vote on when training ends                         check ``stopping``

Each folder holds the row of the table below (``__init__.py``), the workload (``workload.py``), the
program of a rank (``rank_program.py``) and the check (``check.py``).  Scenarios, commands and the
verdict ask a ``kind.py``; a leader asks it for the work of a case (``cases/launcher.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardproof import workloads
from shardproof.case import Case, Lane, WorkloadSpec
from shardproof.cases.kinds.calls import CALLS
from shardproof.cases.kinds.kind import Kind, Schedules
from shardproof.cases.kinds.samples import SAMPLES
from shardproof.cases.kinds.votes import VOTES
from shardproof.contract import Implementation
from shardproof.registry.declaration import Declaration

if TYPE_CHECKING:
    from shardproof.cases.launcher import Work
    from shardproof.evidence.account import Account


class Trained(Kind):
    """A model is trained, of a family with its data and traits (``suite/workloads/``), and compared
    with an oracle.
    """

    def check(self, spec: WorkloadSpec, lane: Lane = "fp64") -> None:
        """Names and knobs, without a build."""
        workloads.check(spec, lane)

    def excludes(self, declaration: Declaration, case: Case, missing: str) -> str:
        """As the system declares."""
        return declaration.excludes_case(case, missing)

    def announce(self, account: Account, system: type[Implementation]) -> Schedules | None:
        """Those of a pipeline."""
        from shardproof.cases import training

        return training.announce(account, system)

    def work(
        self, account: Account, system: type[Implementation], schedules: Schedules
    ) -> Work | None:
        """A training run and its oracle."""
        from shardproof.cases import training

        return training.prepare(account, system, schedules)


#: By the name of the workload, those that train no model.
UNTRAINED = {kind.name: kind for kind in (CALLS, SAMPLES, VOTES)}
_TRAINED = Trained()


def of(spec: Any) -> Kind:
    """The kind of the workload that ``spec`` (anything with a ``name``) is about."""
    return UNTRAINED.get(spec.name, _TRAINED)
