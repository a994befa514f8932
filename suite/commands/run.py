"""``shardproof run``: choose cases, have them run and judged, leave evidence.

Next: ``commands/execution.py``, which has the cases run that are chosen here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from shardproof import wings
from shardproof.case import Case
from shardproof.commands import options
from shardproof.commands.options import option
from shardproof.errors import Problem, SelectionError

if TYPE_CHECKING:
    from shardproof.checks.results import CaseResult


@dataclass(frozen=True, kw_only=True)
class Others:
    """Other cases than scenarios give: random ones, of an earlier run, or at another depth."""

    campaign: options.Campaign = None
    drawn: str | None = option(
        None, "--case", metavar="ID", help="run only the random case with this full id"
    )
    resume: bool = option(
        False, "--resume", help="continue the run in --results (default: the newest run)"
    )
    rerun_failed: bool = option(
        *(False, "--rerun-failed", "--last-failed", "--lf"),
        help="rerun the failed cases of the run in --results (default: the newest run)",
    )
    depth: Literal["family", "layout"] | None = option(
        None, "--depth", help="judge bytes by general bounds (family) or by exact formulas (layout)"
    )

    @property
    def again(self) -> bool:
        """Whether an earlier run has the cases."""
        return self.resume or self.rerun_failed


@options.grouped()
def run(
    context: typer.Context,
    *,
    filters: options.Filters,
    session: options.SessionOptions,
    others: Others,
    how: options.HowRun,
) -> None:
    """Run cases and judge them.

    \b
    shardproof run                                      the quick cases
    shardproof run --tier full                          everything
    shardproof run ddp-gpt --backend gloo --world 4     one part
    shardproof run --backend mpi                        the cases of gloo and in_memory, on MPI
    shardproof run --impl 'pytorch/*' -k 'adamw and not noclip'
    shardproof run ddp-gpt --impl mine:MyDDP            your own class
    shardproof run --impl mine:MyZero1 --depth layout   require exactly the bytes of reference/zero1
    shardproof run --impl mine:MyZero1 --like 'reference/zero1*'   your class in the cases of zero1
    shardproof run --campaign 200 --seed 7              200 random cases
    shardproof run --campaign 50 --impl '*/fsdp*'       50 random cases of FSDP
    shardproof run --impl mine:MyDDP -x                 stop at the first failure
    shardproof run --tier full --shard 2/4 --results part2   part 2 of 4: see `merge`
    shardproof run --tier full --on ray://HOST          on Ray, one task per case
    shardproof run --resume                             continue the newest run, after Ctrl-C
    shardproof run --resume --results results/RUN       continue the run in results/RUN
    shardproof run --last-failed --backend gloo         the failed cases of gloo

    --resume and --rerun-failed run only cases that the earlier run had planned. A filter selects
    among these cases; a filter that matches none of them is refused.

    To run one case, give its full id as SCENARIO or with -k. The evidence is in results/RUN:
    run.json, cases.jsonl, records/, report.html, junit.xml. `verify` judges this evidence again.

    \b
    Exit codes: 0 all checks passed
                1 a fail, unexpected pass, hang or crash
                2 bad input
                3 nothing was judged, or a case is undecided: its ranks were compared
                  only with one another, the budget ran out, or the judge had an error
    """
    from shardproof.scenarios.load import run_by_a_wing

    _require_fitting(filters, others, {"--depth": others.depth, "--shard": session.shard})
    if not others.again and (of_wing := run_by_a_wing(filters.scenarios or ())):
        raise typer.Exit(of_wing(session, how))
    kept: list[CaseResult] = []
    if others.again:
        typed = "--tier" in options.given(context)
        found, cases, kept = _of_earlier(filters, others, session.results, typed)
        session = replace(session, results=found)
    else:
        cases = list(_drawn(filters, others)) or filters.cases()
    if not how.dry_run and how.on is None:
        _require_backends(cases, filters.backend or ())
    if others.depth:
        cases = [replace(case, depth=others.depth) for case in cases]
    fit = not (filters.scenarios or others.again or filters.like)
    with options.joined(None if how.dry_run else how.on, session.jobs) as elsewhere:
        from shardproof.commands.execution import run_and_exit

        run_and_exit(cases, session, how, kept, fit, elsewhere=elsewhere)


def _require_fitting(
    filters: options.Filters, others: Others, of_new_runs: Mapping[str, str | None]
) -> None:
    """:raises SelectionError: options that exclude each other; some are ``of_new_runs`` only."""
    if others.again:
        given = {"--like": filters.like, **of_new_runs}
        what = "the run keeps its planned cases"
        if clash := next((name for name in sorted(given) if given[name]), ""):
            only = f"{clash} is only for a new run"
            raise SelectionError(Problem(only, f"leave {clash} out: {what}", given[clash]))
    if others.resume and others.rerun_failed:
        remedy = "choose one: --resume for cases without a result, --rerun-failed for failed cases"
        raise SelectionError(Problem("--resume and --rerun-failed cannot be combined", remedy))
    for name in filters.scenarios or ():
        if (Path(name) / "run.json").is_file():
            remedy = f"write --results {name} with --resume or --rerun-failed"
            raise SelectionError(Problem("this is a run folder, not a scenario", remedy, name))
    if others.campaign is not None or others.drawn is not None:
        again = {"--resume": others.resume, "--rerun-failed": others.rerun_failed}
        options.refuse(filters.given() | again, "--campaign and --case draw their own cases")


def _of_earlier(
    filters: options.Filters, others: Others, results: Path | None, of_tier: bool
) -> tuple[Path, list[Case], list[CaseResult]]:
    """The earlier run in ``results`` (``None``: the newest), what is run of its cases, and which
    results stay.

    ``of_tier``: the tier filters, too.
    """
    from shardproof.runs.integrity import damage_is_bad_input, require_unedited
    from shardproof.runs.resume import split
    from shardproof.runs.run_folder import find_run

    selection = filters.selection()
    if not of_tier:
        selection = replace(selection, tier="")
    found = find_run(str(results) if results is not None else None)
    with damage_is_bad_input(found):
        require_unedited(found)
        return found, *split(found, selection.within, others.rerun_failed)


def _drawn(filters: options.Filters, others: Others) -> Sequence[Case]:
    """The random cases that were asked for; empty: none were."""
    if others.campaign is not None:
        count, seed, impl = others.campaign, filters.seed or 0, filters.impl or ()
        return options.of_campaign(lambda wing: wing.random_cases(count, seed, impl))
    if (name := others.drawn) is not None:
        return [wings.required("campaign", "--case", lambda wing: wing.random_case(name))]
    return ()


def _require_backends(cases: Sequence[Case], asked: Sequence[str]) -> None:
    """Do not skip cases on a backend that was asked for explicitly and is missing.

    :raises SelectionError: it is (but for some on GPUs), or MPI cannot start as many ranks.
    """
    from shardproof.backends import BACKENDS
    from shardproof.launch.mpi import mpirun
    from shardproof.launch.nodes import Nodes

    for name in asked:
        worlds = {case.world for case in cases if case.backend == name}
        if not worlds or BACKENDS[name].skips_if_missing:
            continue
        reason = BACKENDS[name].available(max(worlds))
        remedy = "run `shardproof doctor` for details, or leave --backend out"
        if not reason and BACKENDS[name].mpirun and Nodes.here() is None:
            reason = mpirun.problem(max(worlds))
            remedy = f"let mpirun start {max(worlds)} ranks here, or choose a smaller --world"
        if reason:
            raise SelectionError(Problem(reason, remedy, f"--backend {name}"))
