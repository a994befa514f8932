"""Wings: products around the core, each in a folder that can be removed.

A wing is a package of ``suite/`` with a module ``wing.py``, which defines ``WING``, an instance of
a subclass of :class:`Wing`.  A wing imports the core; the core reaches a wing only through
:func:`wings`, so it also runs in a tree without that folder: then ``shardproof --help`` lacks the
wing's commands, and lines of ``cases.jsonl`` that only the wing reads are counted, not shown.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from shardproof.errors import Problem, SelectionError

if TYPE_CHECKING:
    import typer

    from shardproof.case import Case
    from shardproof.cases.runner import CaseHost
    from shardproof.commands.options import Output, SessionOptions
    from shardproof.coverage.pairs import Coverage
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


@dataclass(frozen=True)
class Finding:
    """A look of ``shardproof doctor``: ``good``, ``note`` (it works, but) or ``bad`` (do what
    ``remedy`` says first).
    """

    what: str
    state: Literal["good", "note", "bad"]
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class LineKind:
    """A kind of lines in ``cases.jsonl`` that a wing writes.

    A result has a text ``id`` and a text ``verdict``.  ``noun``: one of them; ``label``: several,
    at a count; ``title``: several, in a heading.
    """

    #: Value of ``kind`` in the line.
    name: str
    noun: str = ""
    label: str = ""
    title: str = ""
    #: Whether a line is a result; another says something about results.
    is_result: bool = True
    #: Whether there is a verdict that ``verify`` repeats; else the result is only a measurement.
    is_judged: bool = True


@dataclass(frozen=True)
class FileKind:
    """A kind of scenario files that a wing reads, and cases are not made of.

    ``name``: of its shape, for ``shardproof schema``; ``keys``: regular expression of the top-level
    keys that only these files have; ``command`` reads them, and ``done`` is what becomes of them,
    such as ``timed``.
    """

    name: str
    keys: str
    command: str
    done: str
    #: The pydantic model of a file.
    model: Callable[[], type[Any]]
    #: What a file holds, in words; raises ``InputError`` with every fault of it.
    summary: Callable[[Path], str]
    #: Runs files for ``shardproof run`` (its ``SessionOptions`` and ``HowRun``); the exit code.
    run: Callable[[Sequence[Path], Any, Any], int] | None = None


class NodeCommand:
    """A command that can also run with its ranks on nodes: ``shardproof cluster NAME``."""

    name: str
    #: Help of the command on nodes.
    help: str

    def planned(self, words: Sequence[str]) -> NodePlan:
        """Plan what the ``words`` after the command's name ask for; nothing is done.

        :raises InputError: words that do not fit each other, or what they name.
        """
        raise NotImplementedError


class NodePlan(Protocol):
    """The result of a command on nodes."""

    @property
    def dry_run(self) -> bool:
        """Whether it only prints what it would do."""

    @property
    def names(self) -> Sequence[str]:
        """Words that name scenarios, files or classes."""

    @property
    def ids(self) -> Sequence[str]:
        """Ids of results, which name their systems."""

    @property
    def backends(self) -> Collection[str]:
        """The backends that ranks run on."""

    @property
    def rates(self) -> Sequence[int]:
        """Bits per second between nodes, for each of which it runs; 0: all there are; empty: any.

        :raises SelectionError: that is not the same for all of it.
        """

    def on(self, nodes: Any) -> NodePlan:
        """The part of it for which ``nodes`` have room.

        :raises InputError: there is none.
        """


class Wing:
    """The extensions of the core by a wing; each method adds nothing by default.

    ``wing.py`` is imported with the command line, so its methods import the rest of the wing.
    Rooms above this one define the classes that some methods return; their names stand in the
    descriptions.
    """

    #: Lines of ``shardproof --help``: a command and what it does.
    examples: tuple[str, ...] = ()
    #: Lines for who typed no command: one, and what it does.
    first: tuple[str, ...] = ()
    line_kinds: tuple[LineKind, ...] = ()
    file_kinds: tuple[FileKind, ...] = ()
    node_commands: tuple[NodeCommand, ...] = ()

    def add_commands(self, app: typer.Typer) -> None:
        """Add the commands of this wing to ``app``."""

    def nodes(self, facts: Mapping[str, Any]) -> Nodes | None:
        """The nodes that started this command, of which ``launch.nodes.facts_here`` tells."""
        return None

    def case_hosts(self, where: str) -> CaseHosts | None:
        """Return what judges cases at ``where``, the value of ``run --on``.

        :raises SelectionError: it is no such place.
        """
        return None

    def run_on_nodes(self, command: OnNodes) -> int | None:
        """Start nodes, run ``command`` on them and end them; its exit code."""
        return None

    def run_command(self, invocation: Any) -> str | None:
        """The beginning of a command that runs a case on such nodes as ``invocation`` had
        (:class:`shardproof.runs.header.Invocation`); ``None``: it had none of this wing.
        """
        return None

    def random_cases(self, count: int, seed: int, impl: Sequence[str]) -> Sequence[Case] | None:
        """The first ``count`` random clean cases of ``seed`` whose implementation a glob matches
        (empty: of all).

        :raises SelectionError: a glob matches none.
        """
        return None

    def random_case(self, name: str) -> Case | None:
        """The random clean case with the id ``name``.

        :raises SelectionError: this is no such id.
        """
        return None

    def coverage(self, count: int, seed: int, impl: Sequence[str]) -> tuple[Coverage, str] | None:
        """Pairs of trigger and feature that :meth:`random_cases` meet, and how many in a sentence.

        :raises SelectionError: a glob matches none.
        """
        return None

    def conditions(self, cases: Sequence[Case]) -> str:
        """How many triples of conditions ``cases`` meet, in a sentence; empty: it counts none."""
        return ""

    def plant(
        self, faults: Sequence[Any], most: int, seed: int, asked: SessionOptions, output: Output
    ) -> int | None:
        """Plant each of ``faults`` in up to ``most`` random cases of its parent, and print how many
        die; the exit code.
        """
        return None

    def simulated(self, training: Mapping[str, Any]) -> Mapping[str, Fraction] | None:
        """Figures of the fullest rank of ``training`` by their names, and of its step.

        :raises SelectionError: it cannot be simulated.
        """
        return None

    def compared_with_simulation(self, case: Case, records: Sequence[Any]) -> Any | None:
        """Compare the ranks of ``case`` with simulated ones; ``checks.simulation`` says how."""
        return None

    def findings(self, thorough: bool) -> Iterator[Finding]:
        """Findings of ``shardproof doctor`` here; ``thorough``: with ``--cluster``."""
        return iter(())

    def shrink(self, run: Path, jobs: int | None, quiet: bool) -> int | None:
        """Shrink every failed case of the run in the folder ``run``, so many ``jobs`` at once; the
        exit code.
        """
        return None

    def verify(self, run: Any) -> Iterable[str]:
        """Judge the wing's lines of a ``run`` (:class:`~shardproof.runs.run_folder.Run`) again;
        what comes out differently, in sentences.
        """
        return ()

    def after_merge(self, folder: Any) -> None:
        """Write what has to be said of all results, once a run is put together of parts into
        ``folder`` (:class:`~shardproof.runs.run_folder.RunFolder`).
        """

    def entries(self, run: Any, version: Callable[[str], Any]) -> Iterable[Any]:
        """The wing's results of ``run`` as ``compare`` and ``gate`` see them
        (:class:`shardproof.compare.snapshot.Entry`); ``version`` gives that of an id.
        """
        return ()

    def compared(self, pairs: Sequence[Any]) -> Any:
        """Times that both results of ``pairs`` have, which are
        :class:`shardproof.compare.compare.Pairing`
        (:class:`shardproof.compare.compare.ComparedTimes`; ``None``: none).
        """
        return None

    def by_hardware(
        self, names: Sequence[str], reference: Any, others: Sequence[Any], only_changed: bool
    ) -> Sequence[Any]:
        """Tables with a column a machine, which has one of ``names``: those of the runs
        ``reference`` (:class:`shardproof.compare.snapshot.Snapshot`) and ``others``, each compared
        with it (:class:`shardproof.compare.compare.RunComparison`).
        """
        return ()

    def sections(self, run: Any) -> Sequence[Any]:
        """Sections of the reports of ``run`` (:class:`shardproof.report.section.Section`)."""
        return ()

    def sections_of_cases(self, run: Any) -> Sequence[Any]:
        """Sections like those of :meth:`sections`, also where ``run`` has cases only."""
        return ()

    def hints(self, failure: Any) -> Iterable[str]:
        """Commands that say more of a failure (:class:`shardproof.runs.blocks.Failure`)."""
        return ()

    def limits(self, run: Any) -> Iterable[Any]:
        """Parts not checked by the wing in ``run`` (:class:`shardproof.report.limits.Limit`)."""
        return ()


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


def required(wing: str, option: str, ask: Callable[[Wing], T | None]) -> T:
    """As :func:`first`, for an ``option`` that only the wing in the folder ``wing`` serves.

    :raises SelectionError: this tree does not have that folder.
    """
    if (answer := first(ask)) is None:
        raise absent(wing, option)
    return answer


def wings_of(run: Any) -> list[Wing]:
    """The wings that have results in ``run`` (:class:`~shardproof.runs.run_folder.Run`)."""
    return [w for w in wings() if any(kind.name in run.others for kind in w.line_kinds)]


def line_kinds() -> dict[str, LineKind]:
    """Name of each kind of lines that wings of this tree write, to the kind."""
    return {kind.name: kind for wing in wings() for kind in wing.line_kinds}


def file_kinds() -> dict[str, FileKind]:
    """Name of each kind of scenario files that wings of this tree read, to the kind."""
    return {kind.name: kind for wing in wings() for kind in wing.file_kinds}


def absent(wing: str, option: str) -> SelectionError:
    """The error of ``option``, which needs the folder of ``wing``."""
    what = f"the option needs the folder suite/{wing}, which is missing here"
    return SelectionError(Problem(what, f"restore suite/{wing}, or leave the option out", option))
