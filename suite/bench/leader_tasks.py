"""What leaders do for a bench session: they start fresh ranks and wait for them.

Each task takes a ``payload`` of plain data that names its ``workdir``, and returns plain data: an
``answer`` or a ``problem``, for which :class:`shardproof.bench.session.Session` waits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from shardproof.backends import BACKENDS
from shardproof.bench.launches import (
    AloneRecord,
    Launch,
    PeakRecord,
    RankTimes,
    SideRun,
)
from shardproof.bench.model import measurement, step_time
from shardproof.bench.model.records import RankRounds, Rounds, WatchedStep
from shardproof.bench.plain import from_plain, to_json
from shardproof.registry.declaration import ask

#: Plain data, as JSON has it.
Payload = dict[str, Any]
T = TypeVar("T")


class LaunchFailed(Exception):
    """Ranks, or the process that led them, did not return what they measured."""

    def __init__(self, verdict: str, reason: str) -> None:
        super().__init__(reason)
        self.verdict, self.reason = verdict, reason


@dataclass(frozen=True)
class Timed:
    """What the ranks of a timed launch returned, and the step that was watched before, if any."""

    ranks: list[RankTimes]
    watched: WatchedStep | None = None


def examine(payload: Payload) -> Any:
    """What ``sides`` declare (:class:`Answer`), without running them; and the number of GPUs."""
    gpus = None
    if BACKENDS[payload["backend"]].device == "cuda":
        import torch

        gpus = torch.cuda.device_count()
    sides = {}
    for key, side in payload["sides"].items():
        where = payload["backend"], payload["dtype"], payload["world"]
        sides[key] = ask(side["implementation"], side["options"], *where).to_dict()
    return {"sides": sides, "gpus": gpus}


def time_launch(payload: Payload) -> Any:
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

    return _reply(answer)


def measure_memory(payload: Payload) -> Any:
    """Peak bytes of a step on ranks that are threads, where they are counted exactly."""
    from shardproof.bench import timed_ranks

    run = replace(from_plain(SideRun, payload["run"]), backend="in_memory")
    return _one_side(payload, run, PeakRecord, lambda rank: timed_ranks.memory(run, rank))


def run_alone(payload: Payload) -> Any:
    """One side on ranks of its own, untimed."""
    from shardproof.bench import timed_ranks

    run, workdir = from_plain(SideRun, payload["run"]), Path(payload["workdir"])
    return _one_side(payload, run, AloneRecord, lambda rank: timed_ranks.alone(run, rank, workdir))


def profile(payload: Payload) -> Any:
    """Phases of one side's step."""
    from shardproof.bench.profile import profile

    run = from_plain(SideRun, payload["run"])
    return _one_side(payload, run, dict[str, float], lambda rank: profile(run, rank))


def measure_rounds(payload: Payload) -> Any:
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

    return _reply(answer)


def _one_side(payload: Payload, run: SideRun, kind: type[T], program: Callable[[int], T]) -> Any:
    return _reply(lambda: on_ranks(run, Path(payload["workdir"]), kind, program))


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
    from shardproof import tensor_bytes
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
        records = [tensor_bytes.load(o.record) for o in outcomes if o.record is not None]
        return [from_plain(kind, json.loads(record["json"])) for record in records]
    if cause.error_type == "Refused":
        raise LaunchFailed("precondition", cause.message)
    where = cause.traceback.splitlines()[-3:-1] if cause.traceback else []
    verdict = "hang" if cause.status == "hung" else "crash"
    raise LaunchFailed(verdict, " ".join([cause.sentence(), *where]))


def _reply(answer: Callable[[], object]) -> Any:
    """What ``answer`` returns, or why it failed, as JSON has it."""
    try:
        return json.loads(to_json({"answer": answer()}))
    except LaunchFailed as failed:
        return {"problem": [failed.verdict, failed.reason]}
