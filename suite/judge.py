"""From a case to its verdict: refuse, run the ranks, assemble, check.

:func:`judge_case` runs in the leader process of one case and never executes a step of the
implementation itself.  :func:`verdict_of` turns check outcomes into one of design's verdicts and can
be called again on stored outcomes.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from suite import backends, checks, oracle, registry, workloads
from suite.case import Case
from suite.checks import Outcome
from suite.checks.refusals import judge_errors
from suite.contract import PROFILES, TRAIT_FEATURES, Capabilities, Implementation, Refused
from suite.evidence import Evidence
from suite.formulas import facts_of
from suite.launch import pack
from suite.launch.pool import Ended
from suite.launch.ranks import RankOutcome, root_cause, run_ranks
from suite.rank_program import facts_for_judge, run_rank

#: What a native-precision comparison can prove by itself: it misses small faults.
NATIVE_ONLY = "pass (native only)"
#: Exceptions that say "the implementation broke the contract": a ``fail``, not a ``crash``.
CONTRACT_ERRORS = ("Refused", "NotObserved")


def judge_case(
    case: Case,
    workdir: Path,
    cache: Path,
    run: Callable[..., list[RankOutcome]] = run_ranks,
) -> dict[str, Any]:
    """Run and judge one case; always returns a result, whatever the implementation does.

    ``run`` is called like :func:`~suite.launch.ranks.run_ranks`; where the ranks ran elsewhere it
    returns what they left.
    """
    started = time.monotonic()
    try:
        result = _judge(case, workdir, cache, run)
    except Exception as error:  # noqa: BLE001 - the judge's own fault must become a verdict as well
        trace = "".join(traceback.format_exception(error)[-3:])
        result = _result(case, "crash", f"the judge itself failed: {error!r}\n{trace}")
    result["seconds"] = time.monotonic() - started
    return result


def _judge(
    case: Case, workdir: Path, cache: Path, run: Callable[..., list[RankOutcome]]
) -> dict[str, Any]:
    if case.skip:
        return _result(case, "skip", case.skip)
    try:
        implementation = registry.load(case.implementation)
        capabilities = implementation.capabilities(case.options)
    except registry.BrokenImplementation as error:
        return _expected(case, "crash", str(error))
    except Refused as error:
        return _refused(case, [_as_outcome(error)])
    reason = _outside_profile(implementation, capabilities) or ""
    if reason:
        return _expected(case, "fail", reason)
    reason = _declared_away(case, capabilities)
    if reason:
        return _result(case, "skip", reason)
    workload = workloads.make(case.workload, case.dtype, case.lane)
    outcomes = run(
        case.backend,
        case.world,
        lambda rank, world: run_rank(case, workload, rank),
        workdir,
        case.deadline,
        case.ledgers,
        weather=backends.weather_of(case.workload.traits),
    )
    if "refuses" in case.expect:
        return _refused(case, outcomes)
    cause = root_cause(outcomes)
    if cause is not None:
        return _expected(case, *_broken(cause, outcomes))
    truth = oracle.load_or_train(case, capabilities.buffers, cache)
    records = [pack.load(outcome.record) for outcome in outcomes if outcome.record]
    evidence = Evidence(case, records, truth, facts_for_judge(workload), facts_of(case))
    found = [_run_check(name, evidence) for name in case.checks]
    verdict, text = verdict_of(found)
    if verdict == "pass" and case.lane == "native":
        verdict = NATIVE_ONLY
    return _expected(case, verdict, text, found)


def broken_leader(case: Case, ended: Ended) -> dict[str, Any]:
    """The result of a case whose leader left none: it was killed for its time, or it died."""
    if ended.timed_out:
        verdict, text = "hang", f"no verdict after {ended.seconds:.0f} s: the case was ended"
    elif ended.signal:
        verdict, text = "crash", f"the judging process died of signal {ended.signal}"
    else:
        verdict, text = "crash", f"the judging process ended with exit code {ended.exit_code}"
    if ended.output.strip():
        text += f": {ended.output.strip()[-800:]}"
    result = _expected(case, verdict, text)
    result["seconds"] = ended.seconds
    return result


def _run_check(name: str, evidence: Evidence) -> Outcome:
    try:
        return checks.load(name)(evidence)
    except Exception as error:  # noqa: BLE001 - a check that breaks must not pass for a pass
        where = traceback.format_exception(error)[-2].strip()
        return Outcome(name, "fail", f"the check itself broke: {error!r} ({where})")


def verdict_of(found: Sequence[Outcome]) -> tuple[str, str]:
    """One verdict from all outcomes: a ``fail`` beats ``undecidable`` beats ``precondition``."""
    for status in ("fail", "undecidable", "precondition"):
        for outcome in found:
            if outcome.status == status:
                return status, f"{outcome.check}: {outcome.message}"
    if found and all(outcome.status == "skip" for outcome in found):
        return "skip", "; ".join(f"{o.check}: {o.message}" for o in found)
    return "pass", ""


def _outside_profile(
    implementation: type[Implementation], capabilities: Capabilities
) -> str | None:
    """A declined trait that the claimed strategy's profile implies cannot be declared away."""
    profile = PROFILES.get(implementation.strategy, frozenset())
    for trait in capabilities.declines:
        feature = TRAIT_FEATURES.get(trait)
        if feature in profile:
            return (
                f"declines trait {trait!r}, but claiming {implementation.strategy!r} implies "
                f"{feature!r}"
            )
    return None


def _declared_away(case: Case, capabilities: Capabilities) -> str:
    """Why this case lies outside what the implementation claims or what this machine has."""
    if case.backend not in capabilities.backends:
        return f"runs on {', '.join(capabilities.backends)} only"
    missing = backends.BACKENDS[case.backend].available()
    if missing:
        return missing
    foreign = [axis for axis in case.mesh if axis not in capabilities.axes]
    if foreign:
        return f"has no axis {', '.join(foreign)}; its axes: {', '.join(capabilities.axes)}"
    if capabilities.max_world is not None and case.world > capabilities.max_world:
        return f"runs at world sizes up to {capabilities.max_world}"
    if case.dtype not in capabilities.dtypes:
        return f"has no {case.dtype}; its dtypes: {', '.join(capabilities.dtypes)}"
    for trait in case.workload.traits:
        if trait in capabilities.declines:
            return f"declines trait {trait}: {capabilities.declines[trait]}"
    return ""


def _refused(case: Case, outcomes: Sequence[RankOutcome]) -> dict[str, Any]:
    if "refuses" not in case.expect:
        return _expected(case, "fail", f"refuses without having declared it: {outcomes[0].message}")
    outcome = judge_errors(str(case.expect["refuses"]), outcomes)
    return _expected(case, *verdict_of([outcome]), [outcome])


def _as_outcome(error: Exception) -> RankOutcome:
    return RankOutcome(rank=0, status="raised", error_type=type(error).__name__, message=str(error))


def _broken(cause: RankOutcome, outcomes: Sequence[RankOutcome]) -> tuple[str, str]:
    """Verdict and sentence for ranks that did not end well."""
    if cause.status == "raised" and cause.error_type in CONTRACT_ERRORS:
        return "fail", f"rank {cause.rank}: {cause.error_type}: {cause.message}"
    if cause.status == "hung" or cause.error_type in ("Deadlock", "PeerTimeout"):
        calls = "; ".join(f"rank {o.rank}: {o.last_call}" for o in outcomes if o.last_call)
        return "hang", f"{cause.message}" + (f" [last calls: {calls}]" if calls else "")
    text = f"rank {cause.rank} {cause.status}"
    if cause.error_type:
        text += f" {cause.error_type}"
    if cause.message:
        text += f": {cause.message}"
    if cause.last_call:
        text += f" [its last call: {cause.last_call}]"
    return "crash", text


def _expected(
    case: Case, verdict: str, reason: str, found: Sequence[Outcome] = ()
) -> dict[str, Any]:
    """Apply the scenario's ``xfail``: an expected failure is green, an unexpected pass red."""
    if case.xfail is not None:
        if verdict in ("fail", "crash", "hang"):
            verdict, reason = "xfail", f"{case.xfail} [{reason}]"
        elif verdict in ("pass", NATIVE_ONLY):
            verdict, reason = "xpass", f"expected to fail: {case.xfail}"
    return _result(case, verdict, reason, found)


def _result(case: Case, verdict: str, reason: str, found: Sequence[Outcome] = ()) -> dict[str, Any]:
    by_name = {outcome.check: outcome for outcome in found}
    worst = by_name["equivalence"].worst if "equivalence" in by_name else None
    sent = by_name["traffic"].figures if "traffic" in by_name else {}
    return {
        "id": case.id,
        "case": case.to_dict(),
        "verdict": verdict,
        "reason": reason,
        "checks": [outcome.to_dict() for outcome in found],
        "seconds": 0.0,
        "worst_error": worst.error if worst else None,
        "bound": worst.bound if worst else None,
        "bytes_sent": sent.get("bytes_sent"),
        "bytes_expected": sent.get("bytes_expected"),
        "rerun": f"shardproof run {case.scenario} --tier {case.tier} -k '{case.id}'",
    }
