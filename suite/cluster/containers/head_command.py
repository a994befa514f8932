"""A command in a head: started, followed, and ended in order."""

from __future__ import annotations

import codecs
import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardproof.cluster.containers import interrupts
from shardproof.cluster.containers.engine import NoCluster, Output, failures
from shardproof.verdicts import INTERRUPTED

#: In the head: the number of the command's process.
_PID = "/tmp/command.pid"
_START = ("sh", "-c", 'echo $$ > "$0"; exec "$@"', _PID)
#: Interrupts the command, once it has begun; gives up after 5 s.
_INTERRUPT = (
    "sh",
    "-c",
    'for _ in $(seq 100); do [ -s "$0" ] && kill -INT "$(cat "$0")" && exit; sleep 0.05; done',
    _PID,
)
#: Seconds that a command has to end in order after an interrupt.
_END_SECONDS = 30.0
#: Seconds within which the engine tells the end of what has ended.
_TELL_SECONDS = 5.0


class HeadCommand:
    """``words`` in ``head``, the only command there; what is left of it goes with the head."""

    def __init__(
        self, engine: Any, head: Any, words: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._engine, self._head = engine, head
        asked = engine.api.exec_create(head.id, [*_START, *words], environment=dict(environment))
        self._id = asked["Id"]
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
        code = None if output.broke else self._exit_code(_TELL_SECONDS)
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
            self._head.exec_run([*_INTERRUPT])
            self._exit_code(_END_SECONDS)
            if self._output is not None:
                self._output.ended.wait(_TELL_SECONDS)

    def _exit_code(self, seconds: float) -> int | None:
        """The exit code of the command; ``None``: the engine tells none within ``seconds``."""
        deadline = time.monotonic() + seconds
        while (code := self._engine.api.exec_inspect(self._id)["ExitCode"]) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
        return int(code)
