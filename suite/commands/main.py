"""The command ``shardproof``: what people touch.  Heavy imports wait until a command needs them."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardproof import verdicts
from shardproof.commands import bench, bench_tables, compare, evidence
from shardproof.errors import InputError, Problem, SelectionError
from shardproof.launch.process_control import cores
from shardproof.version import VERSION

if TYPE_CHECKING:
    from shardproof.runs.run_folder import Run
    from shardproof.scenarios.selection import Selection

#: Help texts are laid out here, so click must not fill their lines again (``\b``).
app = typer.Typer(
    name="shardproof",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="""Does splitting the training over many ranks change nothing but the cost?

    Judges implementations of distributed training: same numbers as one process, promised bytes,
    and planted faults that the checks must catch.

    \b
    shardproof run                                             the quick conformance matrix
    shardproof run -k "reference/ddp and gloo and replicate3"  a part of it
    shardproof run ddp-gpt --impl mine:MyDDP                   judge your own class
    shardproof run --resume --results results/RUN              go on with that run
    shardproof list cases                                      what there is to run
    shardproof mutants                                         prove that the checks can fail
    shardproof bench reference/ddp pytorch/ddp --size 20m      which is faster here, if any
    shardproof compare RUN RUN                                 what differs between runs
    shardproof gate RUN --against BASELINE                     may that pass?

    \b
    Exit codes: 0 all held
                1 a fail, unexpected pass, hang or crash; a planted fault that survives
                2 bad input, or a selection that matches nothing
                3 undecided, or nothing was judged
              130 Ctrl-C
    """,
)


evidence.register(app)
bench.register(app)
compare.register(app)


class TierChoice(StrEnum):
    """Tiers as options."""

    quick = "quick"
    full = "full"


class What(StrEnum):
    """What ``list`` can list."""

    impls = "impls"
    backends = "backends"
    scenarios = "scenarios"
    cases = "cases"
    mutants = "mutants"
    checks = "checks"
    traits = "traits"


class Format(StrEnum):
    """Forms of a report."""

    table = "table"
    markdown = "markdown"
    html = "html"


Scenarios = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCENARIO",
        help="files, folders, scenario names or case ids (default: scenarios/conformance)",
    ),
]
Impl = Annotated[
    list[str] | None,
    typer.Option("--impl", metavar="P", help="glob on implementations, or package.module:Class"),
]
BackendOption = Annotated[
    list[str] | None, typer.Option("--backend", metavar="B", help="where ranks talk")
]
World = Annotated[list[int] | None, typer.Option("--world", metavar="N", help="number of ranks")]
Expression = Annotated[
    str,
    typer.Option(
        "-k", metavar="EXPR", help="words of case ids with and, or, not, ( ): pytest's -k"
    ),
]
Tier = Annotated[TierChoice, typer.Option("--tier", help="full: the quick cases and all others")]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", metavar="S", min=0, max=2**31 - 1, help="another seed for every workload"
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        "--budget", metavar="MIN", min=0.01, help="minutes; what does not fit is left out and named"
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option("-j", metavar="JOBS", min=1, max=256, help="cases at once (default: cores)"),
]
Results = Annotated[
    Path | None,
    typer.Option("--results", metavar="RUN_FOLDER", help="write into this run folder, new or old"),
]


@app.command()
def run(
    context: typer.Context,
    scenarios: Scenarios = None,
    impl: Impl = None,
    backend: BackendOption = None,
    world: World = None,
    expression: Expression = "",
    tier: Tier = TierChoice.quick,
    budget: Budget = None,
    jobs: Jobs = None,
    results: Results = None,
    seed: Seed = None,
    campaign: Annotated[
        int | None,
        typer.Option(
            "--campaign", metavar="N", min=1, max=100_000, help="N random clean cases from --seed"
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="go on with the run of --results (default: the newest): what is left"
        ),
    ] = False,
    rerun_failed: Annotated[
        bool, typer.Option("--rerun-failed", help="the same run again: what did not hold")
    ] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="write JUnit XML there, too")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what would run, and run nothing")
    ] = False,
) -> None:
    """Run cases and judge them.

    \b
    shardproof run                                      quick conformance
    shardproof run scenarios/conformance --tier full    everything
    shardproof run ddp-gpt --backend gloo --world 4     one part
    shardproof run --impl 'pytorch/*' -k 'adamw and not noclip'
    shardproof run ddp-gpt --impl mine:MyDDP            a class of your own, in every cell
    shardproof run --campaign 200 --seed 7              look for false alarms
    shardproof run --campaign 50 --impl '*/fsdp*'       in a part of the systems
    shardproof run --resume                             go on after a kill, Ctrl-C or a full disk
    shardproof run --resume --results results/RUN       with that run, not with the newest
    shardproof run --rerun-failed --backend gloo        a part of what did not hold

    With --resume and --rerun-failed nothing is run but what that run had planned: filters choose
    among it, and what was not planned is refused.

    A case id, whole, selects that case: as SCENARIO or after -k. The folder results/RUN holds the
    evidence: run.json, cases.jsonl, records/, report.html, junit.xml; `verify` judges it again.
    """
    from shardproof.commands import execution
    from shardproof.registry import preflight
    from shardproof.runs.run_folder import Durations
    from shardproof.scenarios.budget import plan

    kept: list[dict[str, Any]] = []
    if resume and rerun_failed:
        remedy = "give one: --resume runs what has no result, --rerun-failed what did not hold"
        raise SelectionError(Problem("--resume and --rerun-failed exclude each other", remedy))
    for name in scenarios or ():
        if (Path(name) / "run.json").is_file():
            remedy = f"a run is named by --results {name}, beside --resume or --rerun-failed"
            raise SelectionError(Problem("a run is no scenario", remedy, name))
    if campaign is not None:
        given = {
            "SCENARIO": scenarios,
            "--backend": backend,
            "--world": world,
            "-k": expression,
            "--resume": resume,
            "--rerun-failed": rerun_failed,
        }
        clash = next((name for name, value in given.items() if value), "")
        if clash:
            what = "--campaign draws its own cases"
            raise SelectionError(Problem(what, f"leave out {clash}", str(campaign)))
        from shardproof.studies.campaign import first_cases

        cases = first_cases(campaign, seed or 0, impl or ())
    elif scenarios == ["campaign"] and not (resume or rerun_failed):
        from shardproof.studies.campaign import by_id

        drawn = by_id((expression or "").strip())
        if drawn is None:
            remedy = "give the whole id of one of its cases after -k"
            raise SelectionError(Problem("no case of a campaign", remedy, expression or ""))
        cases = [drawn]
    else:
        selection = _selection(scenarios, impl, backend, world, expression, tier, seed)
        if resume or rerun_failed:
            from shardproof.runs.integrity import damage_is_bad_input
            from shardproof.runs.resume import split
            from shardproof.runs.run_folder import find_run

            source = context.get_parameter_source("tier")
            if source is not None and source.name == "DEFAULT":
                selection = replace(selection, tier="")
            results = find_run(str(results) if results is not None else None, execution.RESULTS)
            with damage_is_bad_input(results):
                cases, kept = split(results, selection.within, rerun_failed)
        else:
            from shardproof.scenarios.vocabulary import installed

            cases = selection.cases(installed())
    preflight.check_cases(cases)
    root = results.parent if results is not None else execution.RESULTS
    durations = Durations(root / "durations.json")
    workers = jobs or cores()
    planned = plan(cases, durations, workers, budget)
    if dry_run:
        for case in planned.chosen:
            typer.echo(case.id)
        told = f"{len(planned.chosen)} cases, about {planned.seconds:.0f} s"
        if not planned.chosen:
            told = "nothing to run" + ("" if cases else f": {len(kept)} results are there")
        left_out = f", {len(planned.left_out)} left out by the budget" if planned.left_out else ""
        typer.echo(f"{told}{left_out}", err=True)
        return
    with execution.open_folder(results) as folder:
        raise typer.Exit(
            execution.execute(folder, planned, workers, budget, durations, kept, junit)
        )


@app.command(short_help="Plant every fault and see its check catch it.")
def mutants(
    impl: Annotated[
        list[str] | None,
        typer.Option("--impl", metavar="P", help="glob on faults or their parents"),
    ] = None,
    tier: Annotated[
        TierChoice, typer.Option("--tier", help="quick: what the budget leaves out is no failure")
    ] = TierChoice.full,
    budget: Budget = None,
    jobs: Jobs = None,
    results: Results = None,
) -> None:
    """Plant every fault: its named check must fail while the parent passes the same case.

    Prints the kill matrix, fault x check. A survivor ends with exit code 1.

    \b
    shardproof mutants
    shardproof mutants --impl reference/ddp        faults of one parent
    shardproof mutants --impl 'ddp_*bucket*'
    """
    from shardproof.commands import execution

    chosen = execution.choose_mutants(impl or ["*"])
    with execution.open_folder(results) as folder:
        workers, all_must_run = jobs or cores(), tier is TierChoice.full
        raise typer.Exit(execution.execute_mutants(folder, chosen, workers, budget, all_must_run))


@app.command(short_help="Measure clean runs beside the thresholds.")
def calibrate(
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="N", min=1, help="clean runs of each dtype")
    ] = 30,
    jobs: Jobs = None,
) -> None:
    """Measure the errors of clean runs and write them beside the thresholds.

    Writes suite/checks/calibration.json. Ends with exit code 1 if a threshold was raised above
    policy, or if twice the clean maximum is above it.
    """
    from shardproof import verdicts
    from shardproof.commands import execution
    from shardproof.studies import calibrate as measuring

    console = execution.make_console()
    record = measuring.measure(seeds, jobs or cores(), console.print)
    measuring.write(record)
    wrong = measuring.problems(record, measuring.thresholds())
    for line in [*measuring.lines(record), *wrong]:
        execution.tell(console, line)
    raise typer.Exit(verdicts.BROKEN if wrong else verdicts.HELD)


@app.command("list")
def list_(
    what: Annotated[What, typer.Argument(help="what to list")],
    scenarios: Scenarios = None,
    impl: Impl = None,
    backend: BackendOption = None,
    world: World = None,
    expression: Expression = "",
    tier: Tier = TierChoice.full,
    seed: Seed = None,
) -> None:
    """List what there is. Piped, one full name a line; the filters of `run` apply to cases.

    \b
    shardproof list impls
    shardproof list cases --tier quick -k 'tied and gloo'
    shardproof list traits
    """
    if what is What.cases:
        from shardproof.scenarios.vocabulary import installed

        selection = _selection(scenarios, impl, backend, world, expression, tier, seed)
        rows = [(case.id, "") for case in selection.cases(installed())]
    elif scenarios or impl or backend or world or expression or seed is not None:
        raise SelectionError(
            Problem("filters belong to `list cases`", "leave them out", what.value)
        )
    else:
        from shardproof.commands.catalogue import LISTS

        rows = LISTS[what.value]()
    width = max((len(name) for name, about in rows if about), default=0)
    for name, about in rows:
        typer.echo(f"{name:{width}}  {about}".rstrip() if sys.stdout.isatty() else name)


@app.command("check-scenario", short_help="Check scenario files.")
def check_scenario(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="scenario files")],
) -> None:
    """Check scenario files, timed ones too: every fault with its file, line, value and remedy.

    \b
    shardproof check-scenario scenarios/conformance/*.yaml
    shardproof check-scenario scenarios/scaling/strong.yaml
    """
    from shardproof.scenarios.load import load, load_all, timed
    from shardproof.scenarios.matrix import expand
    from shardproof.scenarios.vocabulary import installed

    problems: list[Problem] = []
    good: list[Path] = []
    for path in files:
        try:
            if kind := timed(path):
                typer.echo(_timed(path, kind))
                continue
            file = load(path)
            cases = expand(file, installed())
        except InputError as error:
            problems += error.problems
            continue
        good.append(path)
        quick = sum(case.tier == "quick" for case in cases)
        typer.echo(f"{file.file}: {file.name}, {len(cases)} cases, {quick} of them quick")
    try:
        load_all(good)
    except InputError as error:
        problems += error.problems
    if problems:
        raise InputError(problems)


def _timed(path: Path, kind: str) -> str:
    """What a timed scenario without faults holds."""
    if kind == "speed":
        from shardproof.bench.sides import read

        return f"{path}: {len(read([str(path)]))} pairs, for `shardproof bench`"
    from shardproof.bench.scaling import matrix

    cells = matrix.read([path])
    return f"{path}: {cells[0].name}, {len(cells)} cells, for `shardproof bench`"


class Shape(StrEnum):
    """Shapes of scenario files."""

    scenario = "scenario"
    speed = "speed"
    scaling = "scaling"


@app.command()
def schema(
    shape: Annotated[
        Shape, typer.Argument(metavar="SHAPE", help="scenario, or one for `bench`: speed, scaling")
    ] = Shape.scenario,
) -> None:
    """Print the JSON Schema of scenario files, for editors.

    \b
    shardproof schema > scenario.schema.json
    shardproof schema scaling > scaling.schema.json
    """
    from shardproof.scenarios.schema import Model, Scenario, json_schema

    model: type[Model] = Scenario
    if shape is Shape.speed:
        from shardproof.bench.sides import SpeedScenario

        model = SpeedScenario
    elif shape is Shape.scaling:
        from shardproof.bench.scaling.matrix import ScalingScenario

        model = ScalingScenario
    typer.echo(json.dumps(json_schema(model, shape.value), indent=2))


@app.command()
def report(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="run folder, id or bundle (default: the newest)"),
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="form of the report")] = Format.table,
    into: Annotated[
        Path | None,
        typer.Option("--into", metavar="FILE", help="put the Markdown between FILE's markers"),
    ] = None,
) -> None:
    """Show a run again, on the terminal or as a file's text on standard output.

    \b
    shardproof report
    shardproof report 20260102-030405 --format markdown
    shardproof report 20260102-030405.tar.gz --format html > report.html
    shardproof report --into README.md
    """
    from shardproof.commands import execution
    from shardproof.runs.bundle import open_run
    from shardproof.runs.integrity import damage_is_bad_input, require_unchanged
    from shardproof.runs.run_folder import read

    with open_run(run, execution.RESULTS) as path, damage_is_bad_input(path):
        if into is not None:
            require_unchanged(path)
        _report(read(path), form, into)


def _report(found: Run, form: Format, into: Path | None) -> None:
    from shardproof import report as reports
    from shardproof.bench import peers, tables
    from shardproof.bench.scaling import tables as scaling_tables
    from shardproof.commands import execution

    if into is not None:
        if form is Format.html:
            raise SelectionError(Problem("--into takes Markdown", "leave out --format", form.value))
        beside = bool(peers.lines_of(found))
        missing = peers.missing(found) if beside else []
        if not found.cases and (missing or not beside):
            why = "--into: nothing to put there" + (f": {peers.why_not(missing)}" * bool(missing))
            remedy = "name a run of cases, or of the whole `shardproof bench peers`"
            raise SelectionError(Problem(why, remedy, found.path.name))
        if found.cases:
            reports.insert(reports.markdown(found), into)
            typer.echo(f"{into}: table of run {found.path.name}")
        if missing:
            typer.echo(f"{into}: its table of peers stays: {peers.why_not(missing)}")
        elif beside:
            reports.insert(peers.section(found), into, peers.BEGIN, peers.END)
            typer.echo(f"{into}: reference beside upstream systems, run {found.path.name}")
    elif form is Format.markdown:
        timed = [
            *([tables.table(found.benches).markdown()] if found.benches else []),
            *([scaling_tables.markdown(found.scalings)] if found.scalings else []),
        ]
        judged = [reports.markdown(found)] if found.cases or not timed else []
        typer.echo("\n".join([*judged, *timed]), nl=False)
    elif form is Format.html:
        typer.echo(reports.html(found), nl=False)
    else:
        console = execution.make_console()
        if found.cases:
            reports.show(found.cases, console.print)
            reports.show_memory(found.cases, console.print)
            reports.show_bubbles(found.cases, console.print)
        if found.kills:
            reports.show_kills(found.kills, console.print)
        bench_tables.show_pairs(found.benches, console)
        bench_tables.show_cells(found.scalings, console)
        if found.cases or not (found.benches or found.scalings):
            execution.tell(console, reports.closing(found))


def _selection(
    scenarios: list[str] | None,
    impl: list[str] | None,
    backend: list[str] | None,
    world: list[int] | None,
    expression: str,
    tier: TierChoice,
    seed: int | None,
) -> Selection:
    from shardproof.scenarios.selection import Selection

    return Selection(
        scenarios=scenarios or (),
        implementations=impl or (),
        backends=backend or (),
        worlds=world or (),
        expression=expression,
        tier=tier.value,
        seed=seed,
    )


@app.command(
    short_help="Run a scenario on several containers.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def cluster(context: typer.Context) -> None:
    """Run a scenario on several containers and compare with local processes."""
    from shardproof.multinode.cluster import main as run_cluster

    raise typer.Exit(run_cluster(context.args))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardproof {VERSION}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """Run the command line; faults of input become one line each and exit code 2."""
    if sys.argv[1:2] == ["list"]:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `list cases | head` is no failure
    try:
        app()
    except InputError as error:
        for problem in error.problems:
            typer.echo(str(problem), err=True)
        sys.exit(verdicts.BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(verdicts.INTERRUPTED)
    except BrokenPipeError:
        # The reader of the pipe went away (`| head`); flushing at exit must not complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(verdicts.HELD)
