"""After the end: from exit codes, reports, heartbeats and stacks to one outcome per rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from shardproof.backends import heartbeat
from shardproof.backends.errors import CollectiveMismatch, name_ranks
from shardproof.launch import autopsy, process_control, stacks
from shardproof.launch.autopsy import Standing
from shardproof.launch.outcome import RankOutcome, mark_consequences, root_cause
from shardproof.launch.rank_process import RankLaunch

_TAIL = 4000
#: Why we end ranks that did not end themselves.
OVERDUE = ("standstill", "desync", "budget", "grace", "last resort")
#: What the C++ runtime prints of an exception that nobody caught.
_WHAT = re.compile(r"^\s*what\(\):\s*(.+)$", re.MULTILINE)


How = Literal["ended", "paused", "cut off", "full"]
_WORDS: dict[How, str] = {
    "ended": "has ended",
    "paused": "is paused",
    "cut off": "is cut off from the network",
    "full": "has no memory left",
}


@dataclass(frozen=True)
class Lost:
    """A node that ranks are lost with, which they are, and what has become of it."""

    node: int
    ranks: tuple[int, ...]
    how: How

    def __str__(self) -> str:
        return f"node{self.node} ({name_ranks(self.ranks)}) {_WORDS[self.how]}"


@dataclass
class RankProcess:
    """A rank process: its ranks, and what is known about its end."""

    pid: int
    ranks: tuple[int, ...]
    #: Seconds after the start.
    ended: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    #: Why we ended it: one of ``OVERDUE``, or a sentence (memory, output).
    reason: str = ""
    #: Ranks that had not ended when we ended it, and their heartbeats then.  What they do between
    #: being asked for their stack, which interrupts a sleep, and being killed does not count.
    hung: Mapping[int, heartbeat.Heartbeat] = field(default_factory=dict)
    #: CPU seconds of each rank of the launch then.
    spent: Sequence[float] = ()
    #: Ranks known to be why we ended it.
    guilty: frozenset[int] = frozenset()
    stopped: bool = False
    #: What has become of its node.
    lost: Lost | None = None

    @property
    def is_paused(self) -> bool:
        """Whether its node is: it does nothing, nor does it end."""
        return self.lost is not None and self.lost.how == "paused"


def diagnose(
    launch: RankLaunch, processes: Sequence[RankProcess], idle_looks: int = 0
) -> list[RankOutcome]:
    """The outcome of every rank, by rank, with causes and consequences distinguished.

    All processes have ended; ``idle_looks`` are those of the watchdog.  Where ranks waited for one
    another, the one to look at first has the autopsy.
    """
    heartbeats = heartbeat.read(launch.heartbeat)
    outcomes: list[RankOutcome] = []
    dead: dict[int, tuple[_Dead, heartbeat.Heartbeat]] = {}
    for process in processes:
        own = [process.hung.get(rank, heartbeats[rank]) for rank in process.ranks]
        one = _Dead(launch, process, own, idle_looks)
        dead |= {last.rank: (one, last) for last in own}
        outcomes += [one.outcome(last) for last in own]
    settled = mark_consequences(sorted(outcomes, key=lambda outcome: outcome.rank))
    root = root_cause(settled)
    # Only where ranks waited for one another, and none of them failed by itself.
    if root is None or not (
        root.status in ("hung", "early") or (root.status == "raised" and root.is_comm_error)
    ):
        return settled
    standings = [dead[o.rank][0].standing(dead[o.rank][1], o) for o in settled]
    # What a backend says of calls that do not match it may have said before all had come.
    said = root.error_type == CollectiveMismatch.__name__
    lost = next((p.lost for p in processes if p.lost is not None), None)
    if lost is not None and not said:
        found: autopsy.Autopsy | None = autopsy.of_node(standings, lost.ranks, str(lost))
    else:
        found = autopsy.find_mismatch(standings) if said else autopsy.find(standings)
    if found is None:
        return settled
    told = replace(root, autopsy=found.sentence, cause=found.cause, culprit=found.rank)
    return [told if outcome is root else outcome for outcome in settled]


@dataclass
class _Dead:
    """A process that has ended, with the last heartbeats of its ranks."""

    launch: RankLaunch
    process: RankProcess
    heartbeats: Sequence[heartbeat.Heartbeat]
    idle_looks: int

    def __post_init__(self) -> None:
        self._stacks, crashed = stacks.read(self.launch.stacks(self.process.ranks[0]))
        #: Ranks known to have brought the end about, on purpose or by a crash in their thread.
        self._guilty = self.process.guilty | {
            last.rank for last in self.heartbeats if last.exit_notice or last.thread == crashed
        }

    def outcome(self, last: heartbeat.Heartbeat) -> RankOutcome:
        """How the rank ended: as it reported, or else as seen from outside."""
        outcome = self._as_reported(last.rank) or self._from_outside(last)
        return replace(
            outcome,
            last_call=last.last_call,
            calls=last.sequence,
            record=self.launch.record(last.rank) if outcome.status == "ok" else None,
            output=self._tail(self.launch.output(last.rank)),
            injected=last.injected - self.launch.began if last.injected else None,
            idle_looks=self.idle_looks if last.injected else 0,
        )

    def standing(self, last: heartbeat.Heartbeat, outcome: RankOutcome) -> Standing:
        """How the rank stood, for the autopsy; ``outcome`` is its own."""
        stack = self._stacks.get(last.thread)
        place = stack.place if stack and stack.frames else ""
        if not place and outcome.place:
            file, _, function = outcome.place.rpartition(" in ")
            place = f"in {function} ({file})"
        how: autopsy.How = "stands"
        if outcome.status in ("ok", "early"):
            how = "ended"
        elif outcome.status == "hung" and self.process.stopped and not outcome.consequence:
            how = "stopped"
        elif (
            outcome.is_comm_error
            or last.waiting
            # Inside a backward DDP waits in C++.
            or (outcome.status == "hung" and stack is not None and stack.in_backward)
        ):
            joins = last.waiting and not last.waited and (not stack or not stack.waits)
            how = "joins" if joins or (stack is not None and stack.joins) else "waits"
        elif outcome.status == "over budget":
            how = "computes"
        elif outcome.status != "hung":
            how = "gone"
        words = outcome.sentence().removeprefix(f"rank {last.rank} ")
        return Standing(last.rank, how, words, last.noted, last.awaited, place, last.order)

    def _as_reported(self, rank: int) -> RankOutcome | None:
        process = self.process
        if rank in process.hung:
            return None
        try:
            outcome = RankOutcome.stored(self.launch.end(rank))
            if outcome.rank != rank:
                raise ValueError(f"the report belongs to rank {outcome.rank}")
        except FileNotFoundError:
            return None
        except ValueError as error:
            # The system's code runs in the process that wrote it; a kill leaves none, or a whole.
            told = f"its exit report cannot be read: {error}"
            return RankOutcome(rank, "raised", error_type="BrokenContract", message=told)
        crashed_later = process.signal is not None and not process.reason
        if outcome.status == "ok" and crashed_later and len(process.ranks) == 1:
            return None
        return outcome

    def _from_outside(self, last: heartbeat.Heartbeat) -> RankOutcome:
        process = self.process
        assert process.ended is not None
        stack = self._stacks.get(last.thread)
        innocent = bool(self._guilty) and last.rank not in self._guilty
        outcome = RankOutcome(
            last.rank,
            "hung",
            traceback=str(stack) if stack else "",
            consequence=innocent,
            ended=process.ended,
        )
        if process.reason in OVERDUE and not (innocent and process.reason == "budget"):
            # On a busy machine a process may be killed before it has told its stack, or all of it.
            waits = stack.waits if stack is not None and stack.tells else last.waiting
            if process.reason == "budget" or (process.reason == "last resort" and not waits):
                outcome = replace(outcome, status="over budget")
            return replace(outcome, message=self._hang(last, stack), is_comm_error=waits)
        shared = " with the process that another rank ended" if innocent else ""
        killed = partial(replace, outcome, status="killed", signal=process.signal)
        if process.reason:
            return killed(message=f"killed{shared}" if innocent else process.reason)
        notice = f" by {last.exit_notice}" if last.exit_notice else ""
        if process.lost is not None and process.lost.how == "full":
            return killed(message=f"{process.lost}, so the kernel ended this process")
        if process.lost is not None and process.lost.how == "ended":
            return killed(message=f"{process.lost}, and all its processes with it")
        if process.signal is not None:
            name = process_control.signal_name(process.signal)
            where = "" if innocent or notice else self._circumstances(last, stack)
            return killed(error_type=name, message=f"{name}{notice}{shared}{where}")
        return replace(
            outcome,
            status="exited",
            exit_code=process.exit_code,
            # MPI ends a rank that lost a peer, perhaps before the peer's own end is seen.
            consequence=innocent or (self.launch.backend.mpirun and not notice),
            message=f"ended with exit code {process.exit_code}{notice}{shared} before it returned",
        )

    def _hang(self, last: heartbeat.Heartbeat, stack: stacks.ThreadStack | None) -> str:
        process = self.process
        assert process.ended is not None
        if process.stopped and last.exit_notice:
            how = f"stopped by {last.exit_notice}"
        elif process.stopped:
            how = "its process was stopped"
        else:
            what = "computes" if process.reason == "budget" else "still"
            how = f"{what} {stack.place}" if stack and stack.frames else "still running"
        when = {
            "standstill": "when no rank computed, entered or left a call any more",
            "desync": "when calls of other ranks no longer matched its own",
            "budget": f"after {process.spent[last.rank]:.1f} s of CPU, its budget",
            "grace": "after another rank failed",
            "last resort": f"after {process.ended:.0f} s",
        }[process.reason]
        if not last.sequence:
            return f"{how} {when}; it made no call"
        ago = self.launch.began + process.ended - last.at
        return f"{how} {when}; its last call, {ago:.1f} s before: {last.last_call}"

    def _circumstances(self, last: heartbeat.Heartbeat, stack: stacks.ThreadStack | None) -> str:
        """Where a crash struck, and what C++ printed if an exception of its own was the cause."""
        text = f" {stack.place}" if stack and stack.frames else ""
        if last.state == heartbeat.DONE:
            text += " after it had returned"
        printed = _WHAT.search(
            self._tail(self.launch.output(last.rank)) + self._tail(self.launch.shared_output)
        )
        return text + (f": {printed[1]}" if printed else "")

    def _tail(self, path: Path) -> str:
        if not path.is_file():  # a pipe would never end
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            return file.read().decode("utf-8", "replace")
