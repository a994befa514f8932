"""A process that outlives the command, to remove its cluster should the command be killed.

Whoever is ended by SIGKILL removes nothing, and containers are no children of the command.  So it
forks a guardian that holds one end of a pipe: once the other end has closed, the command has
removed everything and said so, or it is dead and the guardian does it.  The guardian has a session
of its own: a Ctrl-C and the end of a terminal do not reach it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_DONE = b"done"
#: Seconds that an engine has to answer: it may have ended with the command, and start again.
_ENGINE_SECONDS = 60.0
#: What the engine was asked for right before the end may be made after it: looks in a row that find
#: nothing, and seconds between two.
_LOOKS, _SECONDS = 10, 1.0


@contextlib.contextmanager
def guarded(name: str, results: Path) -> Iterator[None]:
    """Inside, a guardian watches over cluster ``name``; after it nothing of it is left to remove.

    ``results`` belong to another user meanwhile, who is the owner again once the cluster is gone.
    """
    command = [sys.executable, "-m", "shardproof.cluster.containers.guardian", name, str(results)]
    guardian = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert guardian.stdin is not None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it was killed
            guardian.stdin.write(_DONE)
        with contextlib.suppress(OSError):
            guardian.stdin.close()
        guardian.wait()


def main(name: str, results: str) -> None:
    """Wait for the end of the command; remove what it has left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() == _DONE:
        return
    from shardproof.cluster.containers import cluster  # it takes seconds: not before it is needed

    deadline, looks = time.monotonic() + _ENGINE_SECONDS, 0
    while looks < _LOOKS and time.monotonic() < deadline:
        looks = looks + 1 if _is_gone(name) else 0
        time.sleep(_SECONDS)
    cluster.give(Path(results), os.geteuid())


def _is_gone(name: str) -> bool:
    """Remove what there is of cluster ``name``; whether there was nothing."""
    from shardproof.cluster.containers import cluster, engine

    with (
        contextlib.suppress(engine.NoCluster, *engine.failures()),
        contextlib.closing(engine.client()) as client,
    ):
        if not cluster.parts(client, name):
            return True
        cluster.remove(client, name)
    return False


if __name__ == "__main__":
    main(*sys.argv[1:])
