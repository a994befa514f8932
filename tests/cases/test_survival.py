"""What happens to the runner itself: killed, interrupted, out of disk.  Nothing written is lost."""

from __future__ import annotations

import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from commands import here
from small_disk import remount, small_disk

from shardproof.commands.verify import verify
from shardproof.runs.resume import planned
from shardproof.runs.run_folder import read

ROOT = Path(__file__).parents[2]
MARK = "SHARDPROOF_SURVIVAL_TEST"
SELECTION = ("ddp-gpt", "--impl", "reference/ddp", "--backend", "in_memory", "-j", "2")


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    """The runner as people start it; its processes are known by a variable in their environment."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "shardproof",
        "run",
        *SELECTION,
        "--results",
        str(folder),
        *more,
    ]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**environment, MARK: str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def left_running(folder: Path) -> list[str]:
    """Processes of the run in ``folder``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder) and process.status() != "zombie":
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
        except psutil.Error:
            continue
    return found


def all_gone(folder: Path, within_s: float = 60.0) -> bool:
    """Whether nothing of the run is left before the time is up."""
    deadline = time.monotonic() + within_s
    while left_running(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def lines(folder: Path) -> int:
    path = folder / "cases.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(folder: Path, process: subprocess.Popen[str], count: int) -> None:
    """Until the run is planned and so many cases have ended."""
    deadline = time.monotonic() + 120

    def reached() -> bool:
        sealed = folder / "manifest.jsonl"
        is_planned = sealed.exists() and "planned.jsonl" in sealed.read_text()
        return is_planned and lines(folder) >= count

    while not reached() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def killed_at(folder: Path, moment: float, cases: int) -> None:
    """Kill a run ``moment`` seconds after some case ended, and look at what it left."""
    process = start(folder)
    wait_for(folder, process, cases)
    time.sleep(moment)
    written = lines(folder)
    process.kill()
    process.communicate()
    assert all_gone(folder), left_running(folder)
    run = read(folder)
    assert len(run.cases) >= written, "a case that had ended was lost"
    if cases:
        assert run.cases and all((folder / case.record).is_file() for case in run.cases)
        # What runs is planned, so that what the kill took is known.
        ids = {case.id for case in planned(folder)}
        missing = ids - {case.id for case in run.cases}
        named = " ".join(verify(folder).problems)
        assert all(name in named for name in missing)


def resumed(folder: Path) -> str:
    """What finishing the run printed."""
    done = here("run", *SELECTION, "--results", str(folder), "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert verify(folder).problems == []
    return done.stdout


def test_kill_9_before_the_first_case_has_ended_loses_nothing(tmp_path: Path) -> None:
    killed_at(tmp_path / "run", random.Random(0).uniform(0, 1.5), 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kill_9_at_twenty_random_moments(tmp_path: Path) -> None:
    """Two runs at a time: until its cases run, a run imports on one core."""
    source = random.Random(os.environ.get("SHARDPROOF_SEED", "9"))
    moments = [(source.uniform(0, 2.5), source.randint(0, 3)) for _ in range(20)]
    folders = [tmp_path / f"run{attempt}" for attempt in range(20)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(killed_at, folders, *zip(*moments, strict=True)))


def test_a_killed_run_is_finished_by_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed_at(folder, 0.1, 2)
    before = {case.id for case in read(folder).cases}
    output = resumed(folder)
    run = read(folder)
    assert {case.id for case in run.cases} == {case.id for case in planned(folder)} > before
    again = set(run.header.invocations[1].planned)
    assert not again & before, "what had ended was not run again"
    assert f"{len(run.cases)} judged" in output


def ends_as_by_ctrl_c(process: subprocess.Popen[str], folder: Path, *sent: signal.Signals) -> None:
    for number in sent:
        process.send_signal(number)
        time.sleep(0.05)
    output = process.communicate()[0]
    assert process.returncode == 130, output
    assert (
        "stopped: " in output
        and "; run the rest with: shardproof run --resume --results " in output
    )
    assert "Traceback" not in output
    assert all_gone(folder), left_running(folder)
    run = read(folder)
    assert run.cases and run.left_out
    assert run.header.last.exit_code == 130
    assert verify(folder).problems == []
    assert (folder / "report.html").exists()
    done = {line.id for line in (*run.cases, *run.left_out)}
    assert done == {case.id for case in planned(folder)}


def test_ctrl_c_after_a_hangup_does_not_disturb_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder)
    wait_for(folder, process, 1)
    ends_as_by_ctrl_c(process, folder, signal.SIGHUP, signal.SIGINT)


@pytest.mark.slow
def test_a_terminal_that_is_closed_ends_its_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), MARK: str(folder)}
    command = [sys.executable, "-m", "shardproof", "run", *SELECTION, "--results", str(folder)]
    child, terminal = pty.fork()
    if not child:
        os.chdir(ROOT)
        os.execvpe(command[0], command, environment)
    deadline = time.monotonic() + 120
    while not lines(folder) and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 1 << 16)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    assert all_gone(folder), left_running(folder)
    assert read(folder).header.last.exit_code == 130
    assert verify(folder).problems == []


@pytest.mark.slow
def test_nohup_keeps_a_run_from_ending_until_it_is_terminated(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(folder)
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for(folder, process, 1)
    process.send_signal(signal.SIGHUP)
    wait_for(folder, process, 2)
    assert process.poll() is None and lines(folder) >= 2
    ends_as_by_ctrl_c(process, folder, signal.SIGTERM)


def test_one_folder_takes_one_runner_at_a_time_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = start(folder)
    wait_for(folder, first, 1)
    first.send_signal(signal.SIGSTOP)  # so that it does not end meanwhile
    for more in ((), ("--resume",)):
        second = here("run", *SELECTION, "--results", str(folder), *more)
        assert second.returncode == 2, second.stdout + second.stderr
        assert f"another process writes into this run (pid {first.pid}) - " in second.stderr
    ends_as_by_ctrl_c(first, folder, signal.SIGINT, signal.SIGCONT)
    assert len(read(folder).header.invocations) == 1


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 256) as folder:
        yield folder


def test_a_full_disk_is_a_sentence_and_loses_nothing(disk: Path) -> None:
    folder = disk / "run"
    process = start(folder)
    output = process.communicate()[0]
    assert process.returncode == 2, output
    assert "Traceback" not in output
    told = re.search(r"^(\S+): No space left on device", output, re.MULTILINE)
    assert told and told[1].startswith(str(disk)), output
    assert f"shardproof run --resume --results {folder}" in output
    assert all_gone(folder), left_running(folder)
    run = read(folder)
    assert run.cases, "cases that ended before are kept"
    assert all((folder / case.record).is_file() for case in run.cases)
    remount(disk, "size=64m")
    resumed(folder)
    assert {c.id for c in read(folder).cases} == {case.id for case in planned(folder)}
