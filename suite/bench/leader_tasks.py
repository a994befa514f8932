"""What leaders do for a bench session: they start fresh ranks, wait for them, and leave a reply.

Each task takes a ``payload`` of plain data that names its ``workdir``; the reply is ``reply.json``
there, which :meth:`shardproof.bench.session.Session.lead` reads.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from shardproof.bench.launches import (
    AloneRecord,
    Launch,
    PeakRecord,
    RankTimes,
    SideRun,
    from_plain,
    to_json,
)
from shardproof.bench.model import measurement, step_time
from shardproof.bench.model.records import RankRounds, Rounds, WatchedStep
from shardproof.bench.sides import Side

Payload = dict[str, Any]
T = TypeVar("T")


class LaunchFailed(Exception):
    """Ranks, or the process that led them, did not return what they measured."""

    def __init__(self, verdict: str, reason: str) -> None:
        super().__init__(reason)
        self.verdict, self.reason = verdict, reason


@dataclass(frozen=True)
class Declaration:
    """What a system says of itself under some options, and what it lacks here.

    ``missing`` and ``refused`` are sentences, empty where there is nothing to say.  ``threads``:
    it also runs on ``in_memory``, where bytes are counted exactly.
    """

    axes: tuple[str, ...] = ()
    strategy: str = ""
    threads: bool = False
    max_world: int | None = None
    missing: str = ""
    refused: str = ""


@dataclass(frozen=True)
class Examined:
    """Declarations by side, and the GPUs of this machine (``None``: ranks compute on the CPU)."""

    sides: dict[str, Declaration]
    gpus: int | None = None


@dataclass(frozen=True)
class Timed:
    """What the ranks of a timed launch returned, and the step that was watched before, if any."""

    ranks: list[RankTimes]
    watched: WatchedStep | None = None


def examine(payload: Payload) -> None:
    """What ``sides`` say of themselves, without running them."""
    from shardproof.backends import BACKENDS

    def answer() -> Examined:
        backend, gpus = payload["backend"], None
        if BACKENDS[backend].device == "cuda":
            import torch

            gpus = torch.cuda.device_count()
        sides = {
            key: declaration(from_plain(Side, side), backend, payload["dtype"])
            for key, side in payload["sides"].items()
        }
        return Examined(sides, gpus)

    _reply(payload, answer)


def declaration(side: Side, backend: str, dtype: str) -> Declaration:
    """What ``side`` says of itself, without running it."""
    from shardproof import registry
    from shardproof.backends import BACKENDS
    from shardproof.contract import Refused

    try:
        system = registry.load(side.implementation)
        claims = system.capabilities(side.options)
    except registry.BrokenImplementation as error:
        return Declaration(missing=str(error))
    except Refused as error:
        return Declaration(refused=str(error))
    missing = BACKENDS[backend].available() or ""
    absent = [name for name in claims.packages if importlib.util.find_spec(name) is None]
    if absent:
        missing = f"package {', '.join(absent)} is not installed"
    elif backend not in claims.backends:
        missing = f"does not run on {backend}, only on {', '.join(claims.backends)}"
    elif dtype not in claims.dtypes:
        missing = f"does not train in {dtype}, only in {', '.join(claims.dtypes)}"
    return Declaration(
        tuple(claims.axes),
        system.strategy,
        "in_memory" in claims.backends,
        claims.max_world,
        missing,
    )


def time_launch(payload: Payload) -> None:
    """Time the blocks of a ``launch``; where it probes the model a step is watched before."""
    from shardproof.bench import timed_ranks
    from shardproof.bench.model import probes

    launch, workdir = from_plain(Launch, payload["launch"]), Path(payload["workdir"])

    def answer() -> Timed:
        watched = None
        if launch.probed:
            run = next(iter(launch.probed.values()))
            watched, *_ = on_ranks(
                replace(run, deadline=run.deadline / 2),
                workdir.with_name(f"{workdir.name}-watched"),
                WatchedStep,
                lambda rank: probes.watch(run, rank),
                ledgers=True,
            )
        first = next(iter(launch.sides.values()))
        ranks = on_ranks(
            *(first, workdir, RankTimes),
            lambda rank: timed_ranks.run(launch, watched, workdir, rank),
        )
        return Timed(ranks, watched)

    _reply(payload, answer)


def measure_memory(payload: Payload) -> None:
    """Peak bytes of a step on ranks that are threads, where they are counted exactly."""
    from shardproof.bench import timed_ranks

    run = replace(from_plain(SideRun, payload["run"]), backend="in_memory")
    _one_side(payload, run, PeakRecord, lambda rank: timed_ranks.memory(run, rank))


def run_alone(payload: Payload) -> None:
    """One side on ranks of its own, untimed."""
    from shardproof.bench import timed_ranks

    run, workdir = from_plain(SideRun, payload["run"]), Path(payload["workdir"])
    _one_side(payload, run, AloneRecord, lambda rank: timed_ranks.alone(run, rank, workdir))


def profile(payload: Payload) -> None:
    """Phases of one side's step."""
    from shardproof.bench.profile import profile

    run = from_plain(SideRun, payload["run"])
    _one_side(payload, run, dict[str, float], lambda rank: profile(run, rank))


def measure_rounds(payload: Payload) -> None:
    """Steps of ``runs`` (of one backend and world) with and without traffic, in ``rounds``.

    ``ladder``: payloads to probe by operation; without one those that the steps send.
    """
    from shardproof.bench.model import probes

    runs = [from_plain(SideRun, run) for run in payload["runs"]]
    workdir, first = Path(payload["workdir"]), runs[0]

    def answer() -> Rounds:
        (watched, *_) = on_ranks(
            first,
            workdir / "watched",
            list[WatchedStep],
            lambda rank: [probes.watch(run, rank) for run in runs],
            ledgers=True,
        )
        calls = [call for each in watched for call in step_time.seen(each.calls)]
        ladder = payload.get("ladder") or measurement.ladder(calls)
        sizes = {op: ladder[op] for op in sorted(step_time.sizes(calls)) if op in ladder}
        products, rounds = watched[-1].products, payload["rounds"]
        measured = on_ranks(
            first,
            workdir / "measured",
            RankRounds,
            lambda rank: measurement.measure(runs, sizes, products, rounds, rank),
        )
        return Rounds(watched, measured)

    _reply(payload, answer)


def _one_side(payload: Payload, run: SideRun, kind: type[T], program: Callable[[int], T]) -> None:
    _reply(payload, lambda: on_ranks(run, Path(payload["workdir"]), kind, program))


def on_ranks(
    run: SideRun,
    workdir: Path,
    kind: type[T],
    program: Callable[[int], T],
    ledgers: bool = False,
) -> list[T]:
    """What ``program(rank)``, of type ``kind``, returns on each of the fresh ranks of ``run``.

    :raises LaunchFailed: a rank broke, hung, or refused.
    """
    from shardproof import pack
    from shardproof.launch.ranks import root_cause, run_ranks

    workdir.mkdir(parents=True, exist_ok=True)
    outcomes = run_ranks(
        run.backend,
        run.world,
        lambda rank, _: {"json": to_json(program(rank))},
        workdir,
        run.deadline,
        ledgers=ledgers,
    )
    cause = root_cause(outcomes)
    if cause is None:
        records = [pack.load(o.record) for o in outcomes if o.record is not None]
        return [from_plain(kind, json.loads(record["json"])) for record in records]
    if cause.error_type == "Refused":
        raise LaunchFailed("precondition", cause.message)
    where = cause.traceback.splitlines()[-3:-1] if cause.traceback else []
    verdict = "hang" if cause.status == "hung" else "crash"
    raise LaunchFailed(verdict, " ".join([cause.sentence(), *where]))


def _reply(payload: Payload, answer: Callable[[], object]) -> None:
    """Leave what ``answer`` returns, or why it failed, for the session that waits."""
    workdir = Path(payload["workdir"])
    try:
        text = to_json({"answer": answer()})
    except LaunchFailed as failed:
        text = to_json({"problem": [failed.verdict, failed.reason]})
    workdir.mkdir(parents=True, exist_ok=True)
    partial = workdir / "reply.partial"
    partial.write_text(text)
    partial.replace(workdir / "reply.json")
