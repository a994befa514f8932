"""When the launcher takes ranks for such that stand still; the ranks are processes of a shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardproof.backends import BACKENDS, heartbeat
from shardproof.launch import stacks
from shardproof.launch.watchdog import WAITING_LOOKS, Watchdog
from shardproof.watch import launch
from shardproof.watch.launch import _Rank, _Supervisor
from shardproof.watch.record import End

pytestmark = pytest.mark.launches

LOOKS = 20
SLEEPS = ["sleep", "100"]
BUSY = ["sh", "-c", "sh -c 'while :; do :; done' & sleep 100"]
#: Each child is gone before it is looked at twice.
ONE_BY_ONE = ["sh", "-c", "while :; do sleep 0.2; done"]


class Ranks:
    """A supervisor, and the heartbeats that its ranks would write."""

    def __init__(self, folder: Path, *programs: list[str]) -> None:
        heartbeat.create(folder / "heartbeat", len(programs))
        self.beats = [heartbeat.Writer(folder / "heartbeat", n) for n in range(len(programs))]
        self.ranks = [
            _Rank(subprocess.Popen(program, start_new_session=True), End(rank))
            for rank, program in enumerate(programs)
        ]
        watchdog = Watchdog(folder / "heartbeat", len(programs), BACKENDS["nccl"])
        self.supervisor = _Supervisor(self.ranks, watchdog, folder, time.monotonic(), 60.0)

    def quiet(self, looks: int = LOOKS + 1) -> None:
        """So many looks at which nothing happens."""
        for _ in range(looks):
            self.supervisor.watchdog.look([one.watched for one in self.ranks])
            time.sleep(0.005)

    def all_wait(self) -> bool:
        return self.supervisor._all_wait(self.ranks, LOOKS)

    def differ(self) -> bool:
        return self.supervisor._differ(self.ranks)

    def all_sleep(self) -> bool:
        return self.supervisor._all_sleep(self.ranks, LOOKS)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    made: list[Ranks] = []

    def start(*programs: list[str]) -> Ranks:
        made.append(Ranks(tmp_path, *programs))
        return made[-1]

    yield start
    for one in made:
        launch._end(one.ranks)


def test_ranks_that_all_wait_stand_still_whatever_their_children_do(started: Any) -> None:
    ranks = started(BUSY, BUSY)
    for beat in ranks.beats:
        beat.wait(True)
    ranks.quiet()
    assert ranks.all_wait()


def make_calls(beat: heartbeat.Writer, *texts: str, group: int = 1) -> None:
    for number, text in enumerate(texts, 1):
        beat.note(f"{text} on ranks 0-1", group, number, zlib.crc32(text.encode()))


def test_a_call_that_others_made_differently_is_told_at_once(started: Any) -> None:
    ranks = started(SLEEPS, SLEEPS)
    make_calls(ranks.beats[0], "all_reduce(sum, float32[3])", "barrier()")
    make_calls(ranks.beats[1], "all_reduce(sum, float32[3])", "broadcast(root 0, float32[3])")
    ranks.quiet()
    assert LOOKS <= WAITING_LOOKS / 10
    assert not ranks.differ()  # nobody waits yet
    ranks.beats[0].wait(True)
    ranks.quiet(1)
    assert not ranks.differ()  # it has just come
    ranks.quiet()
    assert ranks.differ() and not ranks.supervisor._all_wait(ranks.ranks, WAITING_LOOKS)


def test_a_rank_that_is_behind_or_calls_another_group_does_not_differ(started: Any) -> None:
    ranks = started(SLEEPS, SLEEPS)
    make_calls(ranks.beats[0], "barrier()", "all_reduce(sum, float32[3])")
    make_calls(ranks.beats[0], "broadcast(root 0, float32[3])", group=2)
    make_calls(ranks.beats[1], "broadcast(root 0, float32[3])", group=2)  # the other way round
    make_calls(ranks.beats[1], "barrier()")
    ranks.beats[0].note("recv(from 1, float32[3]) on ranks 0-1")
    ranks.beats[1].note("send(to 0, float32[3]) on ranks 0-1")
    ranks.beats[0].wait(True)
    ranks.quiet()
    assert not ranks.differ()


def test_nothing_is_ended_for_calls_that_differ_while_a_rank_computes(started: Any) -> None:
    ranks = started(SLEEPS, ["sh", "-c", "while :; do :; done"])
    make_calls(ranks.beats[0], "barrier()")
    make_calls(ranks.beats[1], "all_reduce(sum, float32[3])")
    ranks.beats[0].wait(True)
    ranks.quiet()
    assert not ranks.differ()


def test_ranks_that_sleep_while_a_child_computes_do_not_stand_still(started: Any) -> None:
    ranks = started(BUSY, SLEEPS)
    ranks.quiet()
    assert not ranks.all_wait() and not ranks.all_sleep()


def test_children_that_follow_one_another_compute(started: Any) -> None:
    ranks = started(ONE_BY_ONE, SLEEPS)
    ranks.quiet()
    assert not ranks.all_sleep() and ranks.supervisor.watchdog.silence < LOOKS


def test_what_happens_while_children_are_looked_at_ends_the_silence(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = started(SLEEPS, SLEEPS)
    ranks.quiet()
    with monkeypatch.context() as patch:
        patch.setattr(launch.time, "sleep", lambda _: ranks.beats[0].note("all_reduce"))
        assert not ranks.all_sleep()
    ranks.quiet()
    assert ranks.all_sleep()


def test_nobody_is_asked_where_no_rank_waits(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(stacks, "ask", lambda pids: asked.extend(pids))
    ranks = started(SLEEPS, SLEEPS)
    ranks.quiet()
    assert not ranks.all_wait() and asked == []
    ranks.beats[0].wait(True)
    ranks.quiet()
    assert not ranks.all_wait() and asked == [ranks.ranks[1].process.pid]


#: A rank that answers with its stack, sets a handler of its own, or becomes another program.
ARMED = """\
import os, signal, sys, time
from pathlib import Path
from shardproof.backends import heartbeat
from shardproof.launch import stacks
from shardproof.watch.rank import give_way
beats, path = Path(sys.argv[1]), Path(sys.argv[2])
heartbeat.attach(beats, 0, thread=False)
stacks.arm(path)
give_way(path)
if "handler" in sys.argv:
    signal.signal(signal.SIGUSR2, lambda *_: Path(sys.argv[1] + ".ran").touch())
Path(sys.argv[1] + ".armed").touch()
if "exec" in sys.argv:
    os.execvp("sleep", ["sleep", "100"])
while True:
    time.sleep(0.05)
"""


def armed(started: Any, folder: Path, *how: str) -> Ranks:
    (folder / "rank.py").write_text(ARMED)
    beats, path = str(folder / "heartbeat"), str(folder / "rank0.stacks")
    ranks: Ranks = started([sys.executable, str(folder / "rank.py"), beats, path, *how])
    ready, until = folder / "heartbeat.armed", time.monotonic() + 60
    pid = ranks.ranks[0].process.pid
    while time.monotonic() < until:
        program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        if ready.exists() and (program == b"sleep") == ("exec" in how):
            return ranks
        time.sleep(0.02)
    raise AssertionError("the rank never came to its loop")


@pytest.mark.parametrize("how", ["handler", "exec"])
def test_who_has_another_use_of_the_signal_is_not_asked(
    started: Any, tmp_path: Path, how: str
) -> None:
    ranks = armed(started, tmp_path, how)
    assert ranks.supervisor._ask(ranks.ranks) == {0: ("", False)}
    assert ranks.ranks[0].process.poll() is None
    if how == "handler":  # it still takes what others send
        assert not (tmp_path / "heartbeat.ran").exists()
        os.kill(ranks.ranks[0].process.pid, signal.SIGUSR2)
        until = time.monotonic() + 30
        while not (tmp_path / "heartbeat.ran").exists() and time.monotonic() < until:
            time.sleep(0.02)
        assert (tmp_path / "heartbeat.ran").exists()


def test_where_a_rank_stood_once_is_not_kept(
    started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = armed(started, tmp_path)
    (one,) = ranks.ranks
    place, waits = ranks.supervisor._ask([one])[0]
    assert "rank.py:" in place and not waits
    assert (one.end.place, one.end.waits) == ("", False)
    ranks.supervisor._blame([one], "standstill")
    assert "rank.py:" in one.end.place
    monkeypatch.setattr(stacks, "ask", lambda _: None)
    assert ranks.supervisor._ask([one])[0][0] == "", "an answer of before tells nothing of now"
