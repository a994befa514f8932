"""``shardproof watch``: a training script under observation."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from shardproof import verdicts
from shardproof.commands import options
from shardproof.commands.console import make_console, print_line
from shardproof.errors import Problem, SelectionError


class ForAScript(TyperCommand):
    """Says of an option that it does not know how the script gets it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As every command.

        :raises SelectionError: an option that is none of this command.
        """
        given = [*args]
        try:
            return super().parse_args(ctx, args)
        except options.NOT_UNDERSTOOD as error:
            option = getattr(error, "option_name", None)
            if option is None:
                raise
            own = [name for param in self.params for name in param.opts]
            near = difflib.get_close_matches(option, own, 1, 0.75)
            script = next((word for word in given if word.endswith(".py")), "train.py")
            what = "this is not an option of shardproof watch"
            remedy = (
                f"{f'did you mean {near[0]}? ' if near else ''}Options of the script stand after "
                f"--: shardproof watch {script} -- {option} ..."
            )
            raise SelectionError(Problem(what, remedy, option)) from None


@dataclass(frozen=True, kw_only=True)
class Watched:
    """How the ranks of a script are started and compared, and where the findings go."""

    nproc: Annotated[
        int, typer.Option("--nproc", metavar="N", min=1, max=1024, help="number of ranks")
    ] = 2
    replicas: Annotated[
        str,
        typer.Option(
            "--replicas",
            metavar="SETS",
            help="sets of ranks that hold the same parameters. One of: 'all' (one set); a number "
            "R (every R consecutive ranks are a set); the sets, such as 0,2/1,3; the mesh, such as "
            "replicate=2,tensor=2 (the sets are then 0,2/1,3) "
            "[default: from the script's wrappers and meshes, else 'all']",
        ),
    ] = ""
    every: Annotated[
        int | None,
        typer.Option(
            "--every",
            metavar="K",
            min=1,
            help="compare every K-th step (default: K is chosen to cost at most 2.5 % of the time)",
        ),
    ] = None
    standstill: Annotated[
        float,
        typer.Option(
            "--standstill",
            metavar="S",
            min=1,
            help="stop all ranks if, for S seconds, no rank computes and no rank enters or leaves "
            "a collective. If a deadlock is certain (every rank waits for another rank), the limit "
            "is 10 seconds, or S if S is smaller",
        ),
    ] = 60.0
    results: Annotated[
        Path | None,
        typer.Option(
            "--results",
            metavar="FOLDER",
            help="a new folder for the findings",
            parser=options.named,
        ),
    ] = None
    judge: Annotated[
        Path | None,
        typer.Option(
            "--judge", metavar="FOLDER", help="judge the records of an earlier run in FOLDER"
        ),
    ] = None

    @property
    def environment(self) -> dict[str, str]:
        """The settings of each rank.

        :raises SelectionError: replica sets that do not fit the ranks.
        """
        variables = {}
        if self.replicas:
            from shardproof.watch import replica_sets

            replica_sets.parse(self.replicas, self.nproc)
            variables["SHARDPROOF_WATCH_REPLICAS"] = self.replicas
        if self.every is not None:
            variables["SHARDPROOF_WATCH_EVERY"] = str(self.every)
        return variables

    def typed(self, script: Sequence[str]) -> list[str]:
        """The command that watches ``script`` once more in this way."""
        words = ["shardproof", "watch", script[0], "--nproc", str(self.nproc)]
        words += ["--replicas", self.replicas] if self.replicas else []
        words += [] if self.every is None else ["--every", str(self.every)]
        return [*words, *(["--", *script[1:]] if script[1:] else [])]


@options.grouped()
def watch(
    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [-- ARGUMENTS]", help="a training script and its arguments"),
    ] = None,
    *,
    how: Watched,
) -> None:
    """Run an unmodified training script on N ranks; report the step at which ranks differ, and why.

    \b
    shardproof watch train.py --nproc 4
    shardproof watch train.py --nproc 4 -- --epochs 3 --lr 0.1   script arguments
    shardproof watch train.py --nproc 8 --replicas 0-3/4-7       two replica sets
    shardproof watch --judge results/20260102-030405-watch       judge an earlier run again

    To use your own torchrun, on one machine or many, put `import shardproof.watch` on the first
    line of the script, or run `torchrun --nproc-per-node 4 -m shardproof.watch train.py`.

    \b
    It finds:
    - parameters that differ between ranks at the start
    - gradients, optimizer state and parameters that differ at a step (checksums of
      their bits at steps 1 to 3, then at every K-th step (--every K), and at the end)
    - learning rates and other hyperparameters that differ between ranks
    - values that are not finite
    - collectives whose order or shape differs between ranks
    - numbers of steps that differ between ranks
    - ranks that die, stop or wait forever, and the script line where each rank is
    It also reports bytes by operation, memory by kind of tensor, and what `watch` could not see.

    `watch` only compares ranks with one another; there is no reference run. It does not find a
    mistake that is the same on all ranks, or a rank that reads the wrong samples
    (DistributedSampler, set_epoch). Without --every, K is chosen so that comparisons cost at most
    2.5 % of the time. docs/watch.md has the details.

    \b
    Exit codes: 0 all compared values are equal
                1 a fault, a crash or a hang
                2 bad input
                3 undecided: nothing was compared, the last step was not
                  compared, or ranks may hold different parts of a model
              130 Ctrl-C
    """
    raise typer.Exit(_judged(how.judge, script) if how.judge is not None else _run(script, how))


def _judged(folder: Path, script: list[str] | None) -> int:
    """Judge what ranks left in ``folder``; the exit code."""
    if script:
        remedy = "leave the script out: --judge starts nothing"
        raise SelectionError(Problem("--judge takes no script", remedy, script[0]))
    if not folder.is_dir():
        raise SelectionError(
            Problem("no such folder", "name a folder that `shardproof watch` wrote", str(folder))
        )
    return _shown(folder)


def _run(script: list[str] | None, how: Watched) -> int:
    """Run ``script`` and judge it; the exit code."""
    from shardproof.commands.supervision import Interrupts

    if not script:
        remedy = "name a script: shardproof watch train.py --nproc 4"
        raise SelectionError(Problem("no script is given", remedy))
    if not Path(script[0]).is_file():
        remedy = "name a Python file; arguments of the script stand after --"
        raise SelectionError(Problem("no such script", remedy, script[0]))
    variables, folder = how.environment, _new(how.results)
    interrupted = False
    with Interrupts():
        try:
            from shardproof.watch import launch  # it takes seconds to import torch
            from shardproof.watch.rank import COMMAND

            variables[COMMAND] = shlex.join(how.typed(script))
            launch.run(script, how.nproc, folder, variables, how.standstill)
        except KeyboardInterrupt:
            interrupted = True
    if interrupted and not any(folder.glob("rank*.json")):
        print_line(make_console(), "interrupted before any rank left a record: nothing is judged")
        return verdicts.INTERRUPTED
    code = _shown(folder)
    return verdicts.INTERRUPTED if interrupted else code


def _new(results: Path | None) -> Path:
    """A new folder for this run.

    :raises SelectionError: it holds something, or cannot be made.
    """
    from shardproof.commands.supervision import RESULTS

    folder = results or RESULTS / f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-watch"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            remedy = "name a new folder: records of two runs are not mixed"
            raise SelectionError(Problem("--results: the folder is not empty", remedy, str(folder)))
    except OSError as error:
        what = f"--results: {error.strerror}"
        raise SelectionError(Problem(what, "name a writable folder", str(folder))) from None
    return folder


def _shown(folder: Path) -> int:
    """Judge ``folder``, show and write the report; the exit code."""
    from shardproof.watch import judge, report

    judged = judge.judge(folder)
    made = report.Report(judged)
    console = make_console()
    report.show(made, console.print)
    report.write(made, folder)
    print_line(console, f"evidence: {folder}")
    return verdicts.exit_code({judged.verdict: 1})
