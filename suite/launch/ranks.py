"""Start the ranks of one case, watch them, end them in time, and say how each ended.

Ranks are forked, so the calling process must not have native threads running (leaders come from the
fork server, which has none).  Five things end a rank that does not
end itself: a standstill of all (``launch/watchdog.py``), its budget of CPU seconds, a peer's
failure (after a grace period), its memory limit, and too much output.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardproof.backends import BACKENDS, base, faults, joined
from shardproof.cluster.nodes import asking
from shardproof.cluster.nodes.condition import Lost
from shardproof.launch import autopsy, heartbeat, process_control, stacks
from shardproof.launch.diagnosis import OVERDUE, RankProcess, diagnose
from shardproof.launch.mpi.mpirun import Mpirun, unlink_segments
from shardproof.launch.outcome import RankOutcome, root_cause
from shardproof.launch.rank_process import Link, Program, RankLaunch, run_process
from shardproof.launch.watchdog import DESYNC_LOOKS, TICK_SECONDS, WAITING_LOOKS, Watchdog

__all__ = ["RankOutcome", "root_cause", "run_ranks"]

#: Every wait ends some day: after the budget times this, in wall-clock seconds.  Nothing that may
#: still come to an end takes so long, however busy the machine.
LAST_RESORT = 20.0
#: Seconds that ranks have to end after the first one failed: of standing still, or of CPU.
GRACE_SECONDS = 3.0
#: Bytes that a rank may print.
OUTPUT_LIMIT = 64 << 20

_POLL_SECONDS = 0.005


class RanksGone(RuntimeError):
    """The processes that were kept have ended: their last case left something in them."""


class Ranks(Protocol):
    """The processes of a launch, started for it or kept."""

    def processes(self) -> list[RankProcess]:
        """Start them."""

    def descriptors(self, alive: Sequence[RankProcess]) -> list[int]:
        """What becomes readable when one of them ends; empty where the system has no such thing."""

    def status(self, process: RankProcess) -> int | None:
        """Its wait status, once it has ended, or is done and kept; ``None``: not yet."""

    def lost(self, at_end: bool = False) -> Mapping[int, Lost]:
        """What has become of their nodes, by rank; none of this machine's own.

        ``at_end``: all have ended, and it is waited until it is known whether nodes have, too.
        """

    def close(self, alive: Sequence[RankProcess]) -> None:
        """End what still runs, on an error of ours or Ctrl-C."""

    def stay(self) -> Collection[int]:
        """Children of this process that live on."""


#: Gives the processes of a launch.
Start = Callable[[RankLaunch], Ranks]
#: The same, of processes that wait for one.  :raises RanksGone: there are none any more.
Kept = Start


def run_ranks(
    backend: str | Link,
    world: int,
    program: Program,
    workdir: Path,
    budget_s: float,
    ledgers: bool = True,
    *,
    disturbances: Any = None,
    memory_bytes: int | None = None,
    one_core: bool = False,
    kept: Kept | None = None,
    start: Start | None = None,
) -> list[RankOutcome]:
    """Run ``program(rank, world)`` on every rank of a fresh default group; one outcome per rank.

    ``backend`` is a name in :data:`shardproof.backends.BACKENDS`, or a :class:`Link`.
    ``workdir`` exists and is used by this call only.  What a program returns is packed to the
    ``record`` of its outcome.  ``budget_s``: CPU seconds of each rank, and the seconds after which
    ranks that sleep outside of calls, with no event on any, stand still.  ``memory_bytes`` limits
    the resident bytes of each rank process (some 300 MB of torch included).  ``one_core``: ranks
    that are threads stay on one core; they share an interpreter, and handing it to another core at
    every operator costs CPU (results/evidence/cpu-cost.md).  Whatever a rank does, this returns,
    and no process of the ranks is left.  ``kept`` has processes that go on to live if
    all ends well; ``start`` starts others than by a fork of this process, and is not asked where
    ranks are threads.  The program is pickled for both.
    """
    if world < 1 or budget_s <= 0:
        raise ValueError(f"world {world} and budget {budget_s} s must be positive")
    launch = RankLaunch(
        _SuiteLink(backend) if isinstance(backend, str) else backend,
        world,
        program,
        workdir,
        timeout_s=budget_s * LAST_RESORT,
        ledgers=ledgers,
        disturbances=disturbances,
        began=time.monotonic(),
        one_core=one_core,
    )
    if start is None or launch.link.threads:
        start = _Forked
    return _Watch(launch, budget_s, memory_bytes, kept, start).outcomes()


@dataclass(frozen=True)
class _SuiteLink:
    name: str

    @property
    def threads(self) -> bool:
        return BACKENDS[self.name].threads

    @property
    def polls(self) -> bool:
        return BACKENDS[self.name].polls

    @property
    def mpirun(self) -> bool:
        return BACKENDS[self.name].mpirun

    def hub(self, world: int, timeout_s: float) -> Any:
        return BACKENDS[self.name].hub(world, timeout_s)

    def join(self, rank: int, launch: RankLaunch, hub: Any) -> None:
        base.listen(heartbeat)
        faults.strike_node = asking.strike
        where = self.name, rank, launch.world, launch.rendezvous, launch.timeout_s
        joined.join(*where, launch.ledgers, hub, disturbances=launch.disturbances)
        if self.mpirun:
            unlink_segments()

    def failed(self, error: BaseException) -> None:
        joined.tell_failure(error)

    def leave(self) -> bool:
        return joined.leave()


class _Forked:
    """Ranks that are forked for one launch, in processes of their own or as threads of one."""

    def __init__(self, launch: RankLaunch) -> None:
        self._launch = launch
        self._place = contextlib.ExitStack()
        self._handles: dict[int, int | None] = {}

    def processes(self) -> list[RankProcess]:
        launch, parent = self._launch, os.getpid()
        mpirun = None
        if launch.link.mpirun:
            folder = launch.workdir / "mpirun"
            folder.mkdir()
            mpirun = self._place.enter_context(Mpirun(range(launch.world), folder))
        if launch.link.threads:
            groups: list[tuple[int, ...]] = [tuple(range(launch.world))]
        else:
            groups = [(rank,) for rank in range(launch.world)]
        processes = []
        for ranks in groups:
            pid = os.fork()
            if pid == 0:
                if mpirun is not None:
                    mpirun.become(ranks[0])
                # In the new process: joins the process group, calls launch.program(rank, world),
                # stores what it returns.  A case goes on in cases/rank_program.py: run_rank.
                run_process(launch, ranks, parent)
            self._handles[pid] = process_control.handle_of(pid)
            processes.append(RankProcess(pid, ranks))
        return processes

    def descriptors(self, alive: Sequence[RankProcess]) -> list[int]:
        handles = [self._handles[process.pid] for process in alive]
        return [] if None in handles else [handle for handle in handles if handle is not None]

    def status(self, process: RankProcess) -> int | None:
        pid, status = os.waitpid(process.pid, os.WNOHANG)
        return status if pid else None

    def lost(self, at_end: bool = False) -> Mapping[int, Lost]:
        return {}

    def close(self, alive: Sequence[RankProcess]) -> None:
        for process in alive:
            process_control.kill(process.pid)
            os.waitpid(process.pid, 0)
        for handle in self._handles.values():
            if handle is not None:
                os.close(handle)
        self._place.close()

    def stay(self) -> Collection[int]:
        return ()


class _Watch:
    """The running ranks of a case, until every one of them has ended."""

    def __init__(
        self,
        launch: RankLaunch,
        budget_s: float,
        memory_bytes: int | None,
        kept: Kept | None,
        start: Start,
    ) -> None:
        self._launch = launch
        self._budget_s = budget_s
        self._memory_bytes = memory_bytes
        self._kept, self._start = kept, start
        self._watchdog = Watchdog(launch.heartbeat, launch.world, launch.link)
        #: CPU seconds of each rank when the first one failed.
        self._spent_at_failure: list[float] | None = None
        self._processes: list[RankProcess] = []

    def outcomes(self) -> list[RankOutcome]:
        """Start the ranks and wait until all have ended; one outcome for each rank."""
        strangers_before = process_control.children()
        launch = self._launch
        heartbeat.create(launch.heartbeat, launch.world)
        ranks = self._ranks()
        try:
            self._processes = ranks.processes()
            self._watchdog.begin(self._processes)
            while alive := self._alive():
                _sleep(ranks.descriptors(alive))
                for process in alive:
                    self._collect(process, ranks.status(process))
                if alive := self._alive():
                    self._see_nodes(alive, ranks)
                    self._enforce(alive)
            if any(process.exit_code != 0 for process in self._processes):
                lost = ranks.lost(at_end=True)
                for process in self._processes:
                    process.lost = process.lost or lost.get(process.ranks[0])
        finally:
            ranks.close(self._alive())
            if process_control.is_subreaper():
                process_control.end_adopted({*strangers_before, *ranks.stay()})
        # From exit codes, heartbeats and stacks to an outcome for each rank: launch/diagnosis.py.
        return diagnose(self._launch, self._processes, self._watchdog.idle_looks)

    def _ranks(self) -> Ranks:
        if self._kept is not None:
            with contextlib.suppress(RanksGone):
                return self._kept(self._launch)
        return self._start(self._launch)

    def _alive(self) -> list[RankProcess]:
        return [process for process in self._processes if process.ended is None]

    def _collect(self, process: RankProcess, status: int | None) -> None:
        if status is None:
            return
        process.ended = time.monotonic() - self._launch.began
        if os.WIFSIGNALED(status):
            process.signal = os.WTERMSIG(status)
        else:
            process.exit_code = os.WEXITSTATUS(status)
        if status != 0 and not process.reason:
            self._failed()

    def _see_nodes(self, alive: Sequence[RankProcess], ranks: Ranks) -> None:
        """Once nothing happens, what has become of the nodes of ranks."""
        silent = self._watchdog.silence >= DESYNC_LOOKS
        lost = ranks.lost() if silent else {}
        for process in alive:
            process.lost = lost.get(process.ranks[0])
            if process.reason and process.is_paused:
                # It dies of our signal when its node goes on.
                process.ended = time.monotonic() - self._launch.began

    def _enforce(self, alive: Sequence[RankProcess]) -> None:
        self._watchdog.look(alive)
        spent = self._watchdog.spent
        if self._watchdog.failed:
            self._failed()
        for process in alive:
            excess, guilty = self._excess(process)
            if excess:
                process.guilty = guilty
                self._end([process], excess)
            elif guilty := frozenset(r for r in process.ranks if spent[r] > self._budget_s):
                process.guilty = guilty
                self._end([process], "budget")
        before = self._spent_at_failure
        if before is not None:
            computes = max(now - then for now, then in zip(spent, before, strict=True))
            if computes > GRACE_SECONDS or self._stand_still(GRACE_SECONDS):
                self._end(alive, "grace")
        elif self._stand_still(self._budget_s):
            self._end(alive, "standstill")
        elif self._differ():
            self._end(alive, "desync")
        elif time.monotonic() > self._launch.began + self._budget_s * LAST_RESORT:
            self._end(alive, "last resort")

    def _stand_still(self, asleep_s: float) -> bool:
        return self._watchdog.stand_still(max(1, int(asleep_s / TICK_SECONDS)))

    def _differ(self) -> bool:
        """Whether the calls that ranks have noted cannot match, and nobody goes on."""
        least = WAITING_LOOKS if self._watchdog.parting else DESYNC_LOOKS
        if self._watchdog.silence < least or not self._watchdog.idle:
            return False
        beats = heartbeat.read(self._launch.heartbeat)
        return autopsy.mismatch({beat.rank: beat.noted for beat in beats}) is not None

    def _failed(self) -> None:
        if self._spent_at_failure is None:
            self._spent_at_failure = self._watchdog.spent

    def _excess(self, process: RankProcess) -> tuple[str, frozenset[int]]:
        """What the process has too much of ("": nothing), and which of its ranks is to blame."""
        if self._memory_bytes is not None:
            resident = process_control.resident_bytes(process.pid)
            if resident > self._memory_bytes:
                limit = f"over its memory limit of {self._memory_bytes / 2**20:.0f} MiB"
                whose = "the process of all ranks is " if len(process.ranks) > 1 else ""
                return f"{whose}{limit} ({resident / 2**20:.0f} MiB resident)", frozenset()
        text = f"printed more than {OUTPUT_LIMIT >> 20} MiB"
        for rank in process.ranks:
            if _size(self._launch.output(rank)) > OUTPUT_LIMIT:
                return text, frozenset((rank,))
        return (text if _size(self._launch.shared_output) > OUTPUT_LIMIT else ""), frozenset()

    def _end(self, processes: Sequence[RankProcess], reason: str) -> None:
        """Ask for stacks, unless there was too much of something, then kill."""
        doomed = [p for p in processes if p.ended is None and not p.reason]
        for process in doomed:
            process.reason = reason
            process.stopped = process_control.state_of(process.pid) == "T"
        if reason in OVERDUE:
            heartbeats = heartbeat.read(self._launch.heartbeat)
            for process in doomed:
                unended = (rank for rank in process.ranks if not self._launch.end(rank).exists())
                process.spent = self._watchdog.spent
                process.hung = {rank: heartbeats[rank] for rank in unended}
            stacks.ask({p.pid: self._launch.stacks(p.ranks[0]) for p in doomed})
        for process in doomed:
            process_control.kill(process.pid)
        if reason not in ("grace", "standstill", "desync"):
            self._failed()


def _sleep(descriptors: Sequence[int]) -> None:
    """Wait until one is readable or the next check is due."""
    if not descriptors:
        time.sleep(_POLL_SECONDS)
        return
    with selectors.DefaultSelector() as selector:
        for descriptor in descriptors:
            selector.register(descriptor, selectors.EVENT_READ)
        selector.select(TICK_SECONDS)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
