"""Run the real code of one rank of a large world on fake tensors, with both ledgers."""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shardproof import axes, comm, registry
from shardproof.backends import Joining, joined
from shardproof.comm import Mesh
from shardproof.contract import KINDS, Implementation, Piece, Point
from shardproof.errors import Problem, SelectionError
from shardproof.ledgers import program_order, traffic
from shardproof.ledgers.memory import installed
from shardproof.ledgers.memory.log import MemoryLog
from shardproof.registry import answers
from shardproof.registry.declaration import BrokenContract, Declaration
from shardproof.schedules import Schedule
from shardproof.simulate import group, work
from shardproof.simulate.fakes import functional, upstream
from shardproof.simulate.fakes.known import Decided, known_integers
from shardproof.simulate.group import Simulated
from shardproof.simulate.sources import Source, Watch
from shardproof.simulate.work import Work, WorkLedger


@dataclass(frozen=True)
class SimulatedRank:
    """The memory log and the calls of one rank.  ``calls``: by step; ``groups``: process groups
    that its system made.

    The rest is of the last step: ``work``, its operators; ``actions``, the computations of a
    pipeline's stages; ``tokens``, integers of the inputs, or samples if these are floats;
    ``place``, along the axis of stages; ``schedule``, of one window of micro-batches, if the
    implementation announces one.
    """

    rank: int
    log: MemoryLog
    calls: list[list[traffic.LoggedCall]]
    work: Work = field(default_factory=Work)
    actions: Sequence[program_order.Done] = ()
    tokens: int = 0
    place: int = 0
    schedule: Schedule | None = None
    groups: int = 0


#: Limit on rounds of simulation for each step, in which ranks come to agree on control numbers.
_MOST_ROUNDS = 4


def simulate(
    source: Source,
    ranks: Sequence[int],
    began: Callable[[int], None] = lambda rank: None,
    notes_work: bool = True,
) -> list[SimulatedRank]:
    """Run ``source`` as each of ``ranks``, and again until their control numbers agree.

    ``began`` is called with each rank before it runs.  ``notes_work``: note operators, which only
    seconds need.
    """
    threads = torch.get_num_threads()
    # Control numbers are computed for real.  Threads would outlive that, and break a later fork.
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            # torch warns at every rank, and the user cannot act on it.
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            return _agreed(source, ranks, began, notes_work)
    finally:
        torch.set_num_threads(threads)


def _agreed(
    source: Source, ranks: Sequence[int], began: Callable[[int], None], notes_work: bool
) -> list[SimulatedRank]:
    group.hearsay = hearsay = group.Hearsay()
    found, failed = dict[int, SimulatedRank](), dict[int, Exception]()
    rounds, before, due = _MOST_ROUNDS * source.steps, -1, [*ranks]
    for _ in range(rounds):
        for rank in due:
            began(rank)
            failed.pop(rank, None)
            try:
                found[rank] = simulate_rank(source, rank, notes_work)
            except Exception as error:
                # A wrong guess of another rank's numbers may have caused the error.
                if hearsay.is_settled and not hearsay.guessed:
                    raise
                failed[rank] = error
        unsettled = hearsay.unsettled()
        due = [rank for rank in ranks if rank in failed or rank in unsettled]
        if not due:
            hearsay.require_alike()
            return [found[rank] for rank in ranks]
        if failed and hearsay.changes == before:
            break  # no number changed, so another round would fail in the same way
        before = hearsay.changes
    if failed:
        raise next(iter(failed.values()))
    raise RuntimeError(f"ranks {list(ranks)} did not agree in {rounds} rounds")


def simulate_rank(source: Source, rank: int, notes_work: bool = True) -> SimulatedRank:
    """Run ``source`` as ``rank`` of its world."""
    if dist.is_initialized():
        what = "this process has a process group, which a simulation would replace"
        raise SelectionError(Problem(what, "simulate in another process"))
    group.hearsay.begin()
    world, hook = math.prod(source.axes.values()), sys.excepthook
    joined.join(Simulated(), Joining(rank, world, Path(), 60.0, ledgers=True))
    try:
        own = upstream.patches_of(registry.load(source.implementation))
        with _control_on_values(), upstream.without_values(), own:
            # The mesh reads the numbers of its ranks, so they are made with values.
            mesh = Mesh(source.axes, source.joint)
            log = program_order.current()
            assert log is not None
            decided = Decided(partial(source.is_finite, rank), log)
            with known_integers(decided):
                found = _trained(source, mesh, decided, notes_work)
            group.hearsay.end(rank)
            return found
    finally:
        functional.let_go()
        joined.leave()
        # Threads that are ranks later would find them.
        program_order.install(None, process=True)
        traffic.install(None, process=True)
        sys.excepthook = hook  # torch puts the rank before every later traceback


@contextmanager
def _control_on_values() -> Iterator[None]:
    """Keep the values of control numbers, and do not let ranks wait for each other.

    Each number has a twin without a value, which the ledger of memory counts.
    """

    def valued(integers: Sequence[int], **named: Any) -> Tensor:
        with unset_fake_temporarily():
            tensor = torch.tensor(integers, **named)
        tensor.twin = torch.empty(len(integers), **named)  # type: ignore[attr-defined]
        return tensor

    def alone(ranks: Sequence[int], own: int, place: str, text: str) -> None:
        """Return at once: no other rank runs."""

    comm.control, meet, comm.meet = valued, comm.meet, alone
    try:
        yield
    finally:
        comm.control, comm.meet = torch.tensor, meet


def _trained(source: Source, mesh: Mesh, decided: Decided, notes_work: bool) -> SimulatedRank:
    log, ledger = decided.log, traffic.current()
    assert ledger is not None
    memory, built = WorkLedger(log), list[weakref.ref[nn.Module]]()
    observed = list[Point]()

    def watch(module: nn.Module, units: Sequence[str]) -> None:
        program_order.watch(module, units)
        installed.watch(module)
        # A stage keeps a part of what was built; the rest is freed.
        built.append(weakref.ref(module))

    def observe(point: Point) -> None:
        observed.append(point)
        with log.observe(point):
            pieces: dict[str, Sequence[Piece]] = {
                kind: answers.pieces(system, kind, mesh.rank) for kind in (*KINDS, "extra")
            }
            modules = [module for made in built if (module := made()) is not None]
            memory.classify(pieces, modules)
            memory.mark(point)

    calls, tokens, schedule, began = [], 0, None, _groups()
    kind = registry.load(source.implementation)
    points = [*Declaration.of(kind, source.options).points]
    with memory, work.noted_by(memory), _aborted_on_error(system := kind()):
        system.trace = log.action
        _set_up(system, source, mesh, watch, memory)
        for step in range(source.steps):
            with memory.unseen():
                batch = source.batch(mesh.rank, step)
            if source.evaluates(mesh.rank, step):
                with log.observe("evaluation"):
                    system.evaluate(batch)
            first, memory.step = len(ledger.calls), step
            memory.noting = notes_work and step == source.steps - 1
            with log.step(step):
                result = system.step(batch, observe)
            memory.noting = False
            _require_observed(step, observed, points)
            observed.clear()
            # Users read the result after the step; its tensors live until then.
            with decided.reading():
                answers.step(system, step, result)
                answers.number(system, "step", result.loss)
            del result
            calls.append(ledger.calls[first:])
            tokens = sum(_tokens(micro.inputs) for micro in batch.micro_batches)
            schedule = _schedule(system, source, [len(window) for window in batch.windows])
            del batch
        done = memory.finish()
        system.drain()
        system.close()
        groups = _groups() - began
    actions = [one for one in log.actions if one.step == log.number]
    axis = axes.cutting("layers")
    place = mesh.comm(axis).rank if axis in source.axes else 0
    return SimulatedRank(
        mesh.rank, memory.log, calls, done, actions, tokens, place, schedule, groups
    )


def _require_observed(step: int, observed: Sequence[Point], points: Sequence[Point]) -> None:
    if not {*points} <= {*observed} or len({*observed}) < len(observed):
        raise BrokenContract(f"step {step}: observed {observed}, but it declares {points}")


def _tokens(inputs: Tensor) -> int:
    return len(inputs) if inputs.is_floating_point() else inputs.numel()


def _set_up(
    system: Implementation, source: Source, mesh: Mesh, watch: Watch, memory: WorkLedger
) -> None:
    """Give ``system`` its model, mesh and options, and the initial state if it needs that."""
    everywhere = system.capabilities(source.options).initial_state == "everywhere"
    with memory.paused():
        state = source.state() if everywhere or mesh.rank == mesh.ranks[0] else None
    build = source.build(mesh.rank, watch)
    system.setup(build, state, source.optimizer, mesh, source.options)


@contextmanager
def _aborted_on_error(system: Implementation) -> Iterator[None]:
    """Abort ``system`` on an error inside, and raise that error again."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            system.abort()
        raise


def _groups() -> int:
    """The number of process groups that this world has made, those of other ranks included."""
    return int(c10d._world.group_count)


def _schedule(system: Implementation, source: Source, windows: Sequence[int]) -> Schedule | None:
    """The schedule of a step with one window, if there are stages."""
    stages = axes.parts(source.axes, "layers")
    if stages == 1 or len(windows) != 1:
        return None
    return system.schedule(source.options, stages, windows[0])
