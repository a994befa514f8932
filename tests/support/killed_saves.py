"""Processes that save for ever and are killed at random moments; what they leave.

    python tests/support/killed_saves.py 0 50    kills 0 to 49; exit code 1: not as promised

Each is two ranks, as threads, in a fork of this process, which itself never computes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from local_ranks import succeed

from shardproof.comm import Mesh
from shardproof.contract import Piece
from shardproof.impls.reference.checkpoint.agreement import State
from shardproof.impls.reference.checkpoint.checkpointing import Checkpointing
from shardproof.impls.reference.checkpoint.convert import tensor_of
from shardproof.impls.reference.checkpoint.errors import NotCommitted
from shardproof.impls.reference.checkpoint.manifest import MANIFEST, About
from shardproof.impls.reference.checkpoint.reading.checkpoint import Checkpoint
from shardproof.impls.reference.checkpoint.root import Branch, folders

FORMATS = ("sharded", "asynchronous", "full")
ELEMENTS = 100_000
#: Seconds until a process has begun its first save; seconds in which it is killed afterwards.
START, SPAN = 60.0, 0.3


def save(root: Path, form: str, branch: Branch | None, first: int, last: int) -> None:
    """Save steps ``first`` to ``last`` of two ranks; the file ``done`` names the last committed."""

    def body(rank: int, world: int) -> None:
        saver = getattr(Checkpointing, f"{form}_type")(root, Mesh({"shard": 2}), 2, branch)
        own = (rank * ELEMENTS // 2, (rank + 1) * ELEMENTS // 2)
        for step in range(first, last + 1):
            tensor = torch.full((own[1] - own[0],), float(step))
            piece = Piece("w", (ELEMENTS,), tensor, flat_range=own)
            saver.save(State({"parameters": [piece]}, About(step, "made", {"shard": 2})))
            if rank == 0:  # an asynchronous save waited for the one before it
                done = step - (form == "asynchronous")
                (root.parent / "done.part").write_text(str(done))
                (root.parent / "done.part").rename(root.parent / "done")
        saver.wait()

    succeed(body, 2)


def forked(root: Path, form: str, branch: Branch | None, first: int, last: int) -> int:
    """:func:`save` in a process of its own; its number."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            save(root, form, branch, first, last)
            code = 0
        finally:
            os._exit(code)
    return pid


def kill_one(number: int, place: Path) -> tuple[list[str], dict[str, int]]:
    """What is not as promised after kill ``number``, and what it met."""
    source, form = random.Random(number), FORMATS[number % len(FORMATS)]
    root = place / "root"
    root.mkdir()
    (place / "done").write_text("0")
    pid, latest = forked(root, form, None, 1, 10_000), time.monotonic() + START
    while not folders(root) and time.monotonic() < latest:
        time.sleep(0.001)
    time.sleep(source.random() * SPAN)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wrong: list[str] = []
    torn = [one.path for one in folders(root) if not one.is_committed]
    for folder in torn:
        try:
            Checkpoint.open(folder).close()
            wrong.append(f"{folder.name} is no checkpoint, and was opened")
        except NotCommitted as error:
            if MANIFEST not in str(error) and "holds no checkpoint" not in str(error):
                wrong.append(f"{folder.name}: {error}")
    done, step, branch = int((place / "done").read_text()), 0, None
    try:
        with Checkpoint.open(root) as checkpoint:
            step = checkpoint.manifest.about.step
            wrong += map(str, checkpoint.verify())
            if not bool((tensor_of(checkpoint, ("parameters", "w")) == step).all()):
                wrong.append(f"step {step} has other values")
            seen = frozenset(one.path.name for one in folders(root) if one.is_committed)
            before = (checkpoint.manifest.id, *checkpoint.manifest.before)
            branch = Branch(checkpoint.manifest.run, before, seen)
    except NotCommitted:
        pass
    if step < done:
        wrong.append(f"step {done} was committed, {step or 'nothing'} is there")
    # The next job goes on, whatever the dead one left.
    held = (root / "lock.json").exists()
    _, status = os.waitpid(forked(root, form, branch, step + 1, step + 2), 0)
    left = sorted(path.name for path in root.iterdir() if not (path / MANIFEST).exists())
    steps = [one.step for one in folders(root)]
    if status or left or steps != [step + 2, step + 1]:
        wrong.append(f"gone on with: exit {status}, left {left}, steps {steps}")
    return wrong, {"torn": len(torn), "locked": held, "committed": step > 0}


def main(first: int, last: int) -> int:
    """Kills ``first`` to ``last - 1``."""
    broken, met = 0, {"torn": 0, "locked": 0, "committed": 0}
    with tempfile.TemporaryDirectory() as name:
        for number in range(first, last):
            place = Path(name) / str(number)
            place.mkdir()
            wrong, found = kill_one(number, place)
            met = {key: met[key] + count for key, count in found.items()}
            broken += bool(wrong)
            for line in wrong:
                print(f"kill {number}: {line}", flush=True)
            shutil.rmtree(place)
    print(json.dumps({"kills": last - first, "broken": broken, **met}))
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
