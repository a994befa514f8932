"""Groups of options: dataclasses whose fields typer sees as options of a command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.testing import CliRunner

from shardproof.commands import options


@dataclass(frozen=True, kw_only=True)
class Place:
    nodes: Annotated[int, typer.Option("--nodes", min=1)] = 2


@dataclass(frozen=True, kw_only=True)
class Sizes(Place):
    sizes: Annotated[list[str] | None, typer.Option("--bytes")] = None


def called(*words: str) -> tuple[int, list[Any]]:
    seen: list[Any] = []
    app = typer.Typer()

    @app.command()
    @options.grouped(nodes=3)
    def command(
        context: typer.Context,
        names: Annotated[list[str] | None, typer.Argument()] = None,
        *,
        sizes: Sizes,
    ) -> None:
        seen.extend([names, sizes, options.given(context)])

    return CliRunner().invoke(app, [*words]).exit_code, seen


def test_a_command_is_called_with_its_groups() -> None:
    assert called("a", "--bytes", "4", "--nodes", "5") == (
        0,
        [["a"], Sizes(nodes=5, sizes=["4"]), {"names": ["a"], "--bytes": ["4"], "--nodes": 5}],
    )


def test_defaults_are_those_of_the_fields_or_of_the_command() -> None:
    assert called() == (0, [None, Sizes(nodes=3, sizes=None), {}])


def test_a_field_is_checked_like_a_parameter() -> None:
    code, seen = called("--nodes", "0")
    assert code == 2 and not seen
