"""The additions of this wing to the core: ``shardproof estimate``, and files of claims."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.wings import FileKind, Wing

if TYPE_CHECKING:
    import typer


def _model() -> type[Any]:
    from shardproof.estimate.claims import ClaimFile

    return ClaimFile


def _summary(path: Path) -> str:
    from shardproof.estimate.claims import read

    claim = read(path)
    return f"claim {claim.file.claim}, {claim.verdict()}"


def _run(paths: Sequence[Path], session: Any, how: Any) -> int:
    from shardproof.estimate.claims import run

    return run(paths, session, how)


class Estimates(Wing):
    """Memory and traffic of training, by closed formulas."""

    examples = (
        "shardproof estimate 7b --gpus 64 --memory 80GB             does it fit, and what is sent",
    )
    file_kinds = (
        FileKind("claim", "claim", "shardproof run", "put to the test", _model, _summary, _run),
    )
    first = ("shardproof estimate 7b --gpus 8              memory before you train",)

    def add_commands(self, app: typer.Typer) -> None:
        """Add ``estimate``."""
        from shardproof.estimate import command

        short = "Compute the bytes that training holds and sends; nothing runs."
        app.command("estimate", short_help=short)(command.estimate)


WING = Estimates()
