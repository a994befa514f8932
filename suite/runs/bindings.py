"""Does the evidence of a run belong together: its lines, plan, invocations, records and figures?

Digests say that nothing was changed since it was sealed.  This says what somebody who seals it anew
would have to change besides, since one part of it determines another: a record the case that its
ranks were given, in which invocation (``Case.seal_of``), a plan what has a result, results an exit
code.  ``docs/evidence.md`` tells what is left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from shardproof import verdicts
from shardproof.case import Case
from shardproof.checks import OF_UNTRAINED
from shardproof.checks.results import CaseResult, Kill
from shardproof.costs import ModelFacts
from shardproof.evidence.account import Account
from shardproof.files import standard
from shardproof.runs import random_kills
from shardproof.runs.header import Invocation
from shardproof.runs.run_folder import LINES, Run, comparison_key, is_left_out, lines, read_plans

#: Exit code -> how grave it is; of others (Ctrl-C, a full disk) results say nothing.
_GRAVITY = {verdicts.HELD: 0, verdicts.NOT_DECIDED: 1, verdicts.BROKEN: 2}


def contradiction(account: Account) -> str:
    """The contradiction between its figures and its case or declaration, as a sentence; empty:
    none.

    To be asked before anything is decided: what the case claims to have is then in the file.
    """
    case, figures = account.case, account.figures
    if figures is None:
        return ""
    records, untrained = figures.records, not OF_UNTRAINED.keys().isdisjoint(case.checks)
    for record in records:
        if record.seal != case.seal:
            return f"rank {record.rank} was given another case, or belongs to another invocation"
        if record.declaration != account.declaration:
            return f"rank {record.rank} ran a system with another declaration"
        if not untrained and len(record.steps) != case.steps:
            return f"rank {record.rank} made {len(record.steps)} steps of {case.steps}"
    if not untrained and [*figures.ranks] != [*range(case.world)]:
        return f"its records are of ranks {[*figures.ranks]!s:.80}, expected {case.world}"
    # After a planned fault only what was loaded is measured.
    if case.fault is None and {*figures.compared} != {*case.checks}:
        odd = ", ".join(sorted({*figures.compared} ^ {*case.checks}))
        return f"the checks of its case and of its records differ: {odd}"
    facts = figures.model_facts
    return "" if facts is None or untrained else _other_facts(case, facts)


def _other_facts(case: Case, facts: ModelFacts) -> str:
    optimizer = case.optimizer
    asked = {
        "axes": dict(case.mesh),
        "options": dict(case.options),
        "micro_batches": case.workload.micro_batch_counts(case.data_coordinates),
        "optimizer": optimizer.name,
        "momentum": optimizer.momentum,
        "clipped": optimizer.clip_norm is not None,
        "scaled": optimizer.scaler is not None,
        "steps": case.steps,
    }
    for name, value in asked.items():
        if standard(getattr(facts, name)) != standard(value):
            return f"its costs were computed with other {name} than its case has"
    return ""


def unbound(run: Run) -> Iterator[str]:
    """The contradictions between the lines, the plan and ``run.json``, as sentences."""
    where, invocations, plans = run.path / LINES, run.header.invocations, read_plans(run.path)
    sealed = {case.id for cases in plans.values() for case in cases if case.seal}
    of: dict[str, list[tuple[int, CaseResult]]] = defaultdict(list)
    for result in (*run.superseded, *run.cases, *run.mutant_cases):
        if (by := run.invocation_of(result.case)) is not None:
            of[result.id].append((invocations.index(by), result))
        elif result.case.seal or result.id in sealed:
            yield f"{where}: {result.id}: no invocation of this run planned its case in this form"
    for name, results in of.items():
        if (order := [number for number, _ in results]) != sorted(order):
            yield (
                f"{where}: {name}: the result of an earlier invocation is after that of a later one"
            )
    yield from _planted(run)
    yield from _planned(run, plans)
    planted = {id(result) for result in run.mutant_cases}  # a fault that fails is caught
    # What was lost before, nobody can tell.
    whole = max((n for n, one in enumerate(invocations) if one.mended), default=0)
    for number, one in enumerate(invocations[whole:], whole):
        pairs = (pair for results in of.values() for pair in results if pair[0] <= number)
        ends = [(n, r.verdict) for n, r in pairs if id(r) not in planted]
        if one.exit_code in _GRAVITY and not one.kills:
            own = {verdicts.kind(verdict) for n, verdict in ends if n == number}
            if problem := _other_end(one.exit_code, own, {verdicts.kind(v) for _, v in ends}):
                yield f"{run.path / 'run.json'}: {' '.join(one.command)[:80]}: {problem}"
            yield from _lost(run, one, {n for n, rs in of.items() if number in dict(rs)}, plans)


def _planted(run: Run) -> Iterator[str]:
    """Lines of planted faults that are none."""
    random = random_kills.read(run.path)
    faults: list[Kill | random_kills.RandomKill] = [*run.kills]
    faults += random.faults if random else ()
    known = {f"mutants/{one.name}" for one in faults} | {one.parent for one in faults}
    for result in run.mutant_cases:
        by = run.invocation_of(result.case)
        if result.case.implementation not in known or (by and by.planned and not by.kills):
            yield f"{run.path / LINES}: {result.id}: is stored as a planted fault, but is none"


def _planned(run: Run, plans: Mapping[str, Sequence[Case]]) -> Iterator[str]:
    """Cases that were planned otherwise than they were run, and plans that were changed."""
    where = run.path / "planned.jsonl"
    for result in (*run.superseded, *run.cases):
        if result.case not in plans.get(result.id, ()):
            yield f"{where}: {result.id}: was run differently than planned"
    for one in run.header.invocations if run.header.merged is None else ():
        own = _own(one, plans)
        key = None if one.part or one.kills else one.key
        if key is not None and own and comparison_key(own).scenarios != key.scenarios:
            yield f"{where}: is not the plan of {' '.join(one.command)[:80]}"


def _own(one: Invocation, plans: Mapping[str, Sequence[Case]]) -> list[Case]:
    """The cases that an invocation planned, as its seals tell."""
    cases = (case for name in one.planned for case in plans.get(name, ()))
    return [case for case in cases if case.seal and case.seal == case.seal_of(one.nonce)]


def _lost(
    run: Run, one: Invocation, done: Collection[str], plans: Mapping[str, Sequence[Case]]
) -> Iterator[str]:
    """Cases of an invocation that ended, of which it has no line."""
    left = {str(line.get("id")) for line in lines(run.path) if is_left_out(line)}
    for case in _own(one, plans):
        if case.id not in done and case.id not in left:
            yield f"{run.path / LINES}: {case.id}: its result of {one.started} is missing"


def _other_end(code: int, own: Collection[str], known: Collection[str]) -> str:
    """Why a command with these ``own`` verdicts, and those ``known`` by then, does not end with
    that exit code.
    """
    red, opened = verdicts.RED.intersection(own), verdicts.OPEN.intersection(own)
    if _GRAVITY[code] < (2 if red else 1 if opened else 0):
        return f"exit code {code}, but a case is {min(red or opened)}"
    if own and code == verdicts.BROKEN and verdicts.RED.isdisjoint(known):
        return f"exit code {code}, but no case broke"
    return ""
