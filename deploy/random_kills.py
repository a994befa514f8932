"""Kill a part of a cluster at random, N times in a row, and look for what is left.

    python deploy/random_kills.py --runs 20 --seed 1 [--evidence FILE.md]

Each run is `shardproof cluster run` as one types it. By seed either a fault strikes at a step of a
case (a rank, a node, the head, or the command is killed: `--fault`), or one of node, head and
command is killed so many milliseconds after it runs, also while the cluster is being started.
Afterwards there must be no container, network, volume or process of the run, and its folder must
verify. Exit code 1: something is left, or nothing was killed. Images are built first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shardproof.cluster.containers import cluster, engine

SCENARIO = ("ddp-gpt", "--backend", "gloo", "--world", "4")
AT_STEPS = ("kill", "kill_node", "stop_head", "stop_client")
#: Milliseconds: a cluster that starts, or judges its first case, and has not ended.
LATEST = 4_000
#: Seconds that the engine and the guardian have to remove what is left; they took 5 at most.
END_SECONDS = 60.0


@dataclass(frozen=True)
class Kill:
    """What is killed, and when: at a step (``plan``) or so many milliseconds after it runs."""

    what: str
    plan: str = ""
    after_ms: int = 0

    @classmethod
    def drawn(cls, draw: random.Random) -> Kill:
        what = draw.choice(AT_STEPS)
        if what == "kill" or draw.random() < 0.5:
            node, case, step = draw.randrange(2), draw.randint(1, 3), draw.randrange(3)
            return cls(what, f"{what},node={node},case={case},step={step}")
        return cls(what, after_ms=draw.randrange(LATEST))

    def __str__(self) -> str:
        return self.plan or f"{self.what} {self.after_ms / 1000:.1f} s after it ran"


def kill(kill_it: Kill, process: Any, client: Any) -> bool:
    """Wait until it runs and as long as was drawn, then kill it; whether it was there to be killed.

    The command counts as running once something of its cluster is there.
    """
    while (target := running(kill_it.what, process, client)) is None:
        if process.poll() is not None:
            return False
        time.sleep(0.1)
    time.sleep(kill_it.after_ms / 1000)
    if process.poll() is not None:
        return False
    try:
        target.kill()
    except engine.failures():
        return False  # it has gone meanwhile
    return True


def running(what: str, process: Any, client: Any) -> Any:
    """What is to be killed, if it runs."""
    parts = cluster.parts(client, name_of(process))
    if what == "stop_client":
        return process if parts else None
    ending = "-head" if what == "stop_head" else "-node1"
    found = (part for part in parts if part.name.endswith(ending))
    return next((part for part in found if getattr(part, "status", "") == "running"), None)


def name_of(process: Any) -> str:
    """The cluster of the command; its number where there is none yet."""
    own = f"shardproof-{process.pid}-"
    names = {cluster.label_of(part) for part in cluster.parts(engine.client())}
    return next((name for name in names if name.startswith(own)), own)


def left(client: Any, volumes: set[str], pid: int) -> list[str]:
    """What is there of the run of process ``pid``: its containers and networks, processes of it or
    of a container that is gone, and volumes but for those of before.
    """
    own = f"shardproof-{pid}-"
    parts = [part.name for part in cluster.parts(client) if cluster.label_of(part).startswith(own)]
    boxes = {process.pid: box_of(process.pid) for process in psutil.process_iter()}
    known = {box.id for box in client.containers.list(all=True, ignore_removed=True)}
    processes = [
        f"process {process.pid}"
        for process in psutil.process_iter()
        if process.pid == pid
        or own in words_of(process)
        or not boxes.get(process.pid, set()) <= known
    ]
    return [*parts, *processes, *(volumes_of(client) - volumes)]


def volumes_of(client: Any) -> set[str]:
    return {f"volume {volume.name}" for volume in client.volumes.list()}


def words_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def box_of(pid: int) -> set[str]:
    """The id of the container that a process is in; of none: nothing."""
    try:
        return set(re.findall(r"docker[/-]([0-9a-f]{64})", Path(f"/proc/{pid}/cgroup").read_text()))
    except OSError:
        return set()


def verify(results: Path) -> str:
    """What `verify` says: all is there, or cases are missing (--resume runs them), or more."""
    words = [sys.executable, "-m", "shardproof", "verify", str(results)]
    done = subprocess.run(words, capture_output=True, text=True)
    said = [line for line in (done.stdout + done.stderr).splitlines() if str(results) in line]
    if done.returncode == 0:
        return "verifies"
    missing = [line for line in said if re.search(r"planned case \S+ is missing$", line)]
    return f"verifies but for {len(missing)} cases to come" if missing == said else "DAMAGED"


def run(kill_it: Kill, results: Path, client: Any) -> dict[str, Any]:
    """One run: how it ended, and what it left."""
    volumes = volumes_of(client)
    command = [sys.executable, "-m", "shardproof", "cluster", "run", *SCENARIO]
    command += ["--results", str(results), *(["--fault", kill_it.plan] if kill_it.plan else [])]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=-1, stderr=subprocess.STDOUT, text=True)
    struck = bool(kill_it.plan) or kill(kill_it, process, client)
    output, _ = process.communicate(timeout=600)
    if kill_it.plan:  # a fault that strikes breaks its case
        struck = process.returncode != 0
    ended = time.monotonic()
    while (found := left(client, volumes, process.pid)) and time.monotonic() < ended + END_SECONDS:
        time.sleep(0.2)
    lines = results / "cases.jsonl"
    judged = (
        [json.loads(line)["verdict"] for line in lines.read_text().splitlines()]
        if lines.exists()
        else []
    )
    verified = "no run yet"
    if (results / "run.json").exists():
        verified = verify(results)
    return {
        "kill": f"{kill_it}{'' if struck else ' (NOTHING WAS KILLED)'}",
        "struck": struck,
        "code": process.returncode,
        "cases": ", ".join(judged) or "none",
        "folder": verified,
        "lent": results.exists() and results.stat().st_uid != os.geteuid(),
        "gone_s": time.monotonic() - ended if not found else float("inf"),
        "seconds": ended - began,
        "left": found,
        "output": output,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=3, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=1, metavar="M", help="of the seed's kills")
    parser.add_argument("--evidence", type=Path, metavar="FILE.md", help="write a table there")
    options = parser.parse_args()
    client = engine.client()
    engine.build(client)
    draw = random.Random(options.seed)
    kills = [Kill.drawn(draw) for _ in range(options.first - 1 + options.runs)]
    rows = [
        "| | killed | exit code | cases judged | folder | gone after | left |",
        "|" + "---|" * 7,
    ]
    bad = 0
    for number, kill_it in enumerate(kills[options.first - 1 :], options.first):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o755)
            found = run(kill_it, Path(folder) / "run", client)
        wrong = (
            found["left"] or found["folder"] == "DAMAGED" or found["lent"] or not found["struck"]
        )
        bad += bool(wrong)
        cells = (number, found["kill"], found["code"], found["cases"], found["folder"])
        last = (f"{found['gone_s']:.1f} s", ", ".join(found["left"]) or "nothing")
        rows.append("| " + " | ".join(map(str, (*cells, *last))) + " |")
        print(rows[-1], flush=True)
        if wrong:
            print(found["output"])
    print(f"{options.runs - bad} of {options.runs} runs were killed and left nothing")
    if options.evidence is not None:
        options.evidence.write_text("\n".join(rows) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
