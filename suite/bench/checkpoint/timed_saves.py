"""The program of a rank in a launch that times checkpoints: both sides live in the same ranks.

    set up     each side on a mesh of its own; one step of each, so that optimizers have their state
    warm-up    each side's action twice: memory for a copy, say, is made by the first
    block 0    A B B A; each letter is one action from a barrier
    block 1    ...
    loads      afterwards: both sides are closed, and one rank less loads what A saved

Before each save what was saved before is removed, so that a step can be saved again; before each
load parameters are set to 0, and after it they must be those that were saved.  Neither is timed.
A stall is the call, and what the update of the next step waits for the save: a step follows each.
What a copy behind its back slows that step, by taking a core or the memory's bandwidth, is none.
Of a side that calls torch.distributed.checkpoint only that call is timed: the state dicts that are
made before it, or handed over after it, are the adapter's choice and take longer than small saves.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

from shardproof import backends
from shardproof.bench import on_rank
from shardproof.bench.arm import Arm, assert_nothing_is_recorded, everybody
from shardproof.bench.subjects import Action, Launch, RankCounts, RankTimes, SideRun
from shardproof.bench.timed_ranks import Writer, closed
from shardproof.comm import Comm
from shardproof.contract import Kind, Piece

WARM_UPS = 2
#: What is saved, as far as it has bytes.
_KINDS: tuple[Kind, ...] = ("parameters", "optimizer", "buffers")
_PROC = Path("/proc/self")
#: Whether this machine tells of peaks.
_CAN_TELL = (_PROC / "clear_refs").exists()


class Saves:
    """One side that saves into ``root`` and loads from it, on this rank."""

    def __init__(self, arm: Arm, action: Action, root: Path, control: Comm, rank: int) -> None:
        self.arm, self.action, self.root, self.control = arm, action, root, control
        self.rank = rank
        self.saved: list[float] = []
        #: Bytes of resident memory above that before a save, the most of all saves.
        self.above = 0

    @property
    def pieces(self) -> list[Piece]:
        """The state that this rank holds."""
        return [piece for kind in _KINDS for piece in self.arm.implementation.local_state(kind)]

    def warm_up(self) -> None:
        """The untimed preparation; a load follows a save."""
        if self.action == "load":
            self.save()
            self.saved = self.sums()
        for _ in range(WARM_UPS):
            self.act()
        self.above = 0

    def act(self) -> float:
        """Seconds of the action."""
        return self.load() if self.action == "load" else self.save()

    def save(self) -> float:
        """Seconds of a save until it is committed, or of its ``stall``."""
        self.control.barrier()
        if self.rank == 0:
            for path in self.root.glob("*/"):
                shutil.rmtree(path)
        before = _resident()
        implementation, waits = self.arm.implementation, self.action != "stall"

        def action() -> Any:
            saving = implementation.save(self.root, {"data": {"step": self.arm.steps}})
            if saving is not None and waits:
                saving.wait()
            return saving

        seconds, saving = self.timed(action)
        if saving is not None and not waits:
            self.arm.step()
            seconds += getattr(saving, "waited", 0.0)
            saving.wait()
        self.above = max(self.above, _peak() - before)
        return seconds

    @torch.no_grad()
    def load(self) -> float:
        """Seconds of a load over parameters that are 0.

        :raises AssertionError: what was loaded is not what was saved.
        """
        for piece in self.arm.implementation.local_state("parameters"):
            piece.tensor.zero_()
        seconds, _ = self.timed(lambda: self.arm.implementation.load(self.root))
        if self.sums() != self.saved:
            raise AssertionError(
                "the loaded state differs from the saved state, so the load is not timed"
            )
        return seconds

    def timed(self, action: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds of ``action`` from a barrier, or of its call to DCP; what it returned."""
        with _inside_dcp(self.control) as inside:
            self.control.barrier()
            began = time.perf_counter()
            result = action()
            seconds = time.perf_counter() - began
        return (sum(inside) if inside else seconds), result

    def sums(self) -> list[float]:
        """Of every piece, so that a load that loads nothing is seen."""
        return [float(piece.tensor.sum(dtype=torch.float64)) for piece in self.pieces]


def run(launch: Launch, workdir: Path, rank: int) -> RankTimes:
    """Time the blocks of ``launch``, as :func:`shardproof.bench.timed_ranks.run` does steps."""
    first = launch.first
    assert_nothing_is_recorded(first.backend)
    cores = on_rank.pin(rank, first.world, backends.BACKENDS[first.backend].threads)
    control = everybody(first.backend, first.world)
    arms = {side: Arm(of_side, rank) for side, of_side in launch.sides.items()}
    losses: dict[str, list[float | None]] = {}
    sides = {}
    for side, arm in arms.items():
        loss = arm.set_up().step().loss
        losses[side] = [None if loss is None else float(loss)]
        sides[side] = Saves(arm, launch.action, workdir / side, control, rank)
    for saves in sides.values():
        saves.warm_up()
    with (workdir / f"times{rank}.jsonl").open("w", buffering=1) as file:
        writer = Writer(file, launch.number, rank)
        for block in launch.blocks:
            for name, order in launch.orders.items():
                for segment, side in enumerate(order):
                    writer.add(name, block, segment, side, [sides[side].act()])
            writer.flush()
    assert_nothing_is_recorded(first.backend)
    largest = max(math.prod(p.global_shape) * p.tensor.element_size() for p in sides["a"].pieces)
    above = {side: saves.above for side, saves in sides.items() if launch.action == "save"}
    times = closed(launch, arms, rank, dict.fromkeys(arms, 1), losses, cores)
    sides.clear()
    arms.clear()
    counts = RankCounts(above if _CAN_TELL else {}, largest)
    if launch.action == "load":
        needed, read = _reshaped(launch.sides["a"], workdir / "a", rank)
        counts = dataclasses.replace(counts, needed=needed, read=read)
    control.barrier()
    if rank == 0:
        for side in launch.sides:
            shutil.rmtree(workdir / side)
    return dataclasses.replace(times, counts=counts)


def _reshaped(of_side: SideRun, root: Path, rank: int) -> tuple[int, int | None]:
    """Bytes that this rank holds, and read, where one rank less loads what lies in ``root``."""
    axes, fewer = of_side.axes, of_side.world - 1
    if len(axes) > 1 or not fewer:
        return 0, None
    smaller = dataclasses.replace(of_side, axes=dict.fromkeys(axes, fewer))
    arm = Arm(smaller, rank, ranks=range(fewer))
    if rank == fewer:
        return 0, None
    implementation = arm.set_up().implementation
    implementation.load(root)
    held = [piece for kind in _KINDS for piece in implementation.local_state(kind)]
    needed = sum(piece.tensor.nbytes for piece in held)
    read = getattr(getattr(implementation, "loaded", None), "bytes_read", None)
    arm.close()
    return needed, read


@contextmanager
def _inside_dcp(control: Comm) -> Iterator[list[float]]:
    """Seconds of each call to torch.distributed.checkpoint, from a barrier."""
    inside: list[float] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*given: Any, **named: Any) -> Any:
            control.barrier()
            began = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                inside.append(time.perf_counter() - began)

        return timed_call

    names = ("save", "async_save", "load")
    calls: dict[str, Any] = {name: timed(getattr(dcp, name)) for name in names}
    with mock.patch.multiple(dcp, **calls):
        yield inside


def _resident() -> int:
    """Bytes that are resident now, from where the next :func:`_peak` counts.

    What allocators keep goes back first: a save that took it again would seem to need nothing.
    """
    if not _CAN_TELL:
        return 0
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    (_PROC / "clear_refs").write_text("5")  # proc(5): the peak starts again
    return _status("VmRSS")


def _peak() -> int:
    """The most bytes that were resident since :func:`_resident`."""
    return _status("VmHWM") if _CAN_TELL else 0


def _status(key: str) -> int:
    lines = (_PROC / "status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))
