"""The joins and kills of the histories of ``python -m tools.studies elastic``.

A history is a script.  The rank that an event waits for *halts* at a place that it announces, so
that the event comes at the same moment in every run: before a step, in its forward, or after its
update, before anything of it is saved.  None of these three has committed the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardproof.case import WorkloadSpec
from shardproof.contract import BatchRule, OptimizerSpec
from shardproof.files import Stored
from shardproof.oracle.members import StepMembers

#: What happens: SIGKILL to a worker; to an agent and its worker; a member joins; SIGKILL to an
#: agent whose worker lives on, or SIGSTOP, and a member joins: two groups that believe that the run
#: is theirs; SIGCONT to the agent that was stopped, whose member joins.
What = Literal["worker", "agent", "joins", "splits", "freezes", "wakes"]
SPLITS: tuple[What, ...] = ("splits", "freezes")
JOINS: tuple[What, ...] = ("joins", "wakes")
#: Where in a step the rank halts.
At = Literal["before", "inside", "unsaved"]


@dataclass(frozen=True)
class Event(Stored):
    """``what`` happens to ``member`` in ``step``."""

    step: int
    what: What
    member: int
    at: At = "before"


@dataclass(frozen=True)
class History(Stored):
    """``members`` start and take ``steps`` steps; members have permanent numbers instead of
    ranks.
    """

    name: str
    about: str
    workload: WorkloadSpec
    optimizer: OptimizerSpec
    batch: BatchRule
    members: int
    steps: int
    events: tuple[Event, ...]

    def told(self) -> list[tuple[int, ...]]:
        """The members that commit each step."""
        steps = range(self.steps)
        return [self.after(sum(event.step <= step for event in self.events)) for step in steps]

    def after(self, events: int) -> tuple[int, ...]:
        """The members after the first ``events`` events."""
        now = set(range(self.members))
        for event in self.events[:events]:
            if event.what in ("agent", *SPLITS):
                now -= {event.member}
            if event.what in (*JOINS, *SPLITS):
                now |= {self.newcomer(event)}
        return tuple(sorted(now))

    def newcomer(self, event: Event) -> int:
        """The member that joins in ``event``."""
        return event.member + (event.what in SPLITS)

    def halting(self, number: int) -> int:
        """The member that halts for event ``number``: the killed one, or the first one."""
        event = self.events[number]
        return self.after(number)[0] if event.what in JOINS else event.member

    def worlds(self) -> list[int]:
        """The number of members that commit each step."""
        return [len(members) for members in self.told()]

    def batch_size(self, world: int, began: int) -> int:
        """Samples in a step of ``world`` members, if ``began`` members took the first."""
        whole = self.workload.global_batch
        return whole * world // began if self.batch == "local" else whole


def of_worlds(history: History, worlds: Sequence[int]) -> list[StepMembers]:
    """The numbers of members per step, for the oracle.

    torchrun starts every process anew, so what is a rank's own goes by rank, and members of the
    oracle are ranks: of 3 members of which one dies ranks 0 and 1 go on, and rank 2 joins later.
    """
    steps, first = [], 0
    for world in worlds:
        ranks, size = tuple(range(world)), history.batch_size(world, worlds[0])
        rate = world / worlds[0] if history.batch == "local" else 1.0
        steps.append(StepMembers(ranks, ranks, first, size, rate))
        first += size
    return steps


_GPT = WorkloadSpec(
    "charnames_gpt",
    ("dropout_stateful", "short_epochs"),
    global_batch=12,
    params={"layers": 1, "width": 16, "seq": 8},
)
_CNN = WorkloadSpec("digits_cnn", global_batch=12)
_SGD, _ADAMW = OptimizerSpec("sgd", clip_norm=0.05), OptimizerSpec("adamw", lr=0.01)
HISTORIES = (
    History(
        name="worker",
        about="A worker is killed inside a step; its agent starts it again.",
        workload=_GPT,
        optimizer=_SGD,
        batch="local",
        members=3,
        steps=4,
        events=(Event(2, "worker", 1, "inside"),),
    ),
    History(
        name="agent",
        about="An agent and its worker are killed after an update that no member has saved.",
        workload=_CNN,
        optimizer=_ADAMW,
        batch="local",
        members=3,
        steps=4,
        events=(Event(2, "agent", 2, "unsaved"),),
    ),
    History(
        name="both",
        about="A worker is killed, then an agent and its worker; then one joins, and another.",
        workload=_GPT,
        optimizer=_SGD,
        batch="local",
        members=3,
        steps=8,
        events=(
            Event(1, "worker", 2),
            Event(3, "agent", 0, "inside"),
            Event(5, "joins", 3),
            Event(6, "joins", 4),
        ),
    ),
    History(
        name="late",
        about="One begins, another joins; then the agent and the worker of the first are killed.",
        workload=_CNN,
        optimizer=_SGD,
        batch="global",
        members=1,
        steps=5,
        events=(Event(1, "joins", 1), Event(3, "agent", 0, "unsaved")),
    ),
    History(
        name="split",
        about="An agent is killed alone: its worker and a new group save into one folder.",
        workload=_GPT,
        optimizer=_ADAMW,
        batch="global",
        members=1,
        steps=4,
        events=(Event(2, "splits", 0, "unsaved"),),
    ),
    History(
        name="frozen",
        about="An agent stands still for longer than the time-outs, its worker does not; it wakes.",
        workload=_CNN,
        optimizer=_ADAMW,
        batch="local",
        members=1,
        steps=5,
        events=(Event(2, "freezes", 0, "unsaved"), Event(3, "wakes", 0)),
    ),
)
