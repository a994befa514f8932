"""``shardproof shrink``: make failing cases small."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardproof import verdicts, wings
from shardproof.case import Case
from shardproof.commands import options
from shardproof.commands.console import echo, make_console
from shardproof.commands.options import option
from shardproof.errors import InputError, Problem, SelectionError
from shardproof.files import why_not_writable
from shardproof.launch.process_control import cores
from shardproof.table import Table, number

if TYPE_CHECKING:
    from shardproof.cases.runner import Session
    from shardproof.shrink.search import Limits, Shrunk
    from shardproof.shrink.written import Written

#: The folder of what is written, in the working folder or in that of the run.
FOLDER = "shrunk"


@dataclass(frozen=True, kw_only=True)
class HowShrunk(options.Output):
    """Where files go, and how long cases are made smaller."""

    output: Path | None = option(
        None,
        "--output",
        metavar="FILE",
        help="the scenario file to write; of several cases: a folder [default: shrunk/]",
        parser=options.named,
    )
    budget: float | None = option(
        None, "--budget", metavar="SECONDS", min=0.1, help="seconds for each case"
    )
    max_runs: int | None = option(
        None, "--max-runs", metavar="N", min=1, help="attempts for each case"
    )
    jobs: options.Jobs = None
    script: bool = option(
        True, "--script/--no-script", help="also write a script of an upstream system alone"
    )


@options.grouped()
def shrink(
    what: Annotated[
        str | None,
        typer.Argument(metavar="CASE|RUN", help="a case id, scenario, file, run folder or run id"),
    ] = None,
    impl: options.Impl = None,
    expression: options.Expression = "",
    fault: str | None = option(
        None, "--fault", metavar="NAME", help="shrink the case of a planted fault"
    ),
    *,
    how: HowShrunk,
) -> None:
    """Reduce failing cases: fewer ranks, steps, layers, samples, traits and options.

    Every reduction must fail for the same cause: the same check, kind of state and moment, or the
    same kind of crash or hang. A reduction that the system or the scenario rules forbid is skipped.

    Of each case a scenario file is written that runs by itself, also after Ctrl-C. If the system is
    an upstream one, a script of that system alone is written as well, if such a script shows the
    defect when it is run.

    \b
    shardproof shrink 'ddp-gpt::mine:MyDDP::gloo::replicate4::adamw::clip::fp64::full'
    shardproof shrink ddp-gpt --impl mine:MyDDP         every case of ddp-gpt that fails
    shardproof shrink failing.yaml --output small.yaml
    shardproof shrink results/RUN                       every failed case of a run
    shardproof shrink results/RUN -k adamw --budget 20
    shardproof shrink --fault ddp_sums_instead_of_mean

    \b
    Exit codes: 0 every case was shrunk, and its file fails for the same cause
                2 bad input, or no case fails
                3 a file did not fail again, or a limit ended a search
    """
    from shardproof.commands.supervision import Interrupts

    if (what is None) == (fault is None):
        remedy = "name a case, a scenario or a run, or one fault"
        raise SelectionError(Problem("shrink needs one of CASE|RUN and --fault", remedy, what))
    if fault is not None and (impl or expression):
        raise SelectionError(Problem("--fault names one case", "leave --impl and -k out", fault))
    with Interrupts(), _cases(what, impl or (), expression, fault) as (cases, folder):
        raise typer.Exit(_shrink(cases, folder, how))


def of_run(run: Path, jobs: int | None, quiet: bool) -> int:
    """Shrink every failed case of the run in the folder ``run``; the exit code.

    A run whose failures cannot be shrunk is no bad input here: it is told, and the run has its own
    exit code.
    """
    from shardproof.commands.supervision import Interrupts

    try:
        with Interrupts(), _cases(str(run), (), "", None) as (cases, folder):
            return _shrink(cases, folder, HowShrunk(jobs=jobs, quiet=quiet))
    except InputError as error:
        for problem in error.problems:
            echo(str(problem), err=True)
        return verdicts.NOT_DECIDED


@contextmanager
def _cases(
    what: str | None, impl: Sequence[str], expression: str, fault: str | None
) -> Iterator[tuple[list[Case], Path]]:
    """The cases that are asked for, and where their files go.

    :raises InputError: there is none.
    """
    if fault is not None:
        from shardproof.cases import kills
        from shardproof.commands.mutants import choose_mutants

        chosen = choose_mutants([fault])
        yield [kills.pair(mutant).case for mutant in chosen], Path(FOLDER)
    elif what is not None and (run := _run_of(what)) is not None:
        from shardproof.runs.integrity import damage_is_bad_input
        from shardproof.runs.run_folder import read

        if impl:
            remedy = "leave --impl out: the run has its systems"
            raise SelectionError(Problem("--impl is for a scenario", remedy, str(run)))
        with damage_is_bad_input(run):
            results = read(run, strict=True).cases
        yield _failed(results, expression, str(run)), run / FOLDER
    else:
        yield _selected(str(what), impl, expression), Path(FOLDER)


def _run_of(what: str) -> Path | None:
    """The folder of the run that ``what`` names; ``None``: it names none."""
    from shardproof.commands.supervision import RESULTS

    folders = () if "::" in what else (Path(what), RESULTS / what)
    return next((path for path in folders if (path / "run.json").is_file()), None)


def _failed(results: Sequence[Any], expression: str, run: str) -> list[Case]:
    """The cases of ``results`` that failed.

    :raises SelectionError: there is none.
    """
    from shardproof.scenarios.select import compile_expression
    from shardproof.shrink.cause import ENDS

    matches = compile_expression(expression)
    failed = [one for one in results if verdicts.kind(one.verdict) in ENDS and matches(one.id)]
    if not failed:
        remedy = "name a run with failures (`shardproof run`), or leave -k out"
        raise SelectionError(Problem("the run has no failed case to shrink", remedy, run))
    return [one.case for one in failed]


def _selected(what: str, impl: Sequence[str], expression: str) -> list[Case]:
    """The cases of a scenario, a file or an id, of a random case too.

    :raises InputError: there is none.
    """
    from shardproof.scenarios.selection import Selection
    from shardproof.scenarios.vocabulary import installed

    chosen = Selection([what], impl, expression=expression, tier="full")
    try:
        return chosen.cases(installed())
    except InputError:
        try:
            if (drawn := wings.first(lambda wing: wing.random_case(what))) is not None:
                return [drawn]
        except SelectionError:
            pass  # it is no id of a random case either: the first error says more
        raise


def _shrink(cases: Sequence[Case], folder: Path, how: HowShrunk) -> int:
    """Shrink ``cases`` into ``folder``; the exit code.

    :raises SelectionError: none of them fails.
    """
    from shardproof.cases.runner import Session
    from shardproof.registry import preflight
    from shardproof.shrink.search import Limits

    if how.output is not None and len(cases) == 1:
        why = "is a folder" if how.output.is_dir() else why_not_writable(how.output)
        if why or how.output.suffix == ".py":
            what = f"--output: {why or 'the script is written there'}"
            raise SelectionError(Problem(what, "name a YAML file to write", str(how.output)))
    preflight.check({case.implementation for case in cases})
    cases = preflight.with_found_traits(cases)
    done: list[Written] = []
    errors: list[SelectionError] = []
    stopped = False
    with Session(how.jobs or cores()) as session:
        for case in cases:
            file = how.output if how.output and len(cases) == 1 else _file(case, folder, how)
            try:
                done.append(_one(session, case, file, how, Limits(how.budget, how.max_runs)))
            except SelectionError as error:
                errors.append(error)
            except KeyboardInterrupt:  # while the first run or the script was under way
                stopped = True
            stopped = stopped or (bool(done) and done[-1].shrunk.stopped == "Ctrl-C")
            if stopped:
                break
    if not done and errors and not stopped:
        raise SelectionError([problem for error in errors[:3] for problem in error.problems])
    _tell(done, len(errors), how)
    if stopped:
        return verdicts.INTERRUPTED
    # Of a run every case failed before; of a scenario those that pass are left out.
    whole = not (errors and folder != Path(FOLDER))
    whole = whole and all(one.fails_again and not one.shrunk.stopped for one in done)
    return verdicts.HELD if whole else verdicts.NOT_DECIDED


def _file(case: Case, folder: Path, how: HowShrunk) -> Path:
    from shardproof.shrink.written import name_of

    return (how.output or folder) / f"{name_of(case)}.yaml"


def _one(session: Session, case: Case, file: Path, how: HowShrunk, limits: Limits) -> Written:
    """Shrink one case, and write what is left of it.

    :raises SelectionError: it does not fail.
    """
    from shardproof.scenarios.vocabulary import installed
    from shardproof.shrink import scripts, written
    from shardproof.shrink.search import Shrinker

    vocabulary = installed()
    shrinker = Shrinker(session, vocabulary, limits, _progress(how))
    if how.progress:
        echo(f"shrinking {case.id}", err=True)
    shrunk = shrinker.shrink(case)
    written.write(shrunk, file)
    if shrunk.stopped == "Ctrl-C":
        return written.Written(shrunk, file, fails_again=True)
    again = written.fails_again(shrinker, shrunk, file, vocabulary)
    result = written.Written(shrunk, file, again)
    if not (how.script and again and scripts.is_upstream(case.implementation)):
        return result
    script, why = scripts.write(shrunk, file.with_suffix(".py"))
    return replace(result, script=script, why_none=why)


def _progress(how: HowShrunk) -> Callable[[Shrunk], None]:
    """Prints each reduction that holds."""

    def tell(shrunk: Shrunk) -> None:
        if how.progress:
            best = shrunk.best
            size = f"{number(best.world, 'rank')}, {number(best.steps, 'step')}"
            echo(f"  {shrunk.kept[-1]} reduced: {size} ({shrunk.tried} attempts)", err=True)

    return tell


def _tell(done: Sequence[Written], passed: int, how: HowShrunk) -> None:
    """Print a row for each case, and the commands that run their files."""
    rows = []
    for one in done:
        before, after = one.shrunk.case, one.shrunk.best
        script = str(one.script) if one.script else one.why_none or "-"
        state = one.shrunk.stopped or ("fails again" if one.fails_again else "does not fail again")
        sizes = f"{before.world} -> {after.world}", f"{before.steps} -> {after.steps}"
        rows.append(
            (before.id, str(one.shrunk.cause), *sizes, str(one.shrunk.tried), state, script)
        )
    headings = ("case", "cause", "ranks", "steps", "attempts", "ended", "script")
    table = Table("Shrunk cases", headings, rows, align="llrrrll")
    if rows and not how.quiet:
        make_console().print(table)
    if passed:
        echo(f"{number(passed, 'case')} skipped: they do not fail, or no file can have them")
    for one in done:
        echo(one.command)
