"""What a rank does in a scaling launch: one rank alone and all together, side by side, in blocks.

    set up    plain    the ordinary program, on rank 0
              wrapped  the system alone, on a mesh of rank 0
              ranks    the system on all ranks
    warm-up   each side in turn
    block     plain, wrapped, ranks, ranks, wrapped, plain; the other ranks wait in a barrier

Rank 0 alone computes on the machine on which all ranks do, in the same minute.  A segment is a
barrier, then some steps back to back; ledgers are off, and that is asserted.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardproof.backends import BACKENDS
from shardproof.bench import pinning
from shardproof.bench.model import measurement, probes, step_time
from shardproof.bench.scaling.judge import ALONE_ORDER, ORDER, PAIR
from shardproof.bench.scaling.matrix import PLAIN, Cell
from shardproof.bench.sides import SEGMENT_SECONDS, SEGMENT_STEPS, WARM_LEAST, Pair, Side
from shardproof.bench.timed_ranks import (
    Arm,
    Writer,
    assert_nothing_is_recorded,
    segment_steps,
    segment_times,
    targets_of,
    warm_up,
)
from shardproof.comm import Comm, Mesh


def run(
    cell: Cell,
    mesh: Mapping[str, int],
    together: bool,
    launch: int,
    blocks: Sequence[int],
    watched: Mapping[str, Any] | None,
    workdir: Path,
    rank: int,
) -> dict[str, Any]:
    """Time ``blocks`` (their numbers) of ``cell``, whose ranks are on ``mesh``.

    Without ``together`` one rank is timed alone.  Raw times go to ``times<rank>.jsonl`` at the end
    of each block.  With what ``bench.model.probes.watch`` told (``watched``), each block ends
    with the probes of the model: steps of every rank that sends nothing, the calls that were seen,
    and rates of the machine.
    """
    assert_nothing_is_recorded(cell.backend)
    world, backend = dist.get_world_size(), BACKENDS[cell.backend]
    cores = pinning.pin(rank, world, backend.threads)
    control = Mesh({"replicate": world}, device=backend.device).comm("replicate")
    order = ORDER if together else ALONE_ORDER
    arms = _arms(cell, mesh, order, rank)
    for arm in arms.values():
        arm.set_up()
    probing = None if watched is None else _Probing(cell, mesh, watched, control, rank)
    warm: dict[str, dict[str, Any]] = {}
    steps: dict[str, int] = {}
    with (workdir / f"times{rank}.jsonl").open("w", buffering=1) as file:
        writer = Writer(file, launch, rank)
        for side in dict.fromkeys(order):
            seconds = SEGMENT_SECONDS  # of no account where this rank is no member: rank 0 decides
            if side in arms:
                own = arms[side].mesh.comm(*arms[side].mesh.axes)
                warm[side] = warm_up(arms[side], own, side, writer)
                seconds = warm[side]["seconds"]
            steps[side] = segment_steps(seconds, control)
        if probing is not None:
            probing.warm_up()
        gc.collect()
        gc.freeze()  # what set-up made is not looked through again while the clock runs
        for block in blocks:
            for segment, side in enumerate(order):
                if side not in arms:
                    control.barrier()
                    continue
                times = segment_times(arms[side], control, steps[side])
                writer.add(PAIR, block, segment, side, times)
            writer.flush()
            if probing is not None:
                probing.block()
        control.barrier()  # nothing is closed while rank 0 is still being timed
    assert_nothing_is_recorded(cell.backend)
    for arm in arms.values():
        arm.close()
    probed = {} if probing is None else probing.close()
    return {
        "rank": rank,
        "segment_steps": steps,
        "warm_up": warm,
        "threads": torch.get_num_threads(),
        "cores": cores,
        "coordinates": dict.fromkeys(order) | {side: a.coordinate for side, a in arms.items()},
        "targets": {side: targets_of(arm) for side, arm in arms.items()},
        **probed,
    }


def _arms(cell: Cell, mesh: Mapping[str, int], order: Sequence[str], rank: int) -> dict[str, Arm]:
    """The sides that this rank has a part in; groups are made by all ranks, in one order."""
    (axis,) = mesh
    alone = replace(cell, world=1, workload=cell.base)
    places: dict[str, tuple[Pair, Mapping[str, int], tuple[int, ...] | None]] = {
        "plain": (alone.pair(Side(PLAIN)), {"replicate": 1}, (0,)),
        "wrapped": (alone.pair(), {axis: 1}, (0,)),
        "ranks": (cell.pair(), mesh, None),
    }
    found = {}
    for side in dict.fromkeys(order):
        pair, axes, ranks = places[side]
        arm = Arm(pair, "a", axes, rank, ranks=ranks)
        if arm.mesh.coordinate:
            found[side] = arm
    return found


class _Probing:
    """What the model asks of this rank, block by block.

    Compute is measured with this rank's share of the batch and, where that shrinks with the number
    of ranks, with one sample.
    """

    def __init__(
        self,
        cell: Cell,
        mesh: Mapping[str, int],
        watched: Mapping[str, Any],
        control: Comm,
        rank: int,
    ) -> None:
        pair, self._control = cell.pair(), control
        self._alone = {cell.samples(cell.world): probes.Alone(pair, "a", mesh, rank)}
        if cell.mode == "strong" and 1 not in self._alone:
            single = replace(pair, workload=replace(pair.workload, global_batch=cell.world))
            self._alone[1] = probes.Alone(single, "a", mesh, rank)
        sizes = measurement.ladder(step_time.seen(watched["calls"]))
        dtype = getattr(torch, cell.dtype)
        self._probes = probes.Probes(control, sizes, watched["products"], dtype)

    def warm_up(self) -> None:
        """Steps and calls that do not count."""
        for single in self._alone.values():
            single.segment(WARM_LEAST)
            single.forget()
        self._probes.sweep()
        self._probes.forget()

    def block(self) -> None:
        """One round of everything, all ranks at once."""
        for single in self._alone.values():
            single.segment(SEGMENT_STEPS, self._control.barrier)
        self._probes.sweep()

    def close(self) -> dict[str, Any]:
        """End the steps; what was found."""
        for single in self._alone.values():
            single.arm.close()
        return {
            "probes": self._probes.record(),
            "alone": {
                str(samples): {"steps": single.steps, "gradients": single.gradients}
                for samples, single in self._alone.items()
            },
        }
