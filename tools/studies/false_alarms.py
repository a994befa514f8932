"""The error rate of ``shardproof bench`` on this machine: ``python -m tools.studies false-alarms``.

Two rates, from sessions of the default procedure, each with fresh ranks:

false alarms   an implementation beside itself; its interval excludes "the same"
detection      the same implementation made 10 % slower; the verdict is ``slower``

A session has two sets of blocks, A/B and A/A.  Where B is A once more, both are comparisons of
alike code; where A is the slowed one, the A/A blocks are.  Sessions of both kinds take turns, so
that both meet the same machine.  They are lines of a run folder: `verify` judges them again, and
a second invocation with the same ``--results`` goes on where the first one ended.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Annotated

import typer
from scipy import stats as distributions

from shardproof import registry, verdicts
from shardproof.bench import lines as stored
from shardproof.bench import sides
from shardproof.bench.evidence import keep
from shardproof.bench.lines import Interval, PairLine
from shardproof.bench.ratios import SMALLEST_MARGIN
from shardproof.bench.session import Session
from shardproof.bench.subjects import Pair, Side
from shardproof.commands import options
from shardproof.contract import Batch, Observe, StepResult
from shardproof.errors import Problem, SelectionError
from shardproof.runs import run_folder

PARENT = "reference/ddp"
SIZE = "1m"
SLOWED = "tools.studies.false_alarms:Slowed"
#: What is added to each step of the slowed side, as a share of its own time.
SLOWDOWN = 0.10
#: The aims: a 95 % interval may err in 5 of 100; 10 or more would be a chance of 3 %.
ALIKE, MOST_ALARMS = 100, 9
LEAST_DETECTED = 0.90


class Slowed(registry.load(PARENT)):  # type: ignore[misc]
    """The parent, with every step extended by a tenth of its own time."""

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """A step that takes 10 % longer."""
        began = time.perf_counter()
        result: StepResult = super().step(batch, observe)
        until = time.perf_counter() + SLOWDOWN * (time.perf_counter() - began)
        while time.perf_counter() < until:
            pass
        return result


def sessions(alike: int, slowed: int) -> list[Pair]:
    """The pairs to time: ``slowed`` with a slower A, and as many with B = A as ``alike`` needs.

    Every session gives an A/A comparison and one with B = A gives two.
    """
    twins = max(0, -(-(alike - slowed) // 2))
    places = [(number / max(1, twins), "twin", number) for number in range(twins)]
    places += [(number / max(1, slowed), "slowed", number) for number in range(slowed)]
    return [_pair(kind, number) for _, kind, number in sorted(places)]


def _pair(kind: str, number: int) -> Pair:
    return Pair(
        name=f"{kind}-{number:03d}",
        a=Side(SLOWED if kind == "slowed" else PARENT),
        b=Side(PARENT),
        backend="gloo",
        world=2,
        workload=sides.spec_of("charnames_gpt", SIZE, {}, 16, 1, 0),
        optimizer=sides.default_optimizer("adamw"),
        size=SIZE,
    )


@dataclass(frozen=True)
class Counts:
    """Alarms and detections, with the figures behind them."""

    alarms: int
    #: Of each comparison of alike code.
    half_widths: Sequence[float]
    #: Verdicts of slowed pairs.
    verdicts: dict[str, int]
    ratios: Sequence[float]

    @property
    def comparisons(self) -> int:
        """The comparisons of equal code."""
        return len(self.half_widths)

    @property
    def slowed(self) -> int:
        """Repetitions of the slowdown."""
        return len(self.ratios)

    @property
    def detected(self) -> int:
        """The slowdowns that were detected."""
        return self.verdicts.get("slower", 0)

    @property
    def alarms_interval(self) -> tuple[float, float]:
        """The 95 % interval of the share of alarms."""
        return _share_interval(self.alarms, self.comparisons)


def count(lines: Sequence[PairLine]) -> Counts:
    """Verdicts of equal and of slowed pairs."""
    alike: list[Interval] = []
    words, ratios = Counter[str](), list[float]()
    for line in lines:
        if line.problem is not None or line.figures is None or line.figures.aa is None:
            continue
        alike.append(line.figures.aa)
        if line.pair.a.implementation == SLOWED:
            words[line.verdict] += 1
            ratios.append(line.figures.ratio)
        elif line.pair.a == line.pair.b:
            alike.append(line.figures)
    alarms = sum(each.low > 1 or each.high < 1 for each in alike)
    return Counts(alarms, [each.half_width for each in alike], dict(sorted(words.items())), ratios)


def _share_interval(hits: int, of: int) -> tuple[float, float]:
    """95 % interval of a share (Clopper and Pearson, Biometrika 26, 1934)."""
    interval = distributions.binomtest(hits, of).proportion_ci(0.95)
    return float(interval.low), float(interval.high)


def sentences(counts: Counts) -> list[str]:
    """The counts in words."""
    lines = []
    if halves := counts.half_widths:
        low, high = counts.alarms_interval
        within = sum(value <= SMALLEST_MARGIN for value in halves)
        lines += [
            f"A/A: {counts.alarms} false alarms in {counts.comparisons} comparisons "
            f"(share {low:.1%} to {high:.1%}; aim: at most {MOST_ALARMS} in {ALIKE})",
            f"A/A half-width: median {median_high(halves):.2%}, most {max(halves):.2%}; within "
            f"{SMALLEST_MARGIN:.0%} in {within} of {counts.comparisons}",
        ]
    if counts.slowed:
        low, high = _share_interval(counts.detected, counts.slowed)
        words = ", ".join(f"{n} {verdict}" for verdict, n in counts.verdicts.items())
        lines.append(
            f"{SLOWDOWN:.0%} slower: seen in {counts.detected} of {counts.slowed} "
            f"(share {low:.1%} to {high:.1%}; aim: at least {LEAST_DETECTED:.0%}): {words}; "
            f"median ratio {median_high(counts.ratios):.3f}"
        )
    return lines or ["no session has figures yet"]


def held(counts: Counts) -> bool:
    """Whether both aims are met (with too few comparisons: not yet)."""
    enough = counts.comparisons >= ALIKE and counts.slowed > 0
    quiet = counts.alarms <= MOST_ALARMS * counts.comparisons / ALIKE
    return enough and quiet and counts.detected >= LEAST_DETECTED * counts.slowed


def _measure(folder: run_folder.RunFolder, pairs: Sequence[Pair], minutes: float | None) -> None:
    began, longest = time.monotonic(), 0.0
    done = {line["id"] for line in run_folder.read(folder.path).others.get("bench", ())}
    todo = [pair for pair in pairs if pair.id not in done]
    folder.plan_others([pair.id for pair in todo])
    with Session() as session:
        for number, pair in enumerate(todo):
            start = time.monotonic()
            spent = start - began
            if minutes is not None and spent + longest > 60 * minutes:
                for late in todo[number:]:
                    why = f"no time in a budget of {minutes:g} minutes"
                    folder.leave_out_other(late.to_dict(), why)
                print(f"left out by the budget: {len(todo) - number} sessions", flush=True)
                break
            (measured,) = session.examine([pair])
            session.time(measured, lambda blocks: None)
            line = keep(folder, measured)
            longest = max(longest, time.monotonic() - start)
            figures = line.figures if isinstance(line, PairLine) else None
            ratio = line.reason if figures is None else f"{figures.ratio:.3f}"
            print(f"{pair.name}: {line.verdict} {ratio}, {spent:.0f} s", flush=True)


def run(
    results: Annotated[
        Path, typer.Option("--results", metavar="RUN", help="new or old", parser=options.named)
    ],
    alike: Annotated[int, typer.Option("--alike", metavar="N", help="A/A comparisons")] = ALIKE,
    slowed: Annotated[int, typer.Option("--slowed", metavar="N", help="slowed sessions")] = 30,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", metavar="M", help="stop before the session that would pass it"),
    ] = None,
) -> int:
    """Compare a system with itself, and with itself made 10 % slower.

    Exit codes: 0 both aims met, 1 one missed, 2 bad input, 3 too few comparisons so far, 130
    Ctrl-C.
    """
    if minutes is not None and minutes <= 0:
        raise SelectionError(Problem("no time to measure", "more than 0 minutes", f"{minutes:g}"))
    run_folder.require_run_or_new(results)
    with run_folder.RunFolder(results, ["shardproof", "study", "false-alarms"]) as folder:
        try:
            _measure(folder, sessions(alike, slowed), minutes)
        except KeyboardInterrupt:
            folder.close(verdicts.INTERRUPTED)
            print("stopped: the sessions that had ended are kept", file=sys.stderr)
            return verdicts.INTERRUPTED
    counts = count(stored.pairs(run_folder.read(results)))
    print("\n".join(sentences(counts)))
    if counts.comparisons < alike or counts.slowed < slowed:
        return verdicts.NOT_DECIDED
    return verdicts.HELD if held(counts) else verdicts.BROKEN
