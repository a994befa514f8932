"""The program of a rank in a case of workload ``votes``: vote by its scripts, record the answers.

Nothing is judged here: ``check.py`` compares what the ranks noted.  After each vote the ranks tell
each other whether training is over.  Where they disagree the script ends on all of them, for in
training they would now wait for each other for ever.

Votes are the steps of the program-order log, so a fault plan (``faults``) may name them: it strikes
in the first script.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from shardproof.backends import BACKENDS
from shardproof.cases.kinds.untrained import Program
from shardproof.cases.kinds.votes import workload
from shardproof.comm import Comm, Mesh
from shardproof.contract import Ruling, Stopping
from shardproof.evidence.records import RankRecord, Voted
from shardproof.ledgers import program_order
from shardproof.registry.declaration import BrokenContract


class VotingProgram(Program):
    """Vote through all scripts."""

    def fill(self, record: RankRecord, system: Any, world: int) -> None:
        """Record the answer to each vote."""
        case = self.case
        axes = tuple(case.mesh)
        mesh = Mesh(case.mesh, joint=(axes,), device=BACKENDS[case.backend].device)
        comm = mesh.comm(*axes)
        rule = workload.rule(workload.resolve(case.workload))
        for number, script in enumerate(workload.scripts(case.workload, world)):
            voter = system()
            voter.start(rule, mesh, case.options)
            record.voted += _vote(voter, number, script, record.rank, comm)


def _vote(
    voter: Stopping, number: int, script: workload.Script, rank: int, comm: Comm
) -> list[Voted]:
    """The answers that rank ``rank`` gets in one script."""
    log, noted = program_order.current(), []
    for step, casts in enumerate(script):
        own = casts[rank]
        with log.step(step) if log else nullcontext():
            ruling = voter.vote(step, own.metric, own.weight, own.asks)
        if not isinstance(ruling, Ruling):
            what = f"{type(voter).__name__}.vote(...) gave {ruling!r:.60}"
            raise BrokenContract(f"{what}, expected a Ruling")
        noted.append(Voted(number, step, bool(ruling.ends), ruling.best, float(ruling.metric)))
        over = torch.tensor([float(ruling.ends)], device=comm.device)
        comm.all_reduce(over, "max")
        if over.item():
            break
    return noted
