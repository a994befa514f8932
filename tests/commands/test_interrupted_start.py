"""Ctrl-C while a command still loads its modules, or reads what it is to do."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest


@pytest.mark.parametrize("seconds", [0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7])
def test_no_traceback_and_130(seconds: float) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "shardproof", "list", "cases"]
    started = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # What runs the tests in the background may ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    time.sleep(seconds)
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=60)
    assert "Traceback" not in err, err
    assert started.returncode in (0, 130), err
