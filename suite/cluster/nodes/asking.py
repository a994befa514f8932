"""Faults of nodes, from within: ranks and leaders ask for them, and who started the nodes answers.

A request is a line of JSON in a pipe that the engine's client reads
(``cluster/containers/node_faults.py``); its answer is a file, empty where what was asked for is
done.  Who asks goes on once it is there, so that a fault strikes between two calls of a rank,
however long the engine takes.
"""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

from shardproof.case import Fault
from shardproof.launch.nodes import node_here

#: Where the agents of a cluster have their doors.
FOLDER = Path("/dev/shm/shardproof-nodes")
#: The pipe, and what fills the disk, both there.
PIPE, FILLER = "faults", "filler"
#: What the head knows a request by that undoes what was done to a node.
HEAL = "heal"
_CHUNK = 16 << 20
#: Longer than the engine's client waits for anything, and than a node takes to serve again.
_ANSWER_SECONDS = 300.0


class NotDone(RuntimeError):
    """The fault cannot be made; the message says why."""


def ask(folder: Path, what: str, node: int, seconds: float = 0.0) -> None:
    """Have it done, and return when it is.

    :raises NotDone: it cannot.
    """
    answer = folder / f"answer-{os.getpid()}-{time.monotonic_ns()}"
    request = {"what": what, "node": node, "seconds": seconds, "answer": str(answer)}
    try:
        with (folder / PIPE).open("w") as pipe:
            pipe.write(json.dumps(request) + "\n")
    except OSError as error:
        raise NotDone(f"this run cannot inject faults into nodes: {error}") from None
    deadline = time.monotonic() + _ANSWER_SECONDS
    while not answer.exists():
        if time.monotonic() > deadline:
            raise NotDone(f"request {what} for node {node}: no answer within {_ANSWER_SECONDS:g} s")
        time.sleep(0.005)
    reason = answer.read_text()
    answer.unlink()
    if reason:
        raise NotDone(f"request {what} for node {node}: {reason}")


def strike(fault: Fault) -> None:
    """Carry out ``fault`` on the node of the calling rank, by itself or by the engine's client."""
    node = node_here() or 0
    if fault.kind == "fill_disk":
        _fill_disk(FOLDER / FILLER)
        return
    ask(FOLDER, fault.kind, node, fault.seconds)
    if fault.kind == "fill_memory":
        hoard = []
        while True:  # until the kernel ends this process
            hoard.append(b"1" * _CHUNK)


def heal(fault: Fault, node: int) -> None:
    """Undo ``fault`` on ``node``; returns once its agent serves again."""
    if fault.kind == "fill_disk":
        (FOLDER / FILLER).unlink(missing_ok=True)
    else:
        ask(FOLDER, HEAL, node)


def _fill_disk(file: Path) -> None:
    with file.open("wb", buffering=0) as filler:
        for size in (_CHUNK, 1 << 12):
            try:
                while True:
                    filler.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
