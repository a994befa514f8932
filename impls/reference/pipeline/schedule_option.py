"""The option ``schedule`` of pipelines: the name of a generator, or explicit orders of every rank.

    schedule: zb_h1
    schedule: {name: interleaved, chunks: 3}
    schedule: {orders: [[F0@0, F1@0, BW0@0, BW1@0], [F0@1, BW0@1, F1@1, BW1@1]]}

A schedule that the user wrote is checked before any rank runs it: an unsound one is refused with
what is wrong, where it would otherwise hang.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardproof.contract import Refused
from shardproof.impls.reference.engine.options import at_least
from shardproof.impls.reference.pipeline.schedules import SCHEDULES
from shardproof.schedules import MESSAGES, Action, Schedule, problems, with_messages

Name = Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v"]
#: Schedules whose B and W are two actions.
SPLIT = ("zb_h1", "zb_h2", "zb_v")
#: Stages a rank of ``interleaved`` where the option does not say.
CHUNKS = 2


@dataclass(frozen=True)
class ScheduleOption:
    """A generator by ``name`` (``interleaved`` takes ``chunks`` stages per rank), or a schedule.

    ``orders`` are each rank's actions as ``F0@1`` (micro-batch 0, stage 1), with all messages or
    none; ``place`` the ranks of the stages (``[]``: where their forwards are).
    """

    name: Name | None = None
    chunks: int | None = None
    orders: tuple[tuple[str, ...], ...] = ()
    place: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        at_least("schedule.chunks", 1 if self.chunks is None else self.chunks, 1)
        fixed = {"interleaved": self.chunks, "zb_v": 2, None: None}.get(self.name, 1)
        if self.chunks not in (None, fixed):
            raise Refused(
                f"option 'schedule.chunks' = {self.chunks}: only 'interleaved' lets you choose "
                "the number of stages per rank (zb_v has 2, the other named schedules have 1, "
                "and 'orders' defines its own); leave 'chunks' out"
            )
        if (self.name is None) == (not self.orders):
            raise Refused(
                "option 'schedule': give either 'name' (one of "
                f"{', '.join(SCHEDULES)}) or 'orders' (the actions of every rank)"
            )
        if self.orders and (unsound := problems(self.own)):
            raise Refused(f"option 'schedule.orders': {'; '.join(unsound)}")

    @cached_property
    def own(self) -> Schedule:
        """The schedule that ``orders`` describe.

        Raises :class:`Refused` where they name an action, a stage, a rank or a micro-batch that
        cannot exist.
        """
        try:
            orders = tuple(tuple(map(Action.parse, order)) for order in self.orders)
        except ValueError as error:
            raise Refused(f"option 'schedule.orders': {error}") from None
        actions = [action for order in orders for action in order]
        placed = {a.stage: rank for rank, order in enumerate(orders) for a in order if a.op == "F"}
        place = self.place or tuple(placed[stage] for stage in sorted(placed))
        last = max((action.stage for action in actions), default=0)
        if last >= len(place) or (not self.place and set(placed) != set(range(last + 1))):
            raise Refused(
                f"option 'schedule.orders': the highest stage in the orders is {last}, but "
                f"{'schedule.place lists' if self.place else 'the orders have forwards of'} "
                f"only {len(place)} stages; give each of the stages 0 to {last} a "
                f"{'rank in schedule.place' if self.place else 'forward in schedule.orders'}"
            )
        if any(not 0 <= rank < len(orders) for rank in place):
            raise Refused(
                f"option 'schedule.place' = {list(place)}: schedule.orders has actions for only "
                f"{len(orders)} ranks; valid: 0 to {len(orders) - 1}"
            )
        # Checked before the schedule is built: a slip of the finger (F100000000@0) must not make
        # something that takes all memory.
        micro_batches = 1 + max((action.micro for action in actions), default=0)
        if micro_batches > len(actions):
            raise Refused(
                f"option 'schedule.orders': the highest micro-batch is {micro_batches - 1}, so the "
                f"orders need at least {micro_batches} actions but have only {len(actions)}; check "
                "the micro-batch numbers in the orders"
            )
        own = Schedule("own", micro_batches, place, orders)
        return own if any(a.op in MESSAGES for a in actions) else with_messages(own)

    @property
    def splits(self) -> bool:
        """Whether B and W are two actions."""
        if self.name is not None:
            return self.name in SPLIT
        return any(action.op == "W" for order in self.own.orders for action in order)

    @property
    def has_several(self) -> bool:
        """Whether a rank has several stages."""
        place = self.own.place if self.name is None else self.make(2, 2).place
        return len({*place}) < len(place)

    def ends(self, rank: int, stages: Collection[int]) -> tuple[int, ...]:
        """The ``stages`` of ``rank`` in the order in which their backwards end: the last first,
        except with a user's own orders.
        """
        if self.name is not None:
            return tuple(sorted(stages, reverse=True))
        ended = [a.stage for a in self.own.orders[rank] if a.op in ("B", "W", "BW")]
        return tuple(dict.fromkeys(reversed(ended)))[::-1]

    def place_on(self, ranks: int) -> tuple[int, ...]:
        """The rank of every stage."""
        return self.make(ranks, ranks if self.name else self.own.micro_batches).place

    def make(self, ranks: int, micro_batches: int) -> Schedule:
        """The schedule for a window; :class:`Refused` if there is none."""
        if self.name is not None:
            more = {"chunks": self.chunks or CHUNKS} if self.name == "interleaved" else {}
            return SCHEDULES[self.name](ranks, micro_batches, **more)
        own = self.own
        if own.ranks != ranks:
            raise Refused(
                f"option 'schedule.orders' is for {own.ranks} ranks, but the axis 'pipe' has "
                f"{ranks} ranks: list one order for each rank"
            )
        if own.micro_batches != micro_batches:
            raise Refused(
                f"option 'schedule.orders' lists {own.micro_batches} micro-batches, but each run "
                f"of the schedule has {micro_batches} micro-batches: list the micro-batches 0 to "
                f"{micro_batches - 1}"
            )
        return own
