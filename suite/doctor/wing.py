"""The part of this wing that the core sees: the command ``shardproof doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardproof.wings import Wing

if TYPE_CHECKING:
    import typer


class Doctor(Wing):
    """Whether this machine is ready."""

    first = ("shardproof doctor                            whether this machine is ready",)

    def add_commands(self, app: typer.Typer) -> None:
        """Add ``doctor``."""
        from shardproof.doctor import command

        app.command("doctor", short_help="Check this machine for problems.")(command.doctor)


WING = Doctor()
