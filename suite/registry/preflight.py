"""Whether implementations that are not the suite's own can be loaded, before anything is run.

A name can lead to a module that raises, hangs or ends its process on import.  So it is loaded in a
leader, never here, and what is wrong is told in one sentence instead of once for every case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardproof import registry, strategies, workloads
from shardproof.case import Case, WorkloadSpec
from shardproof.contract import Options, Refused
from shardproof.costs import cost_model_class
from shardproof.errors import InputError, Problem, SelectionError, shorten
from shardproof.launch.pool import Pool, TaskEnd
from shardproof.registry.declaration import BrokenContract, Declaration
from shardproof.workloads.own import FOUND

#: For the import of a user's modules; torch is imported already.
SECONDS = 60.0
_LONGEST = 400


def check(
    names: Iterable[str], pool: Pool | None = None, sources: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """Load those of ``names`` that are a user's own, in leaders of ``pool`` (``None``: a new one).

    Gives the axes that each of them declares without options; none where it takes some.

    ``sources``: the file and line that gave each, which a fault then names.

    :raises SelectionError: some cannot be loaded: no such class, an import that raises, hangs or
        ends the process, or no implementation.  All of them are told.
    """
    own = [name for name in dict.fromkeys(names) if registry.is_foreign(name)]
    if not own:
        return {}
    for name in own:
        registry.check(name)
    with ExitStack() as stack:
        leaders = pool if pool is not None else stack.enter_context(Pool(1))
        items = [(name, name, SECONDS) for name in own]
        ends = list(stack.enter_context(closing(leaders.run(try_to_load, items))))
    loaded: dict[str, Loaded]
    loaded = {end.key: end.value or (_unfinished(end), []) for end in ends}
    remedy = "nothing was run: correct the name or the module"
    problems = []
    for name, (fault, _) in loaded.items():
        file, _, line = (sources or {}).get(name, "").rpartition(":")
        if fault:
            problem = Problem(shorten(fault, _LONGEST), remedy)
            problems.append(replace(problem, file=file, line=int(line)) if line else problem)
    if problems:
        raise SelectionError(problems)
    return {name: axes for name, (_, axes) in loaded.items()}


#: The fault of an implementation (empty: none), and its axes.
Loaded = tuple[str, list[str]]


def try_to_load(name: str) -> Loaded:
    """Task of a leader."""
    try:
        system = registry.load(name)
        if strategies.of(system.strategy).is_known:
            cost_model_class(system.strategy)  # that of a package may be broken
        return "", [*Declaration.of(system, {}).axes]
    except (Refused, BrokenContract):
        return "", []  # it takes options: its cases will tell
    except (InputError, registry.BrokenImplementation) as error:
        return str(error), []


def abilities(name: str, pool: Pool) -> tuple[list[str], list[str]]:
    """The mesh axes and backends that ``name`` declares without options, asked in a leader.

    :raises SelectionError: it cannot be loaded, refuses to be without options, declares no axes or
        what the contract does not know, or ended the process that asked.
    """
    with closing(pool.run(try_abilities, [("abilities", name, SECONDS)])) as ends:
        (end,) = ends
    fault, axes, backends = end.value or (
        f"{name} was asked for its axes: {ending(end)}",
        [],
        [],
    )
    if fault:
        remedy = "nothing was written: name a class that can be used without options"
        raise SelectionError(Problem(shorten(fault, _LONGEST), remedy, name))
    return axes, backends


def try_abilities(name: str) -> tuple[str, list[str], list[str]]:
    """Task of a leader: why ``name`` declares no axes without options; its axes and backends."""
    try:
        declared = Declaration.of(registry.load(name), {})
    except (Refused, BrokenContract, InputError, registry.BrokenImplementation) as error:
        return str(error), [], []
    fault = declared.problem() or ("" if declared.axes else "declares no axes")
    return fault, [*declared.axes], [*declared.usable()]


def check_options(name: str, options: Options, pool: Pool) -> None:
    """Ask ``name``, in a leader of ``pool``, whether it takes ``options``.

    :raises SelectionError: it refuses them, or ended the process that asked.
    """
    with closing(pool.run(try_options, [("options", (name, options), SECONDS)])) as ends:
        (end,) = ends
    fault = f"{name} was asked for its options: {ending(end)}" if end.value is None else end.value
    if fault:
        remedy = "nothing was run: correct the option"
        raise SelectionError(Problem(shorten(fault, _LONGEST), remedy))


def try_options(system: tuple[str, Options]) -> str:
    """Task of a leader: why the system refuses its options; empty: it does not.

    What else is wrong is told by its cases.
    """
    name, options = system
    try:
        Declaration.of(registry.load(name), options)
    except Refused as error:
        return str(error)
    except (BrokenContract, registry.BrokenImplementation):
        pass
    return ""


def with_found_traits(cases: Sequence[Case], pool: Pool | None = None) -> list[Case]:
    """``cases`` with the traits that a user's own models turn out to have.

    Each of these is tried once in a leader, in every dtype that it is built in.

    :raises SelectionError: some cannot be imported or judged.  All of them are told.
    """
    tried = {_trial(case): case for case in cases if ":" in case.workload.name}
    if not tried:
        return list(cases)
    with ExitStack() as stack:
        leaders = pool if pool is not None else stack.enter_context(Pool(1))
        items = [(key, case, SECONDS) for key, case in tried.items()]
        ends = list(stack.enter_context(closing(leaders.run(try_workload, items))))
    found: dict[str, tuple[str, list[str]]] = {
        end.key: end.value or (f"workload {end.payload.workload.name!r}: {ending(end)}", [])
        for end in ends
    }
    problems = []
    for key, (fault, _) in found.items():
        if fault:
            file, line = _named_in(tried[key])
            remedy = "nothing was run: correct the workload"
            problems.append(Problem(shorten(fault, _LONGEST), remedy, file=file, line=line))
    if problems:
        raise SelectionError(list(dict.fromkeys(problems)))
    return [
        case
        if ":" not in case.workload.name
        else replace(case, workload=_carrying(case.workload, found[_trial(case)][1]))
        for case in cases
    ]


def _named_in(case: Case) -> tuple[str, int | None]:
    """The scenario file and the line that names the workload; empty: there is none any more."""
    file = case.source.rpartition(":")[0]
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines() if file else []
    except OSError:
        lines = []
    return file, next((n for n, line in enumerate(lines, 1) if case.workload.name in line), None)


def _trial(case: Case) -> str:
    """What is tried once for all cases that share it."""
    return f"{case.workload} {case.dtype}"


def _carrying(spec: WorkloadSpec, traits: Sequence[str]) -> WorkloadSpec:
    return replace(spec, traits=tuple(dict.fromkeys((*spec.traits, *traits))))


def try_workload(case: Case) -> tuple[str, list[str]]:
    """Task of a leader: why the workload of ``case`` cannot be judged, and the traits it has."""
    try:
        workload = workloads.make(case.workload, case.dtype, case.lane)
        found = list(workload.found.traits)
    except workloads.WorkloadError as error:
        return str(error), []
    lacking = [trait for trait in case.workload.traits if trait in FOUND and trait not in found]
    if lacking:
        return f"{case.workload.name}: the model has no {lacking[0]!r}, only {found or 'none'}", []
    return "", found


def _unfinished(end: TaskEnd[str]) -> str:
    return f"implementation {end.key!r} cannot be imported: {ending(end)}"


def ending(end: TaskEnd[Any]) -> str:
    """How a leader ended that gave no answer, with its last words."""
    if end.timed_out:
        how = f"did not end within {SECONDS:g} s"
    elif end.signal is not None:
        how = f"ended its process (signal {end.signal})"
    elif end.exit_code is not None:
        how = f"ended its process (exit code {end.exit_code})"
    else:
        how = "ended its process (with its fork server)"
    last: Sequence[str] = end.output.strip().splitlines()[-1:]
    return f"the import {how}" + "".join(f": {line}" for line in last)
