"""A command in a head: started, followed, and ended with all its processes (``head_processes``)."""

from __future__ import annotations

import codecs
import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardproof.cluster.containers import interrupts
from shardproof.cluster.containers.engine import NoCluster, Output, failures, said
from shardproof.cluster.containers.head_processes import RUN
from shardproof.verdicts import INTERRUPTED

_PROGRAM = ("python3", "-m", "shardproof.cluster.containers.head_processes")
#: Seconds that a command has to end in order after an interrupt.
_END_SECONDS = 30
#: Seconds within which the engine tells the end of what has ended.
_TELL_SECONDS = 5


def going_on(engine: Any, head: Any) -> list[str]:
    """The names of the commands that go on in ``head``."""
    return _ask(engine, head, "names").split()


class HeadCommand:
    """``shardproof`` with ``words`` in ``head``, under a ``name`` that no other there has."""

    def __init__(
        self,
        engine: Any,
        head: Any,
        name: str,
        words: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        self._engine, self._head, self._name = engine, head, name
        command = ["python3", "-m", "shardproof", *words]
        environment = {**environment, RUN: name}
        self._id = engine.api.exec_create(head.id, command, environment=environment)["Id"]
        self._output: Output | None = None

    def result(self, say: Callable[[str], None]) -> int:
        """Run it to its end, or to a first interrupt's; its exit code.  ``say`` gets its output.

        :raises NoCluster: its output ended before it, or the head is paused.
        """
        text = codecs.getincrementaldecoder("utf-8")("replace")  # a letter may come in two parts
        start = functools.partial(self._engine.api.exec_start, self._id, stream=True)
        try:
            take = lambda part: say(text.decode(part))  # noqa: E731
            self._output = output = Output(self._engine, self._head, start, take)
            output.wait()
        except KeyboardInterrupt:
            interrupts.ignore()
            if self._output is None or not self._output.ended.is_set():
                self._end()
            return INTERRUPTED
        code = None if output.broke else self._exit_code()
        if code is None:
            self._end()
            raise (
                output.broke[0]
                if output.broke
                else NoCluster("the head's output ended before its command did")
            )
        return code

    def _end(self) -> None:
        """By its own way to stop in order: results are kept, and reports made."""
        with contextlib.suppress(NoCluster, *failures()):
            _ask(self._engine, self._head, "end", self._name, str(_END_SECONDS))
            if self._output is not None:
                self._output.ended.wait(_TELL_SECONDS)

    def _exit_code(self) -> int | None:
        deadline = time.monotonic() + _TELL_SECONDS
        while (code := self._engine.api.exec_inspect(self._id)["ExitCode"]) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
        return int(code)


def _ask(engine: Any, head: Any, *words: str) -> str:
    asked = engine.api.exec_create(head.id, [*_PROGRAM, *words])["Id"]
    return said(engine, head, asked)()
