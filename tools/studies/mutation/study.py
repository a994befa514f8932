"""The surviving systematic faults: ``python -m tools.studies mutation``.

1. Every case of reference strategies runs once with notes of the lines that it executes, and twice
   without.  One that does not pass says nothing about faults; in what these differ, neither does
   it: lengths of paths in messages, the numbers of events.
2. A sample of faults by seed.  Each is planted in the cases that execute its line until one is red:
   then it is killed.  First come those that have the most pairs of the coverage table for their
   seconds which no case before them has: cheap ones, each with triggers of its own.
3. A fault that no case executes is *unreached*, and *explained* where ``untaken.yaml`` tells why
   none need come there, or an error ends its block.  One that changed nothing that a case measures,
   in any case that it was planted in (the bits of every tensor, calls, bytes), is *without effect*.
   One that was only ended by its budget of CPU seconds is *endless*.  All others are survivors,
   once more clean runs of the cases in which they changed something have that alike.
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from shardproof import verdicts
from shardproof.case import Case
from shardproof.cases.runner import Session
from shardproof.checks.results import CaseResult
from shardproof.commands import options
from shardproof.commands.console import echo
from shardproof.coverage import pairs
from shardproof.launch.process_control import cores
from shardproof.scenarios.selection import Selection
from shardproof.scenarios.vocabulary import installed
from shardproof.table import number, some
from tools.studies.mutation import earlier, operators, planted, reached, untaken
from tools.studies.mutation.earlier import Earlier
from tools.studies.mutation.operators import Fault

FAMILY = "reference/"
#: CPU seconds of a rank with a fault: clean ranks of quick cases take two.
DEADLINE = 10.0
#: Cases that a fault is planted in at most.
MOST_CASES = 24
#: Faults that are planted together, each in a case at a time.
TOGETHER = 64
#: Cases that an endless fault is planted in: each takes the whole budget.
_MOST_ENDLESS = 2
#: More clean runs of cases in which a survivor changed something.
_CLEAN_RUNS = 6
#: Places of an effect that a line tells.
_MOST_PLACES = 4
#: What a case measured, by place: ``records[].traffic[].bytes`` -> values in their order.
Figures = Mapping[str, Sequence[str]]
#: What any two runs of one program differ in.
_OF_THE_MACHINE = ("timings", "seconds", "peak", "began", "ended", "cpu", "released")
#: What the judge makes of what ranks did, and what it compares that with.
_OF_THE_JUDGE = ("compared", "oracle")
#: What messages about checkpoints are long: they tell names and times of a run.
_TOLD = (".payload_bytes", ".logical_bytes")
#: What counts for no share.
_ASIDE = ("not planted", "without effect", "explained")


@dataclass(frozen=True, kw_only=True)
class Planting:
    """The number of cases per fault, the time limit, and the remains of an earlier study."""

    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="MIN", min=0.01, help="minutes for planting"),
    ] = None
    most: Annotated[
        int, typer.Option("--cases", metavar="M", min=1, help="cases that each fault is planted in")
    ] = MOST_CASES
    left: Annotated[
        Path | None,
        typer.Option("--left", metavar="FILE", help="plant what --out left there, no sample"),
    ] = None
    jobs: options.Jobs = None
    out: Annotated[Path | None, options.output("--out", "write what is left here (JSON)")] = None

    @property
    def seconds(self) -> float:
        """The time after which no fault is planted."""
        return math.inf if self.budget is None else 60 * self.budget


def _say(text: str) -> None:
    echo(text, err=True)


@dataclass
class Home:
    """A clean case: its duration, its measurements, and its executed lines by file.

    ``unsteady``: places whose values two clean runs do not have alike.
    """

    case: Case
    seconds: float
    figures: Figures
    lines: Mapping[str, set[int]]
    unsteady: frozenset[str] = frozenset()

    def changed(self, figures: Figures) -> frozenset[str]:
        """The places where a run differs although clean runs agree."""
        return unlike(self.figures, figures) - self.unsteady

    @functools.cached_property
    def pairs(self) -> frozenset[tuple[str, ...]]:
        """Pairs of a trigger and a feature."""
        return pairs.of(self.case)

    def executes(self, fault: Fault) -> bool:
        """Whether it executes the line of ``fault``."""
        return fault.line in self.lines.get(fault.file, ())


@dataclass
class Planted:
    """A fault, the cases it can be planted in, the results, and its state in ``earlier`` cases."""

    fault: Fault
    homes: list[Home]
    tried: int = 0
    earlier: str = ""
    killed_by: str = ""
    endless: int = 0  # cases that its budget of CPU seconds ended
    is_planted: bool = True
    #: The cases that measured something else, and where.
    effects: list[tuple[Home, frozenset[str]]] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether another case could kill it."""
        is_endless = self.endless >= _MOST_ENDLESS
        return not (self.killed_by or is_endless) and self.tried < len(self.homes)

    @property
    def effect(self) -> tuple[str, frozenset[str]] | None:
        """The first case with another measurement, and the place of the difference."""
        steady = ((home.case.id, places - home.unsteady) for home, places in self.effects)
        return next((one for one in steady if one[1]), None)

    @property
    def reason(self) -> str:
        """Why no case needs to execute it; empty if one does."""
        return untaken.reasons(self.fault.file).get(self.fault.line, "")

    @property
    def state(self) -> str:
        """Its state over all cases, including earlier ones."""
        if self.killed_by:
            return "killed"
        if not self.homes:
            return self.earlier or ("explained" if self.reason else "unreached")
        if not self.is_planted:
            return "not planted"
        if self.endless:
            return "endless"
        if self.effect is not None:
            return "survived"
        was_met = self.earlier not in ("", "unreached", "explained")
        return self.earlier if was_met else "without effect"

    def text(self) -> str:
        """Its state, the change, and a difference that no check notices."""
        told = f"{self.state}: {self.fault.diff()}"
        if self.state == "explained":
            return f"{told}\nno case: {self.reason}"
        if self.state != "survived" or self.effect is None:
            return told
        case, places = self.effect
        return f"{told}\nchanged in {case}: {some(sorted(places), _MOST_PLACES)}"


@dataclass(frozen=True)
class Study:
    """Faults that were planted in some ``cases``; ``before``: those of the sample that other cases
    killed earlier.
    """

    seed: int
    cases: int
    planted: Sequence[Planted]
    left_out: int = 0
    before: int = 0

    @property
    def counts(self) -> Counter[str]:
        """Faults by state."""
        return Counter(one.state for one in self.planted)

    def sentence(self) -> str:
        """The counts and the killed share, as a sentence."""
        counts = self.counts
        told = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        if able := len(self.planted) - sum(counts[state] for state in _ASIDE) + self.before:
            share = (counts["killed"] + self.before) / able
            earlier = f", with {self.before} killed before" if self.before else ""
            told += f"; {share:.1%} killed{earlier}, those without effect or explained aside"
        if self.left_out:
            told += f"; {self.left_out} left out"
        return f"{number(len(self.planted), 'fault')} in {number(self.cases, 'case')}: {told}"

    def left(self) -> list[Planted]:
        """The faults that were not killed, survivors first."""
        states = ("survived", "unreached", "endless", *_ASIDE)
        left = (one for one in self.planted if one.state != "killed")
        return sorted(left, key=lambda one: states.index(one.state))

    def document(self) -> dict[str, Any]:
        """The evidence: every fault that was not killed, with its change."""
        return {
            "seed": self.seed,
            "cases": self.cases,
            "faults": len(self.planted),
            "left_out": self.left_out,
            "before": self.before,
            "counts": dict(self.counts),
            "left": [
                {
                    "fault": one.fault.name,
                    "line": one.fault.line,
                    "operator": one.fault.operator,
                    "state": one.state,
                    "diff": one.fault.diff(),
                    "case": "" if one.effect is None else one.effect[0],
                    "changed": [] if one.effect is None else sorted(one.effect[1]),
                }
                for one in self.left()
            ],
        }


def judged_cases(cases: Iterable[Case]) -> list[Case]:
    """The cases of reference strategies that must pass."""
    own = (case for case in cases if case.implementation.startswith(FAMILY))
    return [c for c in own if c.skip is None and c.xfail is None and "refuses" not in c.expect]


def run(
    cases: Sequence[Case],
    count: int,
    seed: int,
    how: Planting,
    only_reached: bool = False,
    left: Earlier | None = None,
) -> Study:
    """Plant ``count`` faults in ``cases``, or as many as time allows.

    ``only_reached``: faults are drawn from the lines that the cases execute.  ``left``: what is
    left of that study is planted instead of a sample.
    """
    homes = find_homes(cases, how)
    if left is not None:
        faults, states = left.faults(), left.states()
        found = plant_all(homes, faults[:count], left.seed, how, left)
        planted = {one.fault for one in found.planted}
        others = [Planted(f, [], earlier=states[f.name]) for f in faults if f not in planted]
        return replace(found, planted=[*found.planted, *others], left_out=left.left_out)
    every = operators.faults()
    if only_reached:
        every = [fault for fault in every if any(home.executes(fault) for home in homes)]
    chosen = random.Random(seed).sample(every, min(count, len(every)))
    return plant_all(homes, chosen, seed, how)


def plant_all(
    homes: Sequence[Home],
    chosen: Sequence[Fault],
    seed: int,
    how: Planting,
    left: Earlier | None = None,
) -> Study:
    """Plant each of ``chosen`` in ``homes``, some together, in order; continue from ``left``."""
    until, done = time.monotonic() + how.seconds, list[Planted]()
    states, before = (left.states(), left.killed) if left else ({}, 0)
    with Session(how.jobs or cores()) as session:
        for first in range(0, len(chosen), TOGETHER):
            planted = [
                Planted(
                    fault, _homes_of(fault, homes, how.most), earlier=states.get(fault.name, "")
                )
                for fault in chosen[first : first + TOGETHER]
            ]
            while alive := [one for one in planted if one.is_open]:
                if time.monotonic() > until:
                    break
                _plant(session, alive)
                ended = [*done, *(one for one in planted if not one.is_open)]
                so_far = Study(seed, len(homes), ended, before=before)
                _say(f"{so_far.sentence()}; {len(chosen) - len(ended)} to go")
            done += [one for one in planted if not one.is_open]
        _say("clean cases in which survivors changed something")
        _confirm(session, [one for one in done if one.state == "survived"])
    return Study(seed, len(homes), done, len(chosen) - len(done), before)


def find_homes(cases: Sequence[Case], how: Planting, again: bool = True) -> list[Home]:
    """The passing cases, with their executed lines, measurements, and unsteady values.

    ``again``: run twice more; without it nothing is known to be unsteady.
    """
    passed: dict[int, list[tuple[float, Figures]]] = defaultdict(list)

    def keep(result: CaseResult, account: dict[str, Any]) -> None:
        if result.verdict.startswith("pass"):
            passed[int(result.id)].append((result.seconds, measured(account)))
        else:
            case = cases[int(result.id)].id
            _say(f"left out: {case}: {result.verdict}: {result.reason[:200]}")

    def play(name: Callable[[int], str]) -> None:
        numbers = sorted(passed) or range(len(cases))
        runs = [replace(cases[n], id=f"{n}", implementation=name(n)) for n in numbers]
        _say(f"{len(runs)} clean cases")
        with Session(how.jobs or cores()) as session:
            session.run(runs, lambda _: None, on_account=keep)

    with tempfile.TemporaryDirectory(prefix="shardproof-lines-") as folder:
        os.environ[reached.VARIABLE] = folder  # the leaders inherit it
        try:
            play(lambda n: planted.of_case(_strategy(cases[n]), n))
        finally:
            del os.environ[reached.VARIABLE]
        noted = reached.lines(Path(folder))
    for _ in range(2 if again and passed else 0):
        play(lambda n: cases[n].implementation)
    homes = []
    for index, runs in sorted(passed.items()):
        if len(runs) == (3 if again else 1):
            seconds, figures = runs[-1]
            unsteady = frozenset[str]().union(*(unlike(other, figures) for _, other in runs))
            if cases[index].checkpoint is not None:
                unsteady |= {place for place in figures if place.endswith(_TOLD)}
            homes.append(Home(cases[index], seconds, figures, noted.get(index, {}), unsteady))
    return homes


def _homes_of(fault: Fault, homes: Sequence[Home], most: int = MOST_CASES) -> list[Home]:
    """The cases for a fault: each adds the most that the earlier ones lack."""
    able = [home for home in homes if home.executes(fault)]
    order, met = list[Home](), set[tuple[str, ...]]()
    while able and len(order) < most:
        best = max(able, key=lambda home: (len(home.pairs - met) / home.seconds, -home.seconds))
        able.remove(best)
        order.append(best)
        met |= best.pairs
    return order


def _plant(session: Session, faults: Sequence[Planted]) -> None:
    """Each of ``faults`` in its next case."""
    by_name: dict[str, tuple[Planted, Home]] = {}
    runs = []
    for one in faults:
        home = one.homes[one.tried]
        name = f"{one.fault.name}::{home.case.id}"
        by_name[name] = one, home
        strategy = planted.of_fault(_strategy(home.case), one.fault)
        runs.append(replace(home.case, id=name, implementation=strategy, deadline=DEADLINE))

    def keep(result: CaseResult, account: dict[str, Any]) -> None:
        one, home = by_name[result.id]
        one.tried += 1
        kind = verdicts.kind(result.verdict)
        if planted.NOT_PLANTED in result.reason:
            one.is_planted, one.tried = False, len(one.homes)
        elif kind in verdicts.RED:
            failing = [outcome.check for outcome in result.checks if outcome.status == "fail"]
            one.killed_by = f"{', '.join(failing) or kind} in {home.case.id}"
        elif kind == verdicts.OVER_BUDGET:
            one.endless += 1
        elif places := home.changed(measured(account)):
            one.effects.append((home, places))

    session.run(runs, lambda _: None, on_account=keep)


def _confirm(session: Session, survivors: Sequence[Planted]) -> None:
    """Run the changed cases again without a fault, because their values may be unsteady even if
    three runs agreed. The order of a message relative to the rank's computation is unsteady.
    """
    homes = {home.case.id: home for one in survivors for home, _ in one.effects}
    runs = [
        replace(home.case, id=f"{turn}::{name}")
        for name, home in homes.items()
        for turn in range(_CLEAN_RUNS)
    ]

    def keep(result: CaseResult, account: dict[str, Any]) -> None:
        home = homes[result.id.partition("::")[2]]
        home.unsteady |= unlike(home.figures, measured(account))

    session.run(runs, lambda _: None, on_account=keep)


def _strategy(case: Case) -> str:
    return case.implementation.removeprefix(FAMILY)


def measured(account: Mapping[str, Any]) -> Figures:
    """The measurements of a case: equal if every bit, call and byte is."""
    found: dict[str, list[str]] = defaultdict(list)
    for place, value in _values(account.get("figures"), ""):
        found[place].append(value)
    return found


def _values(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Every number and text in ``value``, with its path."""
    if isinstance(value, Mapping):
        for name, inner in sorted(value.items()):
            of_the_judge = not place and name in _OF_THE_JUDGE
            if not (of_the_judge or any(word in name for word in _OF_THE_MACHINE)):
                yield from _values(inner, f"{place}.{name}")
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _values(inner, f"{place}[]")
    else:
        yield place, repr(value)


def unlike(one: Figures, other: Figures) -> frozenset[str]:
    """The places at which they differ."""
    return frozenset(place for place in {*one, *other} if one.get(place) != other.get(place))


@options.grouped()
def command(
    count: Annotated[int, typer.Argument(metavar="N", min=1, max=100_000, help="faults")],
    scenario: options.Scenarios = None,
    backend: options.BackendOption = None,
    expression: options.Expression = "",
    tier: options.Tier = "quick",
    seed: Annotated[
        int, typer.Option("--seed", metavar="S", min=0, help="another sample of faults")
    ] = 0,
    *,
    given: Planting,
) -> int:
    """Change one place of impls/reference at a time, and check whether a case fails.

    Faults are drawn by seed from all places where an operator applies: a call dropped, made twice,
    moved, or left out once; another op, group, root or dtype; a range, a comparison or a
    constant off by one; a scale or a copy lost; arguments exchanged. Each is planted in up to M
    cases that execute its line until one is red, first in those with the most triggers and
    features, for their seconds, that those before them do not have.

    Told apart: faults in lines that no case executes, and those that a reason of
    tools/studies/mutation/untaken.yaml explains; those without effect in any of the M cases (the
    bits of every tensor, all calls and bytes are as without it); those that only a budget of CPU
    seconds ended. Of a survivor is told what changed and no check minds.

    \b
    python -m tools.studies mutation 200 --seed 3
    python -m tools.studies mutation 50 zero-gpt zero-traits --tier full
    python -m tools.studies mutation 200 --out quick.json
    python -m tools.studies mutation 200 --left quick.json covering --tier full

    With scenarios or -k, faults are drawn from the lines that their cases execute. With --left,
    what an earlier study left over is planted in other cases, N of it at most; its kills and its
    seed count, and what is not planted again keeps its state.

    Exit codes: 0 none survived, 1 some did, 2 bad input, 3 no fault had an effect anywhere.
    """
    selection = Selection(scenario or (), backends=backend or (), expression=expression, tier=tier)
    left = None if given.left is None else earlier.read(given.left)
    cases = judged_cases(selection.cases(installed()))
    found = run(cases, count, seed, given, bool(scenario or expression), left)
    for one in found.left():
        echo(f"{one.text()}\n")
    echo(found.sentence())
    if given.out is not None:
        options.write(given.out, json.dumps(found.document(), indent=1) + "\n")
    if not (found.before or {"killed", "survived"} & {*found.counts}):
        return verdicts.NOT_DECIDED
    return verdicts.BROKEN if found.counts["survived"] else verdicts.HELD
