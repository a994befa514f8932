"""Bundles: verified elsewhere, the same bytes for the same run, and no change stays unseen."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from archives import Part, forge
from commands import python

from shardproof import VERSION, report
from shardproof.cases.kills import pair
from shardproof.commands import verify
from shardproof.commands.execution import Execution
from shardproof.commands.main import main
from shardproof.commands.verify import verify_archive
from shardproof.errors import SelectionError
from shardproof.registry import load_mutant
from shardproof.runs.bundle import packing
from shardproof.runs.bundle.form import LISTING, Member
from shardproof.runs.bundle.packing import pack
from shardproof.runs.bundle.unpacking import notes, open_run, unpacked
from shardproof.runs.durations import Durations
from shardproof.runs.run_folder import RunFolder, read
from shardproof.scenarios.budget import fit_cases

pytestmark = pytest.mark.usefixtures("temporary")
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a clean case, a failing one and a comparison, with files that are no evidence."""
    path = tmp_path_factory.mktemp("results") / "20260102-030405"
    fault = pair(load_mutant("ddp_never_reduces"))
    durations = Durations(path.parent / "durations.json")
    with RunFolder(path, ["test"]) as folder:
        cases = fit_cases([fault.parent, fault.case], durations, 1, None)
        assert Execution(folder, cases, 1, durations).run() == 1
        folder.add({"id": "other::x", "verdict": "fine", "times": "times/x"}, "other")
        (path / "times").mkdir()
        folder.write("times/x", "raw")
    (path / "local" / "case0000").mkdir(parents=True)
    (path / "local" / "case0000" / "rank0.log").write_text("hello")
    (path / "local" / "plan.json").write_text("{}")
    (path / "cluster.json").write_text("{}")
    return path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


@pytest.fixture(scope="module")
def packed(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = {"report.md": report.markdown(read(made))}
    return pack(made, tmp_path_factory.mktemp("packed"), texts).path


Files = dict[str, bytes]


def files(archive: Path) -> Files:
    """Names and contents, in order."""
    with tarfile.open(archive) as opened:
        found = {}
        for member in opened:
            stream = opened.extractfile(member)
            assert stream is not None
            found[member.name] = stream.read()
        return found


# ------------------------------------------------------------------------------- packed


def test_a_bundle_is_judged_again_without_the_run(made: Path, packed: Path, tmp_path: Path) -> None:
    moved = tmp_path / "other name.tgz"
    shutil.copy(packed, moved)
    hidden = made.rename(made.with_name("hidden"))
    try:
        found, listing = verify_archive(moved)
    finally:
        hidden.rename(made)
    assert found.problems == []
    assert found.cases == 2 and "1 line of kind other" in found.unread
    assert (listing.run, listing.judged_by) == (made.name, (VERSION,))
    assert found == verify.verify(made)


def test_it_holds_the_evidence_and_names_what_it_leaves_out(made: Path, packed: Path) -> None:
    found = files(packed)
    names = [name.removeprefix(f"{made.name}/") for name in found]
    records = [f"records/{path.name}" for path in (made / "records").iterdir()]
    times = [f"times/{path.name}" for path in (made / "times").iterdir()]
    assert (len(records), len(times)) == (2, 1)
    whole = ["cases.jsonl", "coverage.json", "junit.xml", "manifest.jsonl", "planned.jsonl"]
    whole += ["run.json", "report.html", "report.md", *records, *times]
    assert names == [LISTING, *sorted(whole)]
    for name in whole:
        if name != "report.md" or (made / name).exists():
            assert found[f"{made.name}/{name}"] == (made / name).read_bytes()
    told = json.loads(found[f"{made.name}/{LISTING}"])
    assert told["left_out"] == ["cluster.json", "local/ (2 files)"]
    assert told["digest"] in "".join(notes(verify_archive(packed)[1]))


def test_the_same_run_gives_the_same_bytes(made: Path, packed: Path, run: Path) -> None:
    texts = {"report.md": report.markdown(read(made))}
    for path in run.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    again = pack(run, run.parent / "again.tar.gz", texts)
    assert again.path.read_bytes() == packed.read_bytes()
    assert again.bytes == packed.stat().st_size


def test_nothing_tells_who_packed_it_and_when(packed: Path) -> None:
    head = packed.read_bytes()[:10]
    assert head[3] == 0 and head[4:8] == bytes(4), "no name and no time in gzip's header"
    with tarfile.open(packed) as opened:
        for member in opened:
            owner = (member.uid, member.gid, member.uname, member.gname, member.mtime)
            assert (*owner, member.mode) == (0, 0, "", "", 0, 0o644)
            assert not member.name.startswith(("/", "."))


def test_a_folder_that_cannot_be_written_can_be_packed(run: Path, tmp_path: Path) -> None:
    everything = [run, *run.rglob("*")]
    for path in everything:
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    try:
        made = pack(run, tmp_path / "b.tar.gz")
        assert verify_archive(made.path)[0].problems == []
    finally:
        for path in everything:
            path.chmod(path.stat().st_mode | stat.S_IWUSR)


def test_a_file_that_is_there_is_kept_unless_forced(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "b.tar.gz"
    output.write_text("mine")
    with pytest.raises(SelectionError, match=r"b\.tar\.gz: the file exists.*--force"):
        pack(run, output)
    assert output.read_text() == "mine"
    pack(run, output, force=True)
    assert tarfile.is_tarfile(output)
    assert {path.name for path in tmp_path.iterdir()} == {"b.tar.gz", "copy", "temporary"}


def test_one_that_appears_meanwhile_is_kept_too(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "b.tar.gz"
    monkeypatch.setattr(os, "fsync", lambda _: output.write_text("mine"))
    with pytest.raises(SelectionError, match="the file exists"):
        pack(run, output)
    assert output.read_text() == "mine"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_it_is_written_whole_or_not_at_all(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SelectionError, match=f"cannot be written: {os.strerror(number)}"):
        pack(run, tmp_path / "b.tar.gz")
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "temporary"}


def test_a_run_that_is_not_as_it_was_judged_is_not_packed(run: Path, tmp_path: Path) -> None:
    record = next((run / "records").iterdir())
    record.write_bytes(record.read_bytes() + b"x")
    with pytest.raises(SelectionError, match=rf"{re.escape(record.name)}: was changed"):
        pack(run, tmp_path / "b.tar.gz")
    (run / "manifest.jsonl").unlink()
    with pytest.raises(SelectionError, match="no manifest"):
        pack(run, tmp_path / "b.tar.gz")
    assert not (tmp_path / "b.tar.gz").exists()


def test_a_line_that_lost_its_id_is_told_and_no_traceback(run: Path) -> None:
    first, rest = (run / "cases.jsonl").read_bytes().split(b"\n", 1)
    line = json.loads(first)
    del line["id"]
    (run / "cases.jsonl").write_bytes(json.dumps(line).encode() + b"\n" + rest)
    problems = verify.verify(run).problems
    assert "line 1" in problems[0] and problems[0].endswith("was changed")
    [damage] = [problem for problem in problems if "cases.jsonl:1: is damaged" in problem]
    assert "lacks id" in damage


@pytest.mark.parametrize("change", [b"", b"{}\n"])
def test_a_run_that_goes_on_meanwhile_is_not_packed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: bytes
) -> None:
    """A file that is cut, and one that grows, after it was measured."""
    measure = packing._member

    def meddle(name: str, source: Path | bytes) -> Member:
        found = measure(name, source)
        if isinstance(source, Path) and source.name == "cases.jsonl":
            source.write_bytes(source.read_bytes() + change if change else b"")
        return found

    monkeypatch.setattr(packing, "_member", meddle)
    with pytest.raises(SelectionError, match="changed while it was packed"):
        pack(run, tmp_path / "b.tar.gz")
    assert not (tmp_path / "b.tar.gz").exists()


def test_links_out_of_the_run_are_not_followed(run: Path, tmp_path: Path) -> None:
    record = next((run / "records").iterdir())
    record.rename(tmp_path / "elsewhere")
    record.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SelectionError, match="leads out of the run"):
        pack(run, tmp_path / "b.tar.gz")
    (tmp_path / "elsewhere").unlink()


def test_an_id_that_is_no_name_becomes_one(run: Path, tmp_path: Path) -> None:
    with RunFolder(run, ["again"]) as folder:
        folder._header.id = "../my run"
    made = pack(run, tmp_path / "b.tar.gz")
    assert made.listing.run == "my-run"
    assert verify_archive(made.path)[0].problems == []


# ------------------------------------------------------------------------- changed afterwards


Change = Callable[[Files], list[Part]]


def _pick(found: Files, part: str) -> str:
    return next(name for name in found if part in name)


def _without(found: Files, part: str) -> list[Part]:
    return [(name, data) for name, data in found.items() if name != _pick(found, part)]


def _flipped(found: Files, part: str) -> list[Part]:
    name = _pick(found, part)
    data = bytearray(found[name])
    data[len(data) // 2] ^= 1
    return list((found | {name: bytes(data)}).items())


@pytest.mark.parametrize("part", ["records/", "times/", "run.json", "cases.jsonl", "report.html"])
@pytest.mark.parametrize("how", ["changed", "longer", "missing"])
def test_a_member_that_was_tampered_with_is_named(
    packed: Path, tmp_path: Path, part: str, how: str
) -> None:
    found = files(packed)
    name = _pick(found, part)
    if how == "changed":
        contents = _flipped(found, part)
    elif how == "longer":
        contents = list((found | {name: found[name] + b"\n"}).items())
    else:
        contents = _without(found, part)
    forged = forge(tmp_path / "forged.tar.gz", contents)
    told, _ = verify_archive(forged)
    own = f"{forged}/{name.partition('/')[2]}"
    says = "missing" if how == "missing" else "was changed"
    assert f"{own}: {says}" in told.problems
    assert len(set(told.problems)) == len(told.problems)
    assert "shardproof-" not in "".join(told.problems), "no path of the temporary folder"
    with pytest.raises(SelectionError, match=re.escape(own)), open_run(str(forged)):
        raise AssertionError


def test_an_added_or_doubled_member_is_named(packed: Path, tmp_path: Path) -> None:
    found = files(packed)
    run = next(iter(found)).partition("/")[0]
    record = _pick(found, "records/")
    more: list[Part] = [
        (f"{run}/records/extra.parquet", b"x"),
        ("other/run.json", b"{}"),
        (record, found[record]),
    ]
    forged = forge(tmp_path / "forged.tar.gz", [*found.items(), *more])
    assert verify_archive(forged)[0].problems == [
        f"{forged}/records/extra.parquet: was added",
        f"{forged}/other/run.json: was added",
        f"{forged}/{record.partition('/')[2]}: is in it twice",
    ]


def test_a_list_that_was_changed_with_its_member_is_found(packed: Path, tmp_path: Path) -> None:
    found = files(packed)
    [listing] = [name for name in found if name.endswith(LISTING)]
    told = json.loads(found[listing])
    told["members"] = [m for m in told["members"] if m["name"] != "report.html"]
    contents = [(name, data) for name, data in found.items() if "report.html" not in name]
    forged = forge(
        tmp_path / "forged.tar.gz",
        list((dict(contents) | {listing: json.dumps(told).encode()}).items()),
    )
    problems = verify_archive(forged)[0].problems
    assert f"{forged}/{LISTING}: was changed" in problems
    assert f"{forged}/report.html: missing" in problems, "the manifest has it, too"


def test_a_verdict_that_its_record_does_not_give_is_found(run: Path, tmp_path: Path) -> None:
    """Even with every digest made right again."""
    lines = [json.loads(line) for line in (run / "cases.jsonl").read_bytes().splitlines()]
    failing = next(line for line in lines if line["verdict"] == "fail")
    with RunFolder(run, ["forged"]) as folder:
        folder.add(failing | {"verdict": "pass", "reason": ""})
    [problem] = verify_archive(pack(run, tmp_path / "b.tar.gz").path)[0].problems
    assert failing["id"] in problem and "verdict 'fail'" in problem


def test_damage_on_the_way_is_told_and_never_a_traceback(packed: Path, tmp_path: Path) -> None:
    content = packed.read_bytes()
    damaged = tmp_path / "damaged.tar.gz"
    places = [*range(12), *range(12, len(content), len(content) // 20)]
    for place in places:
        damaged.write_bytes(content[:place])
        with pytest.raises(SelectionError, match=r"damaged\.tar\.gz"):
            verify_archive(damaged)
    silent = []
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 0x10
        damaged.write_bytes(flipped)
        try:
            if not verify_archive(damaged)[0].problems:
                silent.append(bytes(flipped))
        except SelectionError:
            continue
    # What stays silent unpacks to the same bytes: the time in gzip's header, or a copy from
    # another distance in a run of zeros.
    whole = gzip.decompress(content)
    assert silent
    assert all(gzip.decompress(flipped) == whole for flipped in silent)


# ----------------------------------------------------------------------------------- opening


def test_runs_are_opened_by_folder_id_and_archive(
    made: Path, packed: Path, temporary: Path
) -> None:
    with open_run(made.name, made.parent) as folder:
        assert folder == made
    with open_run(None, made.parent) as folder:
        assert folder == made
    with open_run(str(packed)) as folder:
        assert folder.name == made.name
        assert [r.verdict for r in read(folder).cases] == [r.verdict for r in read(made).cases]
    assert not folder.exists()
    with pytest.raises(SelectionError, match="no such run"), open_run("absent"):
        raise AssertionError
    with pytest.raises(ZeroDivisionError), open_run(str(packed)) as folder:
        assert list(temporary.iterdir())
        raise ZeroDivisionError
    assert list(temporary.iterdir()) == []


def test_a_signal_leaves_nothing_behind(packed: Path, temporary: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from shardproof.runs.bundle.unpacking import unpacked\n"
        "with unpacked(Path(sys.argv[1])) as found:\n"
        "    print(found.folder, flush=True)\n    time.sleep(60)\n"
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen(
            [sys.executable, "-c", code, str(packed)],
            cwd=ROOT,
            env={**ENVIRONMENT, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdout is not None
            folder = Path(process.stdout.readline().strip())
            assert folder.is_dir() and temporary in folder.parents
            process.send_signal(number)
            assert process.wait(30) != 0
        assert list(temporary.iterdir()) == []


def test_another_version_judges_with_a_note(packed: Path) -> None:
    _, listing = verify_archive(packed)
    assert len(notes(listing)) == 1
    [_, note] = notes(listing.model_copy(update={"judged_by": ("0.0.9", VERSION)}))
    assert "\x1b" not in notes(listing.model_copy(update={"judged_by": ("\x1b[2J",)}))[1]
    assert "judged by shardproof 0.0.9" in note and f"again by {VERSION}" in note


def test_judging_again_opens_no_file_but_the_archive_and_code(packed: Path, tmp_path: Path) -> None:
    """No scenario, data set, implementation, calibration or run of this machine.

    Records of strategies and their cost models, which lie in impls/, are code of the judge.
    """
    code = r"""
import re, sys
opened = []
def hook(event, told):
    if event == "open" and isinstance(told[0], str):
        opened.append(told[0])
sys.addaudithook(hook)
from pathlib import Path
from shardproof.commands.verify import verify_archive
found, _ = verify_archive(Path(sys.argv[1]))
assert found.cases == 2 and not found.problems, found
own = [name for name in opened if name.startswith(sys.argv[2]) and not name.startswith(sys.prefix)]
own = [name for name in own if ".egg-info/" not in name]  # as .venv, which may lie in the checkout
judges = re.compile(r"/impls/(\w+/)?(__pycache__/)?(__init__\.|strategies\.|costs[/.])")
own = [name for name in own if not judges.search(name)]
odd = [name for name in own if not name.endswith((".py", ".pyc")) or "/impls/" in name]
odd += [name for name in opened if "/results/" in name]
print(odd)
"""
    done = python("-c", code, str(packed), str(ROOT), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


# ------------------------------------------------------------------------------ command line


def test_bundle_here_and_verify_there(
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def shardproof(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["shardproof", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(end.value.code or 0), out + err

    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    code, told = shardproof("bundle", str(made))
    assert code == 0, told
    first, contents, *rest = told.splitlines()
    assert first.startswith(f"{made.name}.tar.gz: 11 files of ")
    assert contents.startswith("contents sha256:")
    assert rest == ["left out: cluster.json", "left out: local/ (2 files)"]
    code, told = shardproof("bundle", str(made))
    assert code == 2 and "--force" in told
    (here / f"{made.name}.tar.gz").rename(there / "theirs.tgz")
    monkeypatch.chdir(there)
    found = files(there / "theirs.tgz")
    forge(there / "forged.tgz", _without(found, "records/"))
    code, told = shardproof("verify", "forged.tgz")
    assert code == 1 and _pick(found, "records/").partition("/")[2] in told
    (there / "cut.tgz").write_bytes((there / "theirs.tgz").read_bytes()[:999])
    code, told = shardproof("verify", "cut.tgz")
    assert code == 2 and "cut.tgz" in told
    code, told = shardproof("badges", "theirs.tgz")
    assert code == 0 and "reference-ddp_in-memory_traffic.svg" in (
        {path.name for path in (there / "badges").iterdir()}
    )
    code, told = shardproof("report", "theirs.tgz")
    assert code == 0 and "reference/ddp" in told
    assert {path.name for path in there.iterdir()} == {
        *("theirs.tgz", "forged.tgz", "cut.tgz", "badges"),
    }
    elsewhere = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "COLUMNS": "90"}
    done = python("-m", "shardproof", "verify", "theirs.tgz", cwd=there, **elsewhere)
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents in done.stdout.splitlines()
    assert "verified: 2 cases" in done.stdout


def test_an_unpacked_bundle_is_a_run(packed: Path, tmp_path: Path) -> None:
    """``tar xzf`` and ``verify`` on the folder do as well."""
    subprocess.run(["tar", "xzf", str(packed)], cwd=tmp_path, check=True)
    with unpacked(packed) as found:
        folder = tmp_path / found.listing.run
    assert verify.verify(folder).problems == []
