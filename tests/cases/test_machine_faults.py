"""What this machine breaks is no crash of the system; what the system breaks stays one."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from commands import here
from small_disk import remount, small_disk

from shardproof.backends import BACKENDS
from shardproof.backends.gloo import problem_of_interface
from shardproof.case import Case
from shardproof.cases import room
from shardproof.cases.launcher import Launcher
from shardproof.cases.leader import _fault_of_machine, judge_case
from shardproof.cases.runner import run_cases
from shardproof.cases.verdict import decide_case
from shardproof.checks.results import CaseResult
from shardproof.errors import Problem
from shardproof.evidence.account import Account
from shardproof.evidence.assembled import Beside, Evidence
from shardproof.launch import machine_faults, workspace
from shardproof.launch.outcome import RankOutcome
from shardproof.launch.ranks import Forked
from shardproof.runs.run_folder import read
from shardproof.scenarios.selection import Selection
from shardproof.scenarios.vocabulary import installed

CASE = "ddp-gpt::reference/ddp+small_buckets::gloo::replicate1::sgd::noclip::fp64::quick"


@pytest.fixture(scope="module")
def case() -> Case:
    return Selection([CASE]).cases(installed())[0]


def test_a_missing_interface_is_a_precondition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope77")
    done = here("run", CASE, "--results", str(tmp_path / "run"))
    told = done.stdout + done.stderr
    assert done.returncode == 3 and "1 judged (1 precondition)" in told, told
    assert "GLOO_SOCKET_IFNAME=nope77, but this machine has no interface nope77 - unset" in told
    (result,) = read(tmp_path / "run").cases
    assert result.verdict == "precondition"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    verified = here("verify", str(tmp_path / "run"))  # elsewhere, where there is nothing missing
    assert verified.returncode == 0 and "1 cases judged again" in verified.stdout


def account(case: Case, message: str) -> tuple[Account, CaseResult]:
    made = Account(case)
    made.outcomes = [RankOutcome(0, "raised", error_type="OSError", message=message)]
    return made, CaseResult(CASE, case, "crash", message)


def test_a_crash_on_a_sound_machine_stays_one(case: Case, tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, Forked(), tmp_path)
    assert _fault_of_machine(*account(case, "mine"), launcher, 0.0) == ""
    full = os.strerror(errno.ENOSPC)
    assert (
        _fault_of_machine(*account(case, f"{full}: '/the/system/writes/here'"), launcher, 0.0) == ""
    )


def test_a_full_work_folder_is_the_machines(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = Launcher(tmp_path, Forked(), tmp_path)
    full = f"[Errno 28] {os.strerror(errno.ENOSPC)}: '{tmp_path}/rank0.rec'"
    made, crash = account(case, full)
    made.machine = _fault_of_machine(made, crash, launcher, 0.0)
    assert made.machine.startswith("the work folder is full: rank 0: [Errno 28]")
    made = Account.from_dict(made.to_dict())
    assert decide_case(made).verdict == "precondition"
    monkeypatch.setattr(machine_faults, "lacking", lambda *_, **__: Problem("no room", "make some"))
    assert _fault_of_machine(*account(case, "mine"), launcher, 0.0) == "no room - make some"


#: A class whose rank takes all room: ``WAY`` of the file system ``DISK``.
GREEDY = """
import os, resource, tempfile
from pathlib import Path
from shardproof.impls.reference.ddp import ReferenceDDP

WAY, DISK = os.environ["WAY"], Path(os.environ["DISK"])


class Mine(ReferenceDDP):
    def setup(self, build, state, optimizer, mesh, options):
        super().setup(build, state, optimizer, mesh, options)
        (work,) = DISK.glob("shardproof-*/case*")
        if WAY == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        elif WAY == "inodes":
            for number in range(10**6):
                (work / f"mine{number}").touch()
        else:
            path = (work if WAY == "work folder" else DISK) / "mine"
            self.file = path.open("wb", buffering=0)
            if WAY == "no name":
                path.unlink()
            try:
                while self.file.write(bytes(1 << 20)) == 1 << 20:
                    pass
            except OSError:
                if WAY != "no name":
                    raise
"""


def ends_on(disk: Path, way: str, case: Case, patch: pytest.MonkeyPatch) -> CaseResult:
    """The result of a greedy class whose work folder is on ``disk``."""
    (disk.parent / "greedy.py").write_text(GREEDY)
    patch.chdir(disk.parent)
    patch.setattr(workspace, "workspace_base", lambda: disk)
    for name, value in {"WAY": way, "DISK": str(disk)}.items():
        patch.setenv(name, value)
    ((result,), _) = run_cases([replace(case, implementation="greedy:Mine")], 1, lambda _: None)
    return result


@pytest.mark.parametrize("way", ["work folder", "beside it", "no name", "limit", "inodes"])
def test_room_that_a_system_took_is_its_own_fault(
    way: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        remount(disk, "nr_inodes=400")
        result = ends_on(disk, way, case, monkeypatch)
    assert result.verdict == "crash", result.reason
    if way == "limit":
        assert "this process itself limits files to 1,000 bytes: [Errno 27]" in result.reason


@pytest.mark.parametrize("way", ["work folder", "inodes"])
def test_room_that_others_took_is_the_machines(
    way: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of it is not enough for any case, which is seen before unless others take it now."""
    monkeypatch.setattr(room, "require", lambda cases, jobs: None)
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        remount(disk, "nr_inodes=80" if way == "inodes" else "size=10m")
        result = ends_on(disk, way, case, monkeypatch)
    assert result.verdict == "precondition", result.reason


def test_where_other_cases_run_nobody_is_blamed_for_what_lies_beside(tmp_path: Path) -> None:
    work = tmp_path / "shardproof-run" / "case1"
    work.mkdir(parents=True)
    assert machine_faults._is_alone(work) and machine_faults._top(work) == tmp_path
    (work.parent / "case2").mkdir()
    assert not machine_faults._is_alone(work)
    (work.parent / "case2").rmdir()
    (tmp_path / "shardproof-other").mkdir()
    assert not machine_faults._is_alone(work)
    assert not machine_faults._is_alone(tmp_path)


def test_records_of_the_suite_are_nothing_that_a_system_took(tmp_path: Path) -> None:
    (tmp_path / "rank0.rec").write_bytes(bytes(1 << 20))
    assert workspace.used_in(tmp_path) == (0, 0)
    (tmp_path / ".rank0.rec.7.tmp").write_bytes(bytes(1 << 20))  # of a rank that was killed
    assert workspace.used_in(tmp_path) == (0, 0)
    (tmp_path / "mine").write_bytes(bytes(1 << 20))
    assert workspace.used_in(tmp_path) == (1 << 20, 1)


def test_what_ended_well_is_not_asked_about(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_faults, "lacking", lambda *_, **__: Problem("no room", "make some"))
    made, passed = Account(case), CaseResult(CASE, case, "pass", "")
    assert _fault_of_machine(made, passed, Launcher(tmp_path, Forked(), tmp_path), 0.0) == ""


def test_what_was_measured_is_the_systems(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = judge_case(case, tmp_path / "work", tmp_path / "oracles")[0]
    assert isinstance(sound.figures, Evidence)
    monkeypatch.setattr(machine_faults, "lacking", lambda *_, **__: Problem("no room", "make some"))
    failed, launcher = (
        CaseResult(CASE, case, "fail", "norm: wrong"),
        Launcher(tmp_path, Forked(), tmp_path),
    )
    assert _fault_of_machine(sound, failed, launcher, 0.0) == ""
    sound.figures.beside["relation"] = Beside(problem="in another run rank 0 raised OSError")
    assert _fault_of_machine(sound, failed, launcher, 0.0) == "no room - make some"


def test_an_interface_that_is_missing_down_or_without_an_address_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert problem_of_interface("") is None
    assert "no interface nope" in str(problem_of_interface("lo,nope"))
    down = "the network interface lo is down, or has no address - run `ip link set lo up`"
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "net_if_addrs", dict)
        assert str(problem_of_interface("lo")).startswith(down)
    state = SimpleNamespace(isup=False)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"lo": state})
    assert str(problem_of_interface("")).startswith(down)


def test_backends_without_an_interface_say_nothing() -> None:
    assert all(BACKENDS[name].unreachable() is None for name in ("in_memory", "gloo"))
