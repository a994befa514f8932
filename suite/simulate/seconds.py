"""The time of a simulated step: its operators and calls are played on a machine.

A rank has a stream of compute, and one of communication for each group.  Operators follow each
other; each takes the time of its arithmetic or of its memory (:meth:`Machine.seconds`).  A call
starts when it is issued and its group's stream is free, and compute continues until the program
waits for the call:

    compute    F1 F2 F3 .. .. F4      2 of the call's 3 slots are exposed
    shard            [gather]         issued after F2, waited for before F4

    operation        algorithm        hops             bytes one way            source
    all-reduce       ring             2(N-1)           2(N-1)/N n               NCCL tuning.cc
                     double tree      2(g-1 + lg m)    2n
    all-gather,      ring             N-1              (N-1)/N n
    reduce-scatter
    broadcast,       pipelined ring   N-1              n                        nccl-tests
    reduce
    all-to-all       pairwise         N-1              n, by where they go      [derived]
    gather, scatter  linear           N-1              (N-1) n                  [derived]
    send, recv       message          1                n

N ranks on m nodes, at most g on one; n payload bytes of the traffic ledger.  Ranks are placed in
order, ``node`` to a node.  Hops between nodes have the latency of their links.  Where a group has
several nodes, all its bytes leave each node once, over the links of the g members there.

Stages of a pipeline wait for each other.  Their schedule is played on a clock
(``schedules.simulate``) with the times of the stages that were simulated; a stage between them
takes the times of the nearest one.  Then the rank is played again, and each computation begins no
earlier than the schedule has it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

from shardproof import axes, schedules
from shardproof.ledgers.program_order import Done
from shardproof.ledgers.traffic import LoggedCall
from shardproof.schedules import Action, Schedule
from shardproof.simulate.machines import Link, Machine
from shardproof.simulate.rank import SimulatedRank
from shardproof.simulate.work import Operator

#: ``eager``: each operator is a kernel; ``fused``: those between two products are one.
Kernels = Literal["eager", "fused"]
KERNELS: tuple[Kernels, ...] = ("eager", "fused")
_NO_BUBBLE = "no schedule is announced, so the time that stages wait for each other is left out"
#: Backward computes two products for each of forward (PaLM, arXiv 2204.02311, appendix B).
_BOTH_WAYS = 3


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on its slowest rank: ``compute`` + ``exposed`` + ``idle``.

    ``exposed``: compute waits for calls; ``idle``: it waits for other stages.  ``communication``:
    all calls, hidden ones included.  ``least``: the step if calls overlapped with compute as far as
    possible.  ``flops``: of the rank, recomputation included; ``model_flops``: of a mean rank,
    three times those of its forwards; ``peak``: FLOP/s of the data sheet in the dtype of most
    products.  ``tokens``: or samples, of all ranks.  ``unknown``: what the seconds leave out.
    """

    rank: int
    seconds: float
    compute: float
    exposed: float
    idle: float
    communication: float
    least: float
    flops: float
    model_flops: float
    peak: float
    tokens: int
    world: int
    unknown: str = ""

    @property
    def share_of_peak(self) -> float:
        """Model FLOPs utilization (PaLM, arXiv 2204.02311): the model's FLOP/s over the peak."""
        return self.model_flops / (self.seconds * self.peak) if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks together in a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def bubble(self) -> float:
        """Share of the step in which the rank waits for other stages."""
        return self.idle / self.seconds if self.seconds else 0.0


def step_seconds(
    made: Sequence[SimulatedRank],
    machine: Machine,
    mesh: Mapping[str, int],
    kernels: Kernels = "eager",
) -> StepTime:
    """The time of the last step of ``made``, ranks of ``mesh``, on ``machine``: the slowest one's.

    For a pipeline, give ranks of several stages; a stage that is not given takes the times of the
    nearest one.
    """
    played = [_Played(one, machine, kernels) for one in made]
    for one in played:
        one.play()
    schedule = next((one.schedule for one in made if one.schedule is not None), None)
    if schedule is not None and not all(map(partial(_follows, schedule), made)):
        schedule = None  # the system does not say which stage computes when
    if schedule is not None:
        begins = _begins(schedule, played)
        for one in played:
            one.play(begins)
    last = max(played, key=lambda one: one.clock)
    by_place, stages = {one.made.place: one for one in played}, axes.parts(mesh, "layers")
    places = [by_place[_nearest(n, [*by_place], stages)] for n in range(stages)]
    return StepTime(
        rank=last.made.rank,
        seconds=last.clock,
        compute=last.compute,
        exposed=last.exposed,
        idle=last.idle,
        communication=last.communication,
        least=max(last.compute + last.idle, *last.busy.values(), 0.0),
        flops=sum(one.flops for one in last.operators),
        model_flops=sum(one.model_flops for one in places) / stages,
        peak=machine.peak(last.dtype),
        tokens=last.made.tokens * axes.size(mesh, axes.sharing(mesh)),
        world=math.prod(mesh.values()),
        unknown=_NO_BUBBLE if schedule is None and stages > 1 else "",
    )


# ------------------------------------------------------------------------------------------ calls


class Placement(NamedTuple):
    """The number of ranks of a group, of its nodes, and of its members on the fullest node."""

    ranks: int
    nodes: int
    members: int

    @classmethod
    def of(cls, group: Sequence[int], node: int) -> Placement:
        """The placement of the global ranks ``group``, ``node`` to a node."""
        counts = dict[int, int]()
        for rank in group:
            counts[rank // node] = counts.get(rank // node, 0) + 1
        return cls(len(group), len(counts), max(counts.values(), default=0))


def call_seconds(operation: str, size: float, group: Sequence[int], machine: Machine) -> float:
    """Seconds of ``operation`` with ``size`` payload bytes by the global ranks ``group``.

    :raises ValueError: the operation is not known.
    """
    place = Placement.of(group, machine.node)
    if place.ranks < 2:
        return 0.0
    carried_out = machine.carried_out.get(operation, operation)
    return machine.call + _COSTS[carried_out](size, place, machine)


def _ring(hops: int, turns: int, size: float, place: Placement, machine: Machine) -> float:
    """``turns`` times around the ring in ``hops`` hops; ``size``: bytes that each rank passes."""
    between = turns * (place.nodes - 1)
    latency = (hops - between) * machine.intra.latency + between * machine.inter.latency
    return latency + _slowest(size, size, place, machine)


def _slowest(inside: float, out: float, place: Placement, machine: Machine) -> float:
    """Seconds that ``inside`` bytes take within a node, and ``out`` bytes out of it."""
    within = inside / machine.intra.bandwidth if place.members > 1 else 0.0
    between = out / (place.members * machine.inter.bandwidth) if place.nodes > 1 else 0.0
    return max(within, between)


def _all_reduce(size: float, place: Placement, machine: Machine) -> float:
    n = place.ranks
    ring = _ring(2 * (n - 1), 2, 2 * (n - 1) / n * size, place, machine)
    depth = math.ceil(math.log2(place.nodes))
    tree = 2 * ((place.members - 1) * machine.intra.latency + depth * machine.inter.latency)
    return min(ring, tree + _slowest(2 * size, 2 * size, place, machine))


def _half(size: float, place: Placement, machine: Machine) -> float:
    n = place.ranks
    return _ring(n - 1, 1, (n - 1) / n * size, place, machine)


def _pipelined(size: float, place: Placement, machine: Machine) -> float:
    return _ring(place.ranks - 1, 1, size, place, machine)


def _linear(size: float, place: Placement, machine: Machine) -> float:
    return _ring(place.ranks - 1, 1, (place.ranks - 1) * size, place, machine)


def _pairwise(size: float, place: Placement, machine: Machine) -> float:
    others = place.ranks - 1
    inside = size * (place.members - 1) / others
    out = place.members * (size - inside)
    latency = (place.members - 1) * machine.intra.latency
    latency += (place.ranks - place.members) * machine.inter.latency
    return latency + _slowest(inside, out, place, machine)


def _barrier(size: float, place: Placement, machine: Machine) -> float:
    return _all_reduce(0.0, place, machine)


_COSTS: dict[str, Callable[[float, Placement, Machine], float]] = {
    "all_reduce": _all_reduce,
    "all_gather": _half,
    "reduce_scatter": _half,
    "broadcast": _pipelined,
    "reduce": _pipelined,
    "all_to_all": _pairwise,
    "gather": _linear,
    "scatter": _linear,
    "barrier": _barrier,
}


def message_seconds(size: float, sender: int, receiver: int, machine: Machine) -> float:
    """Seconds of a message of ``size`` bytes between two global ranks."""
    apart = sender // machine.node != receiver // machine.node
    link: Link = machine.inter if apart else machine.intra
    return machine.call + link.latency + size / link.bandwidth


# ------------------------------------------------------------------------------------------- a rank


class _Event(NamedTuple):
    """``at``, then ``order``: operators come before the event of the same number."""

    at: int
    order: int
    operator: Operator | None = None
    issued: Sequence[LoggedCall] = ()
    waited: int | None = None
    begins: Done | None = None
    ends: Done | None = None


@dataclass
class _Played:
    """One rank on its machine; :meth:`play` fills the times."""

    made: SimulatedRank
    machine: Machine
    kernels: Kernels
    clock: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0
    idle: float = 0.0
    communication: float = 0.0
    #: Seconds of calls by stream, and when each stream is free.
    busy: dict[object, float] = field(default_factory=dict)
    free: dict[object, float] = field(default_factory=dict)
    #: When calls end, by the number of their issue.
    ends: dict[int, float] = field(default_factory=dict)
    #: When actions begin and how long they take.
    began: dict[Action, float] = field(default_factory=dict)
    took: dict[Action, float] = field(default_factory=dict)
    message: float = 0.0

    @property
    def operators(self) -> Sequence[Operator]:
        """The operators that are played."""
        work = self.made.work
        return work.eager if self.kernels == "eager" else work.fused

    @property
    def model_flops(self) -> float:
        """FLOPs of the model, without recomputation."""
        return _BOTH_WAYS * sum(one.flops for one in self.operators if one.phase == "forward")

    @property
    def dtype(self) -> str:
        """The dtype of most FLOPs."""
        totals = defaultdict[str, float](float)
        for one in self.operators:
            totals[one.dtype] += one.flops
        return max(totals, key=lambda name: totals[name], default="float32")

    def play(self, begins: Mapping[Action, float] | None = None) -> None:
        """Play the step; ``begins``: earliest start of each action, from the first one's."""
        fresh = _Played(self.made, self.machine, self.kernels)
        self.__dict__.update(fresh.__dict__)
        start: float | None = None
        for event in sorted(self._events(), key=lambda one: one[:2]):
            if event.operator is not None:
                self._compute(event.operator)
            elif event.issued:
                self._issue(event.issued)
            elif event.waited is not None:
                self._wait(event.waited)
            elif event.begins is not None:
                action = _action(event.begins)
                start = self.clock if start is None else start
                if begins is not None:
                    later = max(0.0, start + begins[action] - self.clock)
                    self.idle += later
                    self.clock += later
                self.began[action] = self.clock
            elif event.ends is not None:
                action = _action(event.ends)
                self.took[action] = self.clock - self.began[action]
        # A step ends after its last call, even if the program does not wait for that.
        for number in [*self.ends]:
            self._wait(number)

    def _events(self) -> Iterator[_Event]:
        for one in self.operators:
            yield _Event(one.at, 0, operator=one)
        for number, calls in _by_issue(self.made.calls[-1]):
            yield _Event(number, 1, issued=calls)
            if (waited := calls[0].waited) is not None:
                yield _Event(waited, 2, waited=number)
        for done in self.made.actions:
            yield _Event(done.begin, 3, begins=done)
            yield _Event(done.end, 4, ends=done)

    def _compute(self, one: Operator) -> None:
        took = self.machine.seconds(one.flops, one.size, one.dtype, one.is_attention)
        took += self.machine.gap
        self.compute += took
        self.clock += took

    def _issue(self, calls: Sequence[LoggedCall]) -> None:
        first, size = calls[0], sum(call.payload_bytes for call in calls)
        is_message = first.operation in ("send", "recv")
        if is_message:
            peer = first.group[0] if first.peer is None else first.peer
            took = message_seconds(size, self.made.rank, peer, self.machine)
            if first.operation == "send" and self._is_scheduled(first):
                self.message = max(self.message, took)
        else:
            took = call_seconds(first.operation, size, first.group, self.machine)
        if first.operation == "recv" and self._is_scheduled(first):
            # The schedule says when the message arrives, and its sender counts its seconds.
            self.ends[first.issued] = self.clock
            return
        # Both directions of a link work at once, so sends and receives have streams of their own.
        stream = (first.group, first.operation if is_message else "")
        begin = max(self.clock, self.free.get(stream, 0.0))
        self.free[stream] = self.ends[first.issued] = begin + took
        self.busy[stream] = self.busy.get(stream, 0.0) + took
        self.communication += took
        # The core that computes moves the bytes itself; the rest of the call runs by itself.
        self.exposed += took * self.machine.busy
        self.clock += took * self.machine.busy

    def _is_scheduled(self, call: LoggedCall) -> bool:
        """Whether ``call`` is a message between computations of stages.  Others belong to a ring
        inside a stage, or carry the gradient of a tied weight after the last computation.
        """
        last = max((done.end for done in self.made.actions), default=-1)
        return call.issued < last and call.axis in ("world", axes.cutting("layers"))

    def _wait(self, number: int) -> None:
        later = max(0.0, self.ends.pop(number, 0.0) - self.clock)
        self.exposed += later
        self.clock += later


def _by_issue(calls: Iterable[LoggedCall]) -> Iterator[tuple[int, list[LoggedCall]]]:
    """The calls of a step by the number of their issue: a call of two dtypes has two entries."""
    found = dict[int, list[LoggedCall]]()
    for call in calls:
        if call.phase != "observe" and len(call.group) > 1:
            found.setdefault(call.issued, []).append(call)
    yield from found.items()


def _follows(schedule: Schedule, made: SimulatedRank) -> bool:
    """Whether ``made`` computed what ``schedule`` says, in whatever order."""
    said = {a for a in schedule.orders[made.place] if a.op in schedules.COMPUTE}
    return said == {_action(done) for done in made.actions}


def _action(done: Done) -> Action:
    return Action(done.op, done.stage, done.micro)


# --------------------------------------------------------------------------------------- a pipeline


def _begins(schedule: Schedule, played: Sequence[_Played]) -> Mapping[Action, float]:
    """The start of each computation, by the times of the stages that were played."""
    known = dict[int, _Played]()
    for one in sorted(played, key=lambda each: each.compute):
        known[one.made.place] = one
    took = dict[Action, float]()
    for place, order in enumerate(schedule.orders):
        like = known[_nearest(place, [*known], schedule.ranks)]
        mine, theirs = schedule.chunks[place], schedule.chunks[like.made.place]
        # The chunks of the two ranks match in forward order.
        stages = dict(zip(mine, theirs, strict=True))
        for action in order:
            if action.op in schedules.COMPUTE:
                took[action] = like.took[action._replace(stage=stages[action.stage])]
    message = max(one.message for one in played)
    return schedules.simulate(schedule, took=took, message=message).begins


def _nearest(place: int, known: Sequence[int], ranks: int) -> int:
    """The place among ``known`` whose times stand for those of ``place``.

    The ends of a pipeline hold the embedding and the head, so they stand for no other place if one
    in between is known.
    """

    def is_end(one: int) -> bool:
        return one in (0, ranks - 1)

    return min(
        known, key=lambda one: (one != place, is_end(one) != is_end(place), abs(one - place))
    )
