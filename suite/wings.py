"""Wings: products around the core, each in a folder that can be removed.

A wing is a package of ``suite/`` with a module ``wing.py``, which defines ``WING``, an instance of
a subclass of :class:`Wing`.  A wing imports the core; the core reaches a wing only through
:func:`wings`, so it also runs in a tree without that folder: then ``shardproof --help`` lacks the
wing's commands.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shardproof.errors import Problem, SelectionError

if TYPE_CHECKING:
    import typer

    from shardproof.case import Case
    from shardproof.cases.runner import CaseHost
    from shardproof.commands.doctor.finding import Finding
    from shardproof.launch.nodes import Nodes

T = TypeVar("T")
#: Joins machines that judge cases, with so many at once (``None``: as many as they can).
CaseHosts = Callable[[int | None], "AbstractContextManager[CaseHost]"]

_SUITE = Path(__file__).parent

#: Whether :func:`wings` imports the wings now.  A package whose import has an effect in a script
#: (``shardproof.watch``) must not have it then.
is_loading = False


@dataclass(frozen=True)
class OnNodes:
    """A command to be run on nodes that are started for it.

    ``words``: those of the command behind ``shardproof``, without ``--results``, which is
    ``results`` (``None``: a new folder).  ``cases``: what it runs; ``seen``: files and folders that
    it reads.
    """

    words: Sequence[str]
    cases: Sequence[Case]
    seen: Sequence[Path]
    nodes: int
    ranks_per_node: int
    results: Path | None


class Wing:
    """What a wing adds to the core; each method adds nothing by default.

    ``wing.py`` is imported with the command line, so its methods import
    the rest of the wing.
    """

    #: Lines of ``shardproof --help``: a command and what it does.
    examples: tuple[str, ...] = ()

    def add_commands(self, app: typer.Typer) -> None:
        """Add the commands of this wing to ``app``."""

    def nodes(self, facts: Mapping[str, Any]) -> Nodes | None:
        """The nodes that started this command, of which ``launch.nodes.facts_here`` tells."""
        return None

    def case_hosts(self, where: str) -> CaseHosts | None:
        """What judges cases at ``where``, the value of ``run --on``.

        :raises SelectionError: it is no such place.
        """
        return None

    def run_on_nodes(self, command: OnNodes) -> int | None:
        """Start nodes, run ``command`` on them and end them; its exit code."""
        return None

    def findings(self, thorough: bool) -> Iterator[Finding]:
        """What ``shardproof doctor`` tells of this wing; ``thorough``: with ``--cluster``."""
        return iter(())


def names() -> tuple[str, ...]:
    """Folders of the wings in this tree, sorted; no wing is imported."""
    return tuple(sorted(path.parent.name for path in _SUITE.glob("*/wing.py")))


@cache
def wings() -> tuple[Wing, ...]:
    """The wings in this tree, in the order of their folders' names."""
    global is_loading
    is_loading = True
    try:
        return tuple(importlib.import_module(f"shardproof.{name}.wing").WING for name in names())
    finally:
        is_loading = False


def first(ask: Callable[[Wing], T | None]) -> T | None:
    """The first answer of a wing that is not ``None``; ``None``: no wing has one."""
    return next((answer for wing in wings() if (answer := ask(wing)) is not None), None)


def absent(wing: str, option: str) -> SelectionError:
    """The error of ``option``, which needs the folder of ``wing``."""
    what = f"it needs the wing suite/{wing}, which this tree does not have"
    return SelectionError(Problem(what, "restore that folder, or leave the option out", option))
