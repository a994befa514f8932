"""How often ``shardproof bench`` errs here: ``python -m shardproof.studies.false_alarms``.

Two rates, measured once a release on sessions of the default procedure, each with fresh ranks:

false alarms   an implementation beside itself; its interval excludes "the same"
detection      the same implementation made 10 % slower; the verdict is ``slower``

Comparisons of other runs by the default number of blocks have A/A blocks, too, which may count.

A session has two sets of blocks, A/B and A/A.  Where B is A once more, both are comparisons of
alike code; where A is the slowed one, the A/A blocks are.  Sessions of both kinds take turns, so
that both meet the same machine.  They are lines of a run folder: `verify` judges them again, and
a second invocation with the same ``--results`` goes on where the first one ended.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy import stats as distributions

from shardproof import registry, verdicts
from shardproof.bench import sides
from shardproof.bench.evidence import keep
from shardproof.bench.session import Session
from shardproof.contract import Batch, Observe, StepResult
from shardproof.errors import InputError
from shardproof.runs import run_folder

PARENT = "reference/ddp"
SIZE = "1m"
SLOWED = "shardproof.studies.false_alarms:Slowed"
#: What is added to each step of the slowed side, as a share of its own time.
SLOWDOWN = 0.10
#: The aims: a 95 % interval may err in 5 of 100; 10 or more would be a chance of 3 %.
ALIKE, MOST_ALARMS = 100, 9
LEAST_DETECTED = 0.90

Line = Mapping[str, Any]


class Slowed(registry.load(PARENT)):  # type: ignore[misc]
    """The parent, whose every step computes on for a tenth of its own time."""

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """The parent's step and the delay."""
        began = time.perf_counter()
        result: StepResult = super().step(batch, observe)
        until = time.perf_counter() + SLOWDOWN * (time.perf_counter() - began)
        while time.perf_counter() < until:
            pass
        return result


def sessions(alike: int, slowed: int) -> list[sides.Pair]:
    """Pairs to time: ``slowed`` with a slower A, and as many with B = A as ``alike`` needs.

    Every session gives an A/A comparison and one with B = A gives two.
    """
    twins = max(0, -(-(alike - slowed) // 2))
    places = [(number / max(1, twins), "twin", number) for number in range(twins)]
    places += [(number / max(1, slowed), "slowed", number) for number in range(slowed)]
    return [_pair(kind, number) for _, kind, number in sorted(places)]


def _pair(kind: str, number: int) -> sides.Pair:
    return sides.Pair(
        name=f"{kind}-{number:03d}",
        a=sides.Side(SLOWED if kind == "slowed" else PARENT),
        b=sides.Side(PARENT),
        backend="gloo",
        world=2,
        workload=sides.spec_of("charnames_gpt", SIZE, {}, 16, 1, 0),
        optimizer=sides.default_optimizer("adamw"),
        size=SIZE,
    )


def count(lines: Sequence[Line]) -> dict[str, Any]:
    """Alarms and detections among lines of kind ``bench``, with the figures behind them."""
    alike: list[Line] = []
    slowed: list[Line] = []
    for line in lines:
        if line["problem"] is not None or "ratio" not in line or not line.get("aa"):
            continue
        alike.append(line["aa"])
        a, b = line["pair"]["a"], line["pair"]["b"]
        if a["implementation"] == SLOWED:
            slowed.append(line)
        elif a == b:
            alike.append(line)
    alarms = sum(told["low"] > 1 or told["high"] < 1 for told in alike)
    found = sum(line["verdict"] == "slower" for line in slowed)
    wide = [told["half_width"] for told in alike]
    return {
        "comparisons": len(alike),
        "alarms": alarms,
        "alarms_interval": _shares(alarms, len(alike)),
        "half_width_median": sorted(wide)[len(wide) // 2] if wide else None,
        "half_width_most": max(wide, default=None),
        "half_width_within": sum(value <= plan_margin() for value in wide),
        "slowed": len(slowed),
        "detected": found,
        "detected_interval": _shares(found, len(slowed)),
        "verdicts": {
            verdict: sum(line["verdict"] == verdict for line in slowed)
            for verdict in sorted({line["verdict"] for line in slowed})
        },
        "ratio_median": sorted(line["ratio"] for line in slowed)[len(slowed) // 2]
        if slowed
        else None,
    }


def plan_margin() -> float:
    """The half-width that the default number of blocks aims at."""
    from shardproof.bench.stats import SMALLEST_MARGIN

    return SMALLEST_MARGIN


def _shares(hits: int, of: int) -> tuple[float, float] | None:
    """95 % interval of a share (Clopper and Pearson, Biometrika 26, 1934)."""
    if not of:
        return None
    interval = distributions.binomtest(hits, of).proportion_ci(0.95)
    return float(interval.low), float(interval.high)


def sentences(told: Mapping[str, Any]) -> list[str]:
    """The counts in words, a line each."""
    lines = []
    if told["comparisons"]:
        low, high = told["alarms_interval"]
        lines += [
            f"A/A: {told['alarms']} false alarms in {told['comparisons']} comparisons "
            f"(share {low:.1%} to {high:.1%}; aim: at most {MOST_ALARMS} in {ALIKE})",
            f"A/A half-width: median {told['half_width_median']:.2%}, most "
            f"{told['half_width_most']:.2%}; within {plan_margin():.0%} in "
            f"{told['half_width_within']} of {told['comparisons']}",
        ]
    if told["slowed"]:
        low, high = told["detected_interval"]
        verdicts = ", ".join(f"{n} {verdict}" for verdict, n in told["verdicts"].items())
        lines.append(
            f"{SLOWDOWN:.0%} slower: seen in {told['detected']} of {told['slowed']} "
            f"(share {low:.1%} to {high:.1%}; aim: at least {LEAST_DETECTED:.0%}): {verdicts}; "
            f"median ratio {told['ratio_median']:.3f}"
        )
    return lines or ["no session has figures yet"]


def held(told: Mapping[str, Any]) -> bool:
    """Whether both aims are met (too few comparisons: not yet)."""
    enough = told["comparisons"] >= ALIKE and told["slowed"] > 0
    quiet = told["alarms"] <= MOST_ALARMS * told["comparisons"] / ALIKE
    return bool(enough and quiet and told["detected"] >= LEAST_DETECTED * told["slowed"])


def _measure(
    folder: run_folder.RunFolder, pairs: Sequence[sides.Pair], minutes: float | None
) -> None:
    """Time those of ``pairs`` that ``folder`` does not have yet, while there is time."""
    began, longest = time.monotonic(), 0.0
    done = {line["id"] for line in run_folder.read(folder.path).benches}
    todo = [pair for pair in pairs if pair.id not in done]
    folder.plan_benches([pair.id for pair in todo])
    with Session() as session:
        for number, pair in enumerate(todo):
            start = time.monotonic()
            spent = start - began
            if minutes is not None and spent + longest > 60 * minutes:
                for late in todo[number:]:
                    why = f"no room in a budget of {minutes:g} minutes"
                    folder.leave_out_bench(late.to_dict(), why)
                print(f"left out by the budget: {len(todo) - number} sessions", flush=True)
                break
            (measured,) = session.examine([pair])
            session.time(measured, lambda blocks: None)
            line = keep(folder, measured)
            longest = max(longest, time.monotonic() - start)
            ratio = f"{line['ratio']:.3f}" if "ratio" in line else line["reason"]
            print(f"{pair.name}: {line['verdict']} {ratio}, {spent:.0f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 both aims met, 1 one missed, 2 bad input, 3 too few comparisons so far, 130 Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m shardproof.studies.false_alarms", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--results", type=Path, required=True, help="run folder, new or old")
    parser.add_argument("--alike", type=int, default=ALIKE, help="A/A comparisons")
    parser.add_argument("--slowed", type=int, default=30, help="repetitions of the slowdown")
    parser.add_argument("--minutes", type=float, help="stop before the session that would pass it")
    parser.add_argument(
        "--also", type=Path, action="append", default=[], help="a run whose A/A blocks count, too"
    )
    chosen = parser.parse_args(arguments)
    if chosen.minutes is not None and chosen.minutes <= 0:
        parser.error("--minutes: more than 0")
    try:
        others = [line for run in chosen.also for line in run_folder.read(run).benches]
        folder = run_folder.RunFolder(chosen.results, [parser.prog, *(arguments or sys.argv[1:])])
    except (InputError, OSError) as error:
        parser.error(str(error))
    with folder:
        try:
            _measure(folder, sessions(chosen.alike, chosen.slowed), chosen.minutes)
        except KeyboardInterrupt:
            folder.close(verdicts.INTERRUPTED)
            print("stopped: the sessions that had ended are kept", file=sys.stderr)
            return verdicts.INTERRUPTED
    lines = run_folder.read(chosen.results).benches
    told = count([*lines, *(line for line in others if line.get("blocks") == sides.BLOCKS)])
    print("\n".join(sentences(told)))
    if told["comparisons"] < chosen.alike or told["slowed"] < chosen.slowed:
        return 3
    return 0 if held(told) else 1


if __name__ == "__main__":
    sys.exit(main())
