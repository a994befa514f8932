"""The members of each step of a case whose members change, and the effect on its batches.

Samples stand in one endless row, epoch after epoch; a step takes the next ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardproof.case import Case
from shardproof.contract import BatchRule


@dataclass(frozen=True)
class StepMembers:
    """One step: ``begin`` it, but ``members`` commit it, for the others die in it.

    Its batch are ``size`` samples from number ``first`` on; ``rate`` times the learning rate.
    """

    begin: tuple[int, ...]
    members: tuple[int, ...]
    first: int
    size: int
    rate: float

    def joined(self, before: StepMembers | None) -> tuple[int, ...]:
        """The members that have not committed the step ``before`` (``None``: this is the first)."""
        return tuple(r for r in self.members if before is not None and r not in before.members)


def of(case: Case, rule: BatchRule = "global") -> list[StepMembers]:
    """All steps of ``case``; under the rule ``local`` batch and rate grow with the members.

    Both are as the case says for as many members as begin the first step.
    """
    changes = {int(step): tuple(ranks) for step, ranks in case.membership.items()}
    members: tuple[int, ...] = tuple(range(case.world))
    steps: list[StepMembers] = []
    first = 0
    for step in range(case.steps):
        begin = changes.get(step, members)
        dead = [death.rank for death in case.deaths if death.step == step]
        members = tuple(rank for rank in begin if rank not in dead)
        started = len(steps[0].begin if steps else begin)
        size = batch_size(case, rule, len(members), started)
        rate = len(members) / started if rule == "local" else 1.0
        steps.append(StepMembers(begin, members, first, size, rate))
        first += size
    return steps


def heirs(steps: Sequence[StepMembers], step: int) -> list[list[int]]:
    """Of each member of ``step``: the coordinates in the step before whose residuals it has.

    Its own; the first that stays has those of all who leave in order as well.  Who joins has none,
    and who dies takes its own along.
    """
    now, before = steps[step], steps[step - 1].members if step else steps[0].begin
    leave = [number for number, rank in enumerate(before) if rank not in now.begin]
    first = next(rank for rank in now.begin if rank in before)
    own = {rank: [number] for number, rank in enumerate(before)}
    own[first] = own[first] + leave
    return [own.get(rank, []) for rank in now.members]


def batch_size(case: Case, rule: BatchRule, members: int, started: int) -> int:
    """Samples of a step of so many ``members``, where ``started`` began the first."""
    whole = case.workload.global_batch
    return whole * members // started if rule == "local" else whole


def sources(steps: Sequence[StepMembers], step: int) -> dict[int, int]:
    """Member of ``step`` -> who it has its own state of: itself, or for who joins the first member
    that stayed, which may have died since.
    """
    now, before = steps[step], steps[step - 1].members if step else steps[0].begin
    stayed = [rank for rank in now.begin if rank in before]
    return {rank: rank if rank in stayed else stayed[0] for rank in now.members}
