"""Disks and folders that cannot be written: every rank is told the file and what helps."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import FORMATS, make, saved, train, workload
from local_ranks import succeed
from small_disk import remount, small_disk

from shardproof.impls.reference.checkpoint.contents import Contents
from shardproof.impls.reference.checkpoint.errors import CheckpointError
from shardproof.impls.reference.checkpoint.files import FileLayer
from shardproof.impls.reference.checkpoint.reading.checkpoint import Checkpoint
from shardproof.impls.reference.checkpoint.root import folders

pytestmark = pytest.mark.usefixtures("one_thread")


def refused(root: Path, form: str) -> str:
    """What two ranks are told who save into ``root``: the same."""
    work = workload(layers=1)

    def body(rank: int, world: int) -> str:
        system = make("zero1", work, {"shard": 2}, rank, checkpoint={"format": form})
        train(system, work, 0, 1)
        with pytest.raises(CheckpointError) as error:
            system.save(root, {}).wait()
        return str(error.value)

    said = succeed(body, 2)
    assert said[0] == said[1]
    return said[0]


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_stands_where_the_folder_should(form: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for root in (file, file / "inside", file / "far" / "inside"):
        said = refused(root, form)
        assert said.startswith(f"{file}: this path cannot be used: "), said
        assert "this path is a file, but must be a folder: name another folder" in said
    assert file.read_text() == "mine"


@pytest.mark.parametrize("form", FORMATS)
def test_a_disk_that_can_only_be_read(form: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4096) as disk:
        root = disk / "root"
        saved(root, "zero1", {"shard": 2}, 1, form, work=workload(layers=1))
        before = {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()}
        remount(disk, "ro")
        for place in (root, disk / "new"):
            said = refused(place, form)
            assert said.startswith(str(place)) and "Read-only file system (rank 0)" in said
            assert "make the path writable, or name another folder; committed" in said
        assert before == {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()}
        with Checkpoint.open(root) as checkpoint:
            assert not list(checkpoint.verify())


@pytest.mark.parametrize("form", FORMATS)
def test_a_disk_that_is_full(form: str, tmp_path: Path) -> None:
    """Really full: with room made the same save is repeated."""
    work = workload(layers=1, width=128)

    def body(rank: int, world: int) -> str:
        system = make("zero1", work, {"shard": 2}, rank, checkpoint={"format": form, "keep": 3})
        train(system, work, 0, 1)
        system.save(root, {}).wait()
        said = ""
        for step in range(1, 20):
            train(system, work, step, step + 1)
            try:
                system.save(root, {}).wait()
            except CheckpointError as error:
                said = str(error)
                break
        system.handle.comm.all_gather_object(None)  # type: ignore[attr-defined]
        if rank == 0:
            remount(disk, "size=64m")
        system.handle.comm.all_gather_object(None)  # type: ignore[attr-defined]
        system.save(root, {}).wait()
        return said

    with small_disk(tmp_path / "disk", 12 << 10) as disk:
        root = disk / "root"
        said = succeed(body, 2)
        assert said[0] == said[1]
        assert "cannot be used: No space left on device (rank " in said[0]
        assert "free space on the disk of this path, or name another folder; committed" in said[0]
        steps = [one.step for one in folders(root)]
        assert steps == sorted(steps, reverse=True) and len(steps) == 3
        with Checkpoint.open(root) as checkpoint:
            assert not list(checkpoint.verify())


def test_a_folder_that_another_user_may_not_enter(tmp_path: Path) -> None:
    """As root every folder can be written, so the file layer says it."""

    class Forbidden(FileLayer):
        def make_folder(self, path: Path) -> None:
            raise PermissionError(13, "Permission denied", str(path))

    def body(rank: int, world: int) -> str:
        system = make("zero1", workload(layers=1), {"shard": 2}, rank)
        train(system, workload(layers=1), 0, 1)
        saver = FORMATS["sharded"](tmp_path / "new", system.mesh, layer=Forbidden())
        with pytest.raises(CheckpointError) as error:
            saver.save(Contents(system).state({}))
        return str(error.value)

    said = succeed(body, 2)
    assert said[0] == said[1]
    assert said[0].startswith(
        f"{tmp_path / 'new'}: this path cannot be used: Permission denied (rank 0) - "
    )
    assert "make the path writable, or name another folder" in said[0]
