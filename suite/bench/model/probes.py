"""The measurements of a rank for the model: rates of the machine, and compute without traffic.

    watch    one untimed step with the traffic ledger on: calls and sizes; FLOPs of the plain model
    Probes   compute rate, memory bandwidth, seconds of each collective: one :meth:`Probes.sweep` a
             round, so that every figure meets the same machine as the steps that it explains
    Alone    the implementation on a mesh of this rank only, with its share of the batch: compute

All ranks measure at once, as they compute at once.  Each call of a collective works on a part of a
buffer that is larger than the caches, because gradients are not in them either.  Ledgers are off
but in ``watch``.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardproof.axes import parts
from shardproof.backends import BACKENDS
from shardproof.bench import subjects
from shardproof.bench.arm import Arm, assert_nothing_is_recorded, everybody, mesh_of
from shardproof.bench.model import step_time
from shardproof.bench.on_rank import Clock, finish, pin
from shardproof.case import data_shares
from shardproof.comm import Comm
from shardproof.contract import MicroBatch, Point
from shardproof.ledgers import program_order, traffic
from shardproof.workloads import Workload

#: Steps before the one that is looked at: buckets are laid out anew after the first.
BEFORE = 3
#: Bytes that probes of collectives and of memory go through: beyond the caches.
POOL_BYTES = 64 * 2**20
#: Calls of one measurement, fewer for large payloads: at most so many bytes.
CALLS, CALL_BYTES = 16, 8 * 2**20
#: Products of matrices that stand for the model's: those of most FLOPs.
SHAPES = 6
#: Steps of a segment of :func:`measure`, and before the first one.
STEPS, WARM = 2, 4
#: Seconds of one measurement of a rate.
RATE_SECONDS = 0.02

#: ``(batch, rows, inner, columns)`` of a product of matrices.
Shape = tuple[int, int, int, int]


def watch(run: subjects.SideRun, rank: int) -> subjects.WatchedStep:
    """One step of ``run`` on this rank, after three that do not count.

    Needs ranks that were joined with ledgers on.

    :raises RuntimeError: ledgers are off.
    """
    log, ledger = program_order.current(), traffic.current()
    if log is None or ledger is None:
        raise RuntimeError("calls of a step are not recorded: pass RankLaunch(..., ledgers=True)")
    arm = Arm(run, rank).set_up()
    begin = 0
    for step in range(BEFORE + 1):
        begin = len(ledger.calls)
        with log.step(step):
            arm.step()
    calls = step_time.seen(ledger.calls[begin:])
    shapes, trained = arm.workload.shapes, arm.workload.trainable_names
    flops, products = work(arm.workload, arm.batches[0].micro_batches, arm.device)
    schedule = _schedule(arm)
    arm.close()
    elements = sum(math.prod(shapes[name]) for name in trained)
    return subjects.WatchedStep(calls, flops, products, elements, schedule)


def _schedule(arm: Arm) -> dict[str, Any] | None:
    """The schedule that a pipeline of one window a step announced; ``None``: no such."""
    ranks, windows = parts(arm.run.axes, "layers"), arm.batches[0].windows
    if ranks == 1 or len(windows) != 1:
        return None
    announced = arm.implementation.schedule(arm.run.side.options, ranks, len(windows[0]))
    return None if announced is None else announced.to_dict()


def watch_each(runs: Sequence[subjects.SideRun], rank: int) -> list[subjects.WatchedStep]:
    """:func:`watch` of each run."""
    return [watch(run, rank) for run in runs]


def work(
    workload: Workload, micro_batches: Iterable[MicroBatch], device: str = "cpu"
) -> tuple[int, list[tuple[Shape, int]]]:
    """FLOPs of forward and backward of the plain model in products of matrices (2 a multiply-add),
    and the :data:`SHAPES` products of most FLOPs, each with how often a step makes it.
    """
    build = workload.build_for(0)
    model = build(device)
    with _Products() as seen:
        for micro in micro_batches:
            build.loss(model(micro.inputs), micro).backward()
    flops = {shape: 2 * math.prod(shape) * n for shape, n in seen.counts.items()}
    chosen = sorted(flops, key=lambda shape: (-flops[shape], shape))[:SHAPES]
    return sum(flops.values()), [(shape, seen.counts[shape]) for shape in chosen]


class _Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Shape] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            left, right = args[-2:] if name in ("mm", "bmm") else args[1:3]
            batch = left.shape[0] if left.dim() == 3 else 1
            self.counts[batch, left.shape[-2], left.shape[-1], right.shape[-1]] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Probed:
    """A group of this rank, the payload bytes to measure each operation in it at, and what was
    found: seconds by operation and payload, wall and CPU seconds by operation.
    """

    comm: Comm
    sizes: Mapping[str, Sequence[int]]
    seconds: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    used: dict[str, list[float]] = field(default_factory=dict)
    #: Messages so far.
    turns: int = 0

    @property
    def largest(self) -> int:
        """Bytes of the largest buffer of a call."""
        # Of a gather or scatter the payload is one rank's shard.
        shards = {"gather": self.comm.size, "scatter": self.comm.size}
        sizes = self.sizes.items()
        return max((n * shards.get(op, 1) for op, each in sizes for n in each), default=0)

    def record(self) -> subjects.GroupRecord:
        """The results of all sweeps."""
        return subjects.GroupRecord(
            self.comm.size,
            [(op, n, seconds) for (op, n), seconds in self.seconds.items()],
            {op: (wall, cpu) for op, (wall, cpu) in self.used.items()},
        )


class Probes:
    """Measurements of one rank; every rank calls :meth:`sweep` equally often.

    ``comm`` is a group of the backend with all ranks, ``sizes`` the payload bytes to measure each
    operation at, ``products`` the shapes that the compute rate is measured with.  ``along``: by
    axis this rank's group along it, and the sizes there; all groups of an axis are measured at
    once, for they share links, as in a step.
    """

    def __init__(
        self,
        comm: Comm,
        sizes: Mapping[str, Sequence[int]],
        products: Sequence[tuple[Sequence[int], int]] = (),
        dtype: torch.dtype = torch.float32,
        along: Mapping[str, tuple[Comm, Mapping[str, Sequence[int]]]] | None = None,
    ) -> None:
        self.comm, self.products = comm, list(products)
        self.device, self.dtype = comm.device, dtype
        groups = {"": (comm, sizes), **(along or {})}
        self.groups = {axis: Probed(*each) for axis, each in groups.items()}
        largest = max(group.largest for group in self.groups.values())
        count = max(POOL_BYTES, 2 * largest + 4096) // 4
        # Written, so that the pages exist; zeros stay zeros in every sum.
        self.pool = torch.empty(count, device=self.device).fill_(0.0)
        self.other = torch.empty(POOL_BYTES // 4, device=self.device).fill_(0.0)
        self.place = 0
        self.forget()

    def sweep(self) -> None:
        """Measure each operation at each of its payloads, and the rates."""
        for group in self.groups.values():
            for operation, payloads in group.sizes.items():
                for payload in payloads:
                    self._collective(group, operation, payload)
        if self.products:
            self.flop_rates.append(self._flop_rate())
        self.byte_rates.append(self._byte_rate())

    def forget(self) -> None:
        """Drop what was measured so far: it was warm-up."""
        for group in self.groups.values():
            group.seconds.clear()
            group.used.clear()
        self.flop_rates: list[float] = []
        self.byte_rates: list[float] = []

    def record(self) -> subjects.ProbeRecord:
        """The results of all sweeps, for :func:`shardproof.bench.model.alpha_beta.machine`."""
        groups = {axis: group.record() for axis, group in self.groups.items()}
        return subjects.ProbeRecord(groups, self.flop_rates, self.byte_rates)

    def _collective(self, group: Probed, operation: str, payload: int) -> None:
        """Mean seconds of a call of ``payload`` bytes, calls back to back from a start that all
        groups have in common.
        """
        call = self._call_of(group, operation, payload)
        calls = max(2, min(CALLS, CALL_BYTES // max(1, payload)))
        call()  # connections and scratch memory are there from the first call on
        finish(self.device)
        self.comm.barrier()
        cpu, began = time.process_time(), time.perf_counter()
        for _ in range(calls):
            call()
        finish(self.device)
        ended, used = time.perf_counter() - began, time.process_time() - cpu
        group.seconds.setdefault((operation, payload), []).append(ended / calls)
        wall, busy = group.used.setdefault(operation, [0.0, 0.0])
        group.used[operation] = [wall + ended, busy + used]

    def _call_of(self, group: Probed, operation: str, payload: int) -> Callable[[], object]:
        comm, count = group.comm, max(1, -(-payload // 4))
        shard = -(-count // comm.size)
        whole = shard * comm.size
        others = -(-count // max(1, comm.size - 1)) * comm.size
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: comm.all_reduce(self._part(count)),
            "broadcast": lambda: comm.broadcast(self._part(count)),
            "reduce": lambda: comm.reduce(self._part(count)),
            "all_gather": lambda: comm.all_gather(self._part(whole), self._own(shard)),
            "reduce_scatter": lambda: comm.reduce_scatter(self._own(shard), self._part(whole)),
            # A rank keeps a chunk: the payload is that of the others.
            "all_to_all": lambda: comm.all_to_all(self._own(others), self._part(others)),
            "gather": lambda: comm.gather(self._own(count), self._shards(comm, count)),
            "scatter": lambda: comm.scatter(self._own(count), self._shards(comm, count)),
            "barrier": lambda: comm.barrier(),
            "send": lambda: self._message(group, self._part(count)),
        }
        if operation not in calls:
            raise ValueError(f"no probe measures {operation!r}")
        return calls[operation]

    def _message(self, group: Probed, tensor: torch.Tensor) -> None:
        """One message from each even rank to its odd neighbour or, the next time, back."""
        comm, peer = group.comm, group.comm.rank ^ 1
        if peer >= comm.size:
            return
        group.turns += 1
        if comm.rank % 2 == group.turns % 2:
            comm.send(tensor, peer)
        else:
            comm.recv(tensor, peer)

    def _part(self, count: int) -> torch.Tensor:
        """The next ``count`` elements of the pool, round and round."""
        if self.place + count > self.pool.numel():
            self.place = 0
        self.place += count
        return self.pool[self.place - count : self.place]

    def _shards(self, comm: Comm, count: int) -> list[torch.Tensor] | None:
        if comm.rank:
            return None
        return list(self._part(count * comm.size).chunk(comm.size))

    def _own(self, count: int) -> torch.Tensor:
        """A second buffer, for what a call reads or writes besides."""
        if self.other.numel() < count:
            self.other = torch.empty(count, device=self.device).fill_(0.0)
        return self.other[:count]

    def _flop_rate(self) -> float:
        """FLOP/s over the products, each as often as a step makes it."""
        flops = seconds = 0.0
        ones = partial(torch.ones, device=self.device, dtype=self.dtype)
        for shape, times in self.products:
            batch, rows, inner, columns = shape
            both = ones(batch, rows, inner), ones(batch, inner, columns)
            flops += 2 * math.prod(shape) * times
            seconds += self._seconds(partial(_product, *both)) * times
        return flops / seconds

    def _byte_rate(self) -> float:
        """Bytes read and written a second by a copy."""
        half = self.pool.numel() // 2
        source, target = self.pool[:half], self.pool[half : 2 * half]
        return 2 * source.nbytes / self._seconds(lambda: target.copy_(source))

    def _seconds(self, action: Callable[[], object]) -> float:
        """Mean seconds of ``action``, over at least :data:`RATE_SECONDS`."""
        action()
        count = 1
        while True:
            finish(self.device)
            clock = Clock(self.device)
            clock.mark()
            for _ in range(count):
                action()
            clock.mark()
            (seconds,) = clock.seconds()
            if seconds >= RATE_SECONDS:
                return seconds / count
            count *= 2


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left @ right if len(left) > 1 else left[0] @ right[0]


class Alone:
    """An arm on a mesh of this rank only, with the share of the batch that it has among ``world``.

    Every rank makes the meshes of all ranks (groups are made by all).  Where ranks share a data
    coordinate (tensor, pipe), each computes the whole share of that coordinate.
    """

    def __init__(self, run: subjects.SideRun, rank: int) -> None:
        ranks = range(run.world)
        shares = data_shares(run.axes, ranks, ranks)
        single = dict.fromkeys(run.axes, 1)
        share = shares[rank], max(shares.values()) + 1
        for member in ranks:
            if member == rank:
                self.arm = Arm(replace(run, axes=single), rank, ranks=(rank,), share=share)
            else:
                mesh_of(single, BACKENDS[run.backend].device, (member,))
        self.arm.set_up()
        self.forget()

    def forget(self) -> None:
        """Drop what was measured so far: it was warm-up."""
        #: Seconds to the gradients and of whole steps, by segment.
        self.gradients: list[list[float]] = []
        self.steps: list[list[float]] = []

    def record(self) -> subjects.AloneSteps:
        """The seconds of all segments."""
        return subjects.AloneSteps(self.steps, self.gradients)

    def segment(self, count: int, meet: Callable[[], object] = lambda: None) -> None:
        """``count`` steps, after one that does not count: it finds other steps' data in caches.

        ``meet`` (a barrier of all ranks) is called before each, so that ranks compute side by side
        from a common start, as steps that communicate do.
        """
        marks: list[float] = []

        def observe(point: Point) -> None:
            if point == "gradients_final":
                finish(self.arm.device)
                marks.append(time.perf_counter())

        gradients, steps = [], []
        self.arm.step()
        for _ in range(count):
            marks.clear()
            meet()
            began = time.perf_counter()
            self.arm.step(observe)
            ended = time.perf_counter()
            steps.append(ended - began)
            gradients.append((marks[-1] if marks else ended) - began)
        self.gradients.append(gradients)
        self.steps.append(steps)


def measure(
    runs: Sequence[subjects.SideRun],
    sizes: Mapping[str, Sequence[int]],
    products: Sequence[tuple[Shape, int]],
    rounds: int,
    rank: int,
) -> subjects.RankRounds:
    """The measurements of steps to compare with their predictions, with ledgers off.

    In ``rounds``, for each run::

        alone  together  together  alone     steps without traffic, and the steps that are predicted

    and a sweep of the probes: seconds of steps by run and segment, and what the probes found.
    """
    backend, world = runs[0].backend, runs[0].world
    assert_nothing_is_recorded(backend)
    cores = pin(rank, world, BACKENDS[backend].threads)
    control = everybody(backend, world)
    alone = [Alone(each, rank) for each in runs]
    together = [Arm(each, rank) for each in runs]
    for arm in together:  # after all groups are made
        arm.set_up()
    for single, arm in zip(alone, together, strict=True):
        single.segment(WARM)
        arm.seconds(WARM)
        single.forget()
    prober = Probes(control, sizes, products)
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
    return subjects.RankRounds(
        rank,
        cores,
        torch.get_num_threads(),
        alone=[one.record() for one in alone],
        together=seconds,
        probes=prober.record(),
    )
