"""One root, one run, one job: what goes on from where, and what two jobs do to each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FORMATS, make, saved, train, workload
from local_ranks import succeed

from shardproof.impls.reference.checkpoint import lock
from shardproof.impls.reference.checkpoint.agreement import Agreed
from shardproof.impls.reference.checkpoint.data_file import Held
from shardproof.impls.reference.checkpoint.errors import CheckpointError
from shardproof.impls.reference.checkpoint.files import FileLayer
from shardproof.impls.reference.checkpoint.manifest import About, Manifest
from shardproof.impls.reference.checkpoint.reading.checkpoint import Checkpoint
from shardproof.impls.reference.checkpoint.reading.regions import Place
from shardproof.impls.reference.checkpoint.root import Branch, Root, folders, named, newest
from shardproof.impls.reference.checkpoint.writing import write_pair

pytestmark = pytest.mark.usefixtures("one_thread")


def steps(root: Path) -> list[int]:
    """Of all that is committed, the last save first."""
    return [one.step for one in folders(root) if one.is_committed]


def put(job: Root, folder: Path) -> None:
    """Write one number into ``folder`` and commit it."""
    found = named(folder)
    assert found is not None
    place = Place((), (), None)
    held = Held("w", "parameters", "w", place, 0, 0, torch.zeros(()))
    listed = write_pair(job.layer, Agreed(folder, ()), "rank-00000", [held])
    assert listed is not None
    about, run = About(found.step, "made", {"shard": 1}), job.branch.run
    job.commit(folder, Manifest("sharded", folder.name, run, job.standing(), about, (listed,)), 2)


def job(root: Path, branch: Branch | None = None) -> Root:
    return Root(FileLayer(), root, branch or Branch())


# ------------------------------------------------------------------------------------ older ones


@pytest.mark.parametrize("form", FORMATS)
def test_who_goes_on_from_an_older_one_starts_a_branch(form: str, tmp_path: Path) -> None:
    """Step 4 of the branch that was left wins no restart, and stays until step 3 is committed."""
    work, mesh = workload(layers=1), {"replicate": 2}
    saved(tmp_path, "ddp", mesh, 2, form, work=work)
    first = newest(tmp_path)
    assert first is not None

    def body(rank: int, world: int) -> list[list[int]]:
        seen = []

        def look(system: Any) -> None:
            system.handle.comm.all_gather_object(None)
            seen.append(steps(tmp_path))
            system.handle.comm.all_gather_object(None)

        system = make("ddp", work, mesh, rank, checkpoint={"format": form})
        system.load(tmp_path)
        train(system, work, 2, 4)
        system.save(tmp_path, {}).wait()
        look(system)
        system.load(first)  # the same job goes back
        assert system.steps_done == 2
        look(system)
        train(system, work, 2, 3)
        system.save(tmp_path, {}).wait()
        look(system)
        other = make("ddp", work, mesh, rank, checkpoint={"format": form})
        other.load(tmp_path)
        assert other.steps_done == 3
        train(other, work, 3, 4)
        other.save(tmp_path, {}).wait()  # step 4 once more
        look(other)
        return seen

    assert succeed(body, 2)[0] == [[4, 2], [4, 2], [3, 2], [4, 3]]


def test_another_branch_goes_after_the_commit_and_never_wins(tmp_path: Path) -> None:
    """Killed between the commit and the removal: the branch that was left stays behind."""
    one = job(tmp_path)
    for step in (2, 4):
        put(one, one.begin(step))
    two, four = (next(f.path for f in folders(tmp_path) if f.step == step) for step in (2, 4))

    class Killed(FileLayer):
        def unlink(self, path: Path) -> None:
            raise OSError(5, "killed", str(path))

    back = Branch(one.branch.run, (two.name,), frozenset({two.name, four.name}))
    killed = Root(Killed(), tmp_path, back)
    with pytest.raises(
        CheckpointError, match="step 3 is committed, but the cleanup after it failed"
    ):
        put(killed, killed.begin(3))
    assert steps(tmp_path) == [3, 4, 2]
    (tmp_path / lock.NAME).unlink()  # as if of a dead process
    three = newest(tmp_path)
    assert three is not None and three.name.startswith("step-00000003")
    seen = frozenset(f.path.name for f in folders(tmp_path))
    again = job(tmp_path, Branch(one.branch.run, (three.name, two.name), seen))
    put(again, again.begin(4))
    assert steps(tmp_path) == [4, 3]  # the other step 4 went, though only two came after it


def test_the_same_step_twice_on_one_branch_is_refused(tmp_path: Path) -> None:
    one = job(tmp_path)
    put(one, one.begin(2))
    with pytest.raises(CheckpointError, match="already holds step 2 of this run - train at"):
        one.begin(2)
    assert not (tmp_path / lock.NAME).exists()


# ------------------------------------------------------------------------------------- two jobs


def test_two_new_runs_in_an_empty_folder(tmp_path: Path) -> None:
    one, two = job(tmp_path), job(tmp_path)
    folder = one.begin(1)
    (folder / "rank-00001.safetensors").write_text("half")
    with pytest.raises(CheckpointError, match="this process saves into this folder already"):
        two.begin(1)
    assert (folder / "rank-00001.safetensors").read_text() == "half"
    put(one, folder)
    with pytest.raises(CheckpointError, match="this checkpoint belongs to run"):
        two.begin(1)
    put(one, one.begin(2))
    assert steps(tmp_path) == [2, 1]


def test_two_jobs_that_go_on_with_the_same_run(tmp_path: Path) -> None:
    """One saves; the other one's next save would be of another course of the same run."""
    work, mesh = workload(layers=1), {"replicate": 1}
    saved(tmp_path, "ddp", mesh, 2, work=work)

    def body(rank: int, world: int) -> str:
        both = [make("ddp", work, mesh, rank) for _ in range(2)]
        for system in both:
            system.load(tmp_path)
            train(system, work, 2, 3)
        both[0].save(tmp_path, {})
        train(both[0], work, 3, 4)
        with pytest.raises(CheckpointError) as error:
            both[1].save(tmp_path, {})
        both[0].save(tmp_path, {})
        return str(error.value)

    said = succeed(body, 1)[0]
    assert "was saved by another job, which continues the same run (rank 0) - end one" in said
    assert steps(tmp_path) == [4, 3]


def test_an_attempt_in_mid_save_is_not_removed_by_another_job(tmp_path: Path) -> None:
    one = job(tmp_path)
    put(one, one.begin(5))
    two = job(tmp_path, Branch(one.branch.run, one.branch.before, one.branch.seen))
    folder = one.begin(6)
    with pytest.raises(CheckpointError, match="saves into this folder"):
        two.begin(6)
    put(one, folder)
    assert steps(tmp_path) == [6, 5]


# ---------------------------------------------------------------------------------------- locks

HOLDER = """
import sys, time
from pathlib import Path
from shardproof.impls.reference.checkpoint.files import FileLayer
from shardproof.impls.reference.checkpoint.reading.regions import Place
from shardproof.impls.reference.checkpoint.writing import write_pair
from shardproof.impls.reference.checkpoint.root import Branch, Root
folder = Root(FileLayer(), Path(sys.argv[1]), Branch()).begin(3)
(folder / "rank-00000.safetensors").write_text("half")
print("begun", flush=True)
time.sleep(60)
"""


def test_a_lock_lives_as_long_as_its_process(tmp_path: Path) -> None:
    """While it lives others are refused; killed, its lock and its orphan are no obstacle."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "begun\n"
        with pytest.raises(CheckpointError, match=f"process {holder.pid} on this machine saves"):
            job(tmp_path).begin(1)
        assert len(folders(tmp_path)) == 1
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
    one = job(tmp_path)
    put(one, one.begin(1))
    assert steps(tmp_path) == [1] and len(folders(tmp_path)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [folders(tmp_path)[0].path.name]


def held(root: Path, **changed: Any) -> None:
    """A lock of this process, but for what is ``changed``."""
    pid = os.getpid()
    owner = lock.Owner(*lock.here(), pid, lock.started(pid), "another")._replace(**changed)
    (root / lock.NAME).write_text(json.dumps(owner._asdict()))


@pytest.mark.parametrize(
    "changed",
    [{"started": 12345}, {"boot": "another"}, {"pid": 2**22 + 1}],
    ids=["the number was given again", "the machine was started again", "no such process"],
)
def test_the_lock_of_a_dead_process_is_taken_over(changed: dict[str, Any], tmp_path: Path) -> None:
    held(tmp_path, **changed)
    one = job(tmp_path)
    put(one, one.begin(1))
    assert steps(tmp_path) == [1] and not (tmp_path / lock.NAME).exists()


@pytest.mark.parametrize("content", [b"", b'{"host": "x"', b"[]", b'{"host": 3}'])
def test_a_lock_that_nobody_finished_is_taken_over(content: bytes, tmp_path: Path) -> None:
    (tmp_path / lock.NAME).write_bytes(content)
    began = time.monotonic()
    job(tmp_path).begin(1)
    assert time.monotonic() - began >= lock._WRITTEN  # its owner might be about to write it


def test_the_lock_of_another_machine_is_refused_with_the_remedy(tmp_path: Path) -> None:
    held(tmp_path, host="far-away", started=1)
    with pytest.raises(CheckpointError) as error:
        job(tmp_path).begin(1)
    said = str(error.value)
    assert f"process {os.getpid()} on 'far-away' saves into this folder" in said
    assert f"if that job is dead, remove {tmp_path / lock.NAME}" in said


def test_who_lost_the_lock_is_refused_at_the_commit(tmp_path: Path) -> None:
    """Another job took this one for dead; it goes on, this one does not count."""
    one, two = job(tmp_path), job(tmp_path)
    folder = one.begin(1)
    held(tmp_path, started=12345)
    other = two.begin(1)  # and removes what it takes for an orphan
    folder.mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match="lock no longer belongs to this job"):
        put(one, folder)
    one.abandon()
    put(two, other)
    assert [path.name for path in tmp_path.iterdir()] == [other.name]


def test_a_failed_save_gives_the_lock_back(tmp_path: Path) -> None:
    work = workload(layers=1)

    def body(rank: int, world: int) -> None:
        system = make("zero1", work, {"shard": 2}, rank)
        train(system, work, 0, 1)
        with pytest.raises(CheckpointError, match="cannot be written as JSON"):
            system.save(tmp_path, {"x": object()} if rank else {})
        meet = system.handle.comm.all_gather_object  # type: ignore[attr-defined]
        meet(None)
        assert not any(tmp_path.iterdir())
        meet(None)  # the next save takes the lock
        system.save(tmp_path, {}).wait()

    succeed(body, 2)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.manifest.about.step == 1
