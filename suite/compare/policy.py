"""The policy of a gate (YAML); every fault in it is reported with its line.

``deploy/ci/policy.yaml`` shows every key.  Whatever is left out has the default that its field
names.  Patterns are globs on whole ids.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field

from shardproof import verdicts
from shardproof.compare.snapshot import Snapshot
from shardproof.errors import Problem, ScenarioError, nearest
from shardproof.scenarios import load
from shardproof.scenarios.schema import Model, Reason
from shardproof.scenarios.source import Node
from shardproof.verdicts import Verdict

Level = Literal["break", "report", "ignore"]
VerdictLevel = Literal["break", "new", "report", "ignore"]
#: ``new`` breaks where the reference has a better verdict.
VERDICTS: Mapping[Verdict, VerdictLevel] = {
    "fail": "break",
    "crash": "break",
    "hang": "break",
    "refused": "break",
    "xpass": "report",
    verdicts.JUDGE_ERROR: "break",
    verdicts.OVER_BUDGET: "new",
    verdicts.FLAKY: "break",
    "undecidable": "new",
    "inconclusive": "new",
    "precondition": "new",
    verdicts.REPLICAS_ONLY: "break",
    "xfail": "new",
    "skip": "new",
    verdicts.WORKING_PRECISION_ONLY: "new",
    "pass": "ignore",
}
#: Days that an expected failure may last from today on: someone looks at it again within a year.
LONGEST = 366
_BRACKETS = re.compile(r"\[[^]]*\]")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}\Z")


def _date(value: Any) -> datetime.date:
    if isinstance(value, str) and _DATE.match(value):
        try:
            return datetime.date.fromisoformat(value)
        except ValueError:
            raise ValueError("this day does not exist") from None
    raise ValueError("not a date: write YYYY-MM-DD")


Date = Annotated[datetime.date, BeforeValidator(_date, json_schema_input_type=str)]
#: A date that may be left out (a union would tell every fault of it twice).
PerhapsDate = Annotated[datetime.date | None, BeforeValidator(_date, json_schema_input_type=str)]
Pattern = Annotated[str, Field(min_length=1)]


def _narrow(value: str) -> str:
    if not re.search(r"\w{3}", _BRACKETS.sub("*", value)):
        raise ValueError("the pattern is too general: write at least 3 adjacent letters of an id")
    return value


#: A pattern of wildcards and a letter or two would switch the gate off.
NarrowPattern = Annotated[str, Field(min_length=1), AfterValidator(_narrow)]
#: A share: 0.05 is 5 %.
Slowdown = Annotated[float, Field(ge=0, le=10)]


class _Dated(Model):
    reason: Reason
    until: PerhapsDate = Field(None, description="the last day, YYYY-MM-DD")


class Allowed(_Dated):
    """Figures of some cases that may differ."""

    cases: Pattern = Field(description="glob on ids of cases")
    figures: list[Pattern] = Field(["*"], min_length=1, description="globs on names of figures")


class FigureRules(Model):
    """Exact figures: what a difference does."""

    worse: Level = Field("break", description="more bytes, more calls, less overlap")
    better: Level = Field("report", description="fewer bytes, fewer calls: too good, or progress")
    changed: Level = Field("break", description="neither worse nor better")
    allow: list[Allowed] = Field(default_factory=list, description="exceptions")


class AllowedTime(_Dated):
    """Pairs that may become slower than the others."""

    pairs: Pattern = Field(description="glob on ids of comparisons and of scaling results")
    slowdown: Slowdown = Field(description="a share: 0.05 is 5 %")


class Times(Model):
    """Ratios of times and efficiencies: what a certain difference does."""

    slower: Level = Field("break", description="certainly slower, by more than is allowed")
    faster: Level = Field("report", description="certainly faster: too good, or progress")
    inconclusive: Level = Field("ignore", description="a slowdown can be neither seen nor excluded")
    slowdown: Slowdown = Field(0.05, description="allowed for each pair; 0.05 is 5 %")
    allow: list[AllowedTime] = Field(default_factory=list, description="exceptions")


class Cases(Model):
    """The rules for results of only one run, or that cannot be compared."""

    missing: Level = Field("break", description="cases, faults, ratios that the run lacks")
    left_out: Level = Field("report", description="left out by the run's budget")
    coverage: float = Field(
        0.9, ge=0, le=1, description="minimum share of the baseline's decided results to be decided"
    )
    new: Level = Field("report", description="in the run and not in the baseline")
    incomparable: Level = Field("report", description="version, settings or data differ")
    faults: Level = Field("break", description="a planted fault that was killed survives")
    scope: list[Pattern] = Field(
        ["*"], min_length=1, description="globs: results of the baseline that a run must contain"
    )


class ExpectedFailure(Model):
    """Cases that may break the gate until a given date."""

    cases: NarrowPattern = Field(description="glob on ids of cases; it has a word of 3 letters")
    reason: Reason
    until: Date = Field(description="the last day, YYYY-MM-DD, at most a year ahead")
    strict: bool = Field(False, description="a case that passes breaks; else it is reported")


class Policy(Model):
    """A policy file."""

    about: str = Field("", description="what it is for")
    verdicts: dict[Verdict, VerdictLevel] = Field(
        default_factory=dict, description="verdict: break, new (than the baseline), report, ignore"
    )
    figures: FigureRules = Field(FigureRules.model_validate({}), description="exact figures")
    times: Times = Field(Times.model_validate({}), description="ratios of times, efficiencies")
    cases: Cases = Field(default=Cases.model_validate({}), description="results of only one run")
    xfails: list[ExpectedFailure] = Field(
        default_factory=list, description="cases that may break the gate until a given date"
    )

    def level(self, verdict: str) -> VerdictLevel:
        word = cast(Verdict, verdict)
        return self.verdicts.get(word) or VERDICTS.get(word, "report")


@dataclass(frozen=True)
class PolicyFile:
    """A valid policy and where each part of it stands; ``file`` is empty for the defaults."""

    policy: Policy
    file: str = ""
    node: Node | None = None

    def line(self, path: Sequence[str | int]) -> int | None:
        return None if self.node is None else self.node.locate(path)


def read(path: Path | None) -> PolicyFile:
    """The policy in a file; ``None``: the defaults.

    :raises ScenarioError: every fault with its line.
    """
    if path is None:
        return PolicyFile(Policy.model_validate({}))
    policy, node = load.read_as(path, Policy, "policy")
    return PolicyFile(policy, str(path), node)


def check(policy_file: PolicyFile, before: Snapshot, after: Snapshot, today: datetime.date) -> None:
    """Every pattern must match something in one of the runs, no expected failure last for ever.

    :raises ScenarioError: the lines of those that do not.
    """
    ids = before.ids | after.ids
    names = {
        figure
        for snapshot in (before, after)
        for entry in snapshot.results.values()
        for figure in (*entry.figures, "verdict")
    }
    problems = [*_too_long(policy_file, today)]
    for path, pattern in _patterns(policy_file.policy):
        if pattern == "*":  # everything, were it nothing
            continue
        known = names if "figures" in path[1:] else ids
        if not any(fnmatchcase(name, pattern) for name in known):
            noun = "figures" if known is names else "ids"
            what = f"{load.dotted(path)}: matches none of the {noun} of either run"
            remedy = nearest(pattern, known, noun) if known is names else "edit or remove the entry"
            problems.append(
                Problem(what, remedy, pattern, policy_file.file, policy_file.line(path))
            )
    if problems:
        raise ScenarioError(problems)


def _too_long(policy_file: PolicyFile, today: datetime.date) -> Iterator[Problem]:
    for index, entry in enumerate(policy_file.policy.xfails):
        if (entry.until - today).days > LONGEST:
            path = ("xfails", index, "until")
            what = f"{load.dotted(path)}: more than a year ahead"
            last = today + datetime.timedelta(days=LONGEST)
            remedy = f"write {last} or an earlier day"
            yield Problem(what, remedy, str(entry.until), policy_file.file, policy_file.line(path))


def _patterns(policy: Policy) -> Iterator[tuple[tuple[str | int, ...], str]]:
    for index, allowed in enumerate(policy.figures.allow):
        yield ("figures", "allow", index, "cases"), allowed.cases
        for number, pattern in enumerate(allowed.figures):
            yield ("figures", "allow", index, "figures", number), pattern
    for index, slower in enumerate(policy.times.allow):
        yield ("times", "allow", index, "pairs"), slower.pairs
    for index, pattern in enumerate(policy.cases.scope):
        yield ("cases", "scope", index), pattern
    for index, expected in enumerate(policy.xfails):
        yield ("xfails", index, "cases"), expected.cases
