"""What one rank does in a case of workload ``votes``: vote as its scripts say, note the answers.

Nothing is judged here: ``checks/untrained/stopping.py`` compares what the ranks noted.  After each
vote the ranks tell each other whether training is over.  Where they disagree the script ends on all
of them, for in training they would now wait for each other for ever.

Votes are the steps of the program-order log, so a fault plan (``faults``) may name them: it strikes
in the first script.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch

from shardproof import registry
from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.comm import Comm, Mesh
from shardproof.contract import Ruling, Stopping
from shardproof.evidence.records import RankRecord, Voted
from shardproof.launch.process_control import cores
from shardproof.ledgers import program_order
from shardproof.registry.declaration import BrokenContract, Declaration
from shardproof.workloads import votes


@dataclass(frozen=True)
class VotingProgram:
    """What every rank does; it travels to ranks that were not forked."""

    case: Case

    def __call__(self, rank: int, world: int) -> dict[str, Any]:
        return _Voter(self.case, rank, world).run().to_dict()


class _Voter:
    def __init__(self, case: Case, rank: int, world: int) -> None:
        self.case, self.rank, self.world = case, rank, world
        self.system = registry.load(case.implementation)
        self.declaration = Declaration.of(self.system, case.options)
        axes = tuple(case.mesh)
        self.mesh = Mesh(case.mesh, joint=(axes,), device=BACKENDS[case.backend].device)
        self.comm = self.mesh.comm(*axes)

    def run(self) -> RankRecord:
        """Vote through all scripts."""
        rule = votes.rule(votes.resolve(self.case.workload))
        voted = []
        for number, script in enumerate(votes.scripts(self.case.workload, self.world)):
            system = cast("Stopping", self.system())
            system.start(rule, self.mesh, self.case.options)
            voted += self._vote(system, number, script, self.comm)
        return RankRecord(self.rank, cores(), self.declaration, voted=voted)

    def _vote(self, system: Stopping, number: int, script: votes.Script, comm: Comm) -> list[Voted]:
        """What one script comes to."""
        log, noted = program_order.current(), []
        for step, casts in enumerate(script):
            own = casts[self.rank]
            with log.step(step) if log else nullcontext():
                ruling = system.vote(step, own.metric, own.weight, own.asks)
            if not isinstance(ruling, Ruling):
                what = f"{self.system.__name__}.vote(...) gave {ruling!r:.60}"
                raise BrokenContract(f"{what}, asked is a Ruling")
            told = bool(ruling.ends), ruling.best, float(ruling.metric)
            noted.append(Voted(number, step, *told))
            over = torch.tensor([float(ruling.ends)], device=comm.device)
            comm.all_reduce(over, "max")
            if over.item():
                break
        return noted
