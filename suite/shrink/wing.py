"""The contribution of this wing: ``shardproof shrink`` and ``run --shrink``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardproof.wings import Wing

if TYPE_CHECKING:
    import typer


class Shrink(Wing):
    """Failing cases, made small."""

    examples = ("shardproof shrink CASE                          a failing case, made small",)

    def add_commands(self, app: typer.Typer) -> None:
        """Add ``shrink``."""
        from shardproof.shrink import command

        short = "Reduce failing cases to the smallest that fail alike."
        app.command("shrink", short_help=short)(command.shrink)

    def shrink(self, run: Path, jobs: int | None, quiet: bool) -> int:
        """Shrink every failed case of ``run``."""
        from shardproof.shrink import command

        return command.of_run(run, jobs, quiet)


WING = Shrink()
