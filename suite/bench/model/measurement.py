"""A step measured beside its prediction, in one launch: the ranks' part, the leader's, the figures.

First a launch with ledgers on tells what a step of each subject sends.  Then, with ledgers off, in
rounds, for each subject

    alone  together  together  alone     steps without traffic, and the steps that are predicted

and a sweep of the probes.  The figure of a round is ln(measured / predicted): predicted from the
compute of this round and the alpha and beta of the whole launch, which no step has a part in.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from shardproof.bench import stats
from shardproof.bench.model import alpha_beta, curve, step_time
from shardproof.bench.sides import Pair
from shardproof.cases.runner import JUDGING_SECONDS
from shardproof.launch.pool import Pool

#: Steps of a segment, and before the first one.
STEPS, WARM = 2, 4
ROUNDS = 6
#: Payloads at which an operation is probed, from the smallest to the largest that a step sends.
RUNGS = 6


@dataclasses.dataclass(frozen=True)
class Subject:
    """Side ``side`` of ``pair`` on the mesh ``axes``; plain data, as the pair is."""

    pair: Pair
    side: str
    axes: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; :meth:`from_dict` is its inverse."""
        return {"pair": self.pair.to_dict(), "side": self.side, "axes": dict(self.axes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Subject:
        """The subject that :meth:`to_dict` described."""
        return cls(Pair.from_dict(data["pair"]), data["side"], data["axes"])


def ladder(calls: Sequence[step_time.Call]) -> dict[str, list[int]]:
    """Payloads to probe each operation at: equal ratios, from the least to the most that is sent.

    One size is probed at itself and at a sixteenth, or there would be no alpha.
    """
    found = {}
    for operation, sizes in step_time.sizes(calls).items():
        least, most = max(8, sizes[0]), max(8, sizes[-1])
        if least * 2 > most:
            least = max(8, most // 16)
        ratio = (most / least) ** (1 / (RUNGS - 1))
        found[operation] = sorted({4 * round(least * ratio**i / 4) for i in range(RUNGS)})
    return found


# ------------------------------------------------------------------------------- in the leader


def lead(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Task of the leader: both launches of ``payload``.

    It holds ``subjects`` (of one backend and world), ``rounds``, and ``ladder`` (payloads by
    operation; absent: those that the steps send).  Returns what ranks returned, as ``watched`` and
    ``measured``, or ``problem``: a sentence.
    """
    from shardproof import tensor_bytes
    from shardproof.bench.model import probes
    from shardproof.launch.ranks import root_cause, run_ranks

    subjects = [Subject.from_dict(each) for each in payload["subjects"]]
    first, workdir = subjects[0].pair, Path(payload["workdir"])
    told: dict[str, Any] = {}

    def watched(rank: int, world: int) -> dict[str, Any]:
        return {"sides": [probes.watch(s.pair, s.side, s.axes, rank) for s in subjects]}

    def measured(rank: int, world: int) -> dict[str, Any]:
        seen = told["watched"][0]["sides"]
        calls = [call for each in seen for call in step_time.seen(each["calls"])]
        sizes = payload.get("ladder") or ladder(calls)
        known = {op: sizes[op] for op in sorted(step_time.sizes(calls)) if op in sizes}
        return measure(subjects, known, seen[-1]["products"], payload["rounds"], rank)

    programs = (("watched", watched, True), ("measured", measured, False))
    for name, program, ledgers in programs:
        folder = workdir / name
        folder.mkdir(parents=True)
        outcomes = run_ranks(
            first.backend, first.world, program, folder, first.deadline, ledgers=ledgers
        )
        cause = root_cause(outcomes)
        if cause is not None:
            where = cause.traceback.splitlines()[-3:-1] if cause.traceback else []
            return {"problem": " ".join([cause.sentence(), *where])}
        told[name] = [tensor_bytes.load(o.record) for o in outcomes if o.record is not None]
    return told


def launch(
    subjects: Sequence[Subject], rounds: int, sizes: Mapping[str, Sequence[int]] | None = None
) -> dict[str, Any]:
    """What :func:`lead` tells, from a leader of its own; ``sizes`` are those of its ``ladder``."""
    with Pool(1, tasks=(lead,)) as pool:
        payload = {
            "subjects": [subject.to_dict() for subject in subjects],
            "rounds": rounds,
            "workdir": str(pool.folder / "score"),
            "ladder": sizes,
        }
        seconds = 2 * subjects[0].pair.deadline + JUDGING_SECONDS
        with closing(pool.run(lead, [("score", payload, seconds)])) as ends:
            (end,) = list(ends)
    if end.value is None:
        return {"problem": f"the measuring process {end.why_no_value}"}
    records: dict[str, Any] = end.value
    return records


def measure(
    subjects: Sequence[Subject],
    sizes: Mapping[str, Sequence[int]],
    products: Sequence[tuple[Sequence[int], int]],
    rounds: int,
    rank: int,
) -> dict[str, Any]:
    """The rank program: seconds of steps by subject and segment, and what the probes found."""
    import torch

    from shardproof.backends import BACKENDS
    from shardproof.bench import pinning, timed_ranks
    from shardproof.bench.model import probes

    backend, world = subjects[0].pair.backend, subjects[0].pair.world
    timed_ranks.assert_nothing_is_recorded(backend)
    cores = pinning.pin(rank, world, BACKENDS[backend].threads)
    control = timed_ranks.mesh_of({"replicate": world}, BACKENDS[backend].device).comm("replicate")
    alone = [probes.Alone(s.pair, s.side, s.axes, rank) for s in subjects]
    together = [timed_ranks.Arm(s.pair, s.side, s.axes, rank) for s in subjects]
    for arm in together:
        arm.set_up()
    for single, arm in zip(alone, together, strict=True):
        single.segment(WARM)
        for _ in range(WARM):
            arm.step()
        single.forget()
    prober = probes.Probes(control, sizes, products)
    prober.sweep()
    prober.forget()
    found: list[list[list[float]]] = [[] for _ in subjects]
    for _ in range(rounds):
        for number, (single, arm) in enumerate(zip(alone, together, strict=True)):
            single.segment(STEPS, control.barrier)
            found[number].append(_steps(arm, 2 * STEPS))
            single.segment(STEPS, control.barrier)
        prober.sweep()
    for arm in (*(single.arm for single in alone), *together):
        arm.close()
    timed_ranks.assert_nothing_is_recorded(backend)
    return {
        "rank": rank,
        "cores": cores,
        "threads": torch.get_num_threads(),
        "alone": [{"steps": one.steps, "gradients": one.gradients} for one in alone],
        "together": found,
        "probes": prober.record(),
    }


def _steps(arm: Any, count: int) -> list[float]:
    """Seconds of ``count`` steps back to back, after one that does not count."""
    arm.step()
    ends = [time.perf_counter()]
    for _ in range(count):
        arm.step()
        ends.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(ends)]


# ------------------------------------------------------------------------------- what it comes to


@dataclasses.dataclass(frozen=True)
class Score:
    """One subject.  ``error`` is measured over predicted less 1, ``low`` and ``high`` its 95 %
    interval over rounds (paired t on logs).
    """

    calls: list[step_time.Call]
    measured_seconds: float
    prediction: step_time.Prediction
    compute: curve.Compute
    error: float
    low: float
    high: float
    card: step_time.Scorecard

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, without the calls."""
        return {
            "measured_seconds": self.measured_seconds,
            "prediction": self.prediction.to_dict(),
            "error": {"mean": self.error, "low": self.low, "high": self.high},
            "scorecard": self.card.to_dict(),
        }


def judge(
    subjects: Sequence[Subject],
    told: Mapping[str, Any],
    memory: Sequence[tuple[float, float] | None] | None = None,
) -> tuple[list[Score], alpha_beta.Machine]:
    """Scores and machine from what :func:`lead` told.  Pure.

    ``memory``: by subject, most bytes that a rank holds in a step, and the formula's.
    """
    records, backend = told["measured"], subjects[0].pair.backend
    found = alpha_beta.machine(backend, [record["probes"] for record in records])
    cores = len(records[0]["cores"]) or None
    scores = []
    for number, subject in enumerate(subjects):
        watched = told["watched"][0]["sides"][number]
        calls = step_time.seen(watched["calls"])
        alone = step_time.slowest([r["alone"][number]["steps"] for r in records])
        # Two segments alone around the one together: a round.
        rounds = [[*a, *b] for a, b in zip(alone[::2], alone[1::2], strict=True)]
        together = step_time.slowest([r["together"][number] for r in records])

        def predicted(
            seconds: Sequence[float], calls: Sequence[step_time.Call] = calls
        ) -> step_time.Prediction:
            compute = statistics.median(seconds)
            return step_time.predict(calls, compute, found.fits, backend, cores_per_rank=cores)

        whole = predicted(list(itertools.chain(*rounds)))
        measured = statistics.median(itertools.chain(*together))
        logs = [
            math.log(statistics.median(steps) / predicted(each).step_seconds)
            for steps, each in zip(together, rounds, strict=True)
        ]
        estimate = stats.estimate(logs)
        error, low, high = (math.expm1(v) for v in (estimate.mean, estimate.low, estimate.high))
        held = memory[number] if memory else None
        scores.append(
            Score(
                calls,
                measured,
                whole,
                curve.measured_compute([r["alone"][number] for r in records], _samples(subject)),
                error,
                low,
                high,
                step_time.scorecard(
                    measured,
                    whole,
                    peak_bytes=held[0] if held else None,
                    formula_bytes=held[1] if held else None,
                    probed_seconds=_probed(subject, watched, found),
                ),
            )
        )
    return scores, found


def _samples(subject: Subject) -> int:
    """Samples of a data coordinate, the largest one."""
    axes = subject.axes
    return -(
        -subject.pair.workload.global_batch // (axes.get("replicate", 1) * axes.get("shard", 1))
    )


def _probed(
    subject: Subject, watched: Mapping[str, Any], found: alpha_beta.Machine
) -> float | None:
    """Compute at probed rates, split as the layers are; every rank updates everything."""
    if not found.flop_rate:
        return None
    split = subject.axes.get("tensor", 1) * subject.axes.get("pipe", 1)
    name = subject.pair.optimizer.name
    flops, elements = watched["flops"] / split, watched["elements"] / split
    return step_time.probed_compute(flops, elements, name, found.flop_rate, found.byte_rate)
