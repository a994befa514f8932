"""What the suite itself costs: ``python -m tools.studies overhead``.

Two ratios.  (1) The harness's own time per step with ledgers
off, on a workload that computes nothing, over the median step of the smallest GPT in one process:
timing pairs cannot decide a few per cent, ten thousand empty steps can.  (2) The latency of a 4 KB
all-reduce at 4 ranks, gloo's over in_memory's, in alternating blocks.  And seconds that it takes
to generate and check the largest schedules, as data.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardproof import contract, tensor_bytes, workloads
from shardproof.case import Case, WorkloadSpec
from shardproof.cases.rank_program import run_rank
from shardproof.comm import Mesh
from shardproof.launch.rank_process import RankLaunch
from shardproof.launch.ranks import Forked
from shardproof.schedules import problems

STEPS = 10_000
#: The harness may cost at most this share of the smallest GPT's median step.
LIMIT = 0.02
ELEMENTS = 1024  # 4 KB of float32
RANKS = 4
CALLS = 100
#: A schedule of so many stages and micro-batches is to be generated and checked in so many seconds.
STAGES, MICRO_BATCHES = 64, 512
SCHEDULE_LIMIT = 5.0
BLOCKS = 8


class Null(contract.Implementation):
    """A system that does nothing: its steps cost what the suite costs."""

    strategy = "single"

    @classmethod
    def capabilities(cls, options: contract.Options) -> contract.Capabilities:
        """It runs alone."""
        return contract.Capabilities(max_world=1)

    def setup(self, *_: object, **__: object) -> None:
        """Nothing but a loss of zero."""
        self.loss = torch.zeros(())

    def step(self, batch: contract.Batch, observe: contract.Observe) -> contract.StepResult:
        """The two observations that every step must have."""
        observe("gradients_final")
        observe("after_update")
        return contract.StepResult(loss=self.loss)

    def local_state(self, kind: contract.Kind) -> list[contract.Piece]:
        """Nothing."""
        return []


class _NoWork:
    """A workload without data, and the build of its model."""

    units: tuple[str, ...] = ()
    cross_entropy = None

    def batch(self, step: int, coordinates: int) -> list[contract.Batch]:
        return [contract.Batch(step, ())] * coordinates

    def build_for(self, rank: int, coordinate: int = 0) -> Any:
        return self

    def state(self) -> dict[str, Tensor]:
        return {}

    def __call__(self, device: str = "cpu") -> nn.Module:
        return nn.Identity()


def harness_seconds(steps: int = STEPS) -> float:
    """Seconds per step that the rank program itself takes, ledgers off."""
    case = Case(
        id="overhead",
        scenario="overhead",
        implementation="tools.studies.overhead:Null",
        backend="in_memory",
        mesh={"replicate": 1},
        workload=WorkloadSpec("charnames_gpt"),
        optimizer=contract.OptimizerSpec(),
        lane="fp64",
        checks=(),
        steps=steps,
        ledgers=False,
    )
    work: Any = _NoWork()

    def measure() -> float:
        begin = time.perf_counter()
        run_rank(case, work, 0)
        return (time.perf_counter() - begin) / steps

    return _slowest("in_memory", 1, measure)


def gpt_step_seconds(steps: int = 30) -> float:
    """Median seconds of a step of the smallest GPT under ``plain``, after warming up."""

    def measure() -> float:
        from shardproof.impls.plain import Plain

        spec = WorkloadSpec("charnames_gpt")
        workload = workloads.make(spec, "float32")
        plain = Plain()
        build = workload.build_for(0)
        plain.setup(build, workload.state(), contract.OptimizerSpec(), Mesh({"replicate": 1}), {})
        times = []
        for step in range(steps + 5):
            batch = workload.batch(step, 1)[0]
            begin = time.perf_counter()
            plain.step(batch, lambda point: None)
            times.append(time.perf_counter() - begin)
        return statistics.median(times[5:])

    return _slowest("in_memory", 1, measure)


def all_reduce_seconds() -> dict[str, float]:
    """Median seconds of a 4 KB all-reduce at 4 ranks: backend -> slowest rank, median of blocks."""
    blocks: dict[str, list[float]] = {"in_memory": [], "gloo": []}
    for number in range(BLOCKS):
        order = list(blocks) if number % 2 else list(blocks)[::-1]
        for backend in order:
            blocks[backend].append(_block(backend))
    return {backend: statistics.median(values) for backend, values in blocks.items()}


def schedule_seconds() -> dict[str, float]:
    """Seconds to generate and check each schedule of 64 stages and 512 micro-batches."""
    from shardproof.impls.reference.pipeline.schedules import SCHEDULES

    seconds = {}
    for name, make in SCHEDULES.items():
        ranks = STAGES // 2 if name in ("interleaved", "zb_v") else STAGES
        begin = time.perf_counter()
        schedule = make(ranks, MICRO_BATCHES)
        wrong = problems(schedule)
        seconds[name] = time.perf_counter() - begin
        if wrong or schedule.stages != STAGES:
            raise RuntimeError(f"{name}: {schedule.stages} stages, {'; '.join(wrong)}")
    return seconds


def _block(backend: str) -> float:
    def measure() -> float:
        comm = Mesh({"replicate": RANKS}).comm("replicate")
        tensor, times = torch.ones(ELEMENTS), []
        for _ in range(CALLS + 20):
            begin = time.perf_counter()
            comm.all_reduce(tensor)
            times.append(time.perf_counter() - begin)
        return statistics.median(times[20:])

    return _slowest(backend, RANKS, measure)


def _slowest(backend: str, ranks: int, measure: Callable[[], float]) -> float:
    """Seconds of the slowest of fresh ``ranks`` that all ``measure``."""

    def program(rank: int, world: int) -> dict[str, float]:
        return {"seconds": measure()}

    with tempfile.TemporaryDirectory(prefix="shardproof-") as folder:
        launch = RankLaunch(backend, ranks, program, Path(folder), 120.0, ledgers=False)
        outcomes = Forked().run(launch)
        records = [tensor_bytes.load(outcome.record) for outcome in outcomes if outcome.record]
    if len(records) != ranks:
        raise RuntimeError("; ".join(outcome.sentence() for outcome in outcomes))
    return max(float(record["seconds"]) for record in records)


def sentences() -> Iterator[str]:
    """The result of each measurement in a sentence, as soon as it is made."""
    torch.set_num_threads(1)
    own, gpt = harness_seconds(), gpt_step_seconds()
    share = own / gpt
    verdict = "within" if share <= LIMIT else "over"
    yield (
        f"harness: {own * 1e6:.1f} us a step over {STEPS:,} empty steps, "
        f"{share:.2%} of a GPT step of {gpt * 1e3:.2f} ms ({verdict} {LIMIT:.0%})"
    )
    latency = all_reduce_seconds()
    yield (
        f"all-reduce, 4 KB, {RANKS} ranks: in_memory {latency['in_memory'] * 1e6:.0f} us, "
        f"gloo {latency['gloo'] * 1e6:.0f} us, ratio {latency['gloo'] / latency['in_memory']:.1f}"
    )
    seconds = schedule_seconds()
    by_name = ", ".join(f"{name} {taken:.1f}" for name, taken in seconds.items())
    verdict = "within" if max(seconds.values()) <= SCHEDULE_LIMIT else "over"
    yield (
        f"schedules, {STAGES} stages x {MICRO_BATCHES} micro-batches, generated and checked: "
        f"{by_name} s ({verdict} {SCHEDULE_LIMIT:g} s)"
    )
