"""Files that were damaged, mixed up or forged: refused in words that name file and remedy."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile_checkpoints
import pytest
from checkpoints import saved

from shardproof.impls.reference.checkpoint.errors import CheckpointError, NotCommitted
from shardproof.impls.reference.checkpoint.manifest import INDEX, MANIFEST
from shardproof.impls.reference.checkpoint.reading.checkpoint import Checkpoint
from shardproof.impls.reference.checkpoint.reading.guarded_json import SEAL
from shardproof.impls.reference.checkpoint.root import folders, newest

pytestmark = pytest.mark.usefixtures("one_thread")
Fields = dict[str, Any]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return hostile_checkpoints.make_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture
def folder(bases: list[Path], tmp_path: Path) -> Path:
    """A sharded checkpoint of two ranks, to be spoilt."""
    copy = tmp_path / bases[1].name
    shutil.copytree(bases[1], copy)
    return copy


def edit(path: Path, change: Callable[[Fields], object]) -> None:
    """Forge a file of JSON: its checksum is right again, and the manifest's of an index, too."""
    fields = json.loads(path.read_bytes().rpartition(SEAL)[0] + b"}")
    change(fields)
    body = json.dumps(fields).encode()[:-1]
    data = body + SEAL + str(zlib.crc32(body)).encode() + b"}\n"
    path.write_bytes(data)
    if path.name != MANIFEST:
        edit(path.parent / MANIFEST, lambda manifest: relist(manifest, path, zlib.crc32(data)))


def relist(manifest: Fields, index: Path, crc: int) -> None:
    for one in manifest["files"]:
        if one["name"] + INDEX == index.name:
            one["index_sum"] = crc


def refused(folder: Path, file: str) -> str:
    """What reading says, which names ``file``."""
    said = hostile_checkpoints.examine(folder)
    assert said.startswith(str(folder / file)), said
    assert " - " in said
    return said


def test_whole_ones_are_read(bases: list[Path]) -> None:
    assert [hostile_checkpoints.examine(base) for base in bases] == ["", ""]


def test_a_flipped_bit_anywhere_is_told(bases: list[Path], tmp_path: Path) -> None:
    """Every region of every file: header length, header, tensors, index, manifest."""
    for base in bases:
        for file in sorted(base.iterdir()):
            size = file.stat().st_size
            for at in {*range(min(size, 12)), *range(0, size, size // 23 + 1), size - 3}:
                copy = tmp_path / base.name
                shutil.copytree(base, copy)
                data = bytearray((copy / file.name).read_bytes())
                data[at] ^= 1 << (at % 8)
                (copy / file.name).write_bytes(data)
                assert refused(copy, file.name), (file.name, at)
                shutil.rmtree(copy)


def test_a_truncated_file_and_a_missing_shard(folder: Path) -> None:
    data = folder / "rank-00001.safetensors"
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    assert "1 bytes, " in refused(folder, data.name) or "cut off" in refused(folder, data.name)
    data.unlink()
    assert "is missing" in refused(folder, data.name)
    (folder / "rank-00001.json").unlink()
    assert "is missing" in refused(folder, "rank-00001.json")
    (folder / MANIFEST).unlink()
    with pytest.raises(NotCommitted, match="cut short, so there is no checkpoint"):
        Checkpoint.open(folder)


def test_a_shard_of_another_step_or_run(folder: Path, tmp_path: Path) -> None:
    work = hostile_checkpoints.workload(layers=1, width=8, heads=2)
    saved(tmp_path / "other", "zero3", {"shard": 2}, 1, "sharded", work=work)
    (other,) = (tmp_path / "other").glob("step-*")
    name = "rank-00000.safetensors"
    shutil.copy(other / name, folder / name)
    assert "the header was changed" in refused(folder, name)  # it has the id of its checkpoint
    shutil.copy(other / "rank-00000.json", folder / "rank-00000.json")
    assert "is not the index that the manifest lists" in refused(folder, "rank-00000.json")
    index = (folder / "rank-00000.json").read_bytes()
    edit(folder / MANIFEST, lambda m: relist(m, folder / "rank-00000.json", zlib.crc32(index)))
    assert "belongs to checkpoint" in refused(folder, "rank-00000.json")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", "", ".x", "x\x00"])
def test_a_path_that_leaves_the_folder(folder: Path, name: str) -> None:
    edit(folder / MANIFEST, lambda fields: fields["files"][0].update(name=name))
    assert "a plain file name inside the checkpoint's folder" in refused(folder, MANIFEST)


def test_links_pipes_and_folders_are_not_followed(folder: Path) -> None:
    file = folder / "rank-00000.safetensors"
    moved = file.rename(folder.parent / "elsewhere")
    file.symlink_to(moved)
    assert "cannot be opened" in refused(folder, file.name)
    file.unlink()
    os.mkfifo(file)
    assert "is not a regular file" in refused(folder, file.name)
    file.unlink()
    file.mkdir()
    assert "is not a regular file" in refused(folder, file.name)


def test_a_checkpoint_that_is_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    """Neither when it is read, nor when a save tidies up what killed ones left."""
    root = tmp_path / "root"
    root.mkdir()
    moved = folder.rename(tmp_path / folder.name)
    (root / folder.name).symlink_to(moved)
    assert folders(root) == [] and newest(root) is None
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        Checkpoint.open(root)
    with pytest.raises(CheckpointError, match="links are not followed"):
        Checkpoint.open(root / folder.name)
    (tmp_path / "linked").symlink_to(tmp_path)  # the root may be one
    Checkpoint.open(tmp_path / "linked" / folder.name).close()


def first(fields: Fields) -> Fields:
    """The first tensor of an index that lies in a flat range."""
    return next(one for one in fields["tensors"] if "flat_range" in one)


FORGED: dict[str, tuple[Callable[[Fields], object], str]] = {
    "a shape of 2^60": (lambda f: first(f).update(shape=[2**60]), "2 \\*\\* 58 elements"),
    "a length of 2^60": (lambda f: f.update(bytes=2**60), "but states"),
    "a header of 2^60": (lambda f: f.update(header_bytes=2**60), "begins at byte"),
    "a checksum too few": (lambda f: f.update(sums=f["sums"][8:]), "chunks"),
    "half a checksum": (lambda f: f.update(sums=f["sums"][4:]), "8 hexadecimal digits"),
    "a range that is no part": (lambda f: first(f).update(flat_range=[0, 10**9]), "not a part of"),
    "an overlap": (
        lambda f: first(f).update(name=f["tensors"][-2]["name"]),
        "is|lies|differ|begin",
    ),
    "a name twice": (lambda f: f["tensors"].append(f["tensors"][0]), "begins at byte"),
    "a kind of nothing": (lambda f: first(f).update(kind="pickle"), "one of parameters"),
    "a dtype of nothing": (lambda f: first(f).update(dtype="F4"), "one of F64"),
    "a text for a number": (lambda f: first(f).update(replica="0"), "a whole number"),
    "bytes in front": (lambda f: first(f).update(bytes=[0, 4]), "is|begins"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_index(folder: Path, what: str) -> None:
    change, words = FORGED[what]
    edit(folder / "rank-00001.json", change)
    with pytest.raises(CheckpointError, match=words), Checkpoint.open(folder):
        pass


def test_parts_that_overlap_or_leave_a_hole(folder: Path) -> None:
    """Every size is right, but a part begins one element early: one has two owners, one none."""

    def shift(fields: Fields) -> None:
        one = next(t for t in fields["tensors"] if t.get("flat_range", [0])[0] > 0)
        one["flat_range"] = [bound - 1 for bound in one["flat_range"]]

    edit(folder / "rank-00001.json", shift)
    assert "lies in" in refused(folder, MANIFEST)


@pytest.mark.parametrize("bulk", range(len(hostile_checkpoints.BULK)))
def test_json_in_bulk(folder: Path, bulk: int) -> None:
    more = hostile_checkpoints.BULK[bulk]()
    body = (folder / MANIFEST).read_bytes().rpartition(SEAL)[0] + f', "more": {more}'.encode()
    data = body + SEAL + str(zlib.crc32(body)).encode() + b"}\n"
    (folder / MANIFEST).write_bytes(data)
    try:
        Checkpoint.open(folder).close()  # a list of lists that is shallow enough is no harm
    except CheckpointError as error:
        assert str(folder) in str(error)
    else:
        assert bulk in (1, 5)


def test_a_name_that_stands_twice(folder: Path) -> None:
    body = (folder / MANIFEST).read_bytes().rpartition(SEAL)[0] + b',"kind": "full"'
    data = body + SEAL + str(zlib.crc32(body)).encode() + b"}\n"
    (folder / MANIFEST).write_bytes(data)
    assert "'kind' occurs twice" in refused(folder, MANIFEST)


def test_another_version_says_so(folder: Path) -> None:
    edit(folder / MANIFEST, lambda fields: fields.update(version=3))
    assert "format version 3, but this reader supports only 2" in refused(folder, MANIFEST)


@pytest.mark.parametrize("part", range(4))
def test_checkpoints_that_nobody_would_write(bases: list[Path], part: int, tmp_path: Path) -> None:
    """The short fuzz; results/evidence/checkpoint.md has the long one."""
    told = [
        hostile_checkpoints.try_one(number, bases, tmp_path)[1]
        for number in range(part * 75, part * 75 + 75)
    ]
    assert sum(map(bool, told)) > 60


def test_an_empty_folder_and_none(tmp_path: Path) -> None:
    with pytest.raises(NotCommitted, match="holds no checkpoint"):
        Checkpoint.open(tmp_path)
    with pytest.raises(NotCommitted, match="is not a folder"):
        Checkpoint.open(tmp_path / "none")
