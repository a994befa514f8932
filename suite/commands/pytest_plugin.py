"""``pytest scenarios/``: scenario files are test modules, their cases are tests.

The repository's ``conftest.py`` loads this; elsewhere write ``pytest_plugins =
"shardproof.commands.pytest_plugin"`` into your own.  Options: ``--impl``, ``--backend``,
``--tier``; ``-k`` is by case id, and ``-n``, ``--junitxml`` and the rest are pytest's.  Each pytest
process runs one case at a time, in a leader, so a case that hangs or kills its ranks
costs itself only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardproof.errors import InputError, SelectionError

if TYPE_CHECKING:
    from shardproof.case import Case
    from shardproof.cases.runner import Session

_SESSION: pytest.StashKey[Session] = pytest.StashKey()


class NotHeld(Exception):
    """A case whose verdict is not green; the message is what the judge says."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options that are not pytest's own."""
    group = parser.getgroup("shardproof", "scenario files (*.yaml)")
    group.addoption("--impl", action="append", default=[], metavar="P", help="implementations")
    group.addoption("--backend", action="append", default=[], metavar="B", help="backends")
    group.addoption("--tier", choices=("quick", "full"), default="quick", help="default: quick")


def pytest_configure(config: pytest.Config) -> None:
    """Load a user's own class once; the processes of pytest-xdist need not do so again.

    :raises pytest.UsageError: it cannot be loaded (pytest's exit code 4).
    """
    names = [name for name in config.getoption("--impl") if ":" in name]
    if names and not hasattr(config, "workerinput"):
        from shardproof.registry import preflight

        try:
            preflight.check(names)
        except InputError as error:
            raise pytest.UsageError(str(error)) from None


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Scenario files are YAML files in a folder ``scenarios`` or named on the command line."""
    if file_path.suffix not in (".yaml", ".yml") or file_path.name.startswith(("_", ".")):
        return None
    named = any(str(file_path) == str(Path(arg).resolve()) for arg in parent.config.args)
    if not named and "scenarios" not in file_path.parts:
        return None
    from shardproof.scenarios.load import kind_of

    if not named and kind_of(file_path):
        return None  # another command runs it
    return CollectedScenario.from_parent(parent, path=file_path)


class CollectedScenario(pytest.File):
    """One scenario file."""

    def collect(self) -> Iterator[CaseItem]:
        """Its cases, as the options select them."""
        from shardproof.commands.options import Filters
        from shardproof.registry import preflight

        impl, backend, tier = map(self.config.getoption, ("--impl", "--backend", "--tier"))
        filters = Filters(scenarios=[str(self.path)], impl=impl, backend=backend, tier=tier)
        try:
            cases = preflight.with_found_traits(filters.cases())
        except InputError as error:
            nothing = re.search("matches no(thing| system)|unknown implementation", str(error))
            if isinstance(error, SelectionError) and nothing:
                return  # a filter may leave nothing of one file; the others have the rest
            raise self.CollectError(str(error)) from None
        for case in cases:
            yield CaseItem.from_parent(self, name=case.id, case=case)


class CaseItem(pytest.Item):
    """One case; its name is the case's id."""

    def __init__(self, *, case: Case, **more: Any) -> None:
        super().__init__(**more)
        self.case = case
        self.add_marker(pytest.mark.timeout(0))  # a case has a deadline of its own

    def runtest(self) -> None:
        """Run the case and translate its verdict."""
        from shardproof import verdicts

        [result], _ = _session(self.config).run([self.case], lambda _: None)
        self.user_properties.append(("verdict", result.verdict))
        kind = verdicts.kind(result.verdict)
        if kind in ("skip", "xfail"):
            outcome = pytest.skip if kind == "skip" else pytest.xfail
            outcome(result.reason)
        if kind not in verdicts.GREEN:
            raise NotHeld(f"{result.verdict}: {result.reason}\nrerun: {result.rerun}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The judge's reason and the line that runs this case again, no traceback of ours."""
        if isinstance(excinfo.value, NotHeld):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where pytest says that this is."""
        return self.path, None, self.name


def _session(config: pytest.Config) -> Session:
    """The leaders of this pytest process, started by its first case."""
    if _SESSION not in config.stash:
        from shardproof.cases.runner import Session

        config.stash[_SESSION] = Session(1).__enter__()
    return config.stash[_SESSION]


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the leaders."""
    if _SESSION in config.stash:
        config.stash[_SESSION].__exit__()
        del config.stash[_SESSION]
