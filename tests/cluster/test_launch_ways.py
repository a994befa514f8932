"""The rank program as people start it: every rank by hand, and under their own mpirun.

Under torchrun: test_cluster.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from shardproof.backends.mpi import found as mpi_found
from shardproof.cluster.launchers.place import LAUNCHERS
from shardproof.verdicts import BAD_INPUT

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, "-m", "shardproof.cluster.torchrun"]
CASE = ["ddp-gpt", "--tier", "full", "-k", "naive and bitwise and sgd"]

pytestmark = pytest.mark.launches


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def start(
    variables: Sequence[Mapping[str, str]], folder: Path, *before: str
) -> list[tuple[int, str]]:
    """One process for each of ``variables``; exit code and output of each."""
    launchers = {name for names in LAUNCHERS.values() for name in vars(names).values()}
    clean = {name: value for name, value in os.environ.items() if name not in launchers}
    command = [*before, *PROGRAM, *CASE, "--records", str(folder / "records")]
    started = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=clean | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)} | dict(own),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for own in variables
    ]
    try:
        said = [process.communicate(timeout=150)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


def by_hand(rank: int, world: int, port: str, **more: str) -> dict[str, str]:
    numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    return numbers | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | more


def test_every_rank_by_hand(tmp_path: Path) -> None:
    port = free_port()
    ends = start([by_hand(rank, 2, port) for rank in range(2)], tmp_path)
    assert [code for code, _ in ends] == [0, 0], ends
    assert "1 judged (1 pass)" in ends[0][1]


def test_under_the_users_own_mpirun_over_gloo(tmp_path: Path) -> None:
    if reason := mpi_found.problem():
        pytest.skip(reason)
    found = mpi_found.find()
    assert found is not None
    ((code, said),) = start([{"MASTER_PORT": free_port()}], tmp_path, *found.command(2))
    assert code == 0, said
    assert "1 judged (1 pass)" in said


def test_two_ranks_of_one_number_both_say_so(tmp_path: Path) -> None:
    port = free_port()
    ends = start([by_hand(rank, 3, port, LOCAL_RANK="0") for rank in (0, 1, 1)], tmp_path)
    for code, said in ends:
        assert code == BAD_INPUT, said
        assert said.startswith("two processes have rank 1, both on "), said
        assert said.count("\n") == 1


class TestUnderOnesOwnMpirun:
    pytestmark = pytest.mark.skipif(
        mpi_found.problem() is not None, reason=str(mpi_found.problem())
    )

    def run(self, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        found = mpi_found.find()
        assert found is not None
        root = Path(__file__).parents[2]
        paths = os.pathsep.join([str(root), str(root / "tests" / "support")])
        program = [sys.executable, "-m", "shardproof.cluster.torchrun", "--backend", "mpi"]
        return subprocess.run(
            [*found.command(2), *program, "--records", str(folder / "records"), *arguments],
            capture_output=True,
            text=True,
            timeout=170,
            cwd=root,
            env=os.environ | {"PYTHONPATH": paths, "TMPDIR": str(folder)},
            check=False,
        )

    def test_the_rank_program_needs_no_address(self, tmp_path: Path) -> None:
        done = self.run(tmp_path, "ddp-gpt", "-k", "naive")
        assert done.returncode == 0, done.stderr
        assert "1 judged (1 pass)" in done.stdout + done.stderr

    def test_a_case_that_breaks_does_not_spoil_the_next(self, tmp_path: Path) -> None:
        systems = "--impl", "faulty_ranks:Raises", "--impl", "reference/naive_ddp"
        done = self.run(tmp_path, "ddp-gpt", *systems, "-k", "bitwise")
        assert done.returncode == 1
        said = done.stdout + done.stderr
        assert "a fish" in said and "2 judged (1 crash, 1 pass)" in said
