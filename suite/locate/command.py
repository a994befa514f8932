"""``shardproof locate``: the line where a failing case first differs from the oracle."""

from __future__ import annotations

import json
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardproof import verdicts
from shardproof.commands import options
from shardproof.commands.console import echo
from shardproof.commands.options import option

if TYPE_CHECKING:
    from shardproof.locate.finding import Finding, Place

#: Frames that are shown of those that led to a line.
_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Of which run a case is, and what is printed."""

    run: str | None = option(
        None, "--run", metavar="RUN", help="the run that has CASE [default: the newest]"
    )
    most: int = option(
        3, "--most", metavar="N", min=1, help="locate at most N failing cases of RUN"
    )
    as_json: bool = option(False, "--json", help="print JSON: a list with one object per case")


@options.grouped()
def locate(
    name: Annotated[
        str, typer.Argument(metavar="CASE|RUN", help="case id, planted fault, or run with failures")
    ],
    expression: options.Expression = "",
    *,
    how: Asked,
) -> None:
    """Find the first difference between a failing case and its oracle.

    The case runs once more here, with a recorder on each rank: operators, calls to process
    groups, and the state at each observation point. From the first tensor that is wrong, the
    search goes back to the operation whose inputs are right and whose result is wrong. The
    output names the operation and its line in the implementation.

    \b
    Exit codes: 0 nothing differs: the case passes
                1 a first difference was found
                2 bad input
                3 a case fails, and the difference could not be placed

    \b
    shardproof locate "bitwise[seed1]::reference/zero2::gloo::..."
    shardproof locate mutants/zero1_all_reduces
    shardproof locate results/RUN -k zero2 --json
    """
    from shardproof.commands.supervision import Interrupts
    from shardproof.locate import asked
    from shardproof.locate.finding import broken
    from shardproof.locate.task import locate_all

    findings: list[Finding] = []
    with Interrupts():
        chosen = asked.cases(name, how.run, expression, how.most)
        for case, found, _ in locate_all(chosen):
            findings.append(broken(case.id, found) if isinstance(found, str) else found)
            if not how.as_json:
                for line in lines(findings[-1]):
                    echo(line)
    if how.as_json:
        echo(json.dumps([found.to_dict() for found in findings], indent=2))
    raise typer.Exit(exit_code(findings))


def exit_code(findings: list[Finding]) -> int:
    """The exit code for ``findings``."""
    kinds = {found.kind for found in findings}
    if "unplaced" in kinds:
        return verdicts.NOT_DECIDED
    return verdicts.HELD if kinds == {"nothing"} else verdicts.BROKEN


def lines(found: Finding) -> Iterator[str]:
    """The finding for a person at a terminal."""
    yield f"{found.case}: {found.verdict}"
    yield f"  {found.sentence}"
    if found.place is not None:
        yield from _shown("line", found.place)
    if found.origin is not None:
        yield from _shown("from", found.origin)
    others = [place for place in found.calls if place not in (found.place, found.origin)]
    for place in others[:_SHOWN]:
        yield from _shown("under", place)
    if found.note:
        yield f"  ({found.note})"


def _shown(label: str, place: Place) -> Iterator[str]:
    from shardproof.locate.finding import path_of

    yield f"  {label:<6}{place} in {place.function}"
    if source := linecache.getline(str(Path(path_of(place))), place.line).strip():
        yield f"          {source}"
