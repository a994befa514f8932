"""The schedules of pipelines as pure data: the actions of each rank in order.

Stages are cut into ``chunks`` a rank; every schedule takes each stage's micro-batches in ascending
order, in F, B and W alike, so that gradients add up in one order whatever the schedule.

    name         order on rank r of p                                   most micro-batches held
    gpipe        all F, then all BW                                     m
    1f1b         p-1-r F, then F and BW in turn, then BW                min(m, p-r)
    interleaved  v chunks a rank, p micro-batches of a chunk in turn    p + (p-1-2r)/v, all chunks
    zb_h1        as 1f1b, but B and W apart, and W r rounds later       p
    zb_h2        2(p-1-r) F first, W 2r rounds later                    2p-1
    zb_v         two chunks a rank, stages r and 2p-1-r                 p, of all chunks

Bubbles, with times T_F, T_B, T_W of a rank's work on one micro-batch: (p-1)(T_F+T_B+T_W) for gpipe
and 1f1b; that over v for interleaved; (p-1)(T_F+T_B-T_W) and (p-1)(T_F+T_B-2T_W) for zb_h1 and
zb_h2; 0 for zb_v if the three are equal.  Sources: GPipe (arXiv 1811.06965, section 2.3); Narayanan
et al. (arXiv 2104.04473, sections 2.2.1 and 2.2.2); zero bubble: Qi et al. (arXiv 2401.10241,
sections 2, 3 and 6).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shardproof.contract import Refused
from shardproof.schedules import Action, Schedule, received, with_messages


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards."""

    def order(rank: int) -> list[Action]:
        return [Action(op, rank, micro) for op in ("F", "BW") for micro in range(micro_batches)]

    return _one_stage_each("gpipe", ranks, micro_batches, order)


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """1F1B: a returned micro-batch frees the slot of the next one."""

    def order(rank: int) -> list[Action]:
        return _in_turn(rank, micro_batches, warm_up=ranks - 1 - rank)

    return _one_stage_each("1f1b", ranks, micro_batches, order)


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """ZB-H1: the memory of 1F1B; W fills the bubble at the end."""

    def order(rank: int) -> list[Action]:
        return _in_turn(rank, micro_batches, warm_up=ranks - 1 - rank, delay=rank)

    return _one_stage_each("zb_h1", ranks, micro_batches, order)


def zb_h2(ranks: int, micro_batches: int) -> Schedule:
    """ZB-H2: more warm-up forwards fill the bubble at the beginning too."""

    def order(rank: int) -> list[Action]:
        return _in_turn(rank, micro_batches, warm_up=2 * (ranks - 1 - rank), delay=2 * rank)

    return _one_stage_each("zb_h2", ranks, micro_batches, order)


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """1F1B over ``chunks`` stages per rank, in groups of ``ranks`` micro-batches.

    Raises :class:`Refused` where the micro-batches are no multiple of the ranks.
    """
    if micro_batches % ranks:
        raise Refused(
            "option 'schedule' = 'interleaved': the number of micro-batches must be a multiple "
            f"of {ranks} (the size of the axis 'pipe'), not {micro_batches}; use "
            f"{ranks * -(-micro_batches // ranks)} micro-batches, or a schedule that accepts any "
            "number, e.g. '1f1b'"
        )
    total = micro_batches * chunks

    def turn(rank: int, number: int, backward: bool) -> tuple[int, int]:
        group, within = divmod(number, ranks * chunks)
        chunk, micro = divmod(within, ranks)
        return (chunks - 1 - chunk if backward else chunk) * ranks + rank, group * ranks + micro

    def order(rank: int) -> tuple[Action, ...]:
        warm_up = min(total, 2 * (ranks - 1 - rank) + (chunks - 1) * ranks)
        actions = [Action("F", *turn(rank, number, False)) for number in range(warm_up)]
        for number in range(total):
            if warm_up + number < total:
                actions.append(Action("F", *turn(rank, warm_up + number, False)))
            actions.append(Action("BW", *turn(rank, number, True)))
        return tuple(actions)

    place = tuple(stage % ranks for stage in range(ranks * chunks))
    orders = tuple(order(rank) for rank in range(ranks))
    return with_messages(Schedule("interleaved", micro_batches, place, orders))


def zb_v(ranks: int, micro_batches: int) -> Schedule:
    """Two chunks per rank, forth and back: the last stage lies on the first rank."""

    def order(rank: int) -> tuple[Action, ...]:
        stages = (rank, 2 * ranks - 1 - rank)
        done = {(op, chunk): 0 for op in "FBW" for chunk in (0, 1)}
        actions: list[Action] = []

        def do(*turn: tuple[str, int]) -> None:
            """Append each of ``turn`` (an operation and a chunk) that still has a micro-batch."""
            for op, chunk in turn:
                ready = {"F": micro_batches, "B": done["F", chunk], "W": done["B", chunk]}[op]
                if done[op, chunk] < ready:
                    actions.append(Action(op, stages[chunk], done[op, chunk]))
                    done[op, chunk] += 1

        def left(op: str, chunk: int) -> bool:
            return done[op, chunk] < micro_batches

        there, back = ([(op, chunk) for op in "FBW"] for chunk in (0, 1))
        for _ in range(2 * (ranks - rank) - 1):
            do(("F", 0))
        for _ in range(rank):
            do(("F", 1), ("F", 0))
        for _ in range(ranks - rank):
            do(*back)
        while left("F", 0) or left("F", 1):
            do(*there, *back)
        # W is held back as long as a B can go: others wait for what B sends, nobody for W's.
        for _ in range(rank):
            do(("B", 0), ("B", 1))
        for _ in range(ranks - rank):
            do(("B", 0), ("W", 0))
        for chunk in (1, 0):
            while left("W", chunk):
                do(("B", chunk), ("W", chunk))
        return tuple(actions)

    place = tuple(s if s < ranks else 2 * ranks - 1 - s for s in range(2 * ranks))
    orders = tuple(order(rank) for rank in range(ranks))
    return with_messages(Schedule("zb_v", micro_batches, place, orders))


def _one_stage_each(
    name: str, ranks: int, micro_batches: int, order: Callable[[int], list[Action]]
) -> Schedule:
    orders = tuple(tuple(order(rank)) for rank in range(ranks))
    return with_messages(Schedule(name, micro_batches, tuple(range(ranks)), orders))


def _in_turn(
    stage: int, micro_batches: int, warm_up: int, delay: int | None = None
) -> list[Action]:
    """``warm_up`` forwards, then alternately one forward and one backward.

    ``delay``: B and W apart, W so many rounds after B.
    """
    # Few micro-batches: fewer forwards first, and no steady state.
    warm_up = min(micro_batches, warm_up)
    actions = [Action("F", stage, micro) for micro in range(warm_up)]
    for micro in range(micro_batches):
        if warm_up + micro < micro_batches:
            actions.append(Action("F", stage, warm_up + micro))
        actions.append(Action("BW" if delay is None else "B", stage, micro))
        if delay is not None and micro >= delay:
            actions.append(Action("W", stage, micro - delay))
    rest = range(max(0, micro_batches - delay), micro_batches) if delay is not None else ()
    return actions + [Action("W", stage, micro) for micro in rest]


def proofs(schedule: Schedule, rank: int) -> Mapping[Action, Sequence[Action]]:
    """Each message to ``rank`` -> earlier messages of ``rank`` whose arrival it proves.

    Both are named by their receives.  Before a rank sends, it has waited for the inputs of all its
    earlier computations, so what comes back proves that these have arrived.
    """
    found: dict[Action, Sequence[Action]] = {}
    for peer, order in enumerate(schedule.orders):
        arrived = list[Action]()
        for action in order if peer != rank else ():
            op, stage, micro = action
            if (taken := received(schedule, peer, action)) is not None:
                if schedule.place[taken.stage + (-1 if taken.op == "RF" else 1)] == rank:
                    arrived.append(taken)
            elif op in ("SF", "SB"):
                goal = stage + 1 if op == "SF" else stage - 1
                if schedule.place[goal] == rank:
                    found[Action("R" + op[1], goal, micro)], arrived = arrived, []
    return found


#: Name -> (ranks, micro-batches) -> schedule; ``interleaved`` has a third argument, the chunks.
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
}
