"""Workloads that train a model: a family, its data and traits (``suite/workloads/``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardproof import workloads
from shardproof.case import Case, Lane, WorkloadSpec
from shardproof.cases.kinds.kind import Kind, Schedules
from shardproof.contract import Implementation
from shardproof.registry.declaration import Declaration

if TYPE_CHECKING:
    from shardproof.cases.launcher import Work
    from shardproof.evidence.account import Account


class Trained(Kind):
    """Steps of training, compared with an oracle."""

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
