"""A step measured beside its prediction: the part of the ranks.

First a launch with ledgers on shows what a step of each run sends.  Then, with ledgers off, in
rounds, for each run

    alone  together  together  alone     steps without traffic, and the steps that are predicted

and a sweep of the probes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardproof.bench.model import step_time
from shardproof.bench.subjects import Call, RankRounds, SideRun

#: Steps of a segment, and before the first one.
STEPS, WARM = 2, 4
ROUNDS = 6
#: Payloads at which an operation is probed, from the smallest to the largest that a step sends.
RUNGS = 6


def ladder(calls: Sequence[Call]) -> dict[str, list[int]]:
    """Payloads to probe each operation at: equal ratios, from the least to the most that is sent.

    One size is probed at itself and at a sixteenth, or there would be no alpha.  Messages of a
    pipeline are as long at any world: theirs from a half on, for a network that caps bandwidth lets
    the first kilobytes through at once.
    """
    rungs = {}
    for operation, sizes in step_time.sizes(calls).items():
        least, most = max(8, sizes[0]), max(8, sizes[-1])
        if least * 2 > most:
            least = max(8, most // (2 if operation == "send" else 16))
        ratio = (most / least) ** (1 / (RUNGS - 1))
        rungs[operation] = sorted({4 * round(least * ratio**i / 4) for i in range(RUNGS)})
    return rungs


def apart(axes: Mapping[str, int], calls: Sequence[Call]) -> dict[str, list[Call]]:
    """``calls`` by the axis that they go along, where each axis is probed apart: several are cut.

    What goes over a group of all ranks, and everything where one axis is cut, stands under "".
    """
    if sum(size > 1 for size in axes.values()) < 2:
        return {"": [*calls]}
    found: dict[str, list[Call]] = {"": []}
    for call in calls:
        along = all(axis in axes for axis in call.axis.split("+"))
        found.setdefault(call.axis if along else "", []).append(call)
    return found


def measure(
    runs: Sequence[SideRun],
    sizes: Mapping[str, Sequence[int]],
    products: Sequence[tuple[tuple[int, int, int, int], int]],
    rounds: int,
    rank: int,
) -> RankRounds:
    """The rank program: seconds of steps by run and segment, and what the probes found."""
    import torch

    from shardproof.backends import BACKENDS
    from shardproof.bench import on_rank
    from shardproof.bench.arm import Arm, assert_nothing_is_recorded, everybody
    from shardproof.bench.model import probes

    backend, world = runs[0].backend, runs[0].world
    assert_nothing_is_recorded(backend)
    cores = on_rank.pin(rank, world, BACKENDS[backend].threads)
    control = everybody(backend, world)
    alone = [probes.Alone(each, rank) for each in runs]
    together = [Arm(each, rank) for each in runs]
    for arm in together:  # after all groups are made
        arm.set_up()
    for single, arm in zip(alone, together, strict=True):
        single.segment(WARM)
        arm.seconds(WARM)
        single.forget()
    prober = probes.Probes(control, sizes, products)
    prober.sweep()
    prober.forget()
    seconds: list[list[list[float]]] = [[] for _ in runs]
    for _ in range(rounds):
        for number, (single, arm) in enumerate(zip(alone, together, strict=True)):
            single.segment(STEPS, control.barrier)
            arm.step()  # one that does not count
            seconds[number].append(arm.seconds(2 * STEPS))
            single.segment(STEPS, control.barrier)
        prober.sweep()
    for arm in (*(single.arm for single in alone), *together):
        arm.close()
    assert_nothing_is_recorded(backend)
    return RankRounds(
        rank,
        cores,
        torch.get_num_threads(),
        alone=[one.record() for one in alone],
        together=seconds,
        probes=prober.record(),
    )
