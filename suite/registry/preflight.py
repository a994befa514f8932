"""Whether implementations that are not the suite's own can be loaded, before anything is run.

A name can lead to a module that raises, hangs or ends its process on import.  So it is loaded in a
leader, never here, and what is wrong is told in one sentence instead of once for every case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from shardproof import registry, strategies, workloads
from shardproof.case import Case
from shardproof.contract import Options, Refused
from shardproof.costs import cost_model_class
from shardproof.errors import InputError, Problem, SelectionError, shorten
from shardproof.files import from_others
from shardproof.launch.informant import NoAnswer, Raised
from shardproof.launch.nodes import Nodes
from shardproof.launch.pool import Pool, TaskEnd
from shardproof.launch.workspace import Workspace
from shardproof.registry.declaration import BrokenContract, Declaration, missing_package
from shardproof.workloads.own import FOUND
from shardproof.workloads.wall import standing

#: CPU seconds for the import of a user's modules, and the longest that it may stand still; torch is
#: imported already.
SECONDS = 60.0
_LONGEST = 400
#: What is asked in a leader.
P = TypeVar("P")
#: What is wrong with an implementation, why it refuses the options, and what nobody can judge of
#: what it declares under them (empty: nothing); then its axes and backends.
Loaded = tuple[str, str, str, list[str], list[str]]


def ask(task: Callable[[P], Any], items: Mapping[str, P], pool: Pool | None) -> list[TaskEnd[P]]:
    """How ``task`` ended for each of ``items``, in leaders of ``pool`` (``None``: a new one); on
    nodes, if ranks run there.
    """
    if task is try_to_load and (nodes := Nodes.here()) is not None:
        nodes.wait()
        return [_on_nodes(nodes, key, item) for key, item in items.items()]
    with ExitStack() as stack:
        leaders = pool if pool is not None else stack.enter_context(Pool(1))
        timed = [(key, item, SECONDS) for key, item in items.items()]
        return list(stack.enter_context(closing(leaders.run(task, timed, by_cpu=True))))


def _on_nodes(nodes: Nodes, key: str, asked: Any) -> TaskEnd[Any]:
    """The result of :func:`try_to_load` where ranks run, for this process imports nothing."""
    with Workspace() as folder, nodes.host().informant(folder, SECONDS) as informant:
        try:
            form: Any = Loaded
            told = from_others(form, informant.do(try_to_load, asked))
        except (NoAnswer, Raised, TypeError) as error:
            fault = f"implementation {key!r} cannot be imported: its process {error}"
            told = (fault, "", "", [], [])
    return TaskEnd(key, asked, 0, None, False, 0.0, "", told)


def problem_of(fault: str, remedy: str, file: str = "", line: int | None = None) -> Problem:
    """The ``fault`` of what was asked, at a length that people read."""
    return Problem(shorten(fault, _LONGEST), remedy, file=file, line=line)


def check(
    names: Iterable[str], pool: Pool | None = None, sources: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """Load those of ``names`` that are a user's own, in leaders of ``pool`` (``None``: a new one).

    Gives the axes that each of them declares without options; none where it takes some.

    ``sources``: the file and line that gave each, which a fault then names.

    :raises SelectionError: some cannot be loaded: no such class, an import that raises, hangs or
        ends the process, or no implementation.  All of them are told.
    """
    own: dict[str, tuple[str, Options]]
    own = {name: (name, {}) for name in names if registry.is_foreign(name)}
    if not own:
        return {}
    for name in own:
        registry.check(name)
    loaded, problems = {}, []
    for end in ask(try_to_load, own, pool):
        unfinished = f"implementation {end.key!r} cannot be imported: {ending(end)}"
        fault, _, _, loaded[end.key], _ = end.value or (unfinished, "", "", [], [])
        if fault:
            remedy = "correct the name or the module (nothing was run)"
            file, _, line = (sources or {}).get(end.key, "").rpartition(":")
            where = (file, int(line)) if line else ()
            problems.append(problem_of(fault, remedy, *where))
    if problems:
        raise SelectionError(problems)
    return loaded


def try_to_load(asked: tuple[str, Options]) -> Loaded:
    """Task of a leader, for a name and options."""
    name, options = asked
    try:
        system = registry.load(name)
        if strategies.of(system.strategy).is_known:
            cost_model_class(system.strategy)  # that of a package may be broken
    except (InputError, registry.BrokenImplementation) as error:
        return str(error), "", "", [], []
    try:
        declared = Declaration.of(system, options)
    except Refused as error:
        return "", str(error), "", [], []
    except BrokenContract as error:
        return "", "", str(error), [], []
    unclear = declared.problem() or ("" if declared.axes else "declares no axes")
    return "", "", unclear, [*declared.axes], [] if unclear else [*declared.usable()]


def check_options(name: str, options: Options, pool: Pool) -> None:
    """Ask ``name``, in a leader of ``pool``, whether it takes ``options``.

    :raises SelectionError: it refuses them, or ended the process that asked.
    """
    (end,) = ask(try_to_load, {"options": (name, options)}, pool)
    ended = f"{name} could not be asked for its options: {ending(end)}"
    _, refused, *_ = end.value or ("", ended)  # what else is wrong is told by its cases
    if refused:
        raise SelectionError(problem_of(refused, "correct the option (nothing was run)"))


def with_found_traits(cases: Sequence[Case], pool: Pool | None = None) -> list[Case]:
    """``cases`` with the traits that a user's own models turn out to have.

    Each of these is tried once in a leader, in every dtype that it is built in.

    :raises SelectionError: some cannot be imported or judged.  All of them are told.
    """
    tried = {_trial(case): case for case in cases if ":" in case.workload.name}
    if not tried:
        return list(cases)
    found, problems = {}, []
    for end in ask(try_workload, tried, pool):
        unfinished = f"workload {end.payload.workload.name!r}: {ending(end)}"
        fault, found[end.key] = end.value or (unfinished, [])
        if fault:
            remedy = "correct the workload (nothing was run)"
            problems.append(problem_of(fault, remedy, *_named_in(tried[end.key])))
    if problems:
        raise SelectionError(dict.fromkeys(problems))
    return [
        replace(case, workload=replace(case.workload, traits=(*dict.fromkeys(traits),)))
        for case in cases
        for traits in [(*case.workload.traits, *found.get(_trial(case), ()))]
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
    """The part that is tried once for all cases that share it."""
    return f"{case.workload} {case.dtype}"


def try_workload(case: Case) -> tuple[str, list[str]]:
    """Task of a leader: why the workload of ``case`` cannot be judged, and the traits it has."""
    try:
        with standing(case.workload.name):
            workload = workloads.make(case.workload, case.dtype, case.lane)
            found = list(workload.found.traits)
    except workloads.WorkloadError as error:
        system = Declaration.of(registry.load(case.implementation), case.options)
        # Cases of a system whose package is missing here are skipped; its models may need it, too.
        return "" if missing_package(system.packages) else str(error), []
    lacking = [trait for trait in case.workload.traits if trait in FOUND and trait not in found]
    if lacking:
        return f"{case.workload.name}: the model has no {lacking[0]!r}, only {found or 'none'}", []
    return "", found


def ending(end: TaskEnd[Any]) -> str:
    """How a leader ended that gave no answer, with its last words."""
    if end.timed_out:
        how = f"did not end within {SECONDS:g} s of CPU time or of sleep"
    elif end.signal is not None:
        how = f"ended its process (signal {end.signal})"
    elif end.exit_code is not None:
        how = f"ended its process (exit code {end.exit_code})"
    else:
        how = "ended its process (with its fork server)"
    last: Sequence[str] = end.output.strip().splitlines()[-1:]
    return f"the import {how}" + "".join(f": {line}" for line in last)
