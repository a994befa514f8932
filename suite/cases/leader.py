"""From a case to its account: load the implementation, run the ranks, assemble, measure.

:func:`examine` runs in the leader process of one case and never executes a step of the
implementation itself.  What it leaves is judged by :func:`shardproof.cases.verdict.decide`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardproof import backends, checks, registry, tensor_bytes, workloads
from shardproof.case import Case
from shardproof.cases.rank_program import describe, facts_for_judge, run_rank
from shardproof.cases.verdict import decide, declared_away, outside_profile
from shardproof.checks import relations, schedule
from shardproof.contract import Implementation, Refused
from shardproof.costs import tensor
from shardproof.costs.expression import facts_of
from shardproof.evidence.account import Account, strip, whole_tensors
from shardproof.evidence.assembled import Evidence
from shardproof.launch.ranks import RankOutcome, root_cause, run_ranks
from shardproof.oracle import replay, training
from shardproof.schedules import Schedule
from shardproof.workloads import Workload

Run = Callable[..., list[RankOutcome]]


def examine(
    case: Case, workdir: Path, cache: Path, run: Run = run_ranks
) -> tuple[Account, dict[str, Any]]:
    """Run one case: its account, and the result that ``cases.verdict.decide`` makes of it.

    Always returns both, whatever the implementation does.  ``run`` is called like
    ``launch.ranks.run_ranks``; where the ranks ran elsewhere it returns what they left.
    """
    started = time.monotonic()
    account = Account(case)
    try:
        evidence = _gather(account, workdir, cache, run)
        began = time.monotonic()
        if evidence is not None:
            for name in case.checks:
                evidence.compared[name] = _measure(name, evidence)
            account.figures = strip(evidence)
        result = decide(account, evidence)
        if evidence is not None:
            account.whole = _failing_tensors(evidence, result)
            account.timings["judge"] = time.monotonic() - began
    except Exception as error:  # noqa: BLE001 - the judge's own fault must become a verdict as well
        trace = "".join(traceback.format_exception(error)[-3:])
        account.figures, account.whole = None, []
        account.fault = f"the judge itself failed: {error!r}\n{trace}"
        result = decide(account)
    result["seconds"] = account.timings["all"] = time.monotonic() - started
    return account, result


def _gather(account: Account, workdir: Path, cache: Path, run: Run) -> Evidence | None:
    """Fill ``account`` as far as the case gets; evidence, if every rank did its work."""
    case = account.case
    if case.skip:
        return None
    try:
        implementation = registry.load(case.implementation)
        capabilities = implementation.capabilities(case.options)
    except registry.BrokenImplementation as error:
        account.broken = str(error)
        return None
    except Refused as error:
        account.refused = [type(error).__name__, str(error)]
        return None
    claims = account.claims = describe(implementation, capabilities)
    account.missing = (
        backends.BACKENDS[case.backend].available(case.world)
        or _lacking(capabilities.packages)
        or ""
    )
    if outside_profile(claims) or declared_away(case, claims, account.missing):
        return None
    try:
        schedules = _schedules(case, implementation)
    except schedule.NoSchedule as error:
        account.broken = str(error)
        return None
    except Refused as error:  # of options that are defaults as well: the mesh does not suit them
        account.cannot_fit = str(error)
        return None
    workload = workloads.for_case(case)
    account.data_digest = workload.digest
    account.cannot_fit = _misfit(case, schedules, workload)
    account.unsound_schedules = schedule.unsound_schedules(case, implementation.strategy, schedules)
    if account.cannot_fit or account.unsound_schedules:
        return None
    began = time.monotonic()
    twice = "relations" in case.checks
    outcomes = run(
        case.backend,
        case.world,
        lambda rank, world: run_rank(case, workload, rank),
        workdir,
        case.deadline / 2 if twice else case.deadline,
        case.ledgers,
        disturbances=backends.disturbances_of(case.workload.traits),
        memory_bytes=int(case.memory_gib * 2**30),
    )
    account.timings["ranks"] = time.monotonic() - began
    account.outcomes = [dataclasses.asdict(outcome) | {"record": None} for outcome in outcomes]
    if "refuses" in case.expect or root_cause(outcomes) is not None:
        return None
    if capabilities.oracle == "plain":
        account.no_oracle_because = training.no_oracle_because(workload, case.precision)
        if account.no_oracle_because:
            return None
    records = [tensor_bytes.load(outcome.record) for outcome in outcomes if outcome.record]
    began = time.monotonic()
    truth = _truth(case, implementation, workload, records, cache)
    account.timings["oracle"] = time.monotonic() - began
    facts = facts_of(case)
    evidence = Evidence(case, records, truth, facts_for_judge(workload), facts, schedules)
    if twice:
        began = time.monotonic()
        _relate(evidence, workdir, run)
        account.timings["ranks"] += time.monotonic() - began
    return evidence


def _schedules(case: Case, implementation: type[Implementation]) -> dict[int, Schedule]:
    """What is claimed for a window of each size that there is; empty: nothing."""
    if "pipe" not in case.mesh:
        return {}
    cut = case.workload.cut(case.data_coordinates)
    found = {}
    for size in sorted({len(window) for share in cut for window in share}):
        claimed = schedule.claimed(implementation, case.options, case.mesh["pipe"], size)
        if claimed is not None:
            found[size] = claimed
    return found


def _misfit(case: Case, schedules: Mapping[int, Schedule], workload: Workload) -> str:
    """Why the axes cannot share the stages or the layers of a model; empty: they can."""
    if case.mesh.get("tensor", 1) > 1 and (odd := tensor.cannot_fit(facts_of(case).plan)):
        return odd
    claimed = next(iter(schedules.values()), None)
    stages, units = case.mesh.get("pipe", 1), len(workload.units)
    stages = claimed.stages if claimed else stages
    if stages <= units:
        return ""
    axis = f"axis 'pipe' of {case.mesh['pipe']} ranks"
    return (
        f"{axis} asks for {stages} stages, but {case.workload.name} has {units} units (layers): "
        f"a stage needs one at least; valid: up to {units} stages"
    )


def _lacking(packages: Sequence[str]) -> str:
    """Which of ``packages`` is not installed here; empty if none."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            return f"the optional package {name!r} is not installed: see docs/install-extras.md"
    return ""


def _relate(evidence: Evidence, workdir: Path, run: Run) -> None:
    """Run the case that a relation derives from this one, and put its records beside them."""
    if run is not run_ranks:
        evidence.no_derived_run_because = (
            "these ranks were started elsewhere: they cannot run a second time"
        )
        return
    try:
        case, evidence.no_derived_run_because = relations.derive(evidence)
        if case is None:
            return
        implementation = registry.load(case.implementation)
        capabilities = implementation.capabilities(case.options)
    except (Refused, registry.BrokenImplementation) as error:
        evidence.derived_run = f"the second run cannot be made: {error}"
        return
    missing = _lacking(capabilities.packages)
    reason = declared_away(case, describe(implementation, capabilities), missing)
    if reason:
        evidence.no_derived_run_because = f"{case.implementation} {reason}"
        return
    workload = workloads.for_case(case)
    folder = workdir / "derived"
    folder.mkdir()
    outcomes = run_ranks(
        case.backend,
        case.world,
        lambda rank, world: run_rank(case, workload, rank),
        folder,
        case.deadline / 2,
        case.ledgers,
        disturbances=backends.disturbances_of(case.workload.traits),
    )
    cause = root_cause(outcomes)
    if cause is not None and cause.error_type == "CannotReload":
        evidence.no_derived_run_because = f"{case.implementation} {cause.message}"
        return
    if cause is not None:
        what = " ".join(filter(None, (cause.status, cause.error_type)))
        evidence.derived_run = f"in the second run rank {cause.rank} {what}: {cause.message}"
        return
    records = [tensor_bytes.load(outcome.record) for outcome in outcomes if outcome.record]
    evidence.derived_run = Evidence(case, records, {}, evidence.workload, {})


def _truth(
    case: Case,
    implementation: type[Implementation],
    workload: Workload,
    records: list[dict[str, Any]],
    cache: Path,
) -> dict[str, Any]:
    """The oracle of the kind that the implementation names."""
    capabilities = implementation.capabilities(case.options)
    if capabilities.oracle == "replay":
        return replay.truth(workload, case.optimizer, case.steps, records)
    if capabilities.oracle == "emulated":
        # Not cached: these numbers depend on the implementation's own code.
        return training.train(
            workload,
            case.optimizer,
            case.data_coordinates,
            case.steps,
            capabilities.buffers,
            fold=implementation.emulator(case.options),
        )
    return training.load_or_train(case, capabilities.buffers, cache)


def _measure(name: str, evidence: Evidence) -> list[dict[str, Any]]:
    try:
        return checks.measure(name, evidence)
    except Exception as error:  # noqa: BLE001 - a check that breaks must not pass for a pass
        where = traceback.format_exception(error)[-2].strip()
        return [{"broke": f"{error!r} ({where})"}]


def _failing_tensors(evidence: Evidence, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for told in result["checks"]:
        if told["status"] == "fail" and told["worst"]:
            found += [t for t in whole_tensors(evidence, told["worst"]) if t not in found]
    return found
