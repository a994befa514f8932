"""Training runs of one case on its ranks: the first, and those beside it.

A leader makes a :class:`Launcher` for its case; out come how each rank ended, and the records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardproof import backends, registry, tensor_bytes, workloads
from shardproof.case import Case
from shardproof.cases.rank_program import run_rank
from shardproof.contract import Refused
from shardproof.evidence.assembled import Beside, Evidence
from shardproof.evidence.held import Shared
from shardproof.evidence.records import RankRecord
from shardproof.launch.ranks import Kept, RankOutcome, root_cause, run_ranks
from shardproof.oracle.truth import Truth
from shardproof.registry.declaration import Declaration
from shardproof.workloads import Workload

Run = Callable[..., list[RankOutcome]]
#: Makes evidence of the records of a run beside the first.
Collect = Callable[[Case, Workload, list[RankRecord]], Evidence]


@dataclass(frozen=True)
class Launcher:
    """Starts the ranks of one case, each run in a folder of its own below ``workdir``.

    ``run`` is called like ``launch.ranks.run_ranks``; ``kept``: where the ``world`` ranks of the
    first run may come from, if they are not started for this case.
    """

    workdir: Path
    run: Run
    kept: Kept | None
    world: int

    @property
    def cannot_again(self) -> str:
        """Why ranks cannot run a second time; empty: they can."""
        elsewhere = "these ranks were started elsewhere: they cannot run a second time"
        return "" if getattr(self.run, "func", self.run) is run_ranks else elsewhere

    def train(
        self, case: Case, workload: Workload, declaration: Declaration, name: str = ""
    ) -> list[RankOutcome]:
        """How each rank ended, with the file of what it returned; one that hangs is an outcome."""
        workload.prepare(case.steps, case.data_coordinates)
        folder = self.workdir / name
        folder.mkdir(exist_ok=True)
        limits: dict[str, Any] = {"memory_bytes": int(case.memory_gib * 2**30)}
        fits = case.world == self.world or not backends.BACKENDS[case.backend].mpirun
        if self.kept and fits and _has_no_globals(declaration) and case.fault is None:
            limits["kept"] = self.kept
        disturbances = backends.disturbances_of(case.workload.traits, case.fault)
        # Calls run_rank on every rank, in a process or thread of its own.
        return self.run(
            case.backend,
            case.world,
            RankProgram(case, workload),
            folder,
            case.deadline,
            case.ledgers,
            disturbances=disturbances,
            one_core=disturbances is None,  # where orders are the point, there are more of them
            **limits,
        )

    def beside(
        self, case: Case, name: str, what: str, collect: Collect
    ) -> tuple[Beside, list[RankOutcome]]:
        """Run ``case`` beside the first, and how its ranks ended; ``what`` it is, in words."""
        if self.cannot_again:
            return Beside(skip=self.cannot_again), []
        try:
            declaration = Declaration.of(registry.load(case.implementation), case.options)
        except (Refused, registry.BrokenImplementation) as error:
            return Beside(problem=f"{what} cannot be made: {error}"), []
        missing = declaration.missing_here(case.backend, case.world)
        if reason := declaration.excludes_case(case, missing):
            return Beside(skip=f"{case.implementation} {reason}"), []
        workload = workloads.for_case(case)
        outcomes = self.train(case, workload, declaration, name)
        cause = root_cause(outcomes)
        if cause is not None and cause.error_type == "CannotReload":
            return Beside(skip=f"{case.implementation} {cause.message}"), outcomes
        if cause is not None:
            how = " ".join(filter(None, (cause.status, cause.error_type)))
            # Where the case works is another place in every run.
            message = cause.message.replace(f"{self.workdir}/", "")
            return Beside(problem=f"in {what} rank {cause.rank} {how}: {message}"), outcomes
        return Beside(collect(case, workload, records_of(outcomes))), outcomes


def without_oracle(base: Evidence) -> Collect:
    """Of the same model as ``base``, and compared with nothing but that."""
    return lambda case, _, records: Evidence(case, records, Truth(), base.workload, {})


def _has_no_globals(declaration: Declaration) -> bool:
    """Whether processes may be used again after a case of the system; threads could not share
    module globals either.
    """
    return "in_memory" in declaration.backends


@dataclass(frozen=True)
class RankProgram:
    """What every rank does; where ranks were not forked they make the workload anew."""

    case: Case
    workload: Workload

    def __call__(self, rank: int, world: int) -> dict[str, Any]:
        return run_rank(self.case, self.workload, rank).to_dict()

    def __reduce__(self) -> tuple[Callable[[Case], RankProgram], tuple[Case]]:
        return _for_case, (self.case,)


def _for_case(case: Case) -> RankProgram:
    workload = workloads.for_case(case)
    workload.prepare(case.steps, case.data_coordinates)  # once, where ranks are threads
    return RankProgram(case, workload)


def records_of(outcomes: Sequence[RankOutcome]) -> list[RankRecord]:
    """The records that the ranks left."""
    files = (outcome.record for outcome in outcomes)
    records = [RankRecord.from_dict(tensor_bytes.load(f)) for f in files if f is not None]
    equal: Shared = {}
    for record in records:
        for held in record.held():
            held.share(equal)
    return records
