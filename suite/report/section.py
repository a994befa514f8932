"""A section of the reports of a run: what each form of a report shows of it.

The core's sections and their order are in :mod:`shardproof.report.sections`; wings add their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from shardproof import verdicts
from shardproof.checks.results import CaseResult
from shardproof.report.looks import look
from shardproof.report.tables import error_of
from shardproof.table import Table

if TYPE_CHECKING:
    from jinja2 import Environment
    from rich.console import Console

TEMPLATES = Path(__file__).parent / "templates"


class Section:
    """A part of the reports of a run; a form leaves out a section that gives it nothing."""

    #: The part of the page's address that leads to it.
    anchor = ""
    title = ""
    #: Whether the page of a long run shows its heading only, until somebody opens it.
    folded = False
    #: Its name in the page's list of sections; empty: the title.
    label = ""

    def html(self) -> Markup:
        """The text below the heading on ``report.html``."""
        return Markup()

    def markdown(self) -> Iterator[str]:
        """Lines of ``report.md``, with the heading."""
        yield from ()

    def table(self) -> str:
        """The Markdown of its main table, for ``report --format markdown``."""
        return ""

    def show(self, console: Console, rows: bool = True, quiet: bool = False) -> None:
        """Print it on a terminal: every row, or (not ``rows``) at most 40 lines; of what failed all
        there is, and nothing else if ``quiet``.
        """


def rendered(template: Path, **values: Any) -> Markup:
    """The HTML that the Jinja ``template`` makes of ``values``; their texts are escaped."""
    jinja = _environment(template.parent)
    return Markup(jinja.get_template(template.name).render(**values).strip())


@cache
def _environment(folder: Path) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    jinja = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {
        "look": look,
        "parts": parts,
        "parted": parted,
        "kind": verdicts.kind,
        "error": error_of,
    }
    jinja.filters["sent"] = _sent
    return jinja


def parts(name: str) -> Markup:
    """An id that a line may be broken in between its parts, and not inside of a word."""
    return Markup("::<wbr>").join(name.split("::"))


def parted(name: str, scenario: str) -> tuple[str, str]:
    """An id as its scenario and the rest; the first is empty where the id does not begin so."""
    return (scenario, name[len(scenario) :]) if name.startswith(scenario) else ("", name)


def _sent(result: CaseResult) -> str:
    sent, expected = result.bytes_sent, result.bytes_expected
    if not sent:
        return "-"
    return "= formula" if sent == expected else f"{sent} / {expected}" if expected else sent


def folded(table: Table) -> str:
    """A table that a reader of Markdown opens (blank lines make it Markdown inside of HTML), or
    nothing, if it has no rows.
    """
    if not table.rows:
        return ""
    notes = "".join(f"\n{note}\n" for note in table.notes)
    title = f"{safe(table.title)} ({len(table.rows)} rows)"
    return f"\n<details>\n<summary>{title}</summary>\n\n{table.markdown()}{notes}\n</details>"


def safe(text: str) -> str:
    """One line of Markdown that may hold code, and no HTML, link or image."""
    return " ".join(text.split()).replace("<", "&lt;").replace("](", "]\\(")
