"""Autopsies of jobs that the suite did not start: Flight Recorder dumps, and scripts that run."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardproof.backends.mpi import found as mpi_found
from shardproof.launch import process_control
from shardproof.watch import calls, record
from tests.support import watched_script
from tests.support.commands import here


def entry(number: int, sequence: int, name: str = "all_reduce", **changes: Any) -> dict[str, Any]:
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "profiling_name": f"nccl:{name}",
        "input_sizes": [[4, 8]],
        "input_dtypes": ["Float"],
        "state": "completed",
        "is_p2p": False,
        "retired": True,
        "frames": [
            {"name": name, "filename": "/x/torch/distributed/distributed_c10d.py", "line": 9},
            {"name": "step", "filename": "/home/me/train.py", "line": 30 + number},
        ],
    } | changes


def dump(folder: Path, rank: int, *entries: dict[str, Any], as_json: bool = False) -> None:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    whole = {"version": "2.10", "entries": [*entries], "pg_config": config, "pg_status": {}}
    data = json.dumps(whole).encode() if as_json else pickle.dumps(whole, protocol=2)
    (folder / f"nccl_trace_rank_{rank}").write_bytes(data)


WAITS = {"state": "started", "retired": False}


@pytest.mark.parametrize("as_json", [False, True], ids=["pickle", "JSON"])
def test_dumps_tell_who_never_came(tmp_path: Path, as_json: bool) -> None:
    for rank in (0, 2):
        dump(tmp_path, rank, entry(0, 1), entry(1, 2, **WAITS), as_json=as_json)
    dump(tmp_path, 1, entry(0, 1), as_json=as_json)
    done = here("watch", "--judge", str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "hang: desync: ranks 0,2 wait in all_reduce(float[4x8]), call 2 of group 0-2 "
        "in step (/home/me/train.py:31); rank 1 never came: it stands in step "
        "(/home/me/train.py:30), its last call: all_reduce(float[4x8]), call 1 of group 0-2"
    ) in done.stdout


def test_a_rank_without_a_dump_is_gone(tmp_path: Path) -> None:
    for rank in (0, 2):
        dump(tmp_path, rank, entry(0, 1), entry(1, 2, **WAITS))
    done = here("watch", "--judge", str(tmp_path))
    assert "hang: dead peer: ranks 0,2 wait in" in done.stdout, done.stdout
    assert "rank 1 never came: it left no dump, it made no call" in done.stdout


def test_calls_that_differ_in_dumps(tmp_path: Path) -> None:
    for rank in (0, 2):
        dump(tmp_path, rank, entry(0, 1), entry(1, 2, **WAITS))
    dump(tmp_path, 1, entry(0, 1), entry(1, 2, "broadcast", **WAITS))
    done = here("watch", "--judge", str(tmp_path))
    assert (
        "desync: call 2 of group 0-2 does not match: ranks 0,2 call all_reduce(float[4x8]); "
        "rank 1 calls broadcast(float[4x8])"
    ) in done.stdout


def test_dumps_of_ranks_that_agree_decide_nothing(tmp_path: Path) -> None:
    for rank in range(3):
        dump(tmp_path, rank, entry(0, 1))
    done = here("watch", "--judge", str(tmp_path))
    assert done.returncode == 3 and "all ranks made the same calls" in done.stdout


DIFFERENT = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
halves = [dist.new_group([0]), dist.new_group([1])]
dist.all_reduce(torch.ones(2 + rank), group=halves[rank])
works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
for work in reversed(works):
    work.wait()
if rank:
    dist.all_reduce(torch.ones(5))
dist.broadcast(torch.ones(3), 0)
dist.barrier()
"""


@pytest.mark.launches
@pytest.mark.usefixtures("forked_ranks")
def test_calls_that_differ_end_a_script_before_its_ranks_stand_still(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DIFFERENT)
    run = tmp_path / "run"
    done = here("watch", str(tmp_path / "train.py"), "--nproc", "2", "--results", str(run))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "desync: call 4 of group 0-1 does not match" in done.stdout, done.stdout
    assert {end.reason for end in record.read_ends(run)} == {"desync"}


class Harmful:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("kind", ["harmful", "cut", "other", "not a dump"])
def test_a_dump_that_is_none_is_refused_and_carries_nothing_out(tmp_path: Path, kind: str) -> None:
    marker, whole = tmp_path / "carried out", {"entries": [entry(0, 1)], "pg_config": {}}
    data = {
        "harmful": pickle.dumps({**whole, "extra": Harmful(marker)}),
        "cut": pickle.dumps(whole)[:-40],
        "other": pickle.dumps({"entries": [{"a": 1}]}),
        "not a dump": b"\x00\x01 nothing",
    }[kind]
    dump(tmp_path, 0, entry(0, 1))
    (tmp_path / "nccl_trace_rank_1").write_bytes(data)
    done = here("watch", "--judge", str(tmp_path))
    assert done.returncode == 2, done.stdout + done.stderr
    assert (
        f"{tmp_path}/nccl_trace_rank_1: this is not a dump of the Flight Recorder: "
        in done.stderr + done.stdout
    )
    assert not marker.exists()


RECORDED = """\
import pickle, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import torch._C._distributed_c10d as c10d
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
store = f"file://{folder}/store"
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
dist.all_reduce(torch.ones(4))
if rank == 0:
    work = dist.all_reduce(torch.ones(6), async_op=True)
while True:  # until gloo's thread has begun the last call and told that the first is over
    calls = pickle.loads(trace := c10d._dump_fr_trace())["entries"]
    if len(calls) == 2 - rank and calls[0]["retired"]:
        break
    time.sleep(0.05)
(folder / f"nccl_trace_rank_{rank}").write_bytes(trace)
(folder / f"done{rank}").touch()
while not all((folder / f"done{r}").exists() for r in (0, 1)):
    pass
import os; os._exit(0)
"""


@pytest.mark.launches
def test_a_dump_that_torch_wrote(tmp_path: Path) -> None:
    """Of gloo, whose entries never say that a call is over."""
    (tmp_path / "recorded.py").write_text(RECORDED)
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "recorded.py"), str(tmp_path), str(rank)],
            env=environment,
        )
        for rank in (0, 1)
    ]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    done = here("watch", "--judge", str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "desync: rank 0 waits in all_reduce(float[6]), call 2 of group 0-1" in done.stdout
    assert "rank 1 never came: it stands at " in done.stdout and "recorded.py:8)" not in done.stdout


OVER_MPI = """\
import shardproof.watch
import sys
from pathlib import Path
import torch, torch.distributed as dist
from shardproof.backends import Joining
from shardproof.backends.mpi import group
from shardproof.launch import process_control
group.join(Joining(0, 1, Path(sys.argv[1]), 60.0, ledgers=False))
dist.all_reduce(torch.ones(3))
group.leave()
group.stop()
"""


@pytest.mark.launches
@pytest.mark.skipif(mpi_found.problem() is not None, reason=str(mpi_found.problem()))
def test_calls_over_mpi_are_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "over_mpi.py").write_text(OVER_MPI)
    given = {"RANK": "0", "WORLD_SIZE": "1", "SHARDPROOF_WATCH_RESULTS": str(tmp_path / "found")}
    words = [sys.executable, str(tmp_path / "over_mpi.py"), str(tmp_path / "store")]
    done = subprocess.run(words, env={**os.environ, **given}, capture_output=True)
    assert done.returncode == 0, done.stderr
    logged = [call.text for call in calls.read(tmp_path / "found" / "rank0.calls")]
    assert "all_reduce(sum, float32[3])" in logged
    assert b"a group of the backend" not in done.stderr


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        started.append(
            subprocess.Popen(
                [sys.executable, *words, "-m", "shardproof.watch", "train.py"],
                cwd=tmp_path,
                env={**os.environ, "SHARDPROOF_WATCH_RESULTS": "found", "OMP_NUM_THREADS": "1"},
                stderr=subprocess.DEVNULL,
            )
        )
        return started[-1]

    yield start
    for process in started:
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
        process.wait()


#: What rank 1 does -> the exit code, and what is said of it.
STANDS = {
    "computes": (3, ("slow rank, not a hang: rank 0 waits in ", "it computes in main (")),
    "sleeps": (1, ("the ranks stand still: desync: rank 0 waits in ", "it stands in main (")),
    "stopped": (
        1,
        ("the ranks stand still: dead peer: rank 0 waits in ", "its process was stopped"),
    ),
}


def has_come_to(how: str, pid: int) -> None:
    """Return when the process does it."""
    state, until = {"computes": "R", "sleeps": "S", "stopped": "T"}[how], time.monotonic() + 60
    while process_control.state_of(pid) != state:
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.launches
def test_a_job_under_torchrun_is_asked_while_it_hangs(
    tmp_path: Path, torchrun: Callable[[], Any]
) -> None:
    """One job, three times: its rank 1 computes, then sleeps, then is stopped."""
    step = "        optimizer.step()\n"
    late = (
        "        if rank == 1 and step == 5:\n"
        "            while not os.path.exists('sleep'):\n"
        "                pass\n"
        "            time.sleep(1000)\n"
    )
    watched_script.write(tmp_path, (step, late + step))
    torchrun()
    folder, until = tmp_path / "found", time.monotonic() + 120
    logs = [folder / f"rank{rank}.calls" for rank in (0, 1)]
    while time.monotonic() < until:
        if all(log.exists() for log in logs):
            first = [len(calls.read(log)) for log in logs]
            time.sleep(1.5)
            if first[0] > first[1] > 3 and first == [len(calls.read(log)) for log in logs]:
                break
        time.sleep(0.2)
    pid = calls.state(logs[1]).pid
    for how, (code, says) in STANDS.items():
        if how == "sleeps":
            (tmp_path / "sleep").touch()
        elif how == "stopped":
            os.kill(pid, signal.SIGSTOP)
        has_come_to(how, pid)
        done = here("watch", "--judge", str(folder))
        for words in (*says, "; rank 1 never came: ", "train.py:"):
            assert words in done.stdout, done.stdout + done.stderr
        assert done.returncode == code
