"""Stacks of processes that do not help: all of a stack, or none."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from shardproof.launch import frames, process_control, stacks

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


def is_asked(pid: int) -> bool:
    pending, blocks = process_control.handling(pid, stacks.DUMP_SIGNAL)
    return pending or any(blocks.values())


def test_a_process_that_is_slow_to_tell_its_stack_is_waited_for(tmp_path: Path) -> None:
    """Also by who asks again while it is at the answer before."""
    pipe, path = tmp_path / "pipe", tmp_path / "stacks"
    path.touch()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    command = [sys.executable, "-c", SLOW, str(pipe)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            stacks.ask({process.pid: path}, 0.5)
            assert is_asked(process.pid), "it has not told"
            asked = threading.Thread(target=stacks.ask, args=({process.pid: path}, 60.0))
            asked.start()
            asked.join(0.2)
            assert asked.is_alive(), "it took the request before for an answer"
            told = b""
            os.set_blocking(reader, True)
            while b"<module>" not in told:
                told += os.read(reader, 4096)
                path.write_bytes(told)
            asked.join(60.0)
            assert not asked.is_alive()
            assert not is_asked(process.pid)
        finally:
            process.kill()
            os.close(reader)


def test_who_dies_of_its_answer_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "stacks").touch()
    source = "import signal, os, time; signal.signal({0}, lambda *_: os._exit(1)); {1}; {2}"
    source = source.format(
        int(stacks.DUMP_SIGNAL), "print('ready', flush=True)", "time.sleep(1000)"
    )
    command = [sys.executable, "-c", source]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            asked = threading.Thread(
                target=stacks.ask, args=({process.pid: tmp_path / "stacks"}, 3600.0), daemon=True
            )
            asked.start()
            asked.join(60.0)
            assert not asked.is_alive()
        finally:
            process.kill()


def test_a_process_without_a_handler_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "stacks").touch()
    with subprocess.Popen(["sleep", "1000"]) as process:
        stacks.ask({process.pid: tmp_path / "stacks"})
        assert process.poll() is None
        process.kill()


def test_the_line_of_a_system_that_is_built_of_the_suites_parts_is_its_own() -> None:
    part = f"{frames.SUITE}/impls/reference/zero1.py", 9, "finish"
    own = "/home/me/mine.py", 7, "step"
    judge = f"{frames.SUITE}/backends/base.py", 3, "wait"
    assert frames.innermost([own, part, judge]) == own
    assert frames.innermost([part, judge]) == part
    assert frames.innermost([judge]) is None


def test_a_stack_is_told_as_python_tells_it() -> None:
    stack = stacks.ThreadStack([("/nowhere/own.py", 7, "step")])
    told = 'Stack (most recent call last):\n  File "/nowhere/own.py", line 7, in step'
    assert str(stack) == told
