"""The commands about evidence and this machine: ``verify``, ``bundle``, ``badges``, ``doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardproof import verdicts
from shardproof.commands import options
from shardproof.commands.console import echo


def verify(run: options.Run = None) -> None:
    """Judge a run again from its records, and check that nothing is missing or changed.

    RUN may be an archive that `shardproof bundle` made: it is unpacked into a temporary folder,
    after a look at what it holds, and needs nothing else of the machine that it came from.

    Ends with exit code 1 and a sentence that names the case and the file if a planned case is
    missing, a byte was changed, or a record gives another verdict; with 2 if an archive is damaged
    or not safe to unpack; with 3 if nothing was judged.

    \b
    shardproof verify
    shardproof verify results/20260102-030405
    shardproof verify 20260102-030405.tar.gz
    """
    from shardproof.commands import supervision
    from shardproof.commands.verify import verify as verify_run
    from shardproof.commands.verify import verify_archive
    from shardproof.runs.bundle.unpacking import notes
    from shardproof.runs.run_folder import find_run

    if run is not None and Path(run).is_file():
        verified, listing = verify_archive(Path(run))
        about = notes(listing)
    else:
        verified, about = verify_run(find_run(run, supervision.RESULTS)), ()
    for text in (*verified.problems, *about, verified.sentence()):
        echo(text)
    if verified.problems:
        raise typer.Exit(verdicts.BROKEN)
    timed = verified.benches + verified.scalings + verified.collectives
    judged = verified.cases + verified.kills + timed
    raise typer.Exit(verdicts.HELD if judged else verdicts.NOT_DECIDED)


def bundle(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="run folder or id (default: the newest)")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="default: <run-id>.tar.gz here"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace FILE if it is there")] = False,
) -> None:
    """Pack a run into one archive that `shardproof verify` accepts on another machine.

    Holds what verdicts are made of (records, raw times, the lines of all cases, the manifest) and
    the reports, with a digest of it all; names what it leaves out (logs of clusters). The same run
    gives the same bytes. Needed to verify: this archive and shardproof, with any torch it runs on.
    Names and times of files are not packed, but what the run recorded is: its commands, and paths
    in messages of failures.

    Ends with exit code 2, and writes nothing, if the run is not what its manifest says.

    \b
    shardproof bundle
    shardproof bundle results/20260102-030405 --output evidence.tar.gz
    shardproof verify evidence.tar.gz
    """
    from shardproof.commands import supervision
    from shardproof.runs.bundle.packing import pack
    from shardproof.runs.bundle.unpacking import notes
    from shardproof.runs.integrity import damage_is_bad_input
    from shardproof.runs.run_folder import find_run

    folder = find_run(run, supervision.RESULTS)
    with damage_is_bad_input(folder):
        reports = _reports(folder)
    packed = pack(folder, output, reports, force)
    listing = packed.listing
    echo(
        f"{packed.path}: {len(listing.members)} files of {listing.bytes / 1e6:.1f} MB "
        f"in {packed.bytes / 1e6:.1f} MB"
    )
    for text in notes(listing):
        echo(text)
    for name in listing.left_out:
        echo(f"left out: {name}")


def _reports(folder: Path) -> dict[str, str]:
    """The reports that a run lacks (it was killed, or is older than they are)."""
    from dataclasses import replace

    from shardproof import report
    from shardproof.runs import junit
    from shardproof.runs.run_folder import read

    run = read(folder)
    run = replace(run, path=run.path.parent / run.name)
    makers = {"report.html": report.html, "report.md": report.document, "junit.xml": junit.document}
    return {name: make(run) for name, make in makers.items() if not (folder / name).exists()}


def badges(
    run: options.Run = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="where the badges go")
    ] = Path("badges"),
) -> None:
    """Draw a run's verdicts as SVG badges: strategy x backend x capability, and one overall.

    Files are named `reference-zero3_gloo_checkpoint.svg`; `overall.svg` counts every case once;
    `badges.md` has all of them as Markdown to cut from. Green is only what was judged and
    passed, every case of it; `working precision only` passed in that lane and nowhere else; `open`
    is undecided. Colours are told apart without seeing hues, and the words say the same.

    Badges of before in FOLDER are replaced, other files stay. Ends with exit code 2, and draws
    nothing, if the run is not what its manifest says.

    \b
    shardproof badges
    shardproof badges results/20260102-030405 --output docs/badges
    shardproof badges 20260102-030405.tar.gz
    """
    from shardproof.commands import supervision
    from shardproof.report import badges as drawing
    from shardproof.runs.bundle.unpacking import open_run
    from shardproof.runs.integrity import require_unchanged
    from shardproof.runs.run_folder import read

    with open_run(run, supervision.RESULTS) as folder:
        require_unchanged(folder)
        names = drawing.write(read(folder), output)
    echo(f"{output}: {len(names)} badges, see {output / drawing.INDEX}")


def doctor() -> None:
    """Look for what would make runs fail or mislead here, and say what to do about it.

    Exit code 0: ready; 3: something has to be done first.
    """
    from shardproof.commands import supervision
    from shardproof.commands.doctor import examine

    ready = True
    for finding in examine(supervision.RESULTS):
        ready = ready and finding.state != "bad"
        echo(f"{finding.state:4}  {finding.what}: {finding.found}")
        if finding.remedy:
            echo(f"      -> {finding.remedy}")
    raise typer.Exit(verdicts.HELD if ready else verdicts.NOT_DECIDED)
