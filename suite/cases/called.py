"""Cases that train nothing: collectives that are called, samplers that are asked, ranks that vote.

A run of workload ``epochs`` has several legs: the ranks of each get what those before told.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardproof import backends, tensor_bytes
from shardproof.cases.calls import CallsProgram
from shardproof.cases.samples import SamplesProgram
from shardproof.cases.voting import VotingProgram
from shardproof.contract import Collectives, Implementation
from shardproof.evidence.account import Account
from shardproof.evidence.assembled import Evidence
from shardproof.evidence.records import RankRecord, WorkloadFacts
from shardproof.launch.rank_process import Program
from shardproof.launch.ranks import Kept, RankOutcome, root_cause
from shardproof.oracle.truth import Truth
from shardproof.workloads import calls, epochs, votes


def run_called(
    account: Account,
    implementation: type[Implementation],
    workdir: Path,
    run: Callable[..., list[RankOutcome]],
    kept: Kept | None,
) -> Evidence | None:
    """Fill ``account`` as far as the case gets; evidence, if every rank did its work.

    ``run`` and ``kept``: as in ``launch.ranks``.
    """
    case, began = account.case, time.monotonic()

    def launched(program: Program, world: int, folder: Path) -> list[RankRecord]:
        """The records of the ranks; none where one broke."""
        # A kept world of MPI has as many ranks as the case.
        own = None if world != case.world and backends.BACKENDS[case.backend].mpirun else kept
        own = own if case.fault is None else None
        limits: dict[str, Any] = {"memory_bytes": int(case.memory_gib * 2**30)}
        limits |= {} if own is None else {"kept": own}
        disturbances = backends.disturbances_of((), case.fault)
        limits |= {"disturbances": disturbances, "one_core": disturbances is None}
        launch = case.backend, world, program, folder, case.deadline, case.ledgers
        outcomes = account.outcomes = run(*launch, **limits)
        account.timings["ranks"] = time.monotonic() - began
        if root_cause(outcomes) is not None:
            return []
        files = (outcome.record for outcome in outcomes if outcome.record is not None)
        return [RankRecord.from_dict(tensor_bytes.load(file)) for file in files]

    legs: list[list[RankRecord]] = []
    if case.workload.name == calls.NAME:
        assert issubclass(implementation, Collectives)
        offered = implementation.offers(case.options, case.backend, case.world)
        cells = calls.sub_matrix(case, offered)
        if not cells:
            operation = calls.resolve(case.workload)["operation"]
            account.cannot_fit = f"{case.system} offers no {operation} of these layouts"
            return None
        legs.append(launched(CallsProgram(case, cells), case.world, workdir))
    elif case.workload.name == votes.NAME:
        legs.append(launched(VotingProgram(case), case.world, workdir))
    else:
        for leg, mesh in enumerate(epochs.meshes(case)):
            folder = workdir / f"leg{leg}"
            folder.mkdir()
            state = legs[-1][0].told_state if legs else ""
            program = SamplesProgram(case, leg, state)
            legs.append(launched(program, math.prod(mesh.values()), folder))
            if not legs[-1]:
                return None
    if not legs[-1]:
        return None
    facts = WorkloadFacts({}, (), (), False, ())
    evidence = Evidence(case, legs[0], Truth(), facts, {})
    evidence.later_legs = legs[1:]
    return evidence
