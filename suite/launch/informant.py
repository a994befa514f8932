"""A process that runs a user's code for a leader, and answers its questions as plain data.

A module that is imported can change whatever lives in its process: torch, ``json``, the checks.  So
a leader imports nothing of a user's.  It forks this process first, and asks it:

    leader      writes ``question1``, sends the number            waits, by CPU seconds
    informant   calls that function of the suite, writes ``answer1``, sends a byte

Questions and answers are files of :mod:`shardproof.tensor_bytes`, which cannot execute anything.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import shutil
import stat
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from shardproof import tensor_bytes
from shardproof.errors import bounded
from shardproof.files import DAMAGE, MOST_BYTES
from shardproof.launch import process_control
from shardproof.launch.watchdog import TICK_SECONDS


class NoAnswer(RuntimeError):
    """The process gave no answer that can be read; says how it ended or what came."""


class Raised(Exception):
    """An exception that the request raised there: its class's name, its text and its ``repr``."""

    def __init__(self, kind: str, text: str, shown: str) -> None:
        super().__init__(text)
        self.kind, self.shown = kind, shown

    def __repr__(self) -> str:
        return self.shown


class Informant:
    """The leader's end; a context manager that ends the process.

    Questions and answers lie in a folder in ``workdir``, which ends with it.  An answer may take
    ``seconds`` of CPU, or of sleep; those of processes that it starts count as well.
    """

    def __init__(self, workdir: Path, seconds: float) -> None:
        self._workdir, self._seconds = workdir, seconds
        self._numbers = itertools.count(1)
        self._ended = ""

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="informant-", dir=self._workdir))
        self._line, self._pid = self.start(self._folder)
        process_control.BARRED.append(self._line.close)
        return self

    def __exit__(self, *_: object) -> None:
        process_control.BARRED.remove(self._line.close)
        self._line.close()
        self._end("was ended")
        shutil.rmtree(self._folder, ignore_errors=True)

    def do(self, function: Callable[..., Any], *given: Any) -> Any:
        """The result of ``function(*given)``, of a module of the suite, from there: plain data.

        :raises Raised: it raised an exception.
        :raises NoAnswer: the process ended, took too long, or answered with something else.
        """
        if self._ended:
            raise NoAnswer(self._ended)
        number = next(self._numbers)
        question = self._folder / f"question{number}"
        asked = {"of": function.__module__, "name": function.__qualname__, "given": given}
        tensor_bytes.dump(question, asked)
        try:
            self._line.send_bytes(b"%d" % number)
            self._wait()
            self._line.recv_bytes(1)
        except (EOFError, OSError):
            self._end("ended its process")
            raise NoAnswer(self._ended) from None
        question.unlink(missing_ok=True)
        return _read(self._folder / f"answer{number}")

    def _wait(self) -> None:
        """Until an answer has come, or the process has ended."""
        watched = process_control.Watched(self._pid, whole=True)
        while not self._line.poll(TICK_SECONDS):
            watched.look()
            if watched.letter == "Z":  # a process that it started may hold the line open
                raise EOFError
            if watched.stopped >= process_control.STOPPED_LOOKS:
                self._end("was ended, because a signal had stopped it")
                raise NoAnswer(self._ended)
            if max(watched.spent, watched.idle) > self._seconds:
                how = "of sleep" if watched.idle else "of CPU"
                self._end(f"was ended, because it gave no answer within {self._seconds:g} s {how}")
                raise NoAnswer(self._ended)

    def _end(self, how: str) -> None:
        """Kill and collect the process, and note how it ended."""
        if self._ended:
            return
        self._ended = f"{how}{self.collect(self._pid)}"

    # Where the process is, and who ends it.

    def start(self, folder: Path) -> tuple[Connection, int]:
        """Start it; the line to it, and its number."""
        ours, theirs = Pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                process_control.die_with_parent(parent)
                process_control.let_go()
                ours.close()
                serve(theirs, folder)
                code = 0
            except BaseException:  # noqa: BLE001 - last stop before the process's end
                traceback.print_exc()
            finally:
                os._exit(code)
        theirs.close()
        process_control.STAYING.add(pid)
        return ours, pid

    def collect(self, pid: int) -> str:
        """Kill and collect it; how it ended, in brackets."""
        process_control.kill_tree(pid)  # no matter where it is ending already
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        process_control.STAYING.discard(pid)
        return f" (exit code {code})" if code >= 0 else f" ({process_control.signal_name(-code)})"


def _read(path: Path) -> Any:
    """The answer in the file.

    :raises Raised: the answer is an exception.
    :raises NoAnswer: it is none that can be read.
    """
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES:
            found = f"mode {about.st_mode:o}, {about.st_size} bytes"
            raise ValueError(f"expected a file of at most {MOST_BYTES} bytes, found {found}")
        answer = tensor_bytes.load(path)
        path.unlink()
        if "raised" in answer:
            kind, text, shown = answer["raised"]
            raise Raised(str(kind), bounded(str(text)), bounded(str(shown)))
        return answer["value"]
    except (*DAMAGE, OSError) as error:
        raise NoAnswer(f"gave an unreadable answer: {error!r}") from None


# ------------------------------------------------------------------------------------- the process


def serve(line: Connection, folder: Path) -> None:
    """Answer what ``line`` asks for, until it closes."""
    gc.enable()
    with suppress(EOFError):
        while True:
            number = int(line.recv_bytes(16))
            answer = _answer(tensor_bytes.load(folder / f"question{number}"))
            try:
                tensor_bytes.dump(folder / f"answer{number}", answer)
            except (TypeError, ValueError) as error:  # the user's own, which nothing can pack
                tensor_bytes.dump(folder / f"answer{number}", _raised(error))
            line.send_bytes(b".")


def _answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    try:
        function = getattr(importlib.import_module(asked["of"]), asked["name"])
        return {"value": function(*asked["given"])}
    except Exception as error:  # noqa: BLE001 - raised again where the answer is awaited
        return _raised(error)


def _raised(error: Exception) -> dict[str, Any]:
    return {"raised": [type(error).__name__, str(error), repr(error)]}
