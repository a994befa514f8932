"""The command ``shardproof``: what people type.  Each command has a file of its own.

Heavy imports wait until a command needs them.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from shardproof import VERSION, verdicts, wings
from shardproof.commands import (
    compare,
    evidence,
    list,
    mutants,
    options,
    run,
    scenario_files,
)
from shardproof.commands.console import echo, mute
from shardproof.commands.group import FIRST, Commands
from shardproof.errors import InputError, MachineError, Problem
from shardproof.files import UNWRITABLE

#: Help texts are laid out here, so click must not fill their lines again (``\b``).
_HELP = """When training is split over many ranks, does anything other than the cost change?

Test implementations of distributed training: their numbers must equal those of one process,
and their bytes must equal the promised bytes. Planted faults prove that the checks can fail.

\b
shardproof run                                   the quick conformance matrix
shardproof run -k "reference/ddp and gloo"       a part of it
shardproof run ddp-gpt --impl mine:MyDDP         judge your own class
shardproof run --resume --results results/RUN    resume the run in this folder
shardproof list cases                            cases that can be run
shardproof run --shard 1/4                       part 1 of 4: see `merge`
shardproof mutants                               prove that checks can fail
shardproof compare RUN RUN                       what differs between runs
shardproof gate RUN --against BASELINE           fail CI on regressions
{examples}

\b
Exit codes: 0 all checks passed
            1 a fail, unexpected pass, hang or crash; a planted fault survives
            2 bad input, a selection that matches nothing, or a full disk
            3 undecided, or nothing was judged
          130 Ctrl-C, SIGTERM or SIGHUP
"""

app = typer.Typer(
    name="shardproof",
    cls=Commands,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help=_HELP.format(examples="\n".join(line for wing in wings.wings() for line in wing.examples)),
)

#: Name -> a command, and how the list of commands describes it; empty: by its first sentence.
_COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "run": (run.run, ""),
    "list": (list.list_, ""),
    "check-scenario": (scenario_files.check_scenario, "Check scenario files."),
    "schema": (scenario_files.schema, ""),
    "mutants": (mutants.mutants, "Plant each fault; its check must catch the fault."),
    "report": (evidence.report, ""),
    "verify": (evidence.verify, "Judge a run again from its records."),
    "merge": (evidence.merge, "Merge the parts of a selection into one run."),
    "bundle": (evidence.bundle, "Pack a run into one archive that verify accepts anywhere."),
    "compare": (compare.compare, "Show the differences between runs."),
    "gate": (compare.gate, "Check a run against a baseline and a policy."),
}
for name, (command, about) in _COMMANDS.items():
    app.command(name, short_help=about or None)(command)
for wing in wings.wings():
    wing.add_commands(app)


def _version(wanted: bool) -> None:
    if wanted:
        echo(f"shardproof {VERSION}")
        raise typer.Exit


@app.callback()
def _top(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    """Options before the command."""
    if context.invoked_subcommand is None:
        echo(
            FIRST.format(
                more="\n".join(f"  {line}" for wing in wings.wings() for line in wing.first)
            )
        )


def main(command: typer.Typer = app) -> None:
    """Run ``command`` with this process's arguments; faults of input become one line each and exit
    code 2.
    """
    try:
        _open_streams()
        if sys.argv[1:2] == ["list"]:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `list cases | head` is no failure
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # file names may hold what is no text
        # Results are many objects without cycles: looked through every 700 new ones, they took a
        # fifth of this process's time.
        gc.set_threshold(100_000)
        sys.exit(command(standalone_mode=False))
    except options.NOT_UNDERSTOOD as error:
        message = io.StringIO()
        error.show(message)  # it repeats words that may hold control characters
        echo(message.getvalue(), err=True, nl=False)
        sys.exit(verdicts.BAD_INPUT)
    except InputError as error:
        for problem in error.problems:
            echo(str(problem), err=True)
        sys.exit(verdicts.BAD_INPUT)
    except MachineError as error:
        echo(f"precondition: {error}", err=True)
        sys.exit(verdicts.NOT_DECIDED)
    except (KeyboardInterrupt, typer.Abort):  # which click makes of it
        sys.exit(verdicts.INTERRUPTED)
    except OSError as error:
        if error.errno not in (errno.EPIPE, *UNWRITABLE):
            raise
        if error.filename is None:
            mute(sys.stdout)  # its disk is full, or the reader of the pipe went away (`| head`)
        if error.errno == errno.EPIPE:
            sys.exit(verdicts.HELD)
        where = str(error.filename or "standard output")
        remedy = "free space there, or name another place"
        with suppress(OSError):  # there is no room on standard error either
            echo(str(Problem(str(error.strerror), remedy, file=where)), err=True)
        sys.exit(verdicts.BAD_INPUT)


def _open_streams() -> None:
    """Where the caller closed a standard stream: nothing is read, and what is written is lost.

    In this order, so that each gets its own number and no file of a run does.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
