"""What commands print on, and what is seen while cases run.

Progress is a bar on a terminal, and now and then a line anywhere else.  The first case that breaks
for each cause is named at once; the blocks at the end tell the rest (``report/terminal.py``).
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

import typer

from shardproof import verdicts
from shardproof.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

    from shardproof.checks.results import CaseResult

EVERY_SECONDS = 10.0
EVERY_CASES = 25


def make_console() -> Console:
    """Standard output; wide where it is not a terminal, so that nothing is cut."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 240, highlight=False)


def print_line(console: Console, text: str) -> None:
    """Print one line unchanged: no markup, no wrapping."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def echo(text: str, err: bool = False, nl: bool = True) -> None:
    """The same on standard output (``err``: error), without rich; ``nl``: end the line."""
    typer.echo(printable(text), err=err, nl=nl)


class _Bar:
    """Context manager: a bar on a terminal, elsewhere a line now and then.

    ``total`` may be unknown (``None``).
    """

    def __init__(self, console: Console, what: str, total: int | None, noun: str) -> None:
        self.console, self.what, self.total, self._noun = console, what, total, noun
        self._began = self._spoke = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                *self._columns(progress),
                console=self.console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=self.total, counts="")
        else:
            count = "" if self.total is None else f": {self.total} {self._noun}"
            print_line(self.console, f"{self.what}{count}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _columns(self, progress: Any) -> list[Any]:
        """What stands right of the bar."""
        raise NotImplementedError

    def _move(self, done: int, unit: str = "", counts: str = "", due: bool = False) -> None:
        """So many are over; ``due``: elsewhere than on a terminal a line says so now."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, counts=counts)
            return
        now = time.monotonic()
        if due or now - self._spoke > EVERY_SECONDS or done == self.total:
            self._spoke = now
            of = "" if self.total is None else f"/{self.total}"
            print_line(
                self.console,
                f"  {done}{of}{unit} in {now - self._began:.0f} s{counts and f': {counts}'}",
            )


class Progress(_Bar):
    """Progress over cases: :meth:`step` is called once for each."""

    words: tuple[str, ...] = verdicts.VERDICTS

    def __init__(self, console: Console, total: int | None, what: str) -> None:
        super().__init__(console, what, total, "cases")
        self.counts: Counter[str] = Counter()
        self._causes: set[tuple[str, ...]] = set()

    def _columns(self, progress: Any) -> list[Any]:
        counts = progress.TextColumn("{task.fields[counts]}")
        return [progress.MofNCompleteColumn(), counts, progress.TimeElapsedColumn()]

    def step(self, result: CaseResult) -> None:
        """Count one result, and name it if it is the first that breaks for its cause."""
        self.counts[self._word(result)] += 1
        done = self.counts.total()
        counts = ", ".join(f"{self.counts[w]} {w}" for w in self.words if self.counts[w])
        self._move(done, counts=counts, due=done % EVERY_CASES == 0)

    def _word(self, result: CaseResult) -> str:
        """What it counts as; the first red or open result of a cause is named."""
        kind = verdicts.kind(result.verdict)
        if kind in verdicts.RED or kind in verdicts.OPEN:
            self._failure(result)
        return kind

    def _failure(self, result: CaseResult) -> None:
        from rich.text import Text

        from shardproof.runs.blocks import cause

        key = (result.case.implementation, *cause(result.verdict, result.reason))
        if self.total == 1 or key in self._causes:
            return
        self._causes.add(key)
        named = Text(printable(f"{result.verdict}: {result.id}"), style="bold red")
        self.console.print(named, soft_wrap=True)
        for line in result.reason.splitlines()[:1]:
            print_line(self.console, f"    {line}")


class FaultProgress(Progress):
    """Progress over planted faults and their parents: a fault that fails its case is caught."""

    words = ("faults caught", "parents passed", "neither (see the table)")

    def _word(self, result: CaseResult) -> str:
        kind = verdicts.kind(result.verdict)
        planted = result.case.implementation.startswith("mutants/")
        caught, passed, neither = self.words
        if planted:
            return caught if kind in verdicts.RED else neither
        return passed if kind in verdicts.GREEN else neither


class Blocks(_Bar):
    """Progress over the blocks of one comparison."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        super().__init__(console, what, total, "blocks")

    def _columns(self, progress: Any) -> list[Any]:
        blocks = progress.TextColumn("{task.completed}/{task.total} blocks")
        return [blocks, progress.TimeElapsedColumn(), progress.TimeRemainingColumn()]

    def update(self, done: int) -> None:
        """So many blocks are over."""
        self._move(done, " blocks")

    def note(self, what: str) -> None:
        """What comes after the blocks."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self.what}: {what}")
        else:
            print_line(self.console, f"  {what}")
