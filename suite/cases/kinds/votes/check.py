"""All ranks end training at one vote, on one best checkpoint and one metric, as the rule says.

Judged in cases of workload ``votes``: ranks vote on scripts of metrics
(``workload.py``) and note after each vote whether training is over, which checkpoint is the best,
and the metric.  First they are compared with each other, then with the rule
(``StopRule`` in ``suite/contract.py``), applied here to all numbers in one place.  Equality,
tolerance 0: the scripts' sums and means are exact.  A metric that is not finite is one value: NaN
and infinities count alike.

Power: a script tells nothing if every rank, deciding by its own number, would come to the same end.
Such scripts count as not tested, and where there are no others nothing is decided.

*Cannot see* what a training loop does with a ruling, or metrics that are no mean over data.  What
becomes of ranks whose peer dies in a vote is the check ``faults``'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardproof.backends.errors import all_do
from shardproof.cases.kinds import judged
from shardproof.cases.kinds.votes import workload
from shardproof.cases.kinds.votes.workload import Cast, Script
from shardproof.checks import Needs, Outcome
from shardproof.contract import StopRule
from shardproof.evidence.assembled import Evidence, Figures
from shardproof.evidence.records import ComparisonRow, Voted

NEEDS: Needs = ("values", "every rank")


class Right(NamedTuple):
    """The expected result of a vote: whether training is over, the step of the best, the metric."""

    ends: bool
    best: int | None
    metric: float


def measure(evidence: Evidence) -> list[ComparisonRow]:
    """Three rows a script, on the end, the best checkpoint and the metric, with what is wrong."""
    if not evidence.records or not evidence.records[0].voted:
        return []
    case, rows = evidence.case, []
    rule = workload.rule(workload.resolve(case.workload))
    for number, script in enumerate(workload.scripts(case.workload, case.world)):
        told = [[v for v in record.voted if v.script == number] for record in evidence.records]
        right = list(rulings(rule, script))
        tested = case.world == 1 or any(_differ(own, right) for own in alone(rule, script))
        where, last = f"script {number}", len(right) - 1
        for name, wrong in (("end", _end), ("best", _best), ("metric", _metric)):
            problem = wrong(told, right)
            text = f"{where}: {problem}" if problem else ""
            rows.append(judged.row(last, where, name, text, tested))
    return rows


def decide(figures: Figures) -> Outcome:
    """By the rows alone."""
    found = judged.outcome("stopping", figures, "no rank voted: it judges workload votes only")
    if found.status == "skip":
        return found
    rows = figures.compared["stopping"]
    untested = sorted({row.phase for row in rows if not row.tested})
    found = replace(found, figures={**found.figures, "not_tested": untested})
    if found.status == "pass" and not any(row.tested for row in rows):
        what = "each rank alone decides as all together: give more scripts or votes"
        return replace(found, status="undecidable", message=what)
    return found


def rulings(rule: StopRule, script: Script) -> Iterator[Right]:
    """The expected result of each vote of a script, up to the end."""
    metrics = [_mean(casts) for casts in script]
    gains: list[int] = []  # the votes that were better than the best before them
    for step, metric in enumerate(metrics):
        if _is_gain(rule, metric, metrics[gains[-1]] if gains else None):
            gains.append(step)
        since = step - gains[-1] if gains else step + 1
        over = (
            any(cast.asks for cast in script[step])
            or (rule.not_finite == "stop" and not math.isfinite(metric))
            or (rule.target is not None and _reaches(rule, metric, rule.target))
            or 0 < rule.patience <= since
            or step + 1 == rule.budget
        )
        yield Right(over, gains[-1] if gains else None, metric)
        if over:
            return


def alone(rule: StopRule, script: Script) -> Iterator[list[Right]]:
    """The result that each rank would get from its own numbers."""
    for rank in range(len(script[0])):
        yield list(rulings(rule, [[casts[rank]] for casts in script]))


def _differ(one: Sequence[Right], other: Sequence[Right]) -> bool:
    """Whether they end elsewhere, or on another checkpoint."""
    return (len(one), one[-1].ends, one[-1].best) != (len(other), other[-1].ends, other[-1].best)


def _mean(casts: Sequence[Cast]) -> float:
    """Over all data; infinities of both signs have none."""
    total = sum(cast.weight * cast.metric for cast in casts if cast.weight)
    weight = sum(cast.weight for cast in casts)
    return total / weight if weight else math.nan


def _is_gain(rule: StopRule, metric: float, best: float | None) -> bool:
    if not math.isfinite(metric) or best is None:
        return math.isfinite(metric)
    less, more = (metric, best) if rule.best == "lowest" else (best, metric)
    return more - less > rule.min_delta


def _reaches(rule: StopRule, metric: float, target: float) -> bool:
    return metric <= target if rule.best == "lowest" else metric >= target


# ---------------------------------------------------------------------------------- what is wrong


def _end(told: Sequence[Sequence[Voted]], right: Sequence[Right]) -> str:
    """The problem of the vote at which ranks end."""
    for step, ruled in enumerate(right):
        ends = [rank for rank, own in enumerate(told) if own[step].ends]
        go_on = [rank for rank in range(len(told)) if rank not in ends]
        if ends and go_on:
            one, other = all_do("end", ends), all_do("continue", go_on)
            return f"{one} training at vote {step}, {other}"
        if ends and not ruled.ends:
            return f"all ranks end training at vote {step}, where the rule continues"
        if go_on and ruled.ends:
            return f"all ranks continue after vote {step}, at which the rule ends training"
    return ""


def _best(told: Sequence[Sequence[Voted]], right: Sequence[Right]) -> str:
    """The problem of the checkpoint that ranks take for the best, at the first such vote."""
    for step in range(min(len(right), *map(len, told))):
        bests = [own[step].best for own in told]
        if len({*bests}) > 1:
            other = next(rank for rank, best in enumerate(bests) if best != bests[0])
            steps = f"those of steps {bests[0]} and {bests[other]}"
            return f"ranks 0 and {other} have different best checkpoints at vote {step}: {steps}"
        if bests[0] != right[step].best:
            found = f"the checkpoint of step {bests[0]} for the best at vote {step}"
            return f"all ranks have {found}, expected that of step {right[step].best}"
    return ""


def _metric(told: Sequence[Sequence[Voted]], right: Sequence[Right]) -> str:
    """The problem of the metric that ranks receive, at the first such vote."""
    for step in range(min(len(right), *map(len, told))):
        metrics, mean = [own[step].metric for own in told], right[step].metric
        for rank, metric in enumerate(metrics):
            if not _is_same(metric, metrics[0]):
                told_of = f"{metrics[0]!r} and {metric!r}; over all data it is {mean!r}"
                return f"ranks 0 and {rank} receive different metrics at vote {step}: {told_of}"
        if not _is_same(metrics[0], mean):
            right_is = f"over all data it is {mean!r}"
            return f"all ranks receive the metric {metrics[0]!r} at vote {step}, {right_is}"
    return ""


def _is_same(one: float, other: float) -> bool:
    return one == other or not (math.isfinite(one) or math.isfinite(other))
