"""A command in a head: started, followed, and ended in order."""

from __future__ import annotations

import codecs
import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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


def run(
    engine: Any,
    head: Any,
    words: Sequence[str],
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> int:
    """Run ``words`` in ``head`` to their end, or to a first interrupt's; the exit code.

    ``say`` gets the output.  What is left of the command goes with the head, where it is alone.

    :raises NoCluster: its output ended before it, or the head is paused.
    """
    asked = engine.api.exec_create(head.id, [*_START, *words], environment=dict(environment))["Id"]
    text = codecs.getincrementaldecoder("utf-8")("replace")  # a letter may come in two parts
    start = functools.partial(engine.api.exec_start, asked, stream=True)
    output: Output | None = None

    def exit_code(seconds: float) -> int | None:
        """``None``: the engine tells none within ``seconds``."""
        deadline = time.monotonic() + seconds
        while (code := engine.api.exec_inspect(asked)["ExitCode"]) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
        return int(code)

    def end() -> None:
        """By its own way to stop in order: results are kept, and reports made."""
        with contextlib.suppress(NoCluster, *failures()):
            head.exec_run([*_INTERRUPT])
            exit_code(_END_SECONDS)
            if output is not None:
                output.ended.wait(_TELL_SECONDS)

    try:
        output = Output(engine, head, start, lambda part: say(text.decode(part)))
        output.wait()
    except KeyboardInterrupt:
        if output is None or not output.ended.is_set():
            end()
        return INTERRUPTED
    code = None if output.broke else exit_code(_TELL_SECONDS)
    if code is None:
        end()
        reason = NoCluster("the head's output ended before its command did")
        raise next(iter(output.broke), reason)
    return code
