"""The command of a tool that puts a run's table into a page, between two markers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from shardproof.errors import InputError
from shardproof.report import insert
from shardproof.runs.integrity import require_unchanged
from shardproof.runs.run_folder import Run, find_run, read


def main(
    tool: str,
    what: str,
    section: Callable[[Run], str],
    markers: tuple[str, str],
    arguments: Sequence[str] | None,
) -> int:
    """Put the ``section`` of a run between the ``markers`` of a page; the exit code.

    It is 2 if the run cannot be read or has no such section, or the page has no markers.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m tools.{tool}", description=f"Put the {what} of a run into a page."
    )
    parser.add_argument("run", metavar="RUN", help="run folder or id")
    parser.add_argument("page", metavar="PAGE", type=Path, help="a page with the markers")
    given = parser.parse_args(arguments)
    try:
        folder = find_run(given.run)
        require_unchanged(folder)
        insert(section(read(folder)), given.page, *markers)
    except InputError as error:
        print(*error.problems, sep="\n", file=sys.stderr)
        return 2
    print(f"{given.page}: {what} of run {folder.name}")
    return 0
