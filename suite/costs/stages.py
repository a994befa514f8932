"""The stages of a pipeline, computed from the options alone: where they lie and what they hold.

stages    the ranks of the pipe axis times the chunks of the schedule, or those of the option
          ``schedule.place``
units     as even as possible, larger stages first, or the option ``split``
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardproof.case import split
from shardproof.contract import Options
from shardproof.costs.model_facts import ModelFacts, TensorFacts
from shardproof.schedules import Action

DEFAULT = "1f1b"
#: Schedules that go there and back: the first stage and the last one lie on the first rank.
V_SHAPED = ("zb_v", "dualpipe_v")
#: Chunks that a rank has unless the option says otherwise; schedules that are not named have one.
CHUNKS = dict.fromkeys(("interleaved", "interleaved_zb", "looped_bfs", *V_SHAPED), 2)
#: Schedules that go backwards through the micro-batches, and so add them up in another order.
DESCENDING = ("looped_bfs",)


@dataclass(frozen=True)
class Stages:
    """``place[stage]`` is its rank of the pipe axis, ``units[stage]`` its units by number."""

    place: tuple[int, ...]
    units: tuple[range, ...]

    def of(self, rank: int) -> list[int]:
        """The stages on ``rank`` of the pipe axis."""
        return [stage for stage, owner in enumerate(self.place) if owner == rank]

    def homes(self, tensor: TensorFacts) -> list[int]:
        """The stages that hold ``tensor``: several where it is tied over them."""
        return sorted({stage for unit in tensor.units for stage in self._holders.get(unit, ())})

    @cached_property
    def _holders(self) -> Mapping[int, list[int]]:
        """The stages that hold each unit."""
        pairs = [(unit, stage) for stage, units in enumerate(self.units) for unit in units]
        return {unit: [stage for of, stage in pairs if of == unit] for unit, _ in pairs}

    def ranks(self, tensor: TensorFacts) -> list[int]:
        """The ranks of the pipe axis that hold ``tensor``, in the order of its stages."""
        return list(dict.fromkeys(self.place[stage] for stage in self.homes(tensor)))


def schedule_name(options: Options) -> str | None:
    """The schedule that the options name; ``None`` for an order of the user's own."""
    chosen = options.get("schedule") or DEFAULT
    if isinstance(chosen, Mapping):
        return None if "orders" in chosen else str(chosen.get("name", DEFAULT))
    return str(chosen)


def place_of(options: Options, ranks: int) -> tuple[int, ...]:
    """The rank of each stage: one after the other, round and round, or there and back."""
    chosen = options.get("schedule") or DEFAULT
    fields: Options = chosen if isinstance(chosen, Mapping) else {}
    if "orders" in fields:
        return tuple(fields.get("place") or _where_forwards_are(fields["orders"]))
    # Ranks of the stages, for 2 ranks:
    #     one chunk               0 1
    #     two, round and round    0 1 0 1
    #     there and back          0 1 1 0     neighbours 1, 1 send no message
    name = schedule_name(options)
    if name in V_SHAPED:
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(range(ranks)) * int(fields.get("chunks") or CHUNKS.get(name or "", 1))


def comes_apart(options: Options) -> bool:
    """Whether the gradients of inputs and of weights are two actions of the schedule."""
    chosen = options.get("schedule")
    orders = chosen.get("orders", ()) if isinstance(chosen, Mapping) else ()
    own = any(Action.parse(text).op == "W" for order in orders for text in order)
    return own or (schedule_name(options) or "").startswith("zb_")


def _where_forwards_are(orders: Sequence[Sequence[str]]) -> list[int]:
    actions = ((Action.parse(text), rank) for rank, order in enumerate(orders) for text in order)
    placed = {action.stage: rank for action, rank in actions if action.op == "F"}
    return [placed[stage] for stage in sorted(placed)]


def split_units(options: Options, units: int, stages: int) -> tuple[range, ...]:
    """Units of each of ``stages``, as the option ``split`` says or as evenly as possible."""
    ends = [0, *itertools.accumulate(options.get("split") or split(units, stages))]
    return tuple(itertools.starmap(range, itertools.pairwise(ends)))


def stages_of(facts: ModelFacts) -> Stages:
    """The stages of a case, and the rank of each."""
    place = place_of(facts.options, facts.parts("layers"))
    return Stages(place, split_units(facts.options, len(facts.units), len(place)))
