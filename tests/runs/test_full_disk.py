"""Every writer of a run on a disk that is full or read-only: one sentence, code 2, nothing lost.

The disk ends at each page in turn, so that each writer meets the end.  Cases are not run again for
that: a run that was made once is played to the command.
"""

from __future__ import annotations

import errno
import gc
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic
from commands import shardproof
from rich.console import Console
from small_disk import remount, small_disk

from shardproof import verdicts
from shardproof.case import Case
from shardproof.cases import runner
from shardproof.checks.results import CaseResult
from shardproof.commands.supervision import supervised
from shardproof.commands.verify import verify
from shardproof.runs import records
from shardproof.runs.resume import planned
from shardproof.runs.run_folder import RunFolder, read

FILTER = (
    "ddp-gpt",
    "--backend",
    "in_memory",
    "-k",
    "replicate2 and small_buckets and sgd and fp64",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[CaseResult, dict[str, Any]]]:
    """Results and accounts by id."""
    from shardproof.scenarios.selection import Selection
    from shardproof.scenarios.vocabulary import installed

    cases = Selection(FILTER[:1], backends=["in_memory"], expression=FILTER[-1]).cases(installed())
    kept = {}

    def keep(result: CaseResult, account: dict[str, Any]) -> None:
        path = tmp_path_factory.mktemp("record")
        account = records.read(path / records.write(path, account)[0])
        kept[result.id] = result, account

    runner.run_cases(cases, 2, lambda result: None, on_account=keep)
    return kept


@pytest.fixture
def played(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Runs are played from ``made``; what is put into the list happens before the next case."""
    happens: list[Callable[[], None]] = []

    def play(
        cases: Sequence[Case], jobs: int, on_result: Any, on_account: Any, *_: object
    ) -> tuple[list[CaseResult], list[Case]]:
        for case in cases:
            while happens:
                happens.pop()()
            result, account = made[case.id]
            # As if the ranks had been given this case, of this invocation.
            records_of = (one | {"seal": case.seal} for one in account["figures"]["records"])
            figures = account["figures"] | {"records": [*records_of]}
            result = replace(result, case=case)
            on_account(result, account | {"case": case.to_dict(), "figures": figures})
            on_result(result)
        return [], []

    monkeypatch.setattr(runner, "run_cases", play)
    return happens


def _goes_on(command: Any, run: Path) -> None:
    """The run can be shown and finished; then it is whole."""
    shown, out, err = command("report", str(run))
    assert shown == 0, out + err
    code, out, err = command("run", "--resume", "--results", str(run))
    if code == 2:
        # It was full before anything was planned.
        assert "has no planned cases" in err and not (run / "records").exists(), out + err
        return
    assert code == 0, out + err
    assert verify(run).problems == []
    assert {case.id for case in read(run).cases} == {case.id for case in planned(run)}


@pytest.mark.parametrize("pages", [*range(1, 60, 3), 1000])
def test_a_disk_that_is_full_at_any_page(
    tmp_path: Path, command: Any, played: list[Any], pages: int
) -> None:
    with small_disk(tmp_path / "disk", 4 * pages) as disk:
        run, junit = disk / "run", disk / "junit.xml"
        arguments = ("run", *FILTER, "--results", str(run), "--junit", str(junit))
        code, out, err = command(*arguments)
        if code == 0:
            assert verify(run).problems == [] and junit.exists()
            return
        assert code == 2 and pages < 1000, out + err
        assert str(disk) in out + err and "No space left on device" in out + err, out + err
        remount(disk, "size=64m")
        if (run / "run.json").exists():
            _goes_on(command, run)
        else:
            assert command(*arguments)[0] == 0, "a folder without a run is taken again"


def test_a_disk_that_becomes_read_only(tmp_path: Path, command: Any, played: list[Any]) -> None:
    with small_disk(tmp_path / "disk", 65536) as disk:
        run = disk / "run"

        def fails() -> None:
            # The kernel would not wait for who holds a file open; `mount` does.
            (folder,) = (o for o in gc.get_objects() if type(o) is RunFolder and o.path == run)
            folder._lock.close()
            remount(disk, "ro")

        played.append(fails)
        code, out, err = command("run", *FILTER, "--results", str(run))
        assert code == 2, out + err
        assert "Read-only file system - what was written is kept" in out
        assert command("report", str(run))[0] == 0
        code, out, err = command("run", "--resume", "--results", str(run))
        assert code == 2 and "Read-only file system" in err, out + err
        for words in (["--junit", str(disk / "new" / "x.xml")], ["--results", str(disk / "other")]):
            code, out, err = command("run", *FILTER, *words)
            assert code == 2 and "Read-only file system" in err, out + err
        remount(disk, "rw")
        _goes_on(command, run)


@pytest.mark.parametrize(
    ("number", "mend"),
    [(errno.ENOSPC, "make room"), (errno.EROFS, "make the path writable")],
    ids=["full", "read-only"],
)
@pytest.mark.parametrize("is_planned", [True, False])
@pytest.mark.parametrize("is_kept", [True, False])
def test_what_goes_or_has_no_plan_is_not_named_to_go_on_with(
    tmp_path: Path, is_kept: bool, is_planned: bool, number: int, mend: str
) -> None:
    def body(_: object) -> int:
        raise OSError(number, os.strerror(number), str(tmp_path / "cases.jsonl"))

    console = Console(file=io.StringIO(), width=200)
    with RunFolder(tmp_path, []) as folder:
        if is_planned:
            folder.plan(folder.bind([synthetic.case(0)]))
        code = supervised(folder, console, body, is_kept=is_kept)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert code == verdicts.BAD_INPUT
    assert f"{tmp_path / 'cases.jsonl'}: {os.strerror(number)} - " in told and mend in told, told
    for words in ("what was written is kept", "evidence: "):
        assert (words in told) == is_kept, told
    goes_on = is_kept and is_planned
    assert ("--resume" in told) == goes_on, told
    kept = "what was written" if is_kept else "nothing"
    assert (f"{kept} is kept; {mend}, then run it again" in told) != goes_on, told


def test_standard_output_may_be_full() -> None:
    with Path("/dev/full").open("w") as full:
        done = shardproof("list", "checks", stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith("standard output: No space left on device - ")
