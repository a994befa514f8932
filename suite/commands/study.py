"""``shardproof study NAME``: measures of the suite itself, whose results become evidence."""

from __future__ import annotations

from typing import Annotated

import typer

from shardproof import verdicts
from shardproof.commands import options, run
from shardproof.launch.process_control import cores

studies = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="""Measure the suite itself: false alarms, thresholds, its own cost, its models.

    \b
    shardproof study campaign 1000 --seed 7     random clean cases: does any fail?
    shardproof study calibrate                  clean errors beside the thresholds
    shardproof study overhead                   what the suite costs a training step
    """,
)


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``; ``calibrate`` was one of its own until 0.2."""
    app.add_typer(studies, name="study", short_help="Measure the suite itself.")
    app.command("calibrate", hidden=True)(calibrate_by_its_old_name)


@studies.command()
def campaign(
    count: Annotated[int, typer.Argument(metavar="N", min=1, max=100_000)],
    impl: options.Impl = None,
    seed: options.Seed = None,
    budget: options.Budget = None,
    jobs: options.Jobs = None,
    results: options.Results = None,
) -> None:
    """Judge N random clean cases; one that fails is a false alarm. Same as `run --campaign N`.

    \b
    shardproof study campaign 200 --seed 7
    shardproof study campaign 50 --impl '*/fsdp*'
    """
    from shardproof.studies.campaign import first_cases

    run.run_and_exit(first_cases(count, seed or 0, impl or ()), budget, jobs, results)


@studies.command(short_help="Measure clean runs beside the thresholds.")
def calibrate(
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="N", min=1, help="clean runs of each dtype")
    ] = 30,
    jobs: options.Jobs = None,
) -> None:
    """Measure the errors of clean runs and write them beside the thresholds.

    Writes suite/checks/calibration.json. Ends with exit code 1 if a threshold was raised above
    policy, or if twice the clean maximum is above it.
    """
    from shardproof.commands.console import make_console, print_line
    from shardproof.studies import calibrate as measuring

    console = make_console()
    record = measuring.measure(seeds, jobs or cores(), console.print)
    measuring.write(record)
    wrong = measuring.problems(record, measuring.thresholds())
    for line in [*measuring.lines(record), *wrong]:
        print_line(console, line)
    raise typer.Exit(verdicts.BROKEN if wrong else verdicts.HELD)


def calibrate_by_its_old_name(seeds: int = 30, jobs: options.Jobs = None) -> None:
    """Old name of `shardproof study calibrate`."""
    typer.echo("`shardproof calibrate` is now `shardproof study calibrate`", err=True)
    calibrate(seeds, jobs)


@studies.command()
def overhead() -> None:
    """Measure the suite's own cost of a step, of a small all-reduce, and of making schedules."""
    from shardproof.studies.overhead import sentences

    for sentence in sentences():
        typer.echo(sentence)
