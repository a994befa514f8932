"""Sections that wings add to the reports of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from shardproof.runs.run_folder import Run
from shardproof.wings import wings_of

if TYPE_CHECKING:
    from rich.console import Console


class Section(ABC):
    """A part of the reports of a run, in each of their forms."""

    #: The part of the page's address that leads to it.
    anchor: str
    title: str

    @abstractmethod
    def html(self) -> Markup:
        """What stands below the heading on ``report.html``."""

    @abstractmethod
    def markdown(self) -> Iterator[str]:
        """Lines of ``report.md``, with the heading."""

    @abstractmethod
    def table(self) -> str:
        """The Markdown of its main table, for ``report --format markdown``."""

    @abstractmethod
    def show(self, console: Console) -> None:
        """Print it on a terminal."""


def sections(run: Run) -> list[Section]:
    """The sections that wings add to the reports of ``run``."""
    return [section for wing in wings_of(run) for section in wing.sections(run)]


def rendered(template: Path, **values: Any) -> Markup:
    """The HTML that the Jinja ``template`` makes of ``values``; their texts are escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    jinja = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return Markup(jinja.get_template(template.name).render(**values))
