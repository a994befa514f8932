"""``shardproof reproduce``: run the cases of a run again here, and say what comes out the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardproof import verdicts, wings
from shardproof.case import Case
from shardproof.commands import options
from shardproof.commands.console import echo
from shardproof.commands.options import option
from shardproof.errors import Problem, SelectionError
from shardproof.launch.nodes import MOST_NODES, MOST_RANKS, Nodes
from shardproof.launch.process_control import cores

if TYPE_CHECKING:
    from shardproof.runs.run_folder import Run

#: In the folder of what was run again: a line for each result of the first run.
OUTCOMES = "reproduced.jsonl"


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where ranks of `reproduce` run, if not on this machine."""

    cluster: bool = option(False, "--cluster", help="run ranks in containers (docs/containers.md)")
    nodes: int | None = option(
        None,
        "--nodes",
        metavar="K",
        min=1,
        max=MOST_NODES,
        help="number of nodes [as in RUN, or 2]",
    )
    ranks_per_node: int | None = option(
        None,
        "--ranks-per-node",
        metavar="R",
        min=1,
        max=MOST_RANKS,
        help="ranks on each node [as in RUN, or 2]",
    )


@options.grouped()
def reproduce(
    run: Annotated[str, typer.Argument(metavar="RUN", help="run folder, id or bundle")],
    expression: options.Expression = "",
    budget: options.Budget = None,
    jobs: options.Jobs = None,
    results: Path | None = option(
        None, "--results", metavar="RUN", help="the new run folder", parser=options.named
    ),
    *,
    where: Where,
) -> None:
    """Run the stored cases of a run again here, and say which results are equal.

    \b
    equal               verdict, exact figures and every tensor's digest are equal
    agrees              bits differ, but both results are within the tolerance
    differs             the verdict or an exact figure differs, or bits differ
                        for no known reason
    cannot be compared  torch, suite or data have another version; other kernels
                        may explain the bits; a backend, system or option is
                        missing here; --budget ran out, or the nodes have too
                        few ranks
    not compared        the stored run skipped the case or left it out; or
                        the case has a fault plan or a planted fault, or is timed

    The cases come from the stored run; changes of scenario files have no effect. The new folder is
    an ordinary run. Its reproduced.jsonl has the outcome of each case.

    \b
    Exit codes: 0 all that can be compared is equal or agrees
                1 a case differs
                2 bad input
                3 some cases, or all, could not be compared

    \b
    shardproof reproduce 20260102-030405.tar.gz
    shardproof reproduce results/RUN -k "bitwise and in_memory" --results results/again
    shardproof reproduce results/RUN --cluster --nodes 4 --ranks-per-node 1
    """
    from shardproof.runs.bundle.unpacking import open_run
    from shardproof.runs.integrity import damage_is_bad_input, require_unedited
    from shardproof.runs.run_folder import read

    if not where.cluster:
        given = {"--nodes": where.nodes, "--ranks-per-node": where.ranks_per_node}
        options.refuse(given, "nodes need --cluster")
    options.require_new("--results", results)
    with open_run(run) as path, damage_is_bad_input(path):
        before = read(path, strict=True)
        require_unedited(path)
        ids = _chosen(before, expression)
        if where.cluster:
            seen = Path(run) if Path(run).is_file() else path
            words = ["reproduce", str(seen.resolve())]
            for flag, value in {"-k": expression, "--budget": budget, "-j": jobs}.items():
                words += [flag, str(value)] if value not in ("", None) else []
            code = _on_nodes(before, ids, words, where, results)
        else:
            code = _here(before, ids, budget, jobs or cores(), results)
        raise typer.Exit(code)


def _chosen(before: Run, expression: str) -> frozenset[str]:
    """Ids of the results, and names of the faults, of ``before`` that ``expression`` matches.

    :raises SelectionError: it matches none.
    """
    from shardproof.scenarios.select import compile_expression

    faults = {f"mutants/{kill.name}" for kill in before.kills}
    cases_of_faults = {result.id for result in before.mutant_cases}
    matches = compile_expression(expression)
    if ids := frozenset(filter(matches, (before.ids | faults) - cases_of_faults)):
        return ids
    remedy = "leave -k out, or name a run with results"
    raise SelectionError(Problem("no case to run again", remedy, expression or before.name))


def _on_nodes(
    before: Run, ids: frozenset[str], words: Sequence[str], where: Where, results: Path | None
) -> int:
    """The command with these ``words`` on as many nodes as asked for, else as ``before`` had.

    :raises SelectionError: there is no wing that has nodes.
    """
    had: Any = before.header.last.cluster or {}
    count, ranks = (len(had["nodes"]), had["ranks_per_node"]) if "ranks_per_node" in had else (2, 2)
    cases = [result.case for result in before.cases if result.id in ids]
    names = {name for case in cases for name in (case.implementation, case.workload.name)}
    own = [Path.cwd()] if any(":" in name for name in names) else []
    count, ranks = where.nodes or count, where.ranks_per_node or ranks
    command = wings.OnNodes(words, cases, [*own, Path(words[1])], count, ranks, results)
    return wings.required("cluster", "--cluster", lambda wing: wing.run_on_nodes(command))


def _here(
    before: Run, ids: frozenset[str], budget: float | None, jobs: int, results: Path | None
) -> int:
    from shardproof.commands.execution import Execution
    from shardproof.commands.supervision import open_folder
    from shardproof.reproduce import reproduced
    from shardproof.runs.durations import Durations
    from shardproof.runs.run_folder import read
    from shardproof.scenarios.budget import fit_cases

    beside, nodes = reproduced.beside(before), Nodes.here()
    cases = [one.case for one in before.cases if one.id in ids and one.id not in beside]
    obstacles = _obstacles(cases, nodes)
    cases = [case for case in cases if case.id not in obstacles]
    if cases:
        options.wait_for(nodes)
        durations = Durations.of_user()
        schedule = fit_cases(cases, durations, jobs, budget)
        with open_folder(results) as folder:
            folder.reproduces(before.name)
            code = Execution(folder, schedule, jobs, durations, budget, nodes=nodes).run()
            if code == verdicts.INTERRUPTED:
                return code
            outcomes = reproduced.judge(before, read(folder.path), obstacles, ids)
            lines = (json.dumps(asdict(outcome)) + "\n" for outcome in outcomes)
            folder.write(OUTCOMES, "".join(lines))
    else:
        outcomes = reproduced.judge(before, None, obstacles, ids)
    for outcome in outcomes:
        echo(outcome.sentence())
    echo(reproduced.summary(outcomes))
    return reproduced.exit_code(outcomes)


def _obstacles(cases: Sequence[Case], nodes: Nodes | None = None) -> dict[str, str]:
    """By its id why a case cannot be run by this version, without a system of its own, or for lack
    of room on ``nodes``.
    """
    from shardproof import registry
    from shardproof.backends import BACKENDS
    from shardproof.cases import kinds
    from shardproof.registry import preflight
    from shardproof.workloads import WORKLOADS

    gone: dict[str, str] = {}
    for name in dict.fromkeys(case.implementation for case in cases):
        try:
            registry.check(name)
            preflight.check([name])
        except SelectionError as error:
            gone[name] = f"the system is missing: {error.problems[0].what}"
    told, known = {}, {*WORKLOADS, *kinds.UNTRAINED}
    for case in cases:
        if case.implementation in gone:
            told[case.id] = gone[case.implementation]
        elif case.backend not in BACKENDS:
            told[case.id] = f"no longer supported: backend {case.backend}"
        elif ":" not in case.workload.name and case.workload.name not in known:
            told[case.id] = f"no longer supported: workload {case.workload.name}"
        elif nodes is not None and not nodes.has_room(case.backend, case.world):
            told[case.id] = f"{case.world} ranks do not fit on {nodes}"
    return told
