"""The case server: judges the cases that it reads, one after the other, until its input ends.

Run as ``python -m shardproof.cluster.on_ray.server`` by ``cluster/on_ray/task.py``.  A line in is a
case as JSON; a line out is its result and its account.  Its input ends when the process of Ray
does, however that ends: then what runs is ended, and the work folder is removed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from typing import BinaryIO


def main() -> None:
    """Serve standard input and output."""
    if os.fork():
        # Ray kills the children of its processes, which could then not remove their folders: so
        # this one is no child of any.  Nothing is imported yet that has threads.
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's processes block SIGINT
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed goes to Ray's logs
    signal.signal(signal.SIGTERM, _interrupted)
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        _serve(lines, output)


def _interrupted(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: the tidying is not disturbed
    raise KeyboardInterrupt


def _read(lines: queue.SimpleQueue[bytes]) -> None:
    """Hand on what comes; the end of the input interrupts the case that is being judged."""
    for line in sys.stdin.buffer:
        lines.put(line)
    os.kill(os.getpid(), signal.SIGTERM)


def _serve(lines: queue.SimpleQueue[bytes], output: BinaryIO) -> None:
    from shardproof.case import Case
    from shardproof.cases.runner import Session
    from shardproof.files import fast_json, read_fast_json

    with Session(1) as session:
        while True:
            case = Case.from_dict(read_fast_json(lines.get()))
            for judged in session.judge([case]):
                answer = {"result": judged.result.to_dict(), "account": judged.account}
                output.write(fast_json(answer) + b"\n")
                output.flush()


if __name__ == "__main__":
    main()
