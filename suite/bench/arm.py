"""One side of a comparison, ready to step, on one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from shardproof import backends, registry, workloads
from shardproof.axes import joint_groups, replicas
from shardproof.bench.on_rank import Clock, finish
from shardproof.bench.subjects import SideRun
from shardproof.case import Lane, data_shares
from shardproof.comm import Comm, Mesh
from shardproof.contract import Batch, MicroBatch, Observe, StepResult
from shardproof.ledgers import program_order, traffic
from shardproof.ledgers.memory.installed import active

#: Different batches; they come round again, so that no time goes into making them.
BATCHES = 8


def mesh_of(axes: Mapping[str, int], device: str, ranks: Sequence[int] | None = None) -> Mesh:
    """The mesh of an arm; every rank makes it, those that are not on it too."""
    return Mesh(axes, joint=joint_groups(axes), device=device, ranks=ranks)


def everybody(backend: str, world: int) -> Comm:
    """A group of all ranks, for barriers and votes."""
    axes = replicas(world)
    return mesh_of(axes, backends.BACKENDS[backend].device).comm(*axes)


def comms_along(axes: Mapping[str, int], backend: str, wanted: Iterable[str]) -> dict[str, Comm]:
    """This rank's group along each ``wanted`` axis (several: joined by ``+``) of a mesh of all."""
    names = {axis: tuple(axis.split("+")) for axis in wanted}
    if not names:
        return {}
    mesh = Mesh(axes, joint=[*names.values()], device=backends.BACKENDS[backend].device)
    return {axis: mesh.comm(*parts) for axis, parts in names.items()}


class Arm:
    """One side on this rank: an implementation, its batches and its number of steps.

    ``ranks`` (default: those of ``run``) are on the mesh; every rank makes the arm all the same,
    because groups are made by all.  ``share`` is `(index, of)`: the share of the global batch that
    the rank gets, where that does not follow from the mesh (a rank alone, with its share of many).
    """

    def __init__(
        self,
        run: SideRun,
        rank: int,
        *,
        ranks: Sequence[int] | None = None,
        share: tuple[int, int] | None = None,
    ) -> None:
        if run.first_rank_only:
            ranks = (0,)
        options, cls = run.side.options, registry.load(run.side.implementation)
        capabilities = cls.capabilities(options)
        device = backends.BACKENDS[run.backend].device
        self.mesh = mesh_of(run.axes, device, ranks)
        lane: Lane = "fp64" if run.dtype == "float64" else "working_precision"
        self.workload = workloads.make(run.workload, run.dtype, lane)
        members = range(run.world) if ranks is None else ranks
        workers = [r for r in members if cls.role(r, len(members), options) == "worker"]
        shares = data_shares(run.axes, members, workers)
        self.coordinate, of = share or (shares.get(rank), max(shares.values()) + 1)
        self.batches = [self._share(number, of, device) for number in range(BATCHES)]
        lends = capabilities.initial_state == "everywhere" or rank == members[0]
        self.state = self.workload.state() if lends else None
        self.build = self.workload.build_for(rank, self.coordinate or 0)
        self.run, self.device = run, device
        self.implementation = cls()
        self.steps = 0

    def set_up(self) -> Self:
        """The implementation's own set-up; this arm, ready to step."""
        self.implementation.setup(
            self.build, self.state, self.run.optimizer, self.mesh, self.run.side.options
        )
        self.state = None
        return self

    def step(self, observe: Observe = lambda point: None) -> StepResult:
        """The next optimizer step; over when the device has done it."""
        result = self._ask(observe)
        finish(self.device)
        return result

    def seconds(self, steps: int) -> list[float]:
        """Seconds of each of ``steps`` steps, back to back; all are over then."""
        clock = Clock(self.device)
        clock.mark()
        for _ in range(steps):
            self._ask()
            clock.mark()
        return clock.seconds()

    def _ask(self, observe: Observe = lambda point: None) -> StepResult:
        """The next optimizer step; the device may still be at it."""
        batch = dataclasses.replace(self.batches[self.steps % BATCHES], step=self.steps)
        self.steps += 1
        return self.implementation.step(batch, observe)

    @property
    def targets(self) -> int:
        """Targets (tokens, or samples of a classifier) of this rank in one step."""
        return sum(micro.targets.numel() for micro in self.batches[0].micro_batches)

    def close(self) -> None:
        """Let what is under way end, and give up what the implementation holds."""
        self.implementation.drain()
        self.implementation.close()

    def _share(self, step: int, shares: int, device: str) -> Batch:
        if self.coordinate is None:
            return Batch(step, ())
        batch = self.workload.batch(step, shares)[self.coordinate]
        windows = tuple(tuple(_placed(m, device) for m in window) for window in batch.windows)
        return dataclasses.replace(batch, windows=windows)


def _placed(micro: MicroBatch, device: str) -> MicroBatch:
    tensors = (getattr(micro, field.name) for field in dataclasses.fields(micro))
    return MicroBatch(*(tensor.to(device) for tensor in tensors))


def assert_nothing_is_recorded(backend: str) -> None:
    """Raise unless every ledger of this rank is off and the groups are native, or only delay."""
    recording = backends.BACKENDS[backend].is_recording()
    if program_order.current() or traffic.current() or active() or recording:
        raise RuntimeError("a timed run cannot record calls: pass RankLaunch(..., ledgers=False)")
