"""What this wing adds to the core: the command ``shardproof cluster``."""

from __future__ import annotations

import typer

from shardproof.wings import Wing


class Cluster(Wing):
    """Ranks on machines of their own: containers, nodes of other launchers, a Ray cluster."""

    examples = (
        "shardproof cluster run ddp-gpt --nodes 2                   on containers as nodes",
    )

    def add_commands(self, app: typer.Typer) -> None:
        """Add ``cluster``."""
        from shardproof.cluster import command

        app.add_typer(
            command.clusters,
            name="cluster",
            short_help="Run on containers of this machine as nodes.",
        )


WING = Cluster()
