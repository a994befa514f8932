"""The cases that the words of ``shardproof locate`` name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardproof import registry, verdicts
from shardproof.case import Case
from shardproof.checks.results import CaseResult
from shardproof.errors import Problem, SelectionError

#: Verdicts of cases that differ from something.
_DIFFERS = frozenset(verdicts.RED | {"xfail", "undecidable"})


def cases(name: str, run: str | None, expression: str, most: int) -> list[Case]:
    """The cases that ``name`` stands for: at most ``most`` of a run.

    ``name`` is the id of a case of ``run`` (``None``: the newest) or of a scenario, a planted fault
    ``mutants/NAME``, or a run: then its failing cases whose ids ``expression`` matches.

    :raises SelectionError: there is no such case, none that can be located, or words that do not
        go together.
    """
    is_run = "::" not in name and not name.startswith(registry.MUTANTS)
    if expression and not is_run:
        raise SelectionError(Problem("-k selects cases of a run", "leave -k out", name))
    if run is not None and (is_run or name.startswith(registry.MUTANTS)):
        raise SelectionError(Problem("--run is for the id of a case", "leave --run out", name))
    if is_run:
        found = _failing(name, expression, most)
    else:
        found = [_named(name, run) if "::" in name else _planted(name)]
    for case in found:
        _require_training(case)
    return found


def _planted(name: str) -> Case:
    from shardproof.cases.kills import pair
    from shardproof.commands.mutants import choose_mutants

    (mutant, *others) = choose_mutants([name])
    if others:
        remedy = "name one fault: `shardproof mutants -v` lists them"
        raise SelectionError(Problem("several faults match", remedy, name))
    return pair(mutant).case


def _named(name: str, run: str | None) -> Case:
    """The case ``name`` as it ran, or else as its scenario has it."""
    from shardproof.scenarios.selection import Selection
    from shardproof.scenarios.vocabulary import installed

    results = _results(run) if run is not None or _has_run() else []
    known = [result.case for result in results if result.id == name]
    if known:
        return known[0]
    if name.startswith(registry.MUTANTS):
        return _planted(name.partition("::")[0])
    [case] = Selection(scenarios=(name,), tier="full").cases(installed())
    return case


def _failing(name: str, expression: str, most: int) -> list[Case]:
    """The failing cases of the run ``name``, the smallest worlds first."""
    from shardproof.scenarios.select import compile_expression

    matches = compile_expression(expression)
    results = [r for r in _results(name) if verdicts.kind(r.verdict) in _DIFFERS and matches(r.id)]
    if not results:
        remedy = "name another run, or another -k; `shardproof report RUN` lists what failed"
        raise SelectionError(Problem("no case of this run fails", remedy, name))
    return [r.case for r in sorted(results, key=lambda r: (r.case.world, r.case.steps))][:most]


def _has_run() -> bool:
    """Whether there is a newest run."""
    from shardproof.runs.run_folder import find_run

    try:
        find_run(None)
    except SelectionError:
        return False
    return True


def _results(run: str | None) -> Sequence[CaseResult]:
    from shardproof.runs.bundle.unpacking import open_run
    from shardproof.runs.integrity import damage_is_bad_input
    from shardproof.runs.run_folder import read

    with open_run(run) as path, damage_is_bad_input(Path(path)):
        found = read(path, strict=True)
        return [*found.cases, *found.mutant_cases]


def _require_training(case: Case) -> None:
    """:raises SelectionError: nothing of ``case`` is compared with a training in one process."""
    from shardproof.backends import BACKENDS
    from shardproof.cases import kinds

    if not kinds.of(case.workload).trains:
        remedy = "read its verdict: it names the call or the sample"
        raise SelectionError(Problem("the case trains no model", remedy, case.id))
    if not BACKENDS[case.backend].has_values:
        remedy = "name the same case on another backend"
        raise SelectionError(Problem(f"tensors have no values on {case.backend}", remedy, case.id))
