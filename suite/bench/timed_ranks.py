"""The program of a rank in a timed launch: its sides share the ranks and take turns in blocks.

    set up     each side on a mesh (hence process groups) of its own, the same batches
    warm-up    each side in turn, until all its ranks agree that it is over
    block 0    a pair: A B B A, then A A' A' A, beside A's twin: what differs there is the machine
               a cell: plain, wrapped, ranks, ranks, wrapped, plain
               then, where the model of a step is probed, one round of its probes
    block 1    ...

A segment (one letter of A B B A) is a barrier, then some steps back to back, without a barrier
between them.  A side that rank 0 runs alone is timed while the other ranks wait in the barrier of
the next segment.  docs/speed.md gives the reasons.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

import psutil
import torch

from shardproof import backends
from shardproof.bench import on_rank, sides, subjects, telemetry
from shardproof.bench.arm import Arm, assert_nothing_is_recorded, comms_along, everybody
from shardproof.bench.model import probes, step_time
from shardproof.bench.stats import TimedStep
from shardproof.comm import Comm
from shardproof.ledgers import program_order, traffic
from shardproof.ledgers.memory.log import FILE
from shardproof.ledgers.memory.recorder import MemoryLedger

#: Steps before the one whose memory is looked at: optimizer state is there from the first on.
MEMORY_STEPS = 3


def run(
    launch: subjects.Launch, watched: subjects.WatchedStep | None, workdir: Path, rank: int
) -> subjects.RankTimes:
    """Time the blocks of ``launch``; raw times go to ``times<rank>.jsonl`` at the end of each
    block, so that a launch that is stopped leaves what it measured.

    ``watched``: the calls to probe, where the launch probes the model.
    """
    assert_nothing_is_recorded(launch.first.backend)
    telemetry.announce(workdir, os.getpid())
    cores = on_rank.pin(rank, launch.first.world, backends.BACKENDS[launch.first.backend].threads)
    control = everybody(launch.first.backend, launch.first.world)
    arms = {}
    for side, of_side in launch.sides.items():
        arm = Arm(of_side, rank)  # every rank makes it: groups are made by all, in one order
        if arm.mesh.coordinate:
            arms[side] = arm
    for arm in arms.values():
        arm.set_up()
    probing = None if watched is None else _Probing(launch, watched, control, rank)
    losses: dict[str, list[float | None]] = {}
    seconds: dict[str, float] = {}
    with (workdir / f"times{rank}.jsonl").open("w", buffering=1) as file:
        writer = Writer(file, launch.number, rank)
        for side, arm in arms.items():
            group = arm.mesh.comm(*arm.mesh.axes) if arm.run.first_rank_only else control
            losses[side], seconds[side] = warm_up(arm, group, side, writer)
        steps = _segment_steps(launch, seconds, control)
        if probing is not None:
            probing.warm_up()
        gc.collect()
        gc.freeze()  # what set-up made is not looked through again while the clock runs
        for block in launch.blocks:
            for name, order in launch.orders.items():
                for segment, side in enumerate(order):
                    control.barrier()
                    if side in arms:
                        writer.add(name, block, segment, side, arms[side].seconds(steps[side]))
            writer.flush()
            if probing is not None:
                probing.block()
        control.barrier()  # nothing is closed while rank 0 is still being timed
    assert_nothing_is_recorded(launch.first.backend)
    times = closed(launch, arms, rank, steps, losses, cores)
    if probing is None:
        return times
    return replace(times, alone=probing.close(), probes=probing.probes.record())


def closed(
    launch: subjects.Launch,
    arms: Mapping[str, Arm],
    rank: int,
    steps: dict[str, int],
    losses: dict[str, list[float | None]],
    cores: list[int],
) -> subjects.RankTimes:
    """Close the ``arms`` of a launch; what the rank returns of them."""
    for arm in arms.values():
        arm.close()
    return subjects.RankTimes(
        rank,
        segment_steps=steps,
        losses=losses,
        coordinates=dict.fromkeys(launch.sides) | {s: arm.coordinate for s, arm in arms.items()},
        targets={side: arm.targets for side, arm in arms.items()},
        threads=torch.get_num_threads(),
        cores=cores,
        pci=telemetry.pci() if backends.BACKENDS[launch.first.backend].device == "cuda" else None,
    )


def warm_up(arm: Arm, control: Comm, side: str, writer: Writer) -> tuple[list[float | None], float]:
    """Steps that do not count: losses of the first ones, which show whether the sides train the
    same, and seconds of a step.
    """
    losses: list[float | None] = []
    times: list[float] = []
    while True:
        control.barrier()
        began = time.perf_counter()
        loss = arm.step().loss
        times.append(time.perf_counter() - began)
        losses.append(None if loss is None else float(loss))
        long = len(times) >= sides.WARM_LEAST and sum(times[1:]) >= sides.WARM_SECONDS
        if _agree(long or len(times) >= sides.WARM_STEPS, control):
            break
    writer.add("warm", -1, 0, side, times)
    return losses[: sides.WARM_LEAST], statistics.median(times[2:])


def _segment_steps(
    launch: subjects.Launch, seconds: dict[str, float], control: Comm
) -> dict[str, int]:
    """Steps of a segment by side, the same on all ranks, from rank 0's ``seconds`` of a step."""
    steps = {}
    for side in [launch.pace] if launch.pace else launch.sides:
        # A rank without a part in the side has no time of it; the number of rank 0 counts.
        steps_of = round(sides.SEGMENT_SECONDS / seconds.get(side, sides.SEGMENT_SECONDS))
        count = torch.tensor([max(sides.SEGMENT_STEPS, steps_of)], device=control.device)
        control.broadcast(count)
        steps[side] = int(count.item())
    return dict.fromkeys(launch.sides, steps[launch.pace]) if launch.pace else steps


def _agree(over: bool, control: Comm) -> bool:
    votes = torch.tensor([int(over)], device=control.device)
    control.all_reduce(votes, "min")
    return bool(votes.item())


class Writer:
    """Raw times of a rank, written at the end of each block."""

    def __init__(self, file: TextIO, launch: int, rank: int) -> None:
        self._file, self._launch, self._rank = file, launch, rank
        self._rows: list[TimedStep] = []

    def add(self, pair: str, block: int, segment: int, side: str, times: Sequence[float]) -> None:
        """Keep the ``times`` of the steps of a segment."""
        for step, seconds in enumerate(times):
            row = TimedStep(self._launch, pair, block, segment, side, step, self._rank, seconds)
            self._rows.append(row)

    def flush(self) -> None:
        """Write what was kept."""
        self._file.write("".join(json.dumps(asdict(row)) + "\n" for row in self._rows))
        self._rows.clear()


class _Probing:
    """The probes that the model of a step needs from this rank, block by block."""

    def __init__(
        self, launch: subjects.Launch, watched: subjects.WatchedStep, control: Comm, rank: int
    ) -> None:
        self._control = control
        self._alone = [probes.Alone(of_side, rank) for of_side in launch.probed.values()]
        #: Ranks that compute at once share a turn.
        at_once = launch.at_once or control.size
        self._turn, self._turns = rank // at_once, -(-control.size // at_once)
        first = next(iter(launch.probed.values()))
        calls = step_time.apart(first.axes, watched.calls)
        sizes = {axis: step_time.ladder(each) for axis, each in calls.items()}
        everybody = sizes.pop("")
        comms = comms_along(first.axes, first.backend, sizes)
        along = {axis: (comms[axis], each) for axis, each in sizes.items()}
        dtype = getattr(torch, first.dtype)
        self.probes = probes.Probes(control, everybody, watched.products, dtype, along)

    def warm_up(self) -> None:
        """Steps and calls that do not count."""
        for single in self._alone:
            single.segment(sides.WARM_LEAST)
            single.forget()
        self.probes.sweep()
        self.probes.forget()

    def block(self) -> None:
        """One round of everything, all ranks at once (of compute: those of a turn)."""
        for single in self._alone:
            for turn in range(self._turns):
                if turn == self._turn:
                    single.segment(sides.SEGMENT_STEPS, self._control.barrier)
                else:  # come to the barriers of those who compute
                    for _ in range(sides.SEGMENT_STEPS):
                        self._control.barrier()
                if self._turns > 1:
                    self._control.barrier()
        self.probes.sweep()

    def close(self) -> list[subjects.AloneSteps]:
        """End the steps; their seconds, in the order of the launch."""
        for single in self._alone:
            single.arm.close()
        return [single.record() for single in self._alone]


def counted(of_side: subjects.SideRun, memory: bool, rank: int) -> subjects.StepBytes:
    """The bytes of a step on this rank, which was joined with ledgers on.

    ``memory``: also those that it holds; the rank is a thread then.
    """
    log, sends = program_order.current(), traffic.current()
    if log is None or sends is None:
        raise RuntimeError("bytes are not recorded: pass RankLaunch(..., ledgers=True)")
    arm, begin = Arm(of_side, rank), 0
    phase = "setup"
    with MemoryLedger(lambda: phase) if memory else nullcontext() as ledger:
        arm.set_up()
        for step in range(MEMORY_STEPS):
            begin, phase = len(sends.calls), "step"
            if ledger is not None:
                ledger.step = step
            with log.step(step):
                arm.step()
    sent = math.ceil(sum(call.logical_bytes for call in sends.calls[begin:]))
    arm.close()
    if ledger is None:
        return subjects.StepBytes(sent)
    last = MEMORY_STEPS - 1
    found = subjects.StepBytes(sent, ledger.log.peak("step", last).bytes)
    for moment, levels, _ in ledger.log.replay():
        if moment == (last, "step"):
            host = levels.get((FILE, "all"), 0)
            every = sum(size for (_, kind), size in levels.items() if kind == "all")
            found = found.or_more(subjects.StepBytes(0, 0, every - host, host))
    return found


def alone(of_side: subjects.SideRun, rank: int) -> subjects.AloneRecord:
    """The untimed resources of the side on this rank, a process of its own."""
    on_gpu = backends.BACKENDS[of_side.backend].device == "cuda"
    arm = Arm(of_side, rank)
    before = psutil.Process().memory_info().rss
    arm.set_up()
    arm.seconds(MEMORY_STEPS)
    scale = 1 if sys.platform == "darwin" else 1 << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    arm.close()
    return subjects.AloneRecord(peak - before, telemetry.allocator() if on_gpu else None)
