"""Stacks of processes that do not help: all of a stack, or none."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from shardproof.launch import process_control, stacks

#: Asked for its stack, it writes into a pipe that nobody reads yet.
SLOW = """
import faulthandler, os, sys, time
from shardproof.launch.stacks import DUMP_SIGNAL
descriptor = os.open(sys.argv[1], os.O_WRONLY)
os.set_blocking(descriptor, False)
try:
    while True:
        os.write(descriptor, b"x" * 512)
except BlockingIOError:
    os.set_blocking(descriptor, True)
faulthandler.register(DUMP_SIGNAL, descriptor)
print("ready", flush=True)
time.sleep(1000)
"""


def test_a_process_that_is_slow_to_tell_its_stack_is_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "stacks"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    command = [sys.executable, "-c", SLOW, str(pipe)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            asked = threading.Thread(target=stacks.ask, args=({process.pid: pipe}, 60.0))
            asked.start()
            while not process_control.handling(process.pid, stacks.DUMP_SIGNAL):
                pass
            asked.join(0.2)
            assert asked.is_alive(), "it did not wait for the rest"
            told = b""
            os.set_blocking(reader, True)
            while b"<module>" not in told:
                told += os.read(reader, 4096)
            asked.join(60.0)
            assert not asked.is_alive() and not process_control.handling(
                process.pid, stacks.DUMP_SIGNAL
            )
        finally:
            process.kill()
            os.close(reader)


def test_a_process_without_a_handler_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "stacks").touch()
    with subprocess.Popen(["sleep", "1000"]) as process:
        stacks.ask({process.pid: tmp_path / "stacks"})
        assert process.poll() is None
        process.kill()
