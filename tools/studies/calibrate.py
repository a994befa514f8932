"""The distance of clean runs from the thresholds: ``python -m tools.studies calibrate``.

Per dtype and seed clean systems are measured: DDP of PyTorch on ``in_memory`` ranks (it scales its
gradients), judged by the real check, once over the first step and once over three teacher-forced
ones, and the order of summation of a ring all-reduce, emulated in one process (a chunk starts its
way round at its own rank).  A figure is the share of its bound that the worst comparison used,
times the dtype's threshold: a relative error in fp64 (where nothing is forced), rho otherwise.

A threshold is never derived from these figures: it is policy.  The policy's measure is the first
step's gradients: twice their clean maximum must stay below the threshold, or it no longer separates
noise from faults.  Later steps are measured beside them and must pass.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from pydantic import BaseModel
from torch import Tensor

from shardproof import VERSION, verdicts
from shardproof.case import Case, WorkloadSpec
from shardproof.checks import numbers, working_precision
from shardproof.checks.results import CaseResult
from shardproof.commands import options
from shardproof.commands.console import make_console, print_line
from shardproof.contract import OptimizerSpec
from shardproof.files import write_whole
from shardproof.launch.process_control import cores
from shardproof.oracle.training import Way, train
from shardproof.oracle.truth import Tensors
from shardproof.workloads import make

RECORD = Path(__file__).parents[2] / "suite" / "checks" / "calibration.json"
DTYPES = ("float64", "float32", "bfloat16")
SEEDS = 30
#: The policy; a threshold in ``numbers.py`` may be lower, never higher.
POLICY = {"float64": 1e-12, "float32": 3.0, "bfloat16": 4.0}
WORLDS = (2, 3, 4)
RANKS, FORCED, RING = "DDP, first step", "DDP, three forced steps", "ring order, first step"
#: Steps of the cases on ranks, and how many times the clean maximum must fit below the threshold.
STEPS = {RANKS: 1, FORCED: 3}
MARGIN = {RANKS: 2.0, RING: 2.0, FORCED: 1.0}


class Spread(BaseModel):
    """Shares of the bound used by clean runs, times the threshold."""

    max: float
    median: float


class Calibration(BaseModel):
    """The measurements: ``clean`` by dtype and source; ``calibration.json`` as JSON."""

    date: str
    versions: dict[str, str]
    seeds: int
    clean: dict[str, dict[str, Spread]]
    thresholds: dict[str, float]

    def write(self, path: Path = RECORD) -> None:
        """Write the figures next to the thresholds."""
        write_whole(path, self.model_dump_json(indent=1) + "\n")


def thresholds() -> dict[str, float]:
    """The current thresholds by dtype."""
    return {
        "float64": numbers.FP64_BOUND,
        **{d: numbers.WORKING_PRECISION_FACTORS[d] for d in DTYPES if d != "float64"},
    }


def problems(measured: Calibration, used: Mapping[str, float]) -> list[str]:
    """The problems of thresholds ``used`` against the ``measured`` values; empty if none."""
    wrong = []
    if measured.seeds < SEEDS:
        wrong.append(f"{measured.seeds} seeds were measured, {SEEDS} are required")
    for dtype, limit in POLICY.items():
        if used[dtype] > limit:
            wrong.append(f"{dtype}: threshold {used[dtype]:g} was raised above policy {limit:g}")
        for source, spread in measured.clean[dtype].items():
            if MARGIN[source] * spread.max > limit:
                wrong.append(
                    f"{dtype}, {source}: {MARGIN[source]:g} times the clean maximum "
                    f"{spread.max:.3g} is above policy {limit:g}"
                )
    return wrong


def ring_fold(step: int, parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The sum in the order of a ring all-reduce: chunk c starts at rank c + 1 and goes round to
    c.
    """
    world = len(parts)
    total = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        like = next(part[name] for part in parts if name in part)
        terms = [part.get(name, torch.zeros_like(like)).reshape(-1) for part in parts]
        chunks = [term.tensor_split(world) for term in terms]
        sums = []
        for chunk in range(world):
            order = [(chunk + 1 + hop) % world for hop in range(world)]
            value = chunks[order[0]][chunk]
            for rank in order[1:]:
                value = value + chunks[rank][chunk]
            sums.append(value)
        total[name] = torch.cat(sums).view(like.shape)
    return total


def ring_error(dtype: str, seed: int, world: int) -> float:
    """The largest error (fp64) or rho of step-0 gradients added in ring order."""
    spec = WorkloadSpec("charnames_gpt", seed=seed)
    twin = make(spec, "float64", rounded_to=dtype)
    workload = make(spec, dtype)

    def gradients(item: Any, **how: Any) -> Tensors:
        return train(item, OptimizerSpec(), world, 1, **how).steps[0].gradients

    truth, ring = gradients(twin), gradients(workload, way=Way(fold=ring_fold))
    zeros = workload.zero_gradient
    if dtype != "float64":
        return max(working_precision.ratios(ring, gradients(workload), truth, zeros).values())
    compare = numbers.relative_frobenius(numbers.FP64_BOUND)
    return max(
        compare(
            *(numbers.split_zero(each[name], zeros.get(name, []))[0] for each in (ring, truth))
        ).error
        for name in truth
    )


def cases(seeds: int) -> list[Case]:
    """Clean cases of DDP, two per dtype and seed, over the worlds in turn."""
    return [
        Case(
            id=f"calibrate::{dtype}::{seed}::{steps}",
            label=source,
            scenario="calibrate",
            implementation="pytorch/ddp",
            backend="in_memory",
            mesh={"replicate": WORLDS[seed % len(WORLDS)]},
            workload=WorkloadSpec("charnames_gpt", seed=seed),
            optimizer=OptimizerSpec(),
            lane="fp64" if dtype == "float64" else "working_precision",
            checks=("equivalence",),
            dtype=dtype,
            options={"bucket_cap_mb": 0.02},
            steps=steps,
        )
        for source, steps in STEPS.items()
        for dtype in DTYPES
        for seed in range(seeds)
    ]


def measure(seeds: int, jobs: int, note: Callable[[str], None] = lambda text: None) -> Calibration:
    """Measure the spread of clean runs.

    :raises RuntimeError: a clean case does not pass: there is nothing to calibrate.
    """
    from shardproof.cases.runner import run_cases

    clean: dict[str, dict[str, list[float]]] = {
        dtype: {RANKS: [], FORCED: [], RING: []} for dtype in DTYPES
    }

    def add(result: CaseResult) -> None:
        if not result.verdict.startswith("pass"):
            raise RuntimeError(f"{result.id} is {result.verdict}: {result.reason}")
        dtype, label = result.case.dtype, result.case.label
        share = (result.worst_error or 0.0) / result.bound if result.bound else 0.0
        clean[dtype][label].append(share * thresholds()[dtype])

    planned = cases(seeds)
    note(f"{len(planned)} clean cases on ranks")
    run_cases(planned, jobs, add)
    note("ring order")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for dtype in DTYPES:
            for seed in range(seeds):
                clean[dtype][RING].append(ring_error(dtype, seed, 3 + seed % 2))
    finally:
        torch.set_num_threads(threads)
    return Calibration(
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        versions={
            "shardproof": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        },
        seeds=seeds,
        clean={
            dtype: {
                source: Spread(max=max(values), median=statistics.median(values))
                for source, values in sources.items()
            }
            for dtype, sources in clean.items()
        },
        thresholds=thresholds(),
    )


def lines(measured: Calibration) -> list[str]:
    """One line per dtype and source of error."""
    return [
        f"{dtype:9} {source:24} clean median {spread.median:.3g}, max {spread.max:.3g}; "
        f"threshold {measured.thresholds[dtype]:g}"
        for dtype, sources in measured.clean.items()
        for source, spread in sources.items()
    ]


def run(
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="N", min=1, help="clean runs of each dtype")
    ] = SEEDS,
    jobs: options.Jobs = None,
) -> int:
    """Measure the errors of clean runs and write them to suite/checks/calibration.json.

    Ends with exit code 1 if a threshold was raised above policy, or if twice the largest error of a
    clean run is above it.
    """
    console = make_console()
    measured = measure(seeds, jobs or cores(), console.print)
    measured.write()
    wrong = problems(measured, thresholds())
    for line in [*lines(measured), *wrong]:
        print_line(console, line)
    return verdicts.BROKEN if wrong else verdicts.HELD
