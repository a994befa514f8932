"""An informant is ended when it stands still, not while what it started computes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from made_case import made_case

from shardproof.launch import process_control
from shardproof.launch.informant import Informant, NoAnswer
from shardproof.oracle import apart

#: Wall-clock seconds of a process that the informant waits for, which computes for few of them.
SECONDS = 6.0
COMPILER = f"""
import time
end = time.monotonic() + {SECONDS}
while time.monotonic() < end:
    began = time.process_time()
    while time.process_time() < began + 0.03:
        pass
    time.sleep(0.2)
"""


MARK = "'spins below an informant'"


def waits_for(text: str) -> str:
    """In the informant: as a module that compiles an extension when it is imported."""
    subprocess.run([sys.executable, "-S", "-c", text], check=True)
    return "compiled"


def stops(*_: Any) -> None:
    """In the informant, or in what trains an oracle."""
    os.kill(os.getpid(), signal.SIGSTOP)


def test_what_an_informant_started_counts_as_its_work(tmp_path: Path) -> None:
    with Informant(tmp_path, SECONDS / 2) as informant:
        assert informant.do(waits_for, COMPILER) == "compiled"
        began = time.monotonic()
        with pytest.raises(NoAnswer, match="no answer within 3 s of sleep"):
            informant.do(waits_for, f"import time; time.sleep({20 * SECONDS})")
        assert time.monotonic() - began < 15 * SECONDS


def test_what_an_informant_started_has_no_more_cpu_than_it_has_itself(tmp_path: Path) -> None:
    with (
        Informant(tmp_path, 1.0) as informant,
        pytest.raises(NoAnswer, match="no answer within 1 s of CPU"),
    ):
        informant.do(waits_for, f"while True: {MARK}")
    deadline = time.monotonic() + 60
    while any(MARK in str(one.info) for one in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < deadline


def test_a_stopped_informant_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_control, "STOPPED_LOOKS", 2)
    with (
        Informant(tmp_path, 1000.0) as informant,
        pytest.raises(NoAnswer, match="was ended, because a signal had stopped it"),
    ):
        informant.do(stops)


def test_a_stopped_trainer_of_oracles_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_control, "STOPPED_LOOKS", 2)
    monkeypatch.setattr(apart, "shared", stops)
    case = made_case("reference/ddp", {"replicate": 1})
    with apart.clean(True, tmp_path), pytest.raises(RuntimeError, match="a signal had stopped it"):
        apart.load_or_train(case, "equal", tmp_path)
    monkeypatch.setattr(apart, "BACKENDS", {case.backend: SimpleNamespace(device="cuda")})
    with pytest.raises(RuntimeError, match="the reference run ended with exit code -9"):
        apart.trained(case, stops)  # type: ignore[arg-type]
