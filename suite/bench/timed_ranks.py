"""What a rank does in a timed launch: both sides side by side, in blocks A B B A, and an A/A pair.

    set up A, A's twin, B      each on a mesh (hence process groups) of its own, the same batches
    warm-up                    each side in turn, until all ranks agree that it is over
    block 0    A B B A         a segment is a barrier, then some steps back to back
               A A' A' A       the A/A pair: what differs here is the machine
    block 1    ...

A step's time on a rank runs from the end of the step before (of the barrier for the first of a
segment) to its own end; the suite takes the maximum over ranks.  There is no barrier inside a
segment, and each rank keeps to cores of its own where there are enough.  In both orders each side
has one segment after itself and one after the other, so what a change of sides costs falls on both
alike.  Ledgers are off, and that is asserted: they would be measured, too.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed import distributed_c10d as c10d

from shardproof import backends, registry, workloads
from shardproof.bench import pinning
from shardproof.bench.sides import (
    SEGMENT_SECONDS,
    SEGMENT_STEPS,
    WARM_LEAST,
    WARM_SECONDS,
    WARM_STEPS,
    Pair,
)
from shardproof.bench.telemetry import nvml, sampling
from shardproof.case import DATA_AXES, data_shares
from shardproof.comm import Comm, Mesh
from shardproof.contract import Batch, MicroBatch, Observe, Point, StepResult
from shardproof.ledgers import program_order, traffic
from shardproof.ledgers.memory import MemoryLedger
from shardproof.ledgers.memory.installed import active

#: Sides that a launch times, in the order of their set-up; ``twin`` is A once more.
SIDES = ("a", "twin", "b")
#: Order of the segments in a block of each pair.
ORDERS = {"ab": ("a", "b", "b", "a"), "aa": ("a", "twin", "twin", "a")}
#: Different batches; they come round again, so that no time goes into making them.
BATCHES = 8
#: Steps before the one whose memory is looked at: optimizer state is there from the first on.
MEMORY_STEPS = 3

Meshes = Mapping[str, Mapping[str, int]]


def _ignore(point: Point) -> None:
    """Nobody observes while the clock runs."""


def mesh_of(axes: Mapping[str, int], device: str, ranks: Sequence[int] | None = None) -> Mesh:
    """The mesh of an arm; every rank makes it, those that are not on it too."""
    joint = (DATA_AXES,) if all(axis in axes for axis in DATA_AXES) else ()
    return Mesh(axes, joint=joint, device=device, ranks=ranks)


class Arm:
    """One side on this rank: an implementation, its batches and its number of steps.

    ``ranks`` (default: all) are those on the mesh ``axes``; arms are made by every rank all the
    same, because groups are.  ``share`` is `(index, of)`: the share of the global batch that the
    rank gets, where that does not follow from the mesh (a rank alone, with its share of many).
    """

    def __init__(
        self,
        pair: Pair,
        side: str,
        axes: Mapping[str, int],
        rank: int,
        *,
        ranks: Sequence[int] | None = None,
        share: tuple[int, int] | None = None,
    ) -> None:
        chosen = pair.side(side)
        cls = registry.load(chosen.implementation)
        capabilities = cls.capabilities(chosen.options)
        device = backends.BACKENDS[pair.backend].device
        self.mesh = mesh_of(axes, device, ranks)
        self.workload = workloads.make(pair.workload, pair.dtype, "working_precision")
        members = range(pair.world) if ranks is None else ranks
        workers = [r for r in members if cls.role(r, len(members), chosen.options) == "worker"]
        shares = data_shares(axes, members, workers)
        self.coordinate, of = shares.get(rank), max(shares.values()) + 1
        if share is not None:
            self.coordinate, of = share
        self.batches = [self._share(number, of, device) for number in range(BATCHES)]
        lends = capabilities.initial_state == "everywhere" or rank == members[0]
        self.state = self.workload.state() if lends else None
        self.build = self.workload.build_for(rank, self.coordinate or 0)
        self.pair, self.options, self.device = pair, chosen.options, device
        self.implementation = cls()
        self.steps = 0

    def set_up(self) -> None:
        """The implementation's own set-up."""
        self.implementation.setup(
            self.build, self.state, self.pair.optimizer, self.mesh, self.options
        )
        self.state = None

    def step(self, observe: Observe = _ignore) -> StepResult:
        """The next optimizer step; over when the device has done it."""
        batch = dataclasses.replace(self.batches[self.steps % BATCHES], step=self.steps)
        self.steps += 1
        result = self.implementation.step(batch, observe)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return result

    def close(self) -> None:
        """End work in flight, then the implementation."""
        self.implementation.drain()
        self.implementation.close()

    def _share(self, step: int, shares: int, device: str) -> Batch:
        if self.coordinate is None:
            return Batch(step, ())
        batch = self.workload.batch(step, shares)[self.coordinate]
        windows = tuple(tuple(_placed(m, device) for m in window) for window in batch.windows)
        return dataclasses.replace(batch, windows=windows)


def _placed(micro: MicroBatch, device: str) -> MicroBatch:
    if device == "cpu":
        return micro
    tensors = (getattr(micro, field.name) for field in dataclasses.fields(micro))
    return MicroBatch(*(tensor.to(device) for tensor in tensors))


# ------------------------------------------------------------------------------------ timing


def run(
    pair: Pair, meshes: Meshes, launch: int, blocks: Sequence[int], workdir: Path, rank: int
) -> dict[str, Any]:
    """Time ``blocks`` (their numbers) of both pairs; raw times go to ``times<rank>.jsonl`` at the
    end of each block, so that a launch that is stopped leaves what it measured.
    """
    assert_nothing_is_recorded(pair.backend)
    sampling.say_who(workdir, os.getpid())
    cores = pinning.pin(rank, pair.world, backends.BACKENDS[pair.backend].threads)
    control = Mesh({"replicate": pair.world}, device=backends.BACKENDS[pair.backend].device).comm(
        "replicate"
    )
    arms = {side: Arm(pair, side, meshes[side], rank) for side in SIDES}
    for arm in arms.values():
        arm.set_up()
    with (workdir / f"times{rank}.jsonl").open("w", buffering=1) as file:
        writer = Writer(file, launch, rank)
        warm = {side: warm_up(arm, control, side, writer) for side, arm in arms.items()}
        steps = segment_steps(warm["a"]["seconds"], control)
        gc.collect()
        gc.freeze()  # what set-up made is not looked through again while the clock runs
        for block in blocks:
            for name, order in ORDERS.items():
                for segment, side in enumerate(order):
                    times = segment_times(arms[side], control, steps)
                    writer.add(name, block, segment, side, times)
                writer.flush()
    assert_nothing_is_recorded(pair.backend)
    for arm in arms.values():
        arm.close()
    return {
        "rank": rank,
        "segment_steps": steps,
        "warm_up": warm,
        "threads": torch.get_num_threads(),
        "cores": cores,
        "pci": _pci(pair.backend),
        "coordinates": {side: arm.coordinate for side, arm in arms.items()},
        "targets": {side: targets_of(arm) for side, arm in arms.items()},
    }


def assert_nothing_is_recorded(backend: str) -> None:
    """Raise unless every ledger of this rank is off and gloo is torch's own."""
    native = backend == "in_memory" or not hasattr(c10d.ProcessGroupGloo, "native")
    if program_order.current() or traffic.current() or active() or not native:
        raise RuntimeError("a ledger is on in a timed run: its cost would be measured")


def segment_times(arm: Arm, control: Comm, steps: int) -> list[float]:
    """Seconds of each of ``steps`` steps on this rank."""
    control.barrier()
    ends = [time.perf_counter()]
    for _ in range(steps):
        arm.step()
        ends.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(ends)]


def warm_up(arm: Arm, control: Comm, side: str, writer: Writer) -> dict[str, Any]:
    """Steps that do not count; their losses show whether the sides train the same."""
    losses: list[float | None] = []
    times: list[float] = []
    while True:
        control.barrier()
        began = time.perf_counter()
        loss = arm.step().loss
        times.append(time.perf_counter() - began)
        losses.append(None if loss is None else float(loss))
        over = len(times) >= WARM_STEPS or (
            len(times) >= WARM_LEAST and sum(times[1:]) >= WARM_SECONDS
        )
        if _agree(over, control):
            break
    writer.add("warm", -1, 0, side, times)
    return {"losses": losses[:WARM_LEAST], "seconds": statistics.median(times[2:])}


def segment_steps(seconds: float, control: Comm) -> int:
    """Steps of a segment, the same on all ranks; ``seconds`` is one's time on this rank."""
    wanted = max(SEGMENT_STEPS, round(SEGMENT_SECONDS / seconds))
    told = torch.tensor([wanted], device=control.device)
    control.broadcast(told)
    return int(told.item())


def _agree(over: bool, control: Comm) -> bool:
    votes = torch.tensor([int(over)], device=control.device)
    control.all_reduce(votes, "min")
    return bool(votes.item())


def targets_of(arm: Arm) -> int:
    """Targets (tokens, or samples of a classifier) of this rank in one step, masked ones too."""
    return sum(micro.targets.numel() for micro in arm.batches[0].micro_batches)


class Writer:
    """Appends raw times of whole blocks."""

    def __init__(self, file: Any, launch: int, rank: int) -> None:
        self._file, self._launch, self._rank = file, launch, rank
        self._rows: list[dict[str, Any]] = []

    def add(self, pair: str, block: int, segment: int, side: str, times: Sequence[float]) -> None:
        for step, seconds in enumerate(times):
            self._rows.append(
                {
                    "launch": self._launch,
                    "pair": pair,
                    "block": block,
                    "segment": segment,
                    "side": side,
                    "step": step,
                    "rank": self._rank,
                    "seconds": seconds,
                }
            )

    def flush(self) -> None:
        self._file.write("".join(json.dumps(row) + "\n" for row in self._rows))
        self._rows.clear()


# --------------------------------------------------------------------------- one side alone


def memory(pair: Pair, side: str, axes: Mapping[str, int], rank: int) -> dict[str, Any]:
    """The most bytes that a step of ``side`` holds on this rank, a thread: the ledger's count."""
    arm = Arm(pair, side, axes, rank)
    moment = {"phase": "setup"}
    with MemoryLedger(lambda: moment["phase"]) as ledger:
        arm.set_up()
        for step in range(MEMORY_STEPS):
            moment["phase"], ledger.step = "step", step
            arm.step()
    arm.close()
    return {"rank": rank, "ledger": ledger.log.peak("step", MEMORY_STEPS - 1).bytes}


def alone(
    pair: Pair, side: str, axes: Mapping[str, int], rank: int, workdir: Path
) -> dict[str, Any]:
    """What ``side`` takes of this rank, a process of its own; see ``telemetry.of_side``.

    ``resident`` is the growth of resident memory since before the set-up, allocators, groups and
    libraries included.  With a GPU steps go on for ``telemetry.ALONE_SECONDS``, so that energy has
    something to be divided by; nobody times them.
    """
    sampling.say_who(workdir, os.getpid())
    on_gpu = backends.BACKENDS[pair.backend].device == "cuda"
    arm = Arm(pair, side, axes, rank)
    before = psutil.Process().memory_info().rss
    arm.set_up()
    for _ in range(MEMORY_STEPS):
        arm.step()
    began = time.monotonic()
    steps = _steps_alone(pair, arm) if on_gpu else 0
    ended = time.monotonic()
    scale = 1 if sys.platform == "darwin" else 1 << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    arm.close()
    return {
        "rank": rank,
        "resident": peak - before,
        "allocator": nvml.allocator() if on_gpu else None,
        "pci": _pci(pair.backend),
        "began": began,
        "ended": ended,
        "steps": steps,
    }


def _steps_alone(pair: Pair, arm: Arm) -> int:
    """Run steps for a while, as many on every rank; how many."""
    device = backends.BACKENDS[pair.backend].device
    control = Mesh({"replicate": pair.world}, device=device).comm("replicate")
    steps = 0
    over = False
    began = time.monotonic()
    while not over:
        for _ in range(SEGMENT_STEPS):
            arm.step()
        steps += SEGMENT_STEPS
        over = _agree(time.monotonic() - began >= sampling.ALONE_SECONDS, control)
    return steps


def _pci(backend: str) -> dict[str, int] | None:
    """Where this rank's GPU is, if it computes on one and torch tells."""
    if backends.BACKENDS[backend].device != "cuda":
        return None
    return nvml.pci_of(torch.cuda.get_device_properties(torch.cuda.current_device()))
