"""A watched script does what it does unwatched, its failures included."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from watched_script import HEAD

pytestmark = pytest.mark.launches

TRAINS = """\
model = nn.parallel.DistributedDataParallel(make())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train():
    for step in range(5):
        if step == 3 and rank == 1:
            FAULT
        steps(model, optimizer, 1)


try:
    train()
finally:
    LEAVES
    open(f"{sys.argv[0]}.{rank}", "a").write("left its groups\\n")
"""
ENDS = TRAINS.replace("LEAVES", "dist.destroy_process_group()")
#: Rank 0 opens the store that both met in; it ends with the groups, so that others may follow it.
PORT = """\
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for p in model.parameters():
    p.grad = torch.ones_like(p)
optimizer.step()
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    import os, socket, time

    for _ in range(100):  # its thread takes a moment to end
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if not probe.connect_ex(("127.0.0.1", int(os.environ["MASTER_PORT"]))):
                time.sleep(0.05)
                continue
        open(f"{sys.argv[0]}.0", "a").write("nobody listens\\n")
        break
"""

#: Name -> (script, which ranks fail, what its ranks write, how the report begins).  ``None``: torch
#: now and then ends a rank in whose groups another has failed, after its last line, unwatched, too.
SCRIPTS: dict[str, tuple[str, list[bool | None], list[str], str]] = {
    "a rank raises and destroys its groups": (
        ENDS.replace("FAULT", "raise ValueError('bad')"),
        [True, True],
        ["left its groups", "left its groups"],
        "crash: rank 1 raised ValueError: bad in train (",
    ),
    "a rank ends before the others": (
        ENDS.replace("FAULT", "break"),
        [True, None],
        ["left its groups", "left its groups"],
        "crash: rank 1 ended the script and never reached call 9 on ranks 0-1, all_reduce",
    ),
    "a rank ends and leaves its groups to Python": (
        TRAINS.replace("FAULT", "break").replace("LEAVES", "pass"),
        [True, None],
        ["left its groups", "left its groups"],
        "crash: rank 1 ended the script and never reached call 9 on ranks 0-1, all_reduce",
    ),
    "the store ends with the groups": (PORT, [False, False], ["nobody listens"], "pass: "),
}


def plain(script: Path) -> list[bool]:
    """Which of both ranks fail without the suite; torch may abort one that has raised."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **common, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
        )
        for rank in (0, 1)
    ]
    try:
        return [process.wait(100) != 0 for process in ranks]
    finally:
        for process in ranks:
            process.kill()


def written(folder: Path) -> list[str]:
    """What the ranks have written; it is gone then."""
    lines = []
    for path in sorted(folder.glob("train.py.?")):
        lines += path.read_text().splitlines()
        path.unlink()
    return lines


def as_planned(failed: list[bool], planned: list[bool | None]) -> bool:
    """Whether the ranks fail that must."""
    return all(p is None or f == p for f, p in zip(failed, planned, strict=True))


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_ends_as_it_does_unwatched(command: Any, tmp_path: Path, name: str) -> None:
    body, fail, lines, says = SCRIPTS[name]
    script = tmp_path / "train.py"
    # Imported later, as optimizers do, its default arguments keep the group of that moment.
    script.write_text(f"import sys, torch.distributed.nn\n{HEAD}{body}")
    alone = plain(script)
    assert as_planned(alone, fail) and written(tmp_path) == lines, f"the script itself: {alone}"
    _, out, err = command("watch", str(script), "--results", str(tmp_path / "run"), "--every", "1")
    ends = json.loads((tmp_path / "run/ends.json").read_text())
    failed = [end["exit_code"] != 0 for end in ends]
    assert as_planned(failed, fail) and {end["reason"] for end in ends} == {""}, out
    assert written(tmp_path) == lines, out + err
    ended = fail[1] is None and failed[1]
    assert out.startswith("crash: rank 1 " if ended else says), out
