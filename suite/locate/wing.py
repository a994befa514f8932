"""The contribution of this wing: the command ``shardproof locate``."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shardproof.wings import Wing

if TYPE_CHECKING:
    import typer


class Locate(Wing):
    """The first difference of a failing case."""

    examples = ("shardproof locate CASE                           the line where it goes wrong",)

    def hints(self, failure: Any) -> Iterable[str]:
        """The command that locates what failed, where it is a training compared with an oracle."""
        from shardproof.backends import BACKENDS
        from shardproof.cases import kinds

        result = failure.result if failure.verdict == "fail" else None
        if (
            result is not None
            and kinds.of(result.case.workload).trains
            and BACKENDS[result.case.backend].has_values
        ):
            yield f"locate: shardproof locate {shlex.quote(failure.id)}"

    def add_commands(self, app: typer.Typer) -> None:
        """Add ``locate``."""
        from shardproof.locate import command

        short = "Find the line where a failing case first differs from the oracle."
        app.command("locate", short_help=short)(command.locate)


WING = Locate()
