"""Whether predicted seconds of a step hold here: ``python -m tools.studies step-seconds``.

The prediction is that of ``shardproof simulate --machine here``, from constants of the machine that
the same ranks measure between the steps of each system:

    round 1    constants  DDP  constants    constants  FSDP  constants    constants  tensor  ...
    round 2    constants  DDP  ...

So other load slows both.  The figure of a turn is ln(predicted / real), predicted from the
constants before and after its steps.  No constant comes from a step.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from shardproof import verdicts
from shardproof.backends import USUAL_PROCESSES
from shardproof.bench import sides, stats
from shardproof.bench.leader_tasks import answering, on_ranks
from shardproof.bench.model import alpha_beta
from shardproof.bench.session import Session
from shardproof.bench.subjects import ProbeRecord, SideRun
from shardproof.cluster import head
from shardproof.cluster.shape import Shape, Words
from shardproof.commands import options
from shardproof.simulate import machines
from shardproof.simulate.rank import simulate
from shardproof.simulate.seconds import step_seconds
from shardproof.simulate.sources import CaseSource
from shardproof.table import Table
from tools.studies.convergence.on_nodes import PROGRAM
from tools.studies.model_check import CODES, DEADLINE, runs_of, verdict
from tools.studies.step_turns import WORLD, Turns, measure

SYSTEMS = ("reference/ddp", "reference/fsdp", "reference/tensor")
#: A step takes half a second on an idle core, nearly all of it in kernels.
PARAMS, BATCH = {"width": 512, "heads": 8, "layers": 4, "seq": 128}, 8
HEADINGS = (
    *("system", "predicted s", "real s", "GFLOP/s", "copy GB/s", "link MB/s", "hop us", "busy"),
    *("predicted / real [95 %]", "0.85 to 1.15"),
)


@answering
def lead(task: tuple[Sequence[SideRun], int, Path]) -> list[Turns]:
    """The turns of all ranks."""
    runs, rounds, workdir = task
    return on_ranks(runs[0], workdir, Turns, partial(measure, runs, rounds))


def machine(records: Sequence[ProbeRecord]) -> machines.Machine:
    """The machine by the probes of a turn: of each the slowest rank, of both sweeps the median."""
    found = alpha_beta.machine(USUAL_PROCESSES, records)
    fits, rates = found.fits.values(), {"float32": found.flop_rate or 0.0}
    # A link has one alpha and one beta, as in ``machines.link_of``; load can hide one of them.
    alpha = statistics.median([fit.alpha for fit in fits if fit.alpha] or [0.0])
    link = machines.Link(1 / statistics.median([fit.beta for fit in fits if fit.beta]), alpha)
    rates |= {"bandwidth": found.byte_rate, "gap": machines.small_operator_seconds()}
    busy = statistics.median(fit.busy for fit in fits)
    return machines.of_rates(rates, link, WORLD, min(1.0, busy))


class _Healthy(CaseSource):
    """A training without overflows and evaluations, of which no record is needed."""

    def is_finite(self, rank: int, step: int) -> bool:
        return True

    def evaluates(self, rank: int, step: int) -> bool:
        return False


def row(run: SideRun, turns: Sequence[Sequence[tuple[ProbeRecord, list[float]]]]) -> list[str]:
    """The row of a system, from its turns by rank."""
    made = simulate(_Healthy(replace(run.case(), steps=2), ()), range(WORLD))
    on = [machine([record for record, _ in ranks]) for ranks in zip(*turns, strict=True)]
    predicted = [step_seconds(made, each, run.axes).seconds for each in on]
    real = [max(statistics.fmean(s) for _, s in ranks) for ranks in zip(*turns, strict=True)]
    rates = [(each.flops["float32"] / 1e9, each.bandwidth / 1e9) for each in on]
    links = [(each.intra.bandwidth / 1e6, each.intra.latency * 1e6, each.busy) for each in on]
    columns = predicted, real, *zip(*rates, strict=True), *zip(*links, strict=True)
    middle = (f"{statistics.median(column):,.2f}" for column in columns)
    return [run.name, *middle, *judge(predicted, real)]


def judge(predicted: Sequence[float], real: Sequence[float]) -> tuple[str, str]:
    """The mean ratio with its interval, in words, and the verdict on it."""
    logs = [math.log(a / b) for a, b in zip(predicted, real, strict=True)]
    ratio, low, high = (stats.estimate(logs).ratios()[key] for key in ("ratio", "low", "high"))
    return f"{ratio:.2f} [{low:.2f}, {high:.2f}]", verdict(low - 1, high - 1)


def run(
    systems: Annotated[list[str] | None, typer.Argument(metavar="IMPL")] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=2)] = 24,
    results: Annotated[Path | None, typer.Option("--results", metavar="FOLDER")] = None,
) -> int:
    """Predict the seconds of a step of 2 gloo ranks, and measure them, in turns.

    Exit codes: 0 the ratio of each system holds, 1 one is broken, 3 one is inconclusive.
    """
    load, work = os.getloadavg()[0], sides.spec_of("charnames_gpt", "", PARAMS, BATCH, 1, 0)
    runs = [
        replace(runs_of(name, USUAL_PROCESSES, WORLD)[0], name=name, workload=work)
        for name in systems or SYSTEMS
    ]
    with Session() as session:
        task = runs, rounds, session.folder()
        told = session.lead(lead, list[Turns], "step-seconds", task, DEADLINE)
    of_each = ([turns[number :: len(runs)] for turns in told] for number in range(len(runs)))
    rows = [*map(row, runs, of_each)]
    text = Table("", HEADINGS, rows).markdown()
    text += f"\n{rounds} rounds; load average {load:.1f} before, {os.getloadavg()[0]:.1f} after.\n"
    print(text, end="")
    if results is not None:
        options.write(results / "step-seconds.md", text)
    return verdicts.gravest(CODES[row[-1]] for row in rows)


@options.grouped(ranks_per_node=1)
def on_nodes(words: Words = None, *, wanted: Shape) -> int:
    """`step-seconds` with its arguments, its ranks in containers.

    \b
    python -m tools.studies step-seconds-on-nodes --bandwidth 1gbit
    """
    systems = head.meant(run, words or []).params["systems"] or SYSTEMS
    needs, seen = head.needs_of(systems, USUAL_PROCESSES, wanted), head.own_folders((), systems)
    return head.run(["step-seconds", *(words or [])], wanted, needs, seen, program=PROGRAM)
