"""The feature is really on: what a strategy claims is what it does.

Looks at the declared features against the strategy's profile, at parameter names after ``setup``,
and, for data parallelism, at the calls: gradients travel in buckets (fewer than parameters, as
many as the scenario expects with ``expect.buckets``), and accumulation stays silent until the last
micro-batch.  A silent fall-back to something simpler is a ``fail``, however right its numbers.

*Cannot see* features that leave no trace in calls, names or capabilities.
"""

from __future__ import annotations

from suite.checks import Outcome
from suite.checks.overlap import REDUCTIONS
from suite.checks.traffic import step_calls
from suite.contract import PROFILES
from suite.evidence import Figures


def decide(evidence: Figures) -> Outcome:
    """Compare claims with traces."""
    strategy = evidence.capabilities["strategy"]
    if strategy not in PROFILES:
        known = ", ".join(sorted(PROFILES))
        return Outcome("engagement", "fail", f"unknown strategy {strategy!r}; known: {known}")
    missing = PROFILES[strategy] - set(evidence.capabilities["features"])
    if missing:
        lacks = ", ".join(sorted(missing))
        return Outcome("engagement", "fail", f"claims {strategy!r} but lacks: {lacks}")
    names = {
        row["name"]
        for row in evidence.tensors
        if row["point"] == "initial" and row["kind"] == "parameters"
    }
    expected = set(evidence.workload["parameter_names"])
    if names != expected:
        changed = ", ".join(sorted(names ^ expected)[:4])
        return Outcome("engagement", "fail", f"parameter names did not survive setup: {changed}")
    if not evidence.case.ledgers:
        return Outcome("engagement", "skip", "ledgers are off")
    figures: dict[str, object] = {}
    for problem in (_silent_accumulation(evidence), _buckets(evidence, figures)):
        if problem:
            return Outcome("engagement", "fail", problem, None, figures)
    return Outcome("engagement", "pass", "", None, figures)


def _silent_accumulation(evidence: Figures) -> str:
    """No gradient reduction before the backward of the last micro-batch begins."""
    features = evidence.capabilities["features"]
    if "accumulation_without_communication" not in features or evidence.case.world == 1:
        return ""
    for index, record in enumerate(evidence.records):
        for step in evidence.steps:
            first, last = record["steps"][step]["events"]
            starts = [
                n
                for n, kind, unit in record["events"]
                if kind == "forward" and unit == "" and first <= n < last
            ]
            if len(starts) < 2:
                continue
            early = [
                call
                for call in step_calls(evidence, step, index)
                if call["operation"] in REDUCTIONS and call["issued"] < starts[-1]
            ]
            if early:
                return (
                    f"rank {record['rank']}, step {step}: {len(early)} reductions before the last "
                    "micro-batch: accumulation should not communicate"
                )
    return ""


def _buckets(evidence: Figures, figures: dict[str, object]) -> str:
    """A bucketed strategy reduces several buckets, fewer than there are parameters."""
    if evidence.capabilities["strategy"] != "ddp" or evidence.case.world == 1:
        return ""
    last = evidence.steps[-1]
    counts = [
        sum(call["operation"] in REDUCTIONS for call in step_calls(evidence, last, index))
        for index in range(len(evidence.records))
    ]
    figures["buckets"] = max(counts)
    parameters = len(evidence.workload["trainable_names"])
    figures["parameters"] = parameters
    if len(set(counts)) > 1:
        return f"ranks reduce different numbers of buckets: {counts}"
    least = int(evidence.case.expect.get("buckets", 1))
    if counts[0] < least:
        return f"{counts[0]} bucket(s) a step, the scenario expects at least {least}"
    if counts[0] >= parameters:
        return f"{counts[0]} reductions for {parameters} parameters: gradients are not bucketed"
    return ""
