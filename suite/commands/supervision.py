"""A run under supervision: its folder, signals that end it, and disks that fill up.

Whatever ends a run, what is written stays, the folder is closed and its reports are made.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof import report, verdicts
from shardproof.commands.console import print_line
from shardproof.coverage import pairs
from shardproof.errors import MachineError, Problem, SelectionError
from shardproof.files import FULL, UNWRITABLE
from shardproof.launch import process_control
from shardproof.report.coverage import judged, seen
from shardproof.runs.integrity import damage_is_bad_input
from shardproof.runs.records import RecordError
from shardproof.runs.run_folder import RunFolder, read, require_run_or_new

if TYPE_CHECKING:
    from rich.console import Console

RESULTS = Path("results")


def open_folder(
    path: Path | None,
    root: Path = RESULTS,
    command: Sequence[str] = (),
    may_hold_more: bool = False,
) -> RunFolder:
    """The run folder at ``path``, or a new one under ``root``.

    ``command``: that of this process, if not what was typed.  ``may_hold_more``: beside a run,
    what ranks left.

    :raises SelectionError: it cannot be written, or holds something else.
    """
    command = command or ["shardproof", *sys.argv[1:]]
    try:
        if path is not None and not may_hold_more:
            require_run_or_new(path)
        return RunFolder.create(root, command) if path is None else RunFolder(path, command)
    except OSError as error:
        where = str(error.filename or path or root)
        what = f"results cannot be written: {error.strerror}"
        raise SelectionError(Problem(what, "choose another --results folder", file=where)) from None
    except RecordError as error:
        raise SelectionError(Problem(str(error), "choose another --results folder")) from None


def resume_command(folder: RunFolder) -> str:
    """The command that runs what the run in ``folder`` has left."""
    return f"shardproof run --resume --results {shlex.quote(str(folder.path))}"


def supervised(
    folder: RunFolder,
    console: Console,
    body: Callable[[Interrupts], int],
    stopped: Callable[[], str] = lambda: "stopped",
    finish: Callable[[], None] = lambda: None,
    is_kept: bool = True,
    quiet: bool = False,
) -> int:
    """Run ``body``; whatever ends it, what is written stays and the folder is closed.

    ``stopped`` keeps what is left to keep after an interrupt, and says so in a line.  ``is_kept``:
    the folder stays once the command has ended, and is named for that; else nobody is told to go on
    with it.  ``quiet``: ``body`` names the folder itself.

    A folder that can no longer be written ends the run with a sentence that names the file.
    """
    code = verdicts.INTERRUPTED
    with Interrupts() as interrupts, damage_is_bad_input(folder.path):
        try:
            try:
                code = body(interrupts)
            except KeyboardInterrupt:
                print_line(console, stopped())
            except MachineError as error:
                print_line(console, f"precondition: {error}")
                code = verdicts.NOT_DECIDED
            _finish(folder, code, finish)
        except OSError as error:
            if error.errno not in UNWRITABLE or error.filename is None:
                raise
            cause = f"{error.filename}: {error.strerror}"
            mend = "make room" if error.errno in FULL else "make the path writable"
            kept = "what was written" if is_kept else "nothing"
            goes_on = is_kept and folder.goes_on
            then = "" if goes_on else " run it again"
            print_line(console, f"{cause} - {kept} is kept; {mend}, then{then}")
            if goes_on:
                print_line(console, f"    {resume_command(folder)}")
            code = verdicts.BAD_INPUT
    if is_kept and not quiet:
        print_line(console, f"evidence: {folder.path}")
    return code


class Interrupts:
    """Ctrl-C (or SIGTERM, SIGHUP) once stops a run in order; the next do not disturb the tidying.

    A SIGHUP that is ignored, as under ``nohup``, stays so.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._holding = self._pending = self._came = False
        self._terminals = [stream for stream in (1, 2) if os.isatty(stream)]

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in process_control.heard():
                self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            for stream in self._terminals:  # it is gone: what is printed there raises errors
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        if self._came:
            os.write(2, b"stopping: ranks are being ended, results kept\n")
            return
        self._came = True
        if self._holding:
            self._pending = True
        else:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """Complete the block inside; an interrupt comes after it."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
            if self._pending:
                self._pending = False
                raise KeyboardInterrupt


def _finish(folder: RunFolder, code: int, more: Callable[[], None]) -> None:
    more()
    folder.close(code)
    run = read(folder.path)
    for name, document in (("report.html", report.html(run)), ("report.md", report.document(run))):
        folder.write(name, document)
    if run.cases:
        met = {**pairs.document(judged(run.cases)), "seen": seen(run.cases)}
        folder.write("coverage.json", json.dumps(met, indent=1) + "\n")
