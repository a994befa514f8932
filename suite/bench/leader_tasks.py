"""The tasks of leaders for a bench session: they start fresh ranks and return an ``answer`` or a
``problem``, as plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shardproof import registry
from shardproof.backends import BACKENDS, USUAL, cuda
from shardproof.bench import subjects
from shardproof.bench.model import step_time
from shardproof.contract import Options, Refused
from shardproof.files import Stored, from_plain, to_plain
from shardproof.registry.declaration import Declaration

if TYPE_CHECKING:
    from shardproof.bench import collective_times
    from shardproof.bench.collectives import Request

P = TypeVar("P")
T = TypeVar("T")


class LaunchFailed(Exception):
    """Ranks, or the process that led them, did not return what they measured."""

    def __init__(self, verdict: str, reason: str) -> None:
        super().__init__(reason)
        self.verdict, self.reason = verdict, reason


@dataclass(frozen=True)
class Timed:
    """The results of the ranks of a timed launch, and the step that was watched before, if any."""

    ranks: list[subjects.RankTimes]
    watched: subjects.WatchedStep | None = None


@dataclass(frozen=True)
class Examination:
    """Sides to ask what they declare, and where they would run."""

    sides: Mapping[str, subjects.Side]
    backend: str
    dtype: str
    world: int


@dataclass(frozen=True)
class RoundsToMeasure:
    """Runs of one backend and world; ``ladder`` are the payloads to probe by operation (``None``:
    those that their steps send).
    """

    runs: Sequence[subjects.SideRun]
    rounds: int
    ladder: Mapping[str, Sequence[int]] | None
    workdir: Path


def answering(work: Callable[[P], object]) -> Callable[[P], Any]:
    """The task of a leader that does ``work``: its ``answer``, or the ``problem`` of a launch."""

    @wraps(work)
    def task(what: P) -> Any:
        try:
            return {"answer": to_plain(work(what))}
        except LaunchFailed as failed:
            return {"problem": [failed.verdict, failed.reason]}

    return task


@dataclass(frozen=True)
class Answer(Stored):
    """The answer of a system: its declaration, or why there is none.

    ``refused``: the options are wrong.  ``missing``: it cannot run here, whatever the options.
    """

    declaration: Declaration | None = None
    refused: str = ""
    missing: str = ""


def ask(implementation: str, options: Options, backend: str, dtype: str, world: int) -> Answer:
    """Load a system and ask what it declares, and whether it can run this way on this machine.

    Call it in a leader: the module of a user's own system may end its process.
    """
    try:
        declaration = Declaration.of(registry.load(implementation), options)
    except registry.BrokenImplementation as error:
        return Answer(missing=str(error))
    except Refused as error:
        return Answer(refused=str(error))
    missing = declaration.missing_here(backend, world)
    return Answer(declaration, missing=declaration.excludes(backend, dtype, world, (), missing))


def examine(task: Examination) -> Any:
    """The declarations of sides (:class:`Answer`), without running them; and the number of GPUs."""
    gpus = cuda.count() if BACKENDS[task.backend].device == "cuda" else None
    where = task.backend, task.dtype, task.world
    sides = {
        key: ask(side.implementation, side.options, *where).to_dict()
        for key, side in task.sides.items()
    }
    return {"sides": sides, "gpus": gpus}


@answering
def time_launch(task: tuple[subjects.Launch, Path]) -> Timed:
    """Time the blocks of a launch; where it probes the model a step is watched before."""
    from shardproof.bench import timed_ranks
    from shardproof.bench.checkpoint import timed_saves
    from shardproof.bench.model import probes

    launch, workdir = task
    watched = None
    if launch.probed:
        run = next(iter(launch.probed.values()))
        watched, *_ = on_ranks(
            replace(run, deadline=run.deadline / 2),
            workdir.with_name(f"{workdir.name}-watched"),
            subjects.WatchedStep,
            partial(probes.watch, run),
            ledgers=True,
        )
    program = partial(timed_ranks.run, launch, watched, workdir)
    if launch.action != "step":
        program = partial(timed_saves.run, launch, workdir)
    return Timed(on_ranks(launch.first, workdir, subjects.RankTimes, program), watched)


@answering
def one_side(
    task: tuple[str, subjects.SideRun, Path],
) -> Sequence[subjects.StepBytes | subjects.AloneRecord]:
    """One side on ranks of its own, untimed: bytes that a step holds and sends (``memory``: on
    ranks that are threads, where they are counted exactly), bytes that it sends (``sent``), or what
    it takes (``alone``).
    """
    from shardproof.bench import timed_ranks

    what, run, workdir = task
    if what == "alone":
        return on_ranks(run, workdir, subjects.AloneRecord, partial(timed_ranks.alone, run))
    run = replace(run, backend=USUAL) if what == "memory" else run
    program = partial(timed_ranks.counted, run, what == "memory")
    return on_ranks(run, workdir, subjects.StepBytes, program, ledgers=True)


@answering
def measure_rounds(task: RoundsToMeasure) -> subjects.Rounds:
    """Steps of runs with and without traffic, in rounds."""
    from shardproof.bench.model import probes

    runs, first = task.runs, task.runs[0]
    program = partial(probes.watch_each, runs)
    watched, *_ = on_ranks(
        first, task.workdir / "watched", list[subjects.WatchedStep], program, ledgers=True
    )
    calls = [call for each in watched for call in each.calls]
    ladder = task.ladder or step_time.ladder(calls)
    sizes = {op: ladder[op] for op in sorted(step_time.sizes(calls)) if op in ladder}
    measure = partial(probes.measure, runs, sizes, watched[-1].products, task.rounds)
    return subjects.Rounds(
        watched, on_ranks(first, task.workdir / "measured", subjects.RankRounds, measure)
    )


@answering
def time_collectives(task: tuple[Request, Path]) -> Sequence[collective_times.Timed]:
    """Collectives of a backend and of the suite, in turns."""
    from shardproof.bench import collectives

    request, workdir = task
    program = partial(collectives.measure, request)
    return collectives.together(request, on_ranks(request, workdir, collectives.Seconds, program))


class Where(Protocol):
    """The launch of ranks; ``deadline`` is in CPU seconds of one."""

    @property
    def backend(self) -> str: ...
    @property
    def world(self) -> int: ...
    @property
    def deadline(self) -> float: ...


def on_ranks(
    run: Where,
    workdir: Path,
    kind: type[T],
    program: Callable[[int], T],
    ledgers: bool = False,
) -> list[T]:
    """The result of ``program(rank)``, of type ``kind``, from each of the fresh ranks of ``run``.

    On the nodes that this machine is the head of, if it is one: ``program`` is pickled then.

    :raises LaunchFailed: a rank broke, hung, or refused.
    """
    from shardproof import tensor_bytes
    from shardproof.launch.machine_faults import fault_of_machine
    from shardproof.launch.nodes import Nodes
    from shardproof.launch.rank_process import RankLaunch
    from shardproof.launch.ranks import Forked, root_cause

    workdir.mkdir(parents=True, exist_ok=True)
    nodes = Nodes.here()
    host = Forked() if nodes is None else nodes.host()
    recorded = partial(_recorded, program)
    launch = RankLaunch(run.backend, run.world, recorded, workdir, run.deadline, ledgers)
    outcomes = host.run(launch)
    cause = root_cause(outcomes)
    if cause is None:
        records = [tensor_bytes.load(o.record) for o in outcomes if o.record is not None]
        return [from_plain(kind, record["record"]) for record in records]
    if cause.error_type == "Refused":
        raise LaunchFailed("precondition", cause.message)
    if why := fault_of_machine(cause, workdir, launch.backend):
        raise LaunchFailed("precondition", why)
    where = cause.traceback.splitlines()[-3:-1] if cause.traceback else []
    verdict = {"hung": "hang", "over budget": "over budget"}.get(cause.status, "crash")
    raise LaunchFailed(verdict, " ".join([cause.sentence(), *where]))


def _recorded(program: Callable[[int], object], rank: int, world: int) -> dict[str, Any]:
    return {"record": to_plain(program(rank))}
