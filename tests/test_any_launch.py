"""The tests are green however they are launched: in the background, and on a busy machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import patience
import pytest
from commands import ROOT


def test_what_a_test_starts_can_be_interrupted() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    status = Path(f"/proc/{child.pid}/status").read_text()
    child.kill()
    child.wait()
    (ignored,) = (int(line.split()[1], 16) for line in status.splitlines() if "SigIgn" in line)
    assert not ignored >> (signal.SIGINT - 1) & 1


def test_so_it_can_where_the_shell_ignores_sigint(tmp_path: Path) -> None:
    name = f"{__file__}::{test_what_a_test_starts_can_be_interrupted.__name__}"
    words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", name]
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *words, f"--basetemp={tmp_path}/base"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


class TestTimeouts:
    def test_seconds_without_a_core_do_not_count(self) -> None:
        now, waited = [0.0], {1: 5.0}
        clock = patience.Clock(lambda: now[0], lambda: dict(waited))
        for _ in range(10):
            now[0] += 10
            waited[1] += 8
        assert clock.look() == pytest.approx(20)
        now[0] += 10
        waited[2] = 9.5  # a new process
        assert clock.look() == pytest.approx(20.5)

    def test_a_test_that_never_gets_a_core_ends_as_well(self) -> None:
        now, waited = [0.0], {1: 0.0}
        clock = patience.Clock(lambda: now[0], lambda: dict(waited))
        now[0] = waited[1] = 1000.0
        assert clock.look() == 1000 / patience.MOST

    def test_a_standstill_counts(self) -> None:
        clock = patience.Clock()
        time.sleep(0.2)
        assert clock.look() > 0.05

    def test_children_that_wait_for_a_core_are_seen(self) -> None:
        core = min(os.sched_getaffinity(0))
        spin = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
        children = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
        try:
            until = time.monotonic() + 60
            while sum(patience.waited_for_a_core().values()) < 0.3:
                assert time.monotonic() < until
                time.sleep(0.1)
        finally:
            for child in children:
                child.kill()
                child.wait()
