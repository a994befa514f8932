"""``shardproof checkpoint``: what is in one, is it whole, how do two differ, another format."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ADAMW, saved, workload
from safetensors.torch import load_file

from shardproof.impls.reference.checkpoint.root import newest

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved")
    saved(place, "zero3", {"shard": 2}, 2, work=workload(layers=1))
    return place


@pytest.fixture
def own(root: Path, tmp_path: Path) -> Path:
    """A copy, to be spoilt."""
    return Path(shutil.copytree(root, tmp_path / "own"))


def last(root: Path) -> Path:
    found = newest(root)
    assert found is not None
    return found


def test_inspect_says_who_saved_what(root: Path, command: Any) -> None:
    code, out, err = command("checkpoint", "inspect", str(root))
    assert (code, err) == (0, "")
    assert "step 2 of run" in out and "saved by zero3 on shard 2" in out
    assert '"name": "adamw"' in out and "optimizer" in out and "F64" in out
    code, out, _ = command("checkpoint", "inspect", str(root), "--names")
    assert code == 0 and "head.weight.exp_avg_sq" in out
    assert f'"lr": {ADAMW.lr}' in command("checkpoint", "inspect", str(root))[1]


def test_verify_and_convert_keep_the_digest(root: Path, tmp_path: Path, command: Any) -> None:
    """Through three formats and back; no difference between any two."""
    digests, places = [], [root]
    for number, words in enumerate(
        (["--to", "full"], ["--to", "sharded", "--ranks", "3"], ["--to", "sharded"])
    ):
        places.append(tmp_path / str(number))
        code, out, err = command("checkpoint", "convert", str(places[-2]), str(places[-1]), *words)
        assert code == 0, err
        assert out.strip() == str(last(places[-1]))
    for place in places:
        code, out, err = command("checkpoint", "verify", str(place))
        assert code == 0 and ": whole, " in out, err
        digests.append(out.partition("SHA-256 ")[2])
    assert len({*digests}) == 1 and len(digests[0].strip()) == 64
    for place in places[1:]:
        assert command("checkpoint", "diff", str(root), str(place))[:2] == (0, "no difference\n")
    assert len(list(last(places[2]).glob("*.safetensors"))) == 3
    assert "head.weight" in load_file(last(places[1]) / "model.safetensors")


def test_diff_names_the_first_element(root: Path, tmp_path: Path, command: Any) -> None:
    saved(tmp_path / "other", "ddp", {"replicate": 2}, 1, work=workload(layers=1))
    code, out, err = command("checkpoint", "diff", str(root), str(tmp_path / "other"))
    assert code == 1, err
    assert "step: 2 and 1" in out
    row = next(line for line in out.splitlines() if " head.bias " in f"{line} ")
    assert "element [0]: " in row and " and " in row


def test_diff_tells_one_bit_and_one_name(root: Path, tmp_path: Path, command: Any) -> None:
    from shardproof.impls.reference.checkpoint.convert import convert
    from shardproof.impls.reference.checkpoint.reading.checkpoint import Checkpoint

    with Checkpoint.open(root) as source:
        fill = source.fill

        def spoil(target: torch.Tensor, reads: Any) -> None:
            fill(target, reads)
            if reads and reads[0].entry.name == "head.weight":
                target.view(-1)[5] *= 2

        source.fill = spoil  # type: ignore[method-assign]
        del source.copies["optimizer", "head.bias.step"]
        convert(source, tmp_path / "spoilt", "full", 1)
    code, out, _ = command("checkpoint", "diff", str(root), str(tmp_path / "spoilt"))
    assert code == 1
    lines = [line for line in out.splitlines() if "head." in line]
    assert len(lines) == 2, out
    assert "element [0, 5]: " in lines[1] and "only in PATH" in lines[0]


def test_damage_is_bad_input_and_named(own: Path, command: Any, tmp_path: Path) -> None:
    file = last(own) / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    data[-9000] ^= 4
    file.write_bytes(data)
    code, out, err = command("checkpoint", "verify", str(own))
    assert code == 2 and out == ""
    lines = err.strip().splitlines()
    assert len(lines) == 2 and all(line.startswith(f"{file}: ") for line in lines), err
    assert "were changed since they were written" in err and "load another checkpoint" in err
    code, _, err = command("checkpoint", "convert", str(own), str(tmp_path / "x"), "--to", "full")
    assert code == 2 and str(file) in err
    assert not (tmp_path / "x").exists()
    assert command("checkpoint", "inspect", str(own))[0] == 0  # it reads no tensor
    file.write_bytes(data[:-1])
    for words in (["inspect"], ["verify"]):
        code, _, err = command("checkpoint", *words, str(own))
        assert code == 2 and "cut off" in err


def test_what_is_no_checkpoint(tmp_path: Path, command: Any, root: Path) -> None:
    for words in (["inspect"], ["verify"]):
        code, _, err = command("checkpoint", *words, str(tmp_path))
        assert code == 2 and "holds no checkpoint - name a folder" in err
    code, _, err = command("checkpoint", "diff", str(root), str(tmp_path / "none"))
    assert code == 2 and "is not a folder" in err
    code, _, err = command("checkpoint", "convert", str(root), str(root), "--to", "full")
    assert code == 2 and "already holds step 2 of this run - name another folder" in err
    file = tmp_path / "file"
    file.write_text("x")
    code, _, err = command("checkpoint", "convert", str(root), str(file), "--to", "full")
    assert code == 2 and str(file) in err and "Traceback" not in err


@pytest.mark.parametrize("to", ["full", "dcp"])
def test_a_second_convert_names_another_folder(
    root: Path, tmp_path: Path, command: Any, to: str
) -> None:
    words = ("checkpoint", "convert", str(root), str(tmp_path / "new"), "--to", to)
    assert command(*words)[0] == 0
    before = sorted((tmp_path / "new").rglob("*"))
    code, _, err = command(*words)
    assert code == 2 and err.startswith(str(next((tmp_path / "new").glob("step-*")))), err
    assert "already" in err and "step 2" in err and "name another folder" in err
    assert sorted((tmp_path / "new").rglob("*")) == before


@pytest.mark.parametrize("to", ["full", "sharded", "dcp"])
def test_a_refused_convert_leaves_no_folder(
    own: Path, tmp_path: Path, command: Any, to: str
) -> None:
    """Neither its own nor one that it lies in; one that was there before stays."""
    file = last(own) / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    (tmp_path / "there").mkdir()
    for place in ("a/b", "there/c", "there"):
        words = ("checkpoint", "convert", str(own), str(tmp_path / place), "--to", to)
        code, _, err = command(*words)
        assert code == 2 and str(file) in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own", "there"]
    assert not list((tmp_path / "there").iterdir())
