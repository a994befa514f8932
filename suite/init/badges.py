"""``shardproof badges``: a run's verdicts as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardproof.commands import options
from shardproof.commands.console import echo
from shardproof.errors import Problem, SelectionError


def badges(
    run: options.Run = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="folder for the badges")
    ] = Path("badges"),
) -> None:
    """Draw a run's verdicts as SVG badges: strategy x backend x capability, and one overall.

    Files are named `reference-zero3_gloo_checkpoint.svg`; `overall.svg` counts every case once;
    `badges.md` has all of them as Markdown to copy from. A badge is green only if every case was
    judged and passed; `working precision only` passed in that lane and nowhere else; `open`
    is undecided. Colours can be distinguished without seeing hues, and the words say the same.

    Older badges in FOLDER are replaced, other files are kept. Ends with exit code 2, and draws
    nothing, if the run does not match its manifest, or ended before all cases had a result.

    \b
    shardproof badges
    shardproof badges results/20260102-030405 --output docs/badges
    shardproof badges 20260102-030405.tar.gz
    """
    from shardproof.init import drawing
    from shardproof.runs.bundle.unpacking import open_run
    from shardproof.runs.integrity import require_unchanged
    from shardproof.runs.run_folder import read

    with open_run(run) as folder:
        require_unchanged(folder)
        found = read(folder)
        if found.gap:
            why = "an unfinished run has no badges"
            raise SelectionError(Problem(why, found.gap, run or str(folder)))
        names = drawing.write(found, output)
    echo(f"{output}: {len(names)} badges, see {output / drawing.INDEX}")
