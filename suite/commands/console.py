"""The consoles of commands, and the progress shown while cases run.

Progress is a live bar on a terminal, and a line every 30 seconds anywhere else.  The first case
that breaks for each cause is named at once; the blocks at the end have all of them
(``report/forms.py``).  With ``--json`` a command prints nothing of this: what it would print is
collected, and written as one document when it ends.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import IO, TYPE_CHECKING, Any, Self

import typer

from shardproof import verdicts
from shardproof.errors import printable, shown
from shardproof.table import Table, number, shortened, some

if TYPE_CHECKING:
    from rich.console import Console

    from shardproof.case import Case
    from shardproof.checks.results import CaseResult

EVERY_SECONDS = 30.0
#: Columns where standard output is not a terminal.
_WIDE = 240
#: Characters of a bar, cases that are named while they run (in a line: fewer), and seconds that are
#: shown as minutes.
_BAR, _RUNNING, _IN_LINE, _MINUTES = 20, 4, 2, 100


class Collected:
    """The output of a command under ``--json``: its tables, and all other lines as text."""

    is_interactive = False

    def __init__(self) -> None:
        self._tables: list[dict[str, Any]] = []
        self._text: list[str] = []

    def print(self, *objects: object, **_: object) -> None:
        """Keep tables by their rows, and anything else by its lines."""
        for one in objects:
            if isinstance(one, Table):
                self._tables.append({"title": one.title, "rows": one.records()})
                self._text += one.notes
            else:
                self._text += filter(None, str(one).splitlines())

    def document(self) -> str:
        """All of it as JSON."""
        return json.dumps({"tables": self._tables, "text": self._text}, indent=1)


_COLLECTED: ContextVar[Collected | None] = ContextVar("collected", default=None)


def is_json() -> bool:
    """Whether the command that runs was called with ``--json``."""
    return _COLLECTED.get() is not None


def collect() -> None:
    """Collect what the command prints from now on; see :func:`documented`."""
    _COLLECTED.set(Collected())


@contextmanager
def documented() -> Iterator[None]:
    """Write what :func:`collect` had collected when the command ends, with an exit code or not."""
    token = _COLLECTED.set(None)
    try:
        try:
            yield
        except typer.Exit:
            _write_document()
            raise
        _write_document()
    finally:
        _COLLECTED.reset(token)


def _write_document() -> None:
    collected = _COLLECTED.get()
    _COLLECTED.set(None)
    if collected is not None:
        echo(collected.document(), raw=True)


def make_console() -> Console:
    """Standard output; wide where it is not a terminal, so that nothing is cut.

    If the reader of a pipe has gone (``| head``), a command still ends with its own exit code.
    """
    from rich.console import Console

    class Heard(Console):
        def on_broken_pipe(self) -> None:  # rich would end the process with exit code 1
            mute(sys.stdout)

    collected: Any = _COLLECTED.get()
    if collected is not None:
        return collected
    is_terminal = sys.stdout.isatty()
    width = None if is_terminal else _WIDE
    # Colours may be forced where there is no terminal (FORCE_COLOR); a bar that moves may not.
    live = None if is_terminal else False
    return Heard(width=width, highlight=False, force_interactive=live)


def mute(stream: IO[str]) -> None:
    """Discard what ``stream`` still holds and all later output."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)


def print_line(console: Console, text: str) -> None:
    """Print one line unchanged: no markup, no wrapping."""
    console.print(shown(text), markup=False, highlight=False, soft_wrap=True)


def echo(text: str, err: bool = False, nl: bool = True, raw: bool = False) -> None:
    """The same on standard output (``err``: error), without rich; ``nl``: end the line.

    ``raw``: a document, or commands of a runner of CI that are meant.
    """
    if not err and (collected := _COLLECTED.get()) is not None:
        collected.print(text)
        return
    try:
        typer.echo(printable(text) if raw else shown(text), err=err, nl=nl)
    except BrokenPipeError:
        mute(sys.stderr if err else sys.stdout)


class ProgressBar:
    """Context manager: a bar on a terminal, elsewhere a line every :data:`EVERY_SECONDS`.

    ``total`` may be unknown (``None``).  Unless ``visible``, nothing is printed.
    """

    def __init__(
        self, console: Console, what: str, total: int | None, noun: str, visible: bool = True
    ) -> None:
        self.console, self.what, self.total, self._noun = console, what, total, noun
        self.visible = visible
        self._began = self._spoke = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if not self.visible:
            return self
        if self.console.is_interactive:
            self._bar = self._make_bar()
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=self.total, left="")
        else:
            noun = self._noun.removesuffix("s")
            count = "" if self.total is None else f": {number(self.total, noun)}"
            print_line(self.console, f"{self.what}{count}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _make_bar(self) -> Any:
        """A bar of rich, as wide as the terminal allows."""
        from rich import progress

        below = self.below

        class View(progress.Progress):
            def get_renderables(self) -> Iterator[Any]:
                yield self.make_tasks_table(self.tasks)
                yield from below()

        return View(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=_BAR),
            *self._columns(progress),
            console=self.console,
            transient=True,
        )

    def below(self) -> Iterator[Any]:
        """Lines below the bar."""
        return iter(())

    def _columns(self, progress: Any) -> list[Any]:
        """The text right of the bar."""
        raise NotImplementedError

    def _move(self, done: int, unit: str = "", counts: str = "", left: str = "") -> None:
        """So many are over."""
        if not self.visible:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=done, left=left)
            return
        now = time.monotonic()
        if now - self._spoke >= EVERY_SECONDS or done == self.total:
            self._spoke = now
            of = "" if self.total is None else f"/{self.total}"
            more = "; ".join(filter(None, (counts, self._now())))
            text = f"  {done}{of}{unit} in {now - self._began:.0f} s{left and f', {left}'}"
            print_line(self.console, text + (more and f": {more}"))

    def _now(self) -> str:
        """The cases under way, for a line."""
        return ""


class Progress(ProgressBar):
    """Progress over ``cases``: :meth:`started` and :meth:`step` are called once for each.

    ``expected``: seconds of a case by its id, where known.  Elsewhere than on a terminal a thread
    says what runs when nothing else has been said for a while.
    """

    words: tuple[str, ...] = verdicts.VERDICTS

    def __init__(
        self,
        console: Console,
        cases: Sequence[Case],
        what: str,
        expected: Mapping[str, float],
        visible: bool = True,
    ) -> None:
        super().__init__(console, what, len(cases), "cases", visible)
        self.counts: Counter[str] = Counter()
        self._causes: set[tuple[str, ...]] = set()
        usual = statistics.median(expected.values()) if expected else 1.0
        #: Seconds that each case without a result is expected to take.
        self._rest = {case.id: expected.get(case.id, usual) for case in cases}
        self._all = sum(self._rest.values())
        self._running: dict[str, float] = {}
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._ticking = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Self:
        super().__enter__()
        self._ticking.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._over.set()
        self._ticking.join()
        super().__exit__(*reason)

    def _tick(self) -> None:
        while not self._over.wait(1.0):
            self.tick()

    def tick(self) -> None:
        """Say what runs if nothing was said for a while."""
        with self._lock:
            if not self._over.is_set() and self._running:
                self._show()

    def _columns(self, progress: Any) -> list[Any]:
        left = progress.TextColumn("{task.fields[left]}")
        return [progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), left]

    def below(self) -> Iterator[Any]:
        """The counts, and the cases that run, the longest first."""
        from rich.text import Text

        now = time.monotonic()
        if counts := self._counts():
            yield Text(f"  {counts}", overflow="fold")
        running = [*self._running.items()]
        for name, began in running[:_RUNNING]:
            text = f"  running {name}  {now - began:.0f} s"
            yield Text(printable(text), style="dim", overflow="fold")
        if running[_RUNNING:]:
            yield Text(f"  and {len(running) - _RUNNING} more run", style="dim")

    def _now(self) -> str:
        now, running = time.monotonic(), [*self._running.items()]
        named = [f"{name} ({now - began:.0f} s)" for name, began in running]
        return f"running: {some(named, _IN_LINE)}" if named else ""

    def _left(self) -> str:
        """About how long it will take: what the cases so far took for each expected second.

        Empty until one has ended: the durations that are expected of new cases are guesses.
        """
        rest, elapsed = sum(self._rest.values()), time.monotonic() - self._began
        done = self._all - rest
        if not rest or not done:
            return ""
        seconds = elapsed * rest / done
        shown = f"{seconds:.0f} s" if seconds < _MINUTES else f"{seconds / 60:.0f} min"
        return f"about {shown} left"

    def started(self, case: Case) -> None:
        """``case`` runs from now on."""
        with self._lock:
            self._running[case.id] = time.monotonic()
            self._show()

    def step(self, result: CaseResult) -> None:
        """Count one result, and name it if it is the first that breaks for its cause."""
        with self._lock:
            self._running.pop(result.id, None)
            self._rest.pop(result.id, None)
            self.counts[self._word(result)] += 1
            self._show()

    def _counts(self) -> str:
        return ", ".join(self._told(w) for w in self.words if self.counts[w])

    def _told(self, word: str) -> str:
        return f"{self.counts[word]} {word}"

    def _show(self) -> None:
        self._move(self.counts.total(), counts=self._counts(), left=self._left())

    def _word(self, result: CaseResult) -> str:
        """The word that it counts as; the first red or open result of a cause is listed."""
        kind = verdicts.kind(result.verdict)
        if kind in verdicts.RED or kind in verdicts.OPEN:
            self._failure(result)
        return kind

    def _failure(self, result: CaseResult) -> None:
        from rich.text import Text

        from shardproof.runs.blocks import cause

        key = (result.case.implementation, *cause(result.verdict, result.reason))
        if self.total == 1 or key in self._causes or not self.visible:
            return
        self._causes.add(key)
        named = Text(shown(f"{result.verdict}: {result.id}"), style="bold red")
        self.console.print(named, soft_wrap=True)
        for line in result.reason.splitlines()[:1]:
            print_line(self.console, f"    {shortened(line)}")


class FaultProgress(Progress):
    """Progress over planted faults and their parents: a fault that fails its case is caught."""

    words = ("fault caught", "parent passed", "neither (see the table)")

    def _told(self, word: str) -> str:
        nouns = self.words[:2]
        return number(self.counts[word], word) if word in nouns else super()._told(word)

    def _word(self, result: CaseResult) -> str:
        caught, passed, neither = self.words
        planted = result.case.implementation.startswith("mutants/")
        wanted = verdicts.RED if planted else verdicts.GREEN
        good = caught if planted else passed
        return good if verdicts.kind(result.verdict) in wanted else neither
