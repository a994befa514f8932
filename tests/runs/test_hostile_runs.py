"""Runs that others made: paths that lead out, files that unpack to far more, endless pipes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import odd_files
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic as made
from synthetic_run import write_run

from shardproof import files
from shardproof.runs import records
from shardproof.runs.records import Manifest


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("made") / "run", 4, 2)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def _names(run: Path, name: str, key: str = "record") -> None:
    """The first line names another file, and the manifest agrees."""
    first, *rest = (run / "cases.jsonl").read_text().splitlines()
    changed = [json.dumps(json.loads(first) | {key: name}), *rest]
    (run / "cases.jsonl").write_text("\n".join(changed) + "\n")
    made.seal(run)


SHOWN = (["verify"], ["report"], ["report", "--format", "html"], ["badges"], ["bundle"])


@pytest.mark.parametrize("name", ["/proc/self/mem", "../../etc/passwd", "/etc/passwd", "x\0y"])
@pytest.mark.parametrize("words", SHOWN, ids=" ".join)
def test_a_record_outside_of_the_run_is_refused(
    command: Any, run: Path, words: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    _names(run, name)
    code, out, err = command(*words, str(run))
    assert code == 2, out + err
    assert f"{run / 'cases.jsonl'}:1: " in err and "copy the whole run again" in err, err
    assert "root:" not in out + err


def test_a_link_out_of_the_run_is_refused(command: Any, run: Path) -> None:
    (run / "records" / "link.parquet").symlink_to("/etc/passwd")
    _names(run, "records/link.parquet")
    code, _, err = command("verify", str(run))
    assert code == 2 and "leads out of the run" in err, err


def test_raw_times_and_files_of_the_manifest_stay_inside_too(command: Any, run: Path) -> None:
    _names(run, "../../../etc/passwd", "times")
    assert command("verify", str(run))[0] == 2
    _names(run, "records/none.parquet", "times")
    Manifest(run).seal("/etc/passwd", "0" * 64)
    code, _, err = command("verify", str(run))
    assert code == 2 and f"{run / Manifest.NAME}:" in err and "leads out" in err, err


def test_a_bundle_with_such_a_path_is_named_itself(command: Any, run: Path, tmp_path: Path) -> None:
    archive = tmp_path / "run.tar.gz"
    _names(run, "/proc/self/mem")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "require_inside", lambda *_: None)
        patch.setattr("shardproof.runs.run_folder.require_inside", lambda *_: None)
        code, _, err = command("bundle", str(run), "--output", str(archive))
        assert code == 0, err
    code, out, err = command("verify", str(archive))
    assert code == 2 and out == "", out + err
    assert err.startswith(
        f"{archive}/cases.jsonl:1: this path leads out of the run (/proc/self/mem) - "
    )


def _texts(path: Path) -> None:
    """A megabyte once, and a million times by its number."""
    numbers = pa.array([0] * 1_000_000, pa.int32())
    column = pa.DictionaryArray.from_arrays(numbers, pa.array(["x" * (1 << 20)]))
    pq.write_table(pa.table({"section": column}), path, compression="zstd", store_schema=False)


def _numbers(path: Path) -> None:
    column = pa.array([0], pa.int64()).take(pa.array([0] * 3_000_000, pa.int8()))
    with pq.ParquetWriter(path, pa.schema({"section": pa.int64()}), compression="zstd") as writer:
        for _ in range(50):
            writer.write_table(pa.table({"section": column}))


def _lists(path: Path) -> None:
    column = pa.array([[0] * 1000] * 1000, pa.list_(pa.int32()))
    with pq.ParquetWriter(path, pa.schema({"section": column.type}), compression="zstd") as writer:
        for _ in range(140):
            writer.write_table(pa.table({"section": column}))


@pytest.mark.parametrize("bomb", [_texts, _numbers, _lists])
def test_a_record_that_unpacks_to_gigabytes_is_not_unpacked(
    command: Any, run: Path, tmp_path: Path, bomb: Any
) -> None:
    bomb(run / "records" / "bomb.parquet")
    assert (run / "records" / "bomb.parquet").stat().st_size < 2_000_000
    _names(run, "records/bomb.parquet")
    before = pa.total_allocated_bytes()
    code, out, _ = command("verify", str(run))
    assert code == 1 and "would unpack to " in out, out
    code, out, _ = command("report", str(run), "--format", "html")
    assert code == 0 and "would unpack to " in out
    assert pa.total_allocated_bytes() - before < 256 << 20


def test_lines_and_files_of_any_length_are_not_read(
    command: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_LINE", 1 << 20)
    with (run / "cases.jsonl").open("a") as stream:
        stream.write('{"kind": "' + "x" * (2 << 20) + '"}\n')
    made.seal(run)
    code, _, err = command("verify", str(run))
    assert code == 2 and "cases.jsonl: has a line of more than 1 MiB - " in err, err
    monkeypatch.setattr(files.read_input, "__defaults__", (1 << 10,))
    code, _, err = command("report", str(run))
    assert code == 2, err


def test_deep_nesting_anywhere_is_damage(command: Any, run: Path) -> None:
    deep = "[" * 100_000
    for name in ("cases.jsonl", "planned.jsonl", "run.json"):
        (run / name).write_text(f'{{"kind": {deep}\n{{"kind": {deep}\n')
        for words in (["verify"], ["report"], ["run", "--resume", "--results"]):
            assert command(*words, str(run))[0] in (1, 2)


PIPES = {
    "run.json": (["verify", "RUN"], ["report", "RUN"], ["compare", "RUN", "RUN"]),
    "cases.jsonl": (["verify", "RUN"], ["bundle", "RUN"], ["run", "ddp-gpt", "--results", "RUN"]),
    "planned.jsonl": (["run", "--resume", "--results", "RUN"],),
    "manifest.jsonl": (["verify", "RUN"], ["badges", "RUN"]),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_in_place_of_a_file_of_the_run_does_not_hang(
    command: Any, run: Path, name: str
) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    for words in PIPES[name]:
        code, out, err = command(*(str(run) if word == "RUN" else word for word in words))
        assert code in (1, 2) and str(run) in out + err, out + err


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", odd_files.KINDS)
def test_only_regular_files_are_read(command: Any, run: Path, tmp_path: Path, kind: str) -> None:
    odd = odd_files.make(kind, tmp_path / "odd.yaml")
    for words in (
        ["run", str(odd)],
        ["check-scenario", str(odd)],
        ["gate", str(run), "--against", str(run), "--policy", str(odd)],
        ["gate", str(run), "--against", str(odd)],
        ["compare", str(run), str(odd)],
        ["verify", str(odd)],
        ["report", str(odd)],
    ):
        code, out, err = command(*words)
        assert code == 2, (words, out, err)
        assert ("odd.yaml" in err or "/dev/zero" in err) and " - " in err, err


@pytest.mark.timeout(120)
def test_nobody_waits_for_the_reader_of_a_pipe(command: Any, run: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for words in (
        ["run", "ddp-gpt", "--junit", str(pipe), "--results", str(tmp_path / "new")],
        ["gate", str(run), "--against", str(run), "--junit", str(pipe)],
        ["gate", str(run), "--against", str(run), "--summary", str(pipe)],
        ["report", str(run), "--into", str(pipe)],
        ["compare", str(run), str(run), "--save", str(pipe)],
    ):
        code, out, err = command(*words)
        assert code == 2 and f"({pipe})" in err, (words, out, err)
    assert not (tmp_path / "new").exists()
    files.write_whole(pipe, "text")
    assert pipe.is_file()


def test_a_pipe_among_locks_is_swept(tmp_path: Path) -> None:
    from shardproof.launch import workspace

    folder = tmp_path / f"{workspace.PREFIX}x"
    folder.mkdir()
    os.mkfifo(folder / workspace.LOCK)
    assert workspace.sweep(tmp_path) == [folder]


@pytest.mark.parametrize(
    "name", ["report.md", "records/link.parquet", "cases.jsonl", "manifest.jsonl", "junit.xml"]
)
def test_nothing_is_written_through_a_link(
    command: Any, run: Path, tmp_path: Path, name: str
) -> None:
    """Neither one that the manifest lists nor one that it does not."""
    outside = tmp_path / "outside"
    path = run / name
    if path.exists():
        path.rename(outside)
    else:
        outside.write_text("mine")
    before = outside.read_bytes()
    path.symlink_to(outside)
    for words in (["run", "--resume", "--results"], ["run", "ddp-gpt", "--results"]):
        code, _, err = command(*words, str(run))
        assert code == 2 and outside.read_bytes() == before, err
    assert f"{path}: is a link - " in err


@pytest.mark.parametrize(
    "command_line", [["run", "ddp-gpt"], ["mutants"], ["bench", "data-parallel"]], ids=" ".join
)
def test_a_folder_whose_name_is_no_text_is_refused_at_once(
    command: Any, tmp_path: Path, command_line: list[str]
) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/r\xff")
    code, out, err = command(*command_line, "--results", name)
    assert code == 2 and "not valid UTF-8" in err, out + err
    assert not os.path.exists(name)  # noqa: PTH110 - as bytes


@pytest.mark.parametrize("words", [["report"], ["compare", "--save", "base.json"]])
def test_a_run_without_its_manifest_is_not_shown(
    command: Any, run: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (run / Manifest.NAME).unlink()
    code, _, err = command(words[0], str(run), *words[1:])
    assert code == 2 and "no manifest, so nothing shows that the run is unchanged" in err, err
    assert not (tmp_path / "base.json").exists()
