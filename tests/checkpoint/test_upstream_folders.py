"""Folders of ``torch.distributed.checkpoint``: looked into, and made into the suite's and back."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import torch.distributed.checkpoint as dcp
from local_ranks import succeed
from pieces import Rows
from upstream_checkpoints import EXTRA, Chosen, assert_equal, loaded, make, saved, workload

from shardproof.contract import OptimizerSpec
from shardproof.impls.pytorch.checkpoint import folders, metadata
from shardproof.impls.pytorch.checkpoint.reading import DcpCheckpoint
from shardproof.impls.reference.checkpoint.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")

DDP: Chosen = ("ddp", {"replicate": 2}, {})
FSDP2: Chosen = ("fsdp2", {"shard": 2}, {})
TENSOR: Chosen = ("tensor_parallel", {"tensor": 2}, {})
PIPE: Chosen = ("pipelining", {"pipe": 2}, {})
SGD = OptimizerSpec("sgd", lr=1e-2, momentum=0.0)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved")
    saved(place, FSDP2, workload("tied", layers=1))
    return place


@pytest.fixture
def own(root: Path, tmp_path: Path) -> Path:
    """A copy, to be spoilt."""
    return Path(shutil.copytree(root, tmp_path / "own"))


def in_reference(root: Path, strategy: str, mesh: dict[str, int], work: Any, spec: Any) -> Any:
    """What ranks of a reference strategy hold that load ``root``."""

    def body(rank: int, _: int) -> dict[str, Rows]:
        system = checkpoints.make(strategy, work, mesh, rank, spec)
        assert system.load(root) == EXTRA and system.steps_done == 2
        return checkpoints.held(system)

    return checkpoints.put_together(succeed(body, *mesh.values()))


@pytest.mark.parametrize("spec", [checkpoints.ADAMW, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("chosen", [FSDP2, TENSOR, PIPE], ids=lambda one: one[0])
def test_upstream_to_reference_and_back(
    chosen: Chosen, spec: OptimizerSpec, tmp_path: Path, command: Any
) -> None:
    """Names, moments, counters, generators, progress and ties, through both formats."""
    work = workload("tied", "frozen")
    held = saved(tmp_path / "theirs", chosen, work, spec)
    for source, target, form in (("theirs", "ours", "sharded"), ("ours", "again", "dcp")):
        words = [str(tmp_path / source), str(tmp_path / target), "--to", form]
        code, _, err = command("checkpoint", "convert", *words)
        assert code == 0, err
    ours = in_reference(tmp_path / "ours", "zero3", {"shard": 3}, work, spec)
    assert_equal(held, ours)
    assert_equal(held, loaded(tmp_path / "again", DDP, work, spec))
    paths = [str(tmp_path / name) for name in ("theirs", "again")]
    code, out, err = command("checkpoint", "diff", *paths)
    assert (code, out, err) == (0, "no difference\n", "")


def test_what_each_rank_has_of_its_own_is_not_made_into_one(tmp_path: Path, command: Any) -> None:
    work = workload()

    def saves(rank: int, _: int) -> None:
        system = checkpoints.make("local_sgd", work, {"replicate": 2}, rank)
        checkpoints.train(system, work, 0, 1)
        system.save(tmp_path / "ours", {"data": {}}).wait()

    succeed(saves, 2)
    words = [str(tmp_path / "ours"), str(tmp_path / "theirs"), "--to", "dcp"]
    code, _, err = command("checkpoint", "convert", *words)
    assert code == 2
    assert "has 2 different copies of" in err and "choose the format 'full' or 'sharded'" in err
    assert not (tmp_path / "theirs").exists()


def test_reference_goes_on_as_upstream(tmp_path: Path, command: Any) -> None:
    """What a reference strategy saved, torch's own system loads, and trains on alike."""
    work = workload()
    checkpoints.saved(tmp_path / "ours", "zero1", {"shard": 2}, work=work)
    words = [str(tmp_path / "ours"), str(tmp_path / "theirs"), "--to", "dcp"]
    assert command("checkpoint", "convert", *words)[0] == 0

    def theirs(rank: int, _: int) -> dict[str, Rows]:
        system = make(FSDP2, work, rank)
        assert system.load(tmp_path / "theirs") == {
            "data": {"epoch": 1},
            "note": ["x", None, 0.1],
        }
        checkpoints.train(system, work, system.steps_done, 4)
        return checkpoints.held(system)

    def straight(rank: int, _: int) -> dict[str, Rows]:
        system = checkpoints.make("zero3", work, {"shard": 2}, rank)
        checkpoints.train(system, work, 0, 4)
        return checkpoints.held(system)

    one, other = (checkpoints.put_together(succeed(body, 2)) for body in (theirs, straight))
    for kind, tensors in one.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, other[kind][name], rtol=1e-9, atol=1e-12)


def test_inspect_and_verify_say_what_can_be_said(root: Path, command: Any) -> None:
    code, out, err = command("checkpoint", "inspect", str(root), "--names")
    assert (code, err) == (0, "")
    assert "saved by fsdp2 on shard 2" in out and "step 2" in out and '"epoch": 1' in out
    assert "embed.token.weight.exp_avg" in out and "torch@1" in out
    code, out, err = command("checkpoint", "verify", str(root))
    assert (code, err) == (0, "")
    assert "the CRC-32 of each" in out and ".metadata has no CRC-32" in out and "SHA-256 " in out


def data_files(root: Path) -> list[Path]:
    return sorted(folders.find(root).glob("*.distcp"))


def test_every_flipped_bit_of_a_tensor_is_told(own: Path, command: Any) -> None:
    """torch's own reader takes them all for what was saved."""
    with DcpCheckpoint.open(own) as checkpoint:
        chosen = [entry for entry in checkpoint.chunks if entry.kind == "parameters"][:3]
        elements = {entry: checkpoint._elements(entry) for entry in chosen}
    for entry, data in elements.items():
        path = folders.find(own) / entry.file
        before = path.read_bytes()
        at = before.index(data) + len(data) // 2
        path.write_bytes(before[:at] + bytes([before[at] ^ 16]) + before[at + 1 :])
        code, _, err = command("checkpoint", "verify", str(own))
        assert code == 2
        assert f"{path}: bytes" in err and "the CRC-32 of" in err and "another checkpoint" in err
        path.write_bytes(before)
    assert command("checkpoint", "verify", str(own))[0] == 0


@pytest.mark.parametrize("how", ["short", "missing", "link", "folder"])
def test_damage_is_told_with_file_and_remedy(how: str, own: Path, command: Any) -> None:
    path = data_files(own)[0]
    data = path.read_bytes()
    path.unlink()
    if how == "short":
        path.write_bytes(data[:-1])
    elif how == "link":
        path.symlink_to("/dev/zero")
    elif how == "folder":
        path.mkdir()
    code, out, err = command("checkpoint", "verify", str(own))
    assert (code, out) == (2, "") and str(path) in err and "Traceback" not in err


def test_what_would_be_carried_out_is_refused(own: Path, command: Any) -> None:
    """In the metadata, and in a value, which torch itself would load as well."""

    class Hostile:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(own / "carried-out"),)

    place = folders.find(own) / folders.DCP
    good = place.read_bytes()
    place.write_bytes(pickle.dumps(Hostile()))
    for words in (["inspect"], ["verify"], ["convert"]):
        more = [str(own / "new"), "--to", "full"] if words == ["convert"] else []
        code, out, err = command("checkpoint", *words, str(own), *more)
        assert (code, out) == (2, "")
        assert str(place) in err and "posix.mkdir" in err
    place.write_bytes(good)
    chunk = metadata.read(good, place)["progress.extra"].chunks[0]
    file = folders.find(own) / chunk.file
    said = io.BytesIO()
    torch.save(Hostile(), said)
    data = bytearray(file.read_bytes())
    room = said.getvalue()
    assert len(room) <= chunk.length + 200
    data[chunk.begin : chunk.begin + len(room)] = room
    file.write_bytes(data)
    code, out, err = command("checkpoint", "inspect", str(own))
    assert (code, out) == (2, "") and str(file) in err
    assert not (own / "carried-out").exists()


def test_names_cannot_lead_out_of_the_folder(own: Path, command: Any) -> None:
    place = folders.find(own) / folders.DCP
    outside = own / "elsewhere"
    shutil.copy(data_files(own)[0], outside)
    data = place.read_bytes()
    name = data_files(own)[0].name
    other = "../elsewhere"
    assert len(other) == len(name)
    place.write_bytes(data.replace(name.encode(), other.encode()))
    code, out, err = command("checkpoint", "verify", str(own))
    assert (code, out) == (2, "") and "which is not a file of this folder" in err


def test_mutated_metadata_is_an_error_in_words_and_nothing_else(own: Path) -> None:
    place = folders.find(own) / folders.DCP
    good, draw, refused = place.read_bytes(), random.Random(5), 0
    for _ in range(400):
        data = bytearray(good)
        for _ in range(draw.choice((1, 1, 2, 8))):
            at = draw.randrange(len(data))
            kind = draw.randrange(3)
            if kind == 0:
                data[at] = draw.randrange(256)
            elif kind == 1:
                del data[at : at + draw.randrange(1, 40)]
            else:
                data[at:at] = draw.randbytes(draw.randrange(1, 10))
        place.write_bytes(data)
        try:
            with DcpCheckpoint.open(own):
                pass
        except CheckpointError as error:
            refused += 1
            assert error.remedy
    assert refused > 100


def test_a_folder_that_somebody_else_saved(tmp_path: Path, command: Any) -> None:
    """Keys of their own are told and compared; what trained is not known."""
    state: dict[str, Any] = {"w": torch.arange(6.0).view(2, 3), "n": {"lr": 0.1}}
    dcp.save(state, checkpoint_id=tmp_path / "one", no_dist=True)
    state["w"][1, 2] = 7.0
    dcp.save(state, checkpoint_id=tmp_path / "two", no_dist=True)
    code, out, _ = command("checkpoint", "inspect", str(tmp_path / "one"), "--names")
    assert code == 0 and "saved by unknown" in out and "2 x 3" in out
    code, out, _ = command("checkpoint", "diff", str(tmp_path / "one"), str(tmp_path / "two"))
    assert code == 1 and "element [1, 2]: 5.0 and 7.0" in out
    words = [str(tmp_path / "one"), str(tmp_path / "new"), "--to", "dcp"]
    code, _, err = command("checkpoint", "convert", *words)
    assert code == 2 and "the checkpoint does not describe the optimizer" in err
    with DcpCheckpoint.open(tmp_path / "one") as checkpoint:
        assert checkpoint.names("extra") == ["w"]
