"""Sizes that a file claims: what reads it takes memory for what it has, not for what it says."""

from __future__ import annotations

import pickle
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import synthetic as made
from synthetic_run import write_run

from shardproof import files
from shardproof.case import Case
from shardproof.files import read_input
from shardproof.impls.pytorch.checkpoint import metadata
from shardproof.impls.pytorch.checkpoint.plain_pickle import read_pickle
from shardproof.impls.reference.checkpoint.errors import CheckpointError
from shardproof.watch import flight_recorder

#: Bytes of address space that a command may take here: what it needs to start, and little more.
MOST = 3_000_000 << 10


def _limited(*words: str) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MOST, MOST))

    command = [sys.executable, "-m", "shardproof", *words]
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=False)


@pytest.mark.parametrize("words", [["verify"], ["report", "--format", "html"], ["report"]])
def test_a_small_run_is_read_in_little_memory(tmp_path: Path, words: list[str]) -> None:
    """`read(n)` reserves n bytes: a GiB for each file."""
    run = write_run(tmp_path / "run", 8, 1)
    done = _limited(*words, str(run))
    assert "Traceback" not in done.stderr and done.returncode in (0, 1), done.stderr


@pytest.mark.parametrize(
    "claim",
    [
        {"mesh": {"replicate": 10**9}},
        {"mesh": {"replicate": 2, "shard": 3000}},
        {"mesh": {"replicate": 0}},
        {"steps": 10**9},
        {"steps": -1},
        {"checkpoint": {"save_at": 10**9, "saves": 10**9}},
    ],
)
def test_a_case_that_claims_more_than_any_has_is_damage(
    tmp_path: Path, command: Any, claim: dict[str, Any]
) -> None:
    lines = made.results(3)
    lines[1]["case"] |= claim
    run = made.write(tmp_path / "run", lines)
    code, out, _ = command("verify", str(run))
    assert code == 1 and "cases.jsonl:2: is damaged" in out, out
    for words in (["report"], ["report", "--format", "html"], ["badges"]):
        code, _, err = command(*words, str(run))
        assert code == 2 and "cases.jsonl:2: is damaged" in err, err


@pytest.mark.parametrize("name", ["global_batch", "micro_batches", "windows"])
def test_a_batch_is_none_of_a_billion(name: str) -> None:
    fields = made.case(0).to_dict()
    fields["workload"] = dict(fields["workload"]) | {name: 10**9}
    with pytest.raises(TypeError, match=f"workload.{name}"):
        Case.from_dict(fields)


def test_a_file_is_read_to_its_end_and_no_further(tmp_path: Path) -> None:
    data = bytes(range(256)) * 8192
    (tmp_path / "file").write_bytes(data)
    assert read_input(tmp_path / "file") == data
    assert read_input(tmp_path / "file", len(data)) == data
    with pytest.raises(files.SelectionError, match="exceeds 1 MiB"):
        read_input(tmp_path / "file", 1 << 20)


# ------------------------------------------------------------------------------------- pickles


def _laughs(depth: int) -> bytes:
    value: Any = ["x"]
    for _ in range(depth):
        value = [value, value]
    return pickle.dumps(value)


def _itself() -> bytes:
    value: list[Any] = []
    value.append(value)
    return pickle.dumps(value)


HOSTILE = {
    "bytes": b"\x96" + struct.pack("<Q", 1 << 32),
    "place": b"Nr\xff\xff\xff\xff.",
    "place in words": b"Np4000000000\n.",
    "lists of lists": _laughs(60),
    "long text": pickle.dumps(["x" * 5000] * 1 + [(t := "y" * 5000)] + [t] * 9000),
    "itself": _itself(),
    "text": b"\x8d" + struct.pack("<Q", 1 << 40),
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_pickle_takes_no_more_memory_than_its_bytes_explain(name: str, tmp_path: Path) -> None:
    data = HOSTILE[name]
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="not a dump of the Flight Recorder"):
        flight_recorder.standings(tmp_path)
    with pytest.raises(CheckpointError, match="is not metadata"):
        metadata.read(data, path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_plain_pickles_come_back(tmp_path: Path) -> None:
    text = "some/long/file/name.py" * 4
    value = {"entries": [{"frames": [{"filename": text, "line": n}]} for n in range(2000)]}
    for protocol in range(6):
        assert read_pickle(pickle.dumps(value, protocol), flight_recorder._Plain) == value
