"""Whether predicted seconds of a step hold here: ``python -m tools.studies step-seconds``.

The prediction is that of ``shardproof simulate --machine here``, from constants of the machine that
the same ranks measure between the steps of each system:

    round 1    constants  DDP  constants  FSDP  constants  tensor  constants
    round 2               DDP  ...

So other load slows both.  The figure of a round is ln(predicted / real), predicted from the
constants before and after the steps.  No constant comes from a step.
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
from shardproof.bench.arm import Arm, everybody
from shardproof.bench.collectives import OPERATIONS
from shardproof.bench.leader_tasks import answering, on_ranks
from shardproof.bench.model import alpha_beta, probes
from shardproof.bench.on_rank import pin
from shardproof.bench.session import Session
from shardproof.bench.subjects import ProbeRecord, RankRounds, SideRun
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

WORLD = 2
SYSTEMS = ("reference/ddp", "reference/fsdp", "reference/tensor")
#: A step takes half a second on an idle core, nearly all of it in kernels.
PARAMS, BATCH = {"width": 512, "heads": 8, "layers": 4, "seq": 128}, 8
#: The products and the payload bytes by which ``--machine here`` is measured; products several
#: times, because most of a step is products.
PRODUCTS = [((1, 1024, 1024, 1024), 1)] * 10
PAYLOADS = (2**12, 2**18, 2**22, 2**24)
HEADINGS = ("system", "predicted s", "real s", "predicted / real [95 %]", "within 0.85 to 1.15")


def measure(runs: Sequence[SideRun], rounds: int, number: int) -> RankRounds:
    """The measurements of rank ``number``."""
    cores = pin(number, WORLD, threads=False)
    control = everybody(USUAL_PROCESSES, WORLD)
    arms = [Arm(run, number) for run in runs]
    for arm in arms:  # after all groups are made
        arm.set_up().seconds(probes.WARM)
    prober = probes.Probes(control, dict.fromkeys(OPERATIONS, PAYLOADS), PRODUCTS)
    prober.sweep()
    prober.forget()  # it was warm-up
    prober.sweep()
    steps = [list[list[float]]() for _ in arms]
    for _ in range(rounds):
        for arm, segments in zip(arms, steps, strict=True):
            control.barrier()
            segments.append(arm.seconds(probes.STEPS))
            control.barrier()
            prober.sweep()
    for arm in arms:
        arm.close()
    return RankRounds(number, cores, 1, [], steps, prober.record())


@answering
def lead(task: tuple[Sequence[SideRun], int, Path]) -> list[RankRounds]:
    """The measurements of all ranks."""
    runs, rounds, workdir = task
    return on_ranks(runs[0], workdir, RankRounds, partial(measure, runs, rounds))


def machine(told: Sequence[RankRounds], sweeps: slice) -> machines.Machine:
    """The machine by these ``sweeps``: of each the slowest rank, of several the median."""
    records = []
    for record in (one.probes for one in told):
        group = record.groups[""]
        calls = [(name, size, seconds[sweeps]) for name, size, seconds in group.collectives]
        rates = record.flop_rates[sweeps], record.byte_rates[sweeps]
        records.append(ProbeRecord({"": replace(group, collectives=calls)}, *rates))
    found = alpha_beta.machine(USUAL_PROCESSES, records)
    # A link has one alpha and one beta, as in ``machines.link_of``; load can hide one of them.
    fits = found.fits.values()
    alpha = statistics.median([fit.alpha for fit in fits if fit.alpha] or [0.0])
    beta = statistics.median([fit.beta for fit in fits if fit.beta])
    busy = min(1.0, statistics.median(fit.busy for fit in fits))
    constants = {"float32": found.flop_rate or 0.0, "bandwidth": found.byte_rate}
    constants["gap"] = machines.small_operator_seconds()
    return machines.of_rates(constants, machines.Link(1 / beta, alpha), WORLD, busy)


class _Healthy(CaseSource):
    """A training without overflows and evaluations, of which no record is needed."""

    def is_finite(self, rank: int, step: int) -> bool:
        return True

    def evaluates(self, rank: int, step: int) -> bool:
        return False


def seconds(runs: Sequence[SideRun], told: Sequence[RankRounds], number: int) -> list[list[float]]:
    """Predicted and real seconds of a step of system ``number``, by round."""
    run, rounds = runs[number], [*zip(*(one.together[number] for one in told), strict=True)]
    made = simulate(_Healthy(replace(run.case(), steps=2), ()), range(WORLD))
    places = (turn * len(runs) + number for turn in range(len(rounds)))
    around = (machine(told, slice(place, place + 2)) for place in places)
    predicted = [step_seconds(made, on, run.axes).seconds for on in around]
    return [predicted, [max(map(statistics.fmean, ranks)) for ranks in rounds]]


def judge(predicted: Sequence[float], real: Sequence[float]) -> tuple[str, str]:
    """The mean ratio with its interval, in words, and the verdict on it."""
    found = stats.estimate([math.log(a / b) for a, b in zip(predicted, real, strict=True)])
    ratio, low, high = map(math.exp, (found.mean, found.low, found.high))
    return f"{ratio:.2f} [{low:.2f}, {high:.2f}]", verdict(low - 1, high - 1)


def run(
    systems: Annotated[list[str] | None, typer.Argument(metavar="IMPL")] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=2)] = 24,
    results: Annotated[Path | None, typer.Option("--results", metavar="FOLDER")] = None,
) -> int:
    """Predict the seconds of a step of 2 gloo ranks, and measure them, in turns.

    Exit codes: 0 the ratio of each system holds, 1 one is broken, 3 one is inconclusive.
    """
    load, rows = os.getloadavg()[0], list[tuple[str, ...]]()
    work = sides.spec_of("charnames_gpt", "", PARAMS, BATCH, 1, 0)
    runs = [
        replace(runs_of(name, USUAL_PROCESSES, WORLD)[0], name=name, workload=work)
        for name in systems or SYSTEMS
    ]
    with Session() as session:
        task = runs, rounds, session.folder()
        told = session.lead(lead, list[RankRounds], "step-seconds", task, DEADLINE)
    for number, each in enumerate(runs):
        both = seconds(runs, told, number)
        rows.append((each.name, *(f"{statistics.median(t):.3f}" for t in both), *judge(*both)))
    on = machine(told, slice(None))
    text = Table("", HEADINGS, rows).markdown() + (
        f"\n{rounds} rounds; load average {load:.1f} before, {os.getloadavg()[0]:.1f} after. "
        f"Median constants of a rank: {on.flops['float32'] / 1e9:.0f} GFLOP/s, a copy "
        f"{on.bandwidth / 1e9:.1f} GB/s, a small operator {on.gap * 1e6:.1f} us; link "
        f"{on.intra.bandwidth / 1e6:,.0f} MB/s, {on.intra.latency * 1e6:,.0f} us a hop, "
        f"{on.busy:.0%} of a call on the core.\n"
    )
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
