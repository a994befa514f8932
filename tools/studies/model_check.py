"""Whether the alpha-beta model holds on this machine: ``python -m tools.studies model-check``.

Models of three sizes train side by side on the same ranks.  None of their messages has a size at
which alpha and beta are probed (else the study refuses), and no step of theirs is used in a fit.
Rounds and figures: suite/bench/model/probes.py.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from shardproof import registry, verdicts
from shardproof.backends import BACKENDS
from shardproof.bench import sides, stats
from shardproof.bench.leader_tasks import LaunchFailed
from shardproof.bench.model import alpha_beta, scorecard, step_time
from shardproof.bench.session import Session
from shardproof.bench.subjects import Call, Rounds, Side, SideRun
from shardproof.commands import options
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.files import write_whole
from shardproof.table import Table

#: What is trained: parameters of charnames_gpt by size, none of them a preset's.
SIZES: dict[str, dict[str, int]] = {
    "1.3m": {"width": 160, "heads": 5, "layers": 4, "seq": 32},
    "5.1m": {"width": 288, "heads": 9, "layers": 5, "seq": 32},
    "16m": {"width": 512, "heads": 8, "layers": 5, "seq": 32},
}
#: Samples of a step, few: communication has a share of it that shows.
BATCH = 4
#: Payload bytes of the probes.
LADDER = (2**8, 2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**25)
#: Relative disagreement that the measure allows.
LIMIT = 0.15
CODES = {"holds": verdicts.HELD, "inconclusive": verdicts.NOT_DECIDED, "broken": verdicts.BROKEN}
#: Seconds of a launch, at most.
DEADLINE = 900.0

INTRODUCTION = """\
# Does the alpha-beta prediction hold?

Written by `python -m tools.studies model-check`; method: [docs/model.md](../../docs/model.md).
Models of three sizes train side by side. None of their messages has a probed size, and none of
their steps is in the fit. Limit: 15 % for the whole interval. `inconclusive`: the machine was too
noisy to decide.
"""
#: Those of predictions, of scorecards and of what alpha and beta were fitted to.
HEADINGS: Sequence[tuple[str, ...]] = (
    (
        *("model", "calls, bytes per step", "compute ms", "communication ms (alpha + beta)"),
        *("predicted ms (bounds)", "measured ms", "measured / predicted - 1 [95 %]"),
        "within 15 %",
    ),
    ("model", "achieved / predicted", "exposed communication", "achieved / probed rates"),
    (
        *("operation", "alpha us", "beta ns/byte", "RMS residual", "worst", "busy cores per rank"),
        "us at each payload (bytes)",
    ),
)


def runs_of(implementation: str, backend: str, world: int) -> list[SideRun]:
    """One run per size.

    :raises InputError: an unknown implementation, or one that has no data axis.
    """
    registry.check(implementation)
    axes = sides.natural_mesh(registry.load(implementation).capabilities({}).axes, world)
    return [
        SideRun(
            name=name,
            side=Side(implementation),
            axes=axes,
            backend=backend,
            world=world,
            workload=sides.spec_of("charnames_gpt", "", params, BATCH, 1, 0),
            optimizer=sides.default_optimizer("adamw"),
            dtype="float32",
            deadline=DEADLINE,
        )
        for name, params in SIZES.items()
    ]


@dataclass(frozen=True)
class Score:
    """One run. ``error`` is measured over predicted less 1; ``low`` and ``high`` are its 95 %
    interval over rounds (paired t on logs).
    """

    calls: list[Call]
    measured_seconds: float
    prediction: step_time.Prediction
    card: step_time.Scorecard
    error: float
    low: float
    high: float


def scores_of(runs: Sequence[SideRun], rounds: Rounds) -> tuple[list[Score], alpha_beta.Machine]:
    """Scores of ``runs`` on the machine, without side effects.

    The figure of a round is ln(measured / predicted): predicted from the compute of this round and
    the alpha and beta of the whole launch, which no step has a part in.
    """
    probes, steps = scorecard.digest(runs[0].backend, rounds)
    scores = []
    for number, (run, step) in enumerate(zip(runs, steps, strict=True)):
        alone = step_time.slowest([r.alone[number].steps for r in rounds.measured])
        together = step_time.slowest([r.together[number] for r in rounds.measured])
        logs = []
        # Two segments alone around the one together: a round.
        for before, after, measured in zip(alone[::2], alone[1::2], together, strict=True):
            of_round = step.model_copy(update={"alone": statistics.median([*before, *after])})
            predicted = scorecard.predicted(probes, of_round).step_seconds
            logs.append(math.log(statistics.median(measured) / predicted))
        found = stats.estimate(logs)
        error = (math.expm1(log) for log in (found.mean, found.low, found.high))
        made = scorecard.predicted(probes, step)
        card = scorecard.card(probes, step, step.together, run)
        scores.append(Score(step.calls, step.together, made, card, *error))
    return scores, probes.machine


def judge(runs: Sequence[SideRun], rounds: Rounds) -> tuple[list[Score], alpha_beta.Machine]:
    """The scores of :func:`scores_of`.

    :raises ValueError: a model sends a message of a size that alpha and beta come from.
    """
    scores, machine = scores_of(runs, rounds)
    for run, score in zip(runs, scores, strict=True):
        for operation, payloads in step_time.sizes(score.calls).items():
            if shared := set(payloads) & set(machine.times.get(operation, ())):
                raise ValueError(f"{run.name}: probed at its own sizes {sorted(shared)}")
    return scores, machine


def verdict(low: float, high: float) -> str:
    """`holds` if the interval of a relative error lies within the limit, `broken` if all of it is
    outside, else `inconclusive`.
    """
    if low >= -LIMIT and high <= LIMIT:
        return "holds"
    return "broken" if low > LIMIT or high < -LIMIT else "inconclusive"


def markdown(
    runs: Sequence[SideRun],
    scores: Sequence[Score],
    machine: alpha_beta.Machine,
    about: str = "",
) -> str:
    """The page of the study: predicted next to measured step times, and the inputs of the
    prediction.
    """
    predicted, cards = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for name, score in zip((run.name for run in runs), scores, strict=True):
        made, card, rate = score.prediction, score.card, score.card.achieved_over_probed
        calls = sum(call.count for call in score.calls)
        payload = sum(call.bytes * call.count for call in score.calls)
        predicted.append(
            (
                name,
                f"{calls:.0f}, {payload:,.0f}",
                f"{1e3 * made.compute_seconds:.1f}",
                f"{1e3 * made.communication_seconds:.1f} "
                f"({1e3 * made.alpha_seconds:.2f} + {1e3 * made.beta_seconds:.1f})",
                f"{1e3 * made.step_seconds:.1f} "
                f"({1e3 * made.low_seconds:.1f} to {1e3 * made.high_seconds:.1f})",
                f"{1e3 * score.measured_seconds:.1f}",
                f"{score.error:+.1%} [{score.low:+.1%}, {score.high:+.1%}]",
                verdict(score.low, score.high),
            )
        )
        ratios = f"{card.achieved_over_predicted:.3f}", f"{card.exposed_share:.1%}"
        cards.append((name, *ratios, "-" if rate is None else f"{rate:.2f}"))
    fits: list[tuple[str, ...]] = [
        (
            *(operation, f"{1e6 * fit.alpha:.1f}", f"{1e9 * fit.beta:.3f}"),
            *(f"{fit.residual:.1%}", f"{fit.worst:+.1%}", f"{fit.busy:.2f}"),
            ", ".join(f"{n}: {1e6 * t:.0f}" for n, t in machine.times[operation].items()),
        )
        for operation, fit in machine.fits.items()
    ]
    flops = "-" if machine.flop_rate is None else f"{machine.flop_rate / 1e9:.1f} GFLOP/s"
    closing = f"Rates of a rank, all at once: {flops}, {machine.byte_rate / 1e9:.1f} GB/s.\n"
    tables = zip(HEADINGS, (predicted, cards, fits), strict=True)
    parts = [INTRODUCTION, *([f"{about}\n"] if about else [])]
    parts += [Table("", headings, rows).markdown() for headings, rows in tables]
    return "\n".join([*parts, closing])


def run(
    implementation: Annotated[
        str, typer.Option("--implementation", metavar="NAME", help="family/name")
    ] = "reference/ddp",
    backend: Annotated[str, typer.Option("--backend", metavar="B")] = "gloo",
    world: Annotated[int, typer.Option("--world", metavar="N", help="ranks")] = 2,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", help="at least 2")] = 10,
    out: Annotated[Path | None, options.output("--out", "write the Markdown here, too")] = None,
) -> int:
    """Predict steps of three models by the alpha-beta model, and measure them.

    Exit codes: 0 all within 15 %, 1 one is not, or the ranks broke, 2 bad input, 3 the machine is
    too restless for a verdict.
    """
    if world < 2 or rounds < 2:
        remedy = "at least 2 of each"
        raise SelectionError(Problem("too few ranks or rounds", remedy, f"{world}, {rounds}"))
    if not alpha_beta.algorithms_of(backend):
        remedy = nearest(backend, filter(alpha_beta.algorithms_of, BACKENDS), "backends")
        raise SelectionError(Problem("no cost formulas for this backend", remedy, backend))
    runs = runs_of(implementation, backend, world)
    began, load = time.monotonic(), os.getloadavg()[0]
    try:
        with Session() as session:
            ladder = dict.fromkeys(alpha_beta.algorithms_of(backend), LADDER)
            measured = session.measure_rounds(runs, rounds, ladder)
    except LaunchFailed as failed:
        print(f"the ranks broke: {failed.reason}", file=sys.stderr)
        return verdicts.BROKEN
    try:
        scores, machine = judge(runs, measured)
    except ValueError as error:  # a message of a probed size, or a call without a formula
        raise SelectionError(Problem("no prediction to hold", str(error))) from None
    about = (
        f"{implementation} on {world} {backend} ranks, adamw, {BATCH} samples of 32 tokens, "
        f"{rounds} rounds, {time.monotonic() - began:.0f} s; torch {version('torch')}, "
        f"{platform.machine()}, {os.cpu_count()} cores, load average before {load:.1f}."
    )
    text = markdown(runs, scores, machine, about)
    print(text, end="")
    if out is not None:
        write_whole(out, text)
    return verdicts.gravest(CODES[verdict(score.low, score.high)] for score in scores)
