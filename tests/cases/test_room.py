"""Whether work folders have room for the cases that are chosen is known before any runs."""

from __future__ import annotations

import io
import resource
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small_disk import small_disk

from shardproof.cases import room
from shardproof.cases.runner import Session
from shardproof.commands.supervision import Interrupts, supervised
from shardproof.errors import MachineError
from shardproof.launch import workspace
from shardproof.runs.run_folder import RunFolder, read
from shardproof.scenarios.selection import Selection
from shardproof.scenarios.vocabulary import installed

#: The largest of the quick cases, and one of a usual size.
LARGE = "ddp-defaults"
SMALL = "ddp-gpt::reference/ddp+small_buckets::in_memory::replicate2::sgd::noclip::fp64::quick"


@pytest.fixture
def docker_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work folders lie in 64 MiB."""
    with small_disk(tmp_path / "shm", 64 << 10) as folder:
        for module in (workspace, room):
            monkeypatch.setattr(module, "workspace_base", lambda: folder)
        yield folder


def cases(name: str, tier: str = "quick") -> list[Any]:
    return Selection([name], tier=tier).cases(installed())


def test_small_cases_fit_into_64_mib_and_a_large_one_does_not(docker_default: Path) -> None:
    room.require(cases("ddp-gpt"), 2)
    with pytest.raises(MachineError, match=r"may need 92 MiB - delete files there or enlarge"):
        room.require(cases(LARGE), 2)


def test_the_average_case_runs_beside_the_largest(docker_default: Path) -> None:
    """13 at once do not fit; one does, and the remedy says so.  More than there are never run."""
    room.require(cases("ddp-gpt")[:1], 16)
    with pytest.raises(MachineError, match=r"13 cases at once may .*fewer cases at once \(-j 1\)"):
        room.require(cases("ddp-gpt"), 16)


def test_no_case_is_thought_to_need_more_than_any_ever_had() -> None:
    elements: dict[str, int] = {}
    assert room.bytes_of(cases("async-orders", "full")[0], elements) == room.MOST_BYTES
    assert room.bytes_of(cases("collectives")[0], elements) <= room.MOST_BYTES


def test_a_case_whose_model_has_no_form_in_its_lane_is_counted_all_the_same() -> None:
    case = replace(cases("mixtures", "full")[0], lane="working_precision")
    assert 0 < room.bytes_of(case, {}) < room.MOST_BYTES


def test_a_run_is_refused_before_it_leaves_anything(
    docker_default: Path, tmp_path: Path, command: Any
) -> None:
    (docker_default / "fills").write_bytes(bytes(62 << 20))
    code, _, err = command("run", SMALL, "--results", str(tmp_path / "run"))
    assert code == 3 and err.startswith("precondition: "), err
    assert "--shm-size 1g" in err and not (tmp_path / "run").exists()
    assert workspace.lacking(1) is not None


def test_oracles_go_to_disk_where_memory_is_short(docker_default: Path) -> None:
    with Session(1) as session:
        assert not session._cache.is_relative_to(docker_default) and session._cache.is_dir()
        left = session._cache
    assert not left.exists()


def test_oracles_lie_beside_work_folders_where_there_is_room(tmp_path: Path) -> None:
    if shutil.disk_usage(workspace.workspace_base()).free < workspace.ROOMY_BYTES:
        pytest.skip("this machine has no such room")
    with Session(1) as session:
        assert session._cache.parent == session._pool.folder


def test_few_files_and_short_ones_are_told_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert workspace.lacking(1, base=tmp_path) is None
    with small_disk(tmp_path / "few", 64 << 10) as folder:
        subprocess.run(["mount", "-o", "remount,nr_inodes=50", str(folder)], check=True)
        assert "files, but a case may need 100" in str(workspace.lacking(1, base=folder))
    limits = {resource.RLIMIT_FSIZE: (1 << 20, 1 << 20)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    told = str(workspace.lacking(1, base=tmp_path))
    assert told.startswith("files are limited to 1.0 MiB") and "ulimit -f unlimited" in told


def test_a_machine_that_gives_way_in_mid_run_leaves_it_undecided(tmp_path: Path) -> None:
    said = io.StringIO()
    folder = RunFolder(tmp_path / "run", ["shardproof", "run"])

    def body(_: Interrupts) -> int:
        raise MachineError("the fork server was stopped by a signal")

    assert supervised(folder, Console(file=said, width=200), body) == 3
    assert "precondition: the fork server was stopped by a signal" in said.getvalue()
    assert read(tmp_path / "run").header.last.exit_code == 3
    assert (tmp_path / "run" / "report.html").exists(), "what was written stays, and is reported"
