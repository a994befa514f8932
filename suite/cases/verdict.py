"""From the account of a case to its verdict: pure functions, so that a stored run is judged again.

Every check is a file of ``suite/checks/`` with a ``measure`` and a ``decide``.
:func:`measure_case` runs in the leader, where the tensors are, and leaves figures.
:func:`decide_case` makes the verdict from figures: once when the case has run, and again in
``shardproof verify``.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Mapping, Sequence

from shardproof import axes, checks
from shardproof.backends.errors import MOST_CALLS, CollectiveMismatch, name_ranks
from shardproof.case import Case
from shardproof.cases import kinds
from shardproof.cases.audit import audited
from shardproof.checks import Outcome, faults
from shardproof.checks.refusals import judge_errors
from shardproof.checks.results import CaseResult, rerun
from shardproof.checks.schedule import announced
from shardproof.costs.expression import FormulaError, parse
from shardproof.errors import is_exhausted
from shardproof.evidence import seen
from shardproof.evidence.account import Account, LeaderEnd
from shardproof.evidence.assembled import Evidence, Figures
from shardproof.evidence.records import ComparisonRow
from shardproof.launch import frames
from shardproof.launch.outcome import RankOutcome, root_cause
from shardproof.launch.process_control import signal_name
from shardproof.launch.watchdog import most_idle_looks
from shardproof.registry.declaration import Declaration
from shardproof.table import grouped
from shardproof.verdicts import JUDGE_ERROR, OVER_BUDGET, REPLICAS_ONLY, WORKING_PRECISION_ONLY

#: Exceptions that say "the implementation broke the contract": a ``fail``, not a ``crash``.
CONTRACT_ERRORS = ("Refused", "BrokenContract")
#: The options that a refusal names, by their outermost names, and the axes of the mesh.
_OPTION = re.compile(r"\boption '(\w+)")
_AXIS = re.compile(rf"\baxis '({'|'.join(axes.names())})'")


def measure_case(evidence: Evidence) -> None:
    """Fill ``evidence.compared`` with what every check measures, or with how it ``broke``.

    A machine that has no memory or descriptors left is no fault of the check: that is raised.
    """
    for name in evidence.case.checks:
        try:
            evidence.compared[name] = checks.measure(name, evidence)
        except Exception as error:
            if is_exhausted(error):
                raise
            where = traceback.format_exception(error)[-2].strip()
            evidence.compared[name] = [ComparisonRow(broke=f"{error!r} ({where})")]


def decide_case(account: Account) -> CaseResult:
    """The result of the case that ``account`` describes."""
    result, declared = _decided(account), account.declaration
    result.depth = account.case.depth or (declared.depth if declared else None)
    result.loss_factor = declared.loss_factor if declared else None
    result.seen = seen.of(account.figures) if account.figures is not None else None
    return result


def _decided(account: Account) -> CaseResult:
    case = account.case
    if account.machine:
        return _result(case, "precondition", account.machine)
    if account.fault:
        return _result(case, JUDGE_ERROR, account.fault)
    if case.skip:
        return _result(case, "skip", case.skip)
    if account.leader is not None:
        return _result(case, JUDGE_ERROR, _broken_leader(account.leader))
    if account.broken:
        return _apply_xfail(case, "crash", account.broken)
    if account.refused is not None:
        kind, message = account.refused
        if kind == "BrokenContract":
            return _apply_xfail(case, "fail", message)
        if case.is_borrowed and case.precision and account.declaration is not None:
            reason = _excluded(account.declaration, account)
            return _result(case, "skip", reason or f"refuses the precision: {message}")
        error = RankOutcome(rank=0, status="raised", error_type=kind, message=message)
        return _refused(case, [error])
    assert account.declaration is not None
    if reason := problem_of(account.declaration):
        return _apply_xfail(case, "fail", reason)
    if reason := _excluded(account.declaration, account):
        return _result(case, "skip", reason)
    rank_outcomes: Sequence[RankOutcome] = account.outcomes
    is_foreign = case.is_borrowed or (case.is_moved and "refuses" not in case.expect)
    if account.cannot_fit and is_foreign:
        return _result(case, "skip", account.cannot_fit)
    if account.cannot_fit:
        error = RankOutcome(0, status="raised", error_type="Misfit", message=account.cannot_fit)
        if "refuses" not in case.expect:
            return _apply_xfail(case, "refused", account.cannot_fit)
        rank_outcomes = [error]
    if "refuses" in case.expect:
        return _refused(case, rank_outcomes)
    if account.unsound_schedules:
        outcome = announced.not_run(account.unsound_schedules)
        return _apply_xfail(case, *verdict_of([outcome]), [outcome])
    cause = root_cause(rank_outcomes)
    if case.fault is not None and case.fault.verdicts:
        return _under_fault(case, account, cause)
    is_refusal = cause is not None and cause.error_type == "Refused"
    declined = account.declaration.declined_by
    if cause and is_refusal and (reason := declined(cause.message, case.dtype)):
        return _result(case, "skip", reason)
    if cause and is_refusal and is_about_input(case, cause.message):
        return _apply_xfail(case, "refused", cause.message)
    if cause is not None:
        verdict, reason = _broken(cause, rank_outcomes)
        raises = cause.status == "raised" and not (cause.is_comm_error or cause.autopsy)
        if case.unasked and raises:
            remedy = f"handle trait {case.unasked}, or name it in Capabilities.declines"
            return _result(case, "skip", f"{reason}: {remedy}")
        return _apply_xfail(case, verdict, reason)
    if account.no_oracle_because:
        return _apply_xfail(case, "precondition", account.no_oracle_because)
    outcomes = _judged(account, case.checks)
    # In a matrix of a scenario some cases have nothing of what the others are asked.
    asked = checks.EXPECTED if case.scenario == "prove" and not case.source else ()
    return _apply_xfail(case, *verdict_of(outcomes, asked), outcomes)


def _judged(account: Account, names: Iterable[str]) -> list[Outcome]:
    """The outcomes of the checks ``names`` on the figures, audited."""
    figures = account.figures
    assert figures is not None
    return [audited(_run_check(name, figures), figures) for name in names]


def _under_fault(case: Case, account: Account, cause: RankOutcome | None) -> CaseResult:
    """The result where the suite made a fault: it must have come to what its plan expects."""
    assert case.fault is not None
    blamed = None
    if cause is not None:
        verdict, reason = _broken(cause, account.outcomes)
        blamed = cause.culprit if reason == cause.autopsy else cause.rank
    elif account.no_oracle_because:
        verdict, reason = "precondition", account.no_oracle_because
    else:
        others = (name for name in case.checks if name != "faults")
        verdict, reason = verdict_of(_judged(account, others))
    most = most_idle_looks(case.deadline)
    outcome = faults.judge_end(case.fault, verdict, reason, blamed, account.outcomes, most)
    if outcome.status == "pass" and cause is not None and case.fault.phase != "load":
        return _apply_xfail(case, *_after_fault(case, account, outcome))
    return _apply_xfail(case, outcome.status, outcome.message, [outcome])


def _after_fault(case: Case, account: Account, end: Outcome) -> tuple[str, str, list[Outcome]]:
    """``end`` of a fault as it was expected, and whether what had been saved can be loaded."""
    if "checkpoint" not in case.checks:
        return end.status, end.message, [end]
    if account.figures is None:
        what = "nothing was loaded: the run without saves failed as well"
        loaded = Outcome("checkpoint", "undecidable", what)
    else:
        loaded = _run_check("checkpoint", account.figures)
    if loaded.status == "pass":
        message = f"{end.message}; the last committed checkpoint loads"
        return end.status, message, [end, loaded]
    return loaded.status, f"checkpoint: {loaded.message} [{end.message}]", [end, loaded]


def _excluded(declaration: Declaration, account: Account) -> str:
    return kinds.of(account.case.workload).excludes(declaration, account.case, account.missing)


def problem_of(declaration: Declaration) -> str:
    """A declaration of the system that has no meaning; empty: none."""
    try:
        parse(declaration.loss_factor)
    except FormulaError as error:
        return f"loss_factor: {error}"
    return declaration.problem()


def _broken_leader(leader: LeaderEnd) -> str:
    """Why there is no verdict: the judging process ran out of time or died, also the second time.

    That is no fault of the system's: it runs in processes of its own.
    """
    if leader.timed_out:
        how = f"had no verdict after {leader.seconds:.0f} s"
    elif leader.signal:
        how = f"died of {signal_name(leader.signal)}"
    elif leader.exit_code is not None:
        how = f"ended with exit code {leader.exit_code}"
    else:
        how = "died with its fork server"
    return f"the judging process {how}: {leader.output.strip()[-800:]}".rstrip(": ")


def _run_check(name: str, figures: Figures) -> Outcome:
    if broke := next((row.broke for row in figures.compared.get(name, ()) if row.broke), ""):
        return Outcome(name, "judge error", f"the check itself broke: {broke}")
    try:
        return checks.decide(name, figures)
    except Exception as error:  # noqa: BLE001 - a check that breaks must not pass for a pass
        where = traceback.format_exception(error)[-2].strip()
        return Outcome(name, "judge error", f"the check itself broke: {error!r} ({where})")


def verdict_of(outcomes: Sequence[Outcome], asked: Iterable[str] = ()) -> tuple[str, str]:
    """One verdict from all outcomes: the gravest that a check says; a skip if one is left out that
    is ``asked`` for by its name.

    Each outcome that gave it has a line of its own: together they often explain the fault.  Only
    what was compared with the oracle passes without a word; a case that asks for no numbers names
    what it judged.
    """
    for status in ("fail", JUDGE_ERROR, "undecidable", "precondition"):
        if lines := [f"{o.check}: {o.message}" for o in outcomes if o.status == status]:
            return status, "\n".join(lines)
    passed = {outcome.check: outcome for outcome in outcomes if outcome.status == "pass"}
    if lines := [
        f"{o.check}: {o.message}" for o in outcomes if o.check in asked and o.status == "skip"
    ]:
        return "skip", "; ".join(lines) + (" (other checks passed)" if passed else "")
    if not outcomes:
        return "undecidable", "no check judged this case"
    if not passed:
        return "skip", "; ".join(f"{o.check}: {o.message}" for o in outcomes)
    if (numbers := passed.get("equivalence")) is not None:
        return WORKING_PRECISION_ONLY if "factor" in numbers.figures else "pass", ""
    if "replicas" in passed:
        return REPLICAS_ONLY, "nothing was compared with the oracle; judged: " + ", ".join(passed)
    return "pass", "judged: " + ", ".join(passed)


def _refused(case: Case, outcomes: Sequence[RankOutcome]) -> CaseResult:
    if "refuses" not in case.expect:
        message = outcomes[0].message
        if is_about_input(case, message):
            return _apply_xfail(case, "refused", message)
        return _apply_xfail(case, "fail", f"refuses without having declared it: {message}")
    outcome = judge_errors(str(case.expect["refuses"]), outcomes)
    return _apply_xfail(case, *verdict_of([outcome]), [outcome])


def is_about_input(case: Case, message: str) -> bool:
    """Whether a refusal names what is at fault: an option that the scenario gives, or an axis."""
    inner = case.options.get("data_options")
    given = {*case.options, *(inner if isinstance(inner, Mapping) else ())}
    named = any(name in given for name in _OPTION.findall(message))
    return named or _AXIS.search(message) is not None


#: A frame of a formatted traceback.
_FRAME = re.compile(r'^ +File "([^"]+)", line (\d+), in (.+)$', re.MULTILINE)


def _broken(cause: RankOutcome, outcomes: Sequence[RankOutcome]) -> tuple[str, str]:
    """Verdict and sentence for ranks that did not end well."""
    if cause.cause == "lost node":
        return "hang" if cause.status == "hung" else "crash", cause.autopsy
    if cause.status == "raised" and cause.error_type in CONTRACT_ERRORS:
        return "fail", f"rank {cause.rank}: {cause.error_type}: {cause.message}"
    if cause.status == "hung" or cause.error_type in ("Deadlock", "PeerTimeout"):
        if cause.autopsy:
            return "hang", cause.autopsy
        who = "" if cause.error_type else f"rank {cause.rank} "
        calls = "" if cause.error_type == CollectiveMismatch.__name__ else _last_calls(outcomes)
        return "hang", f"{who}{cause.message}{calls}"
    if cause.status == "over budget":
        return OVER_BUDGET, f"rank {cause.rank} {cause.message}{_last_calls(outcomes)}"
    message, newline, more = cause.message.partition("\n")
    message += f"{_where(cause)}{newline}{more}"
    if cause.error_type == CollectiveMismatch.__name__:
        return "crash", cause.autopsy or f"desync: {message}"  # it names the calls
    text = f"rank {cause.rank} {cause.status} {cause.error_type}".rstrip()
    text += f": {message}" if message else ""
    if len({outcome.last_call for outcome in outcomes}) > 1:
        text += _last_calls(outcomes)
    elif cause.last_call:
        text += f" [its last call: {cause.last_call}]"
    return "crash", text


def _where(cause: RankOutcome) -> str:
    """The method of the contract that ran, and the implementation's innermost frame."""
    place = cause.place
    if not place and cause.status == "raised":
        others = [f for f in _FRAME.findall(cause.traceback) if not frames.is_judge(f[0])]
        place = "{}:{} in {}".format(*others[-1]) if others else ""
    called = f"in {cause.method}" if cause.method else ""
    where = ", ".join(filter(None, (called, place)))
    return f" ({where})" if where else ""


def _last_calls(outcomes: Sequence[RankOutcome]) -> str:
    ranks_of = grouped((one.last_call, one.rank) for one in outcomes if one.last_call)
    told = [f"{name_ranks(ranks)}: {call}" for call, ranks in ranks_of.items()]
    more = len(told) - MOST_CALLS
    calls = "; ".join(told[:MOST_CALLS]) + (f"; {more} other calls" if more > 0 else "")
    return f" [last calls: {calls}]" if calls else ""


def _apply_xfail(
    case: Case, verdict: str, reason: str, outcomes: Sequence[Outcome] = ()
) -> CaseResult:
    """Apply the scenario's ``xfail``: an expected failure is green, an unexpected pass red.

    A failure without the words that the rule asks for stays what it is.
    """
    if case.xfail is not None:
        if verdict in ("fail", "crash", "hang", "refused"):
            if unsaid := [words for words in case.xfail_says if words not in reason]:
                reason = f"expected a failure that contains {unsaid[0]!r}: {reason}"
            else:
                verdict, reason = "xfail", f"{case.xfail} [{reason}]"
        elif verdict in ("pass", WORKING_PRECISION_ONLY):
            verdict, reason = "xpass", f"expected to fail: {case.xfail}"
    if verdict == "refused" and case.source[-1:].isdigit():
        reason = f"{case.source}: {reason}"
    return _result(case, verdict, reason, outcomes)


def _result(case: Case, verdict: str, reason: str, outcomes: Sequence[Outcome] = ()) -> CaseResult:
    by_name = {outcome.check: outcome for outcome in outcomes}
    worst = by_name["equivalence"].worst if "equivalence" in by_name else None
    sent = by_name["traffic"].figures if "traffic" in by_name else {}
    return CaseResult(
        id=case.id,
        case=case,
        verdict=verdict,
        reason=reason,
        checks=list(outcomes),
        worst_error=worst.error if worst else None,
        bound=worst.bound if worst else None,
        bytes_sent=sent.get("bytes_sent"),
        bytes_expected=sent.get("bytes_expected"),
        rerun=rerun(case),
    )
