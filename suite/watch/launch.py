"""Starts the ranks of a script as torchrun would, and ends them when one fails or all stand still.

Every rank is a process in a session of its own, so that what it starts can be ended with it, and
dies with this process.  Ranks are looked at by :class:`shardproof.launch.watchdog.Watchdog`: a rank
that computes is left alone, however long it takes.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from shardproof.backends import heartbeat
from shardproof.backends.nccl import Nccl
from shardproof.launch import autopsy, process_control, stacks
from shardproof.launch.diagnosis import RankProcess
from shardproof.launch.watchdog import DESYNC_LOOKS, TICK_SECONDS, WAITING_LOOKS, Watchdog
from shardproof.watch import calls
from shardproof.watch.record import End, write_ends

#: Seconds that the others have when one has failed: most see it by themselves.
GRACE_SECONDS = 10.0
#: What a rank runs: the suite is the one of this process, behind the script's own packages.
_PROGRAM = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from shardproof.watch.__main__ import main; main(sys.argv[1:])"
)
_PACKAGES = str(Path(__file__).parents[2])
#: Seconds over which processes that ranks have started are looked at, and the share of a core
#: below which they do nothing.
_CHILDREN_SECONDS, _IDLE_SHARE = 1.0, 0.02
#: Seconds between being asked to end and being killed.
TERM_SECONDS = 3.0


class _Rank:
    def __init__(self, process: subprocess.Popen[bytes], end: End) -> None:
        self.process, self.end = process, end
        self.watched = RankProcess(process.pid, (end.rank,))


def run(
    script: Sequence[str],
    ranks: int,
    folder: Path,
    variables: Mapping[str, str],
    standstill_seconds: float,
) -> list[End]:
    """Run ``script`` (its file and arguments) on ``ranks`` processes; how each of them ended.

    Records go into ``folder``, and the ends as well.  Whatever leaves this function, an interrupt
    included, no rank is left.
    """
    beats = folder / "heartbeat"
    heartbeat.create(beats, ranks)
    started: list[_Rank] = []
    began = time.monotonic()
    try:
        common = _environment(ranks, folder, beats) | dict(variables)
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, _PACKAGES, *script],
                env=common | own,
                start_new_session=True,
            )
            started.append(_Rank(process, End(rank)))
        # Whatever the script's backend is: who waits in a call and burns CPU computes nothing.
        watchdog = Watchdog(beats, ranks, Nccl())
        _Supervisor(started, watchdog, folder, began, standstill_seconds).run()
    finally:
        _end(started)
        for one, beat in zip(started, heartbeat.read(beats), strict=False):
            one.end.last_call, one.end.calls = beat.last_call, beat.sequence
        write_ends(folder, [one.end for one in started])
        with contextlib.suppress(FileNotFoundError):
            beats.unlink()
    return [one.end for one in started]


def _environment(ranks: int, folder: Path, beats: Path) -> dict[str, str]:
    """The variables that torchrun sets, and the folder for records."""
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_WORLD_SIZE": "1",
        "SHARDPROOF_WATCH_RESULTS": str(folder.resolve()),
        "SHARDPROOF_WATCH_BEATS": str(beats.resolve()),
        "SHARDPROOF_WATCH_PARENT": str(os.getpid()),
    }
    # As torchrun: ranks that each take all cores are slower than one.
    defaults = {"OMP_NUM_THREADS": "1"} if ranks > 1 else {}
    return defaults | dict(os.environ) | variables


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class _Supervisor:
    ranks: Sequence[_Rank]
    watchdog: Watchdog
    folder: Path
    began: float
    standstill_seconds: float
    #: When another rank's failure gives those that are left their last seconds.
    until: float = math.inf
    #: Whether the ranks have been asked in this silence where they stand.
    asked: bool = False

    def run(self) -> None:
        """Return when all ranks have ended, or have to be ended."""
        asleep = max(1, int(self.standstill_seconds / TICK_SECONDS))
        waiting = min(WAITING_LOOKS, asleep)
        while alive := [one for one in self.ranks if not self._has_ended(one)]:
            self.watchdog.look([one.watched for one in alive])
            if time.monotonic() > self.until:
                self._blame(alive, "grace")
                return
            if self._all_wait(alive, waiting) or self._all_sleep(alive, asleep):
                self._blame(alive, "standstill")
                return
            if self._differ(alive):
                self._blame(alive, "desync")
                return
            time.sleep(TICK_SECONDS)

    def _differ(self, alive: Sequence[_Rank]) -> bool:
        """Whether a rank waits in a call that others made differently, and no rank continues."""
        if self.watchdog.silence < DESYNC_LOOKS or not self.watchdog.idle:
            return False
        beats = heartbeat.read(self.folder / "heartbeat")
        found = autopsy.mismatch({beat.rank: beat.noted for beat in beats})
        if found is None:
            return False
        ranks = [one.end.rank for one in alive if one.end.rank in found.calls]
        paths = [self.folder / f"rank{rank}.calls" for rank in ranks]
        # A last call inside of a backward: there DDP waits unseen.
        return any(beats[rank].waiting for rank in ranks) or any(
            path.exists() and calls.state(path).in_backward for path in paths
        )

    def _all_wait(self, alive: Sequence[_Rank], looks: int) -> bool:
        """Whether all wait for others, whatever processes that they have started do.

        DDP waits in C++, where only a stack tells of it: ranks are asked for theirs, once in a
        silence, where another is seen to wait.
        """
        if self.watchdog.silence < looks:
            self.asked = False
            return False
        if self.asked or not self.watchdog.idle:
            return False
        beats = heartbeat.read(self.folder / "heartbeat")
        others = [one for one in alive if not (beats[one.end.rank].waiting or _is_stopped(one))]
        if len(others) == len(alive):
            return False
        self.asked = True
        stands = self._ask(others)
        return all(waits for _, waits in stands.values()) and self._is_still_silent(alive, looks)

    def _all_sleep(self, alive: Sequence[_Rank], looks: int) -> bool:
        """Whether nothing computes, nor do processes that ranks have started (a loader's workers).

        A process that is new or gone counts as one that computes: many may follow one another.
        """
        if self.watchdog.silence < looks or not self.watchdog.stand_still(looks):
            return False
        before = _spent_by_children(alive)
        time.sleep(_CHILDREN_SECONDS)
        after = _spent_by_children(alive)
        least = _CHILDREN_SECONDS * _IDLE_SHARE
        if before.keys() == after.keys() and all(after[k] - before[k] < least for k in after):
            return self._is_still_silent(alive, looks)
        self.watchdog.restart()
        return False

    def _is_still_silent(self, alive: Sequence[_Rank], looks: int) -> bool:
        """Whether nothing has happened while this process asked or slept."""
        self.watchdog.look([one.watched for one in alive])
        return self.watchdog.silence >= looks

    def _has_ended(self, one: _Rank) -> bool:
        if one.end.ended:
            return True
        code = one.process.poll()
        if code is None:
            return False
        one.end.ended = time.monotonic() - self.began
        one.end.signal, one.end.exit_code = (-code, None) if code < 0 else (None, code)
        if code:
            self.until = min(self.until, time.monotonic() + GRACE_SECONDS)
        return True

    def _blame(self, alive: Sequence[_Rank], reason: str) -> None:
        """Write down why and where the ranks are given up."""
        for one in alive:
            one.end.reason, one.end.stopped = reason, _is_stopped(one)
            one.end.ended = time.monotonic() - self.began
        stands = self._ask(alive)
        for one in alive:
            one.end.place, one.end.waits = stands[one.end.rank]

    def _ask(self, ranks: Sequence[_Rank]) -> dict[int, tuple[str, bool]]:
        """Rank -> where it stands in the script, and whether it waits for others there.

        The place of one that does not answer is ``""``.
        """
        beats = heartbeat.read(self.folder / "heartbeat")
        paths = {one.end.rank: self.folder / f"rank{one.end.rank}.stacks" for one in ranks}
        sizes = {rank: _size(path) for rank, path in paths.items()}
        stacks.ask({one.process.pid: paths[one.end.rank] for one in ranks})
        found = {}
        for rank, path in paths.items():
            place, waits = "", beats[rank].waiting
            # What it answered before tells nothing of now.
            known = stacks.read(path)[0] if _size(path) > sizes[rank] else {}
            if (stack := known.get(beats[rank].thread)) is not None:
                place = calls.place_in_script(stack.frames)
                waits = waits or stack.waits or stack.in_backward
            found[rank] = place, waits
        return found


def _is_stopped(one: _Rank) -> bool:
    return process_control.state_of(one.process.pid) in ("T", "t")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _spent_by_children(ranks: Sequence[_Rank]) -> dict[psutil.Process, float]:
    """CPU seconds of each process that ``ranks`` have started and that is still there."""
    spent = {}
    for one in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(one.process.pid).children(recursive=True):
                spent[child] = process_control.activity_of(child.pid)[1]
    return spent


def _end(ranks: Sequence[_Rank]) -> None:
    """End what is left: asked first, then killed, with all that the ranks have started."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        left = [one.process for one in ranks if one.process.poll() is None]
        for process in left:
            process_control.kill(process.pid, signum)
        until = time.monotonic() + TERM_SECONDS
        while any(process.poll() is None for process in left) and time.monotonic() < until:
            time.sleep(TICK_SECONDS)
    for one in ranks:
        process_control.kill_group(one.process.pid)
