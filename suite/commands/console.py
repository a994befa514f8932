"""What commands print on, and what is seen while cases run.

A case that breaks is shown at once, with the reason and the command that reruns just that case.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, Self

from shardproof import verdicts

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn

    from shardproof.checks.results import CaseResult

EVERY_SECONDS = 10.0
EVERY_CASES = 25


def make_console() -> Console:
    """Standard output; wide where it is not a terminal, so that nothing is cut."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 240, highlight=False)


def print_line(console: Console, text: str) -> None:
    """Print one line unchanged: no markup, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Bar:
    """A bar on a terminal, anywhere else a line now and then; ``total`` may be unknown (``None``).

    A context manager.
    """

    unit: ClassVar[str]

    def __init__(self, console: Console, what: str, total: int | None) -> None:
        self._console, self._what, self._total = console, what, total
        self._began = self._spoke = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                *self._columns(),
                console=self._console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total, counts="")
        else:
            count = "" if self._total is None else f": {self._total} {self.unit}"
            self._say(f"{self._what}{count}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _columns(self) -> list[ProgressColumn]:
        """What stands behind the bar."""
        raise NotImplementedError

    def _show(self, done: int, unit: str = "", counts: str = "", is_due: bool = False) -> None:
        """So many are over; a line says it if it ``is_due``, after a while, and at the end."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, counts=counts)
            return
        now = time.monotonic()
        if is_due or now - self._spoke > EVERY_SECONDS or done == self._total:
            self._spoke = now
            of = "" if self._total is None else f"/{self._total}"
            self._say(f"  {done}{of}{unit} in {now - self._began:.0f} s{counts and f': {counts}'}")

    def _say(self, text: str) -> None:
        print_line(self._console, text)


class Progress(_Bar):
    """Progress over cases; :meth:`step` is called once a case."""

    unit = "cases"

    def __init__(self, console: Console, what: str, total: int | None) -> None:
        super().__init__(console, what, total)
        self.counts: Counter[str] = Counter()

    def _columns(self) -> list[ProgressColumn]:
        from rich import progress

        counts = progress.TextColumn("{task.fields[counts]}")
        return [progress.MofNCompleteColumn(), counts, progress.TimeElapsedColumn()]

    def step(self, result: CaseResult) -> None:
        """Count one result and show it if it is red."""
        self._note(result)
        done = self.counts.total()
        self._show(done, counts=self._counts(), is_due=done % EVERY_CASES == 0)

    def _note(self, result: CaseResult) -> None:
        kind = verdicts.kind(result.verdict)
        self.counts[kind] += 1
        if kind in verdicts.RED or kind in verdicts.OPEN:
            self._failure(result)

    def _counts(self) -> str:
        return ", ".join(f"{self.counts[v]} {v}" for v in verdicts.VERDICTS if self.counts[v])

    def _failure(self, result: CaseResult) -> None:
        from rich.text import Text

        self._console.print(Text(f"{result.verdict}: {result.id}", style="bold red"))
        for line in result.reason.splitlines()[:12]:
            self._say(f"    {line}")
        self._say(f"    rerun: {result.rerun}")


class FaultProgress(Progress):
    """Progress over planted faults and their parents: a fault that fails its case is caught."""

    CAUGHT, PASSED, OTHER = "faults caught", "parents passed", "neither (see the table)"

    def _note(self, result: CaseResult) -> None:
        kind = verdicts.kind(result.verdict)
        planted = result.case.implementation.startswith("mutants/")
        if planted and kind in verdicts.RED:
            self.counts[self.CAUGHT] += 1
        elif not planted and kind in verdicts.GREEN:
            self.counts[self.PASSED] += 1
        else:
            self.counts[self.OTHER] += 1

    def _counts(self) -> str:
        kinds = (self.CAUGHT, self.PASSED, self.OTHER)
        return ", ".join(f"{self.counts[kind]} {kind}" for kind in kinds if self.counts[kind])


class Blocks(_Bar):
    """Progress over the blocks of one comparison."""

    unit = "blocks"

    def _columns(self) -> list[ProgressColumn]:
        from rich import progress

        count = progress.TextColumn("{task.completed}/{task.total} blocks")
        return [count, progress.TimeElapsedColumn(), progress.TimeRemainingColumn()]

    def update(self, done: int) -> None:
        """So many blocks are over."""
        self._show(done, " blocks")

    def note(self, what: str) -> None:
        """What comes after the blocks."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._what}: {what}")
        else:
            self._say(f"  {what}")
