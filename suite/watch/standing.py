"""How the ranks of a watched script stand, for the autopsy: as they ended, or as they run now.

A job that ``shardproof watch`` did not start goes on while it is looked at, on this machine only:
nothing is done to its ranks but that they are asked for their stacks.
"""

from __future__ import annotations

import platform
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardproof.backends.heartbeat import Noted
from shardproof.launch import autopsy, process_control, stacks
from shardproof.launch.autopsy import Standing
from shardproof.launch.outcome import RankOutcome
from shardproof.watch import calls
from shardproof.watch.record import End, RankRecord

#: Seconds over which ranks that run are looked at; the share of a core above which one computes.
LOOK_SECONDS, _IDLE_SHARE = 1.0, 0.05


def of_outcomes(
    outcomes: Sequence[RankOutcome],
    ends: Mapping[int, End],
    logs: Mapping[int, Sequence[calls.Call]],
) -> list[Standing]:
    """How ranks stood that have ended, or were ended."""
    found = []
    for outcome in outcomes:
        made, end = logs.get(outcome.rank, ()), ends.get(outcome.rank)
        how: autopsy.How = "stands"
        if outcome.status in ("ok", "early"):
            how = "ended"
        elif end is not None and end.stopped:
            how = "stopped"
        elif outcome.is_comm_error:
            how = "waits"
        elif outcome.status != "hung":
            how = "gone"
        place = (end.place if end else "") or _line(made)
        words = outcome.sentence().removeprefix(f"rank {outcome.rank} ")
        found.append(Standing(outcome.rank, how, words, noted(made), place=place))
    return found


def of_running(
    folder: Path,
    records: Mapping[int, RankRecord],
    logs: Mapping[int, Sequence[calls.Call]],
) -> list[Standing] | None:
    """How ranks stand whose script still runs here; ``None``: none does, or they make calls."""
    here = {
        rank: record.pid
        for rank, record in records.items()
        if record.host == platform.node() and not record.ended and not record.error
    }
    alive = {rank: pid for rank, pid in here.items() if process_control.state_of(pid) != "Z"}
    if not alive:
        return None
    before = {rank: process_control.activity_of(pid)[1] for rank, pid in alive.items()}
    time.sleep(LOOK_SECONDS)
    now = {rank: _log(folder, rank) for rank in logs}
    if any(len(now[rank]) and now[rank][-1] != logs[rank][-1] for rank in logs if logs[rank]):
        return None
    stands = _stacks(folder, alive)
    found = []
    for rank, record in records.items():
        made, pid = now.get(rank, []), alive.get(rank)
        place, waits = stands.get(rank, ("", False))
        how: autopsy.How = "stands"
        if pid is None:
            how = "ended" if record.ended else "gone"
        elif process_control.state_of(pid) in "Tt":
            how = "stopped"
        elif waits or calls.state(folder / f"rank{rank}.calls").waits:
            how = "waits"
        elif process_control.activity_of(pid)[1] - before[rank] > _IDLE_SHARE * LOOK_SECONDS:
            how = "computes"
        words = f"raised {record.error_type}" if record.error else "is no more, or runs elsewhere"
        place = place or record.place or _line(made)
        found.append(Standing(rank, how, words, noted(made), place=place))
    return found


def noted(made: Sequence[calls.Call]) -> list[Noted]:
    """Calls of a log as the autopsy takes them; it numbers those of a group from 0, the log from 1.

    A call's digest stands for all calls of the group up to it.
    """
    return [
        Noted(
            call.number,
            zlib.crc32(call.group.encode()),
            call.in_group + 1 if call.in_group else 0,
            call.chain,
            f"{call.text} on {call.group}",
        )
        for call in made
    ]


def _line(made: Sequence[calls.Call]) -> str:
    """Where the last of these calls was made."""
    return f"at {made[-1].place}" if made and made[-1].place else ""


def _log(folder: Path, rank: int) -> list[calls.Call]:
    return calls.read(folder / f"rank{rank}.calls")


def _stacks(folder: Path, alive: Mapping[int, int]) -> dict[int, tuple[str, bool]]:
    """Rank -> its line of the script, and whether it waits there for others, of those that answer.

    A script runs on the main thread of its process.
    """
    paths = {rank: folder / f"rank{rank}.stacks" for rank in alive}
    sizes = {rank: path.stat().st_size for rank, path in paths.items() if path.exists()}
    stacks.ask({alive[rank]: paths[rank] for rank in sizes})
    found = {}
    for rank, size in sizes.items():
        if paths[rank].stat().st_size == size:
            continue
        for stack in stacks.read(paths[rank])[0].values():
            if place := calls.place_in_script(stack.frames):
                found[rank] = place, stack.waits or stack.in_backward
    return found
