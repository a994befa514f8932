"""The roll call: mistakes of a launch that no rank sees by itself, told by all of them.

Each rank writes into the store who it is; whoever came first reads all and refuses a job that
cannot come together (:func:`mistake`), or tells while it waits who is missing.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from shardproof.cluster.launchers import meeting
from shardproof.cluster.launchers.foreign_records import Host
from shardproof.cluster.launchers.place import Place, is_loopback, telling
from shardproof.errors import Problem

#: Seconds without a newcomer after which one rank a node is a mistake, not a slow start.
SETTLED_SECONDS = 20.0


@dataclass(frozen=True)
class Entry:
    """Who a rank says it is."""

    rank: int
    world: int
    host: str
    address: str
    local_rank: int | None = None
    local_world: int | None = None
    #: Whether MASTER_ADDR is the loopback, as seen from its machine.
    loopback: bool = False

    @classmethod
    def of(cls, place: Place) -> Entry:
        loopback = place.served is None and is_loopback(place.address)
        host, local = socket.gethostname(), (place.local_rank, place.local_world)
        return cls(place.rank, place.world, host, place.address, *local, loopback)


def mistake(entries: Sequence[Entry], settled: bool = False) -> Problem | None:
    """What is wrong with a job of ``entries``; ``settled``: nobody has come for a while."""
    return _worlds(entries) or _twice(entries) or (_one_a_node(entries) if settled else None)


def _worlds(entries: Sequence[Entry]) -> Problem | None:
    first = entries[0]
    for entry in entries:
        if entry.world != first.world:
            what = (
                f"rank {first.rank} ({first.host}) was told of {first.world} ranks, "
                f"rank {entry.rank} ({entry.host}) of {entry.world}"
            )
            return Problem(what, "set one WORLD_SIZE on all, the number of ranks of all nodes")
    return None


def _twice(entries: Sequence[Entry]) -> Problem | None:
    seen: dict[int, Entry] = {}
    for entry in entries:
        other = seen.setdefault(entry.rank, entry)
        if other is entry:
            continue
        what = f"two ranks have number {entry.rank}, on {other.host} and on {entry.host}"
        remedy = "give every node a rank of its own (torchrun: --node-rank; by hand: RANK)"
        if other.host == entry.host:
            what = f"two ranks have number {entry.rank}, both on {entry.host}"
            remedy = "RANK counts ranks, not nodes: node * ranks per node + LOCAL_RANK; or an "
            remedy += "earlier job has this MASTER_PORT"
        return Problem(what, remedy)
    return None


def _one_a_node(entries: Sequence[Entry]) -> Problem | None:
    """Ranks 0 and 4 of 8, each alone on its node: started once a node instead of four times."""
    ranks, world = sorted(entry.rank for entry in entries), entries[0].world
    apart = len({entry.host for entry in entries}) == len(entries) > 1
    told = any((entry.local_world or 1) > 1 for entry in entries)
    step = world // len(entries)
    if told or not apart or step < 2 or ranks != list(range(0, world, step)):
        return None
    what = f"one process was started per node, as {spans(ranks)} of {world} ranks"
    return Problem(what, f"start {step} per node, e.g. torchrun --nproc-per-node {step}")


def _loopback(entries: Sequence[Entry]) -> Problem | None:
    """Only asked of entries of all ranks: they met, but gloo would go by the loopback."""
    for entry in entries:
        if entry.loopback and len({other.host for other in entries}) > 1:
            what = f"MASTER_ADDR is the loopback on {entry.host}, on a job of several machines"
            remedy = "mend its /etc/hosts, or give an IP address"
            return Problem(what, remedy, entry.address)
    return None


def missing(entries: Sequence[Entry]) -> list[int]:
    return sorted({*range(entries[0].world)} - {entry.rank for entry in entries})


def spans(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``; at most eight of them."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in found[:8]]
    return ", ".join(shown) + (", ..." if len(found) > 8 else "")


def answer(store: dist.Store, place: Place, seconds: float, interface: str | None = None) -> None:
    """Return when every number has come once; ``interface``: what the user gave gloo.

    :raises LaunchError: on all ranks that have come, what is wrong with them.
    :raises TimeoutError: who has not come in ``seconds``.
    """
    entry = Entry.of(place)
    number = meeting.come(store)
    store.set(f"entry{number}", json.dumps(asdict(entry)))
    if number > place.world:  # the others may be under way
        meeting.refuse(store, place, mistake(_read(store, number)) or _too_many(place))
    if number > 1:
        late = "the first rank to come did not end the roll call"
        wait = seconds + meeting.READING_SECONDS
        meeting.wait(store, place, lambda: store.check(["complete"]), wait, late)
        return
    _lead(store, place, seconds, interface)


def hosts(store: dist.Store, world: int) -> list[Host]:
    """Where the ranks of a job are that has answered, by their lowest ranks."""
    ranks: dict[str, list[int]] = {}
    for entry in sorted(_read(store, world), key=lambda entry: entry.rank):
        ranks.setdefault(entry.host, []).append(entry.rank)
    return [Host(name, on_it) for name, on_it in ranks.items()]


def _lead(store: dist.Store, place: Place, seconds: float, interface: str | None) -> None:
    entries: list[Entry] = []
    newest = began = time.monotonic()

    def absent() -> str:
        one = f"rank {place.rank} waits for {spans(missing(entries))} of {place.world} ranks"
        return one + (
            f"; MASTER_ADDR={place.address} is this machine" if entries[0].loopback else ""
        )

    with telling(absent) as tell:
        while len(entries) < place.world:
            count = int(store.add("came", 0))
            if count > len(entries):
                entries += _read(store, count, len(entries))
                newest = time.monotonic()
            settled = time.monotonic() - newest > SETTLED_SECONDS
            if problem := mistake(entries, settled):
                meeting.refuse(store, place, problem)
            meeting.look(store, place)
            tell()
            if time.monotonic() - began > seconds:
                what = f"ranks {spans(missing(entries))} of {place.world} have not come"
                remedy = "start them, or let their machines reach MASTER_ADDR and MASTER_PORT"
                meeting.refuse(store, place, Problem(what, remedy, f"{place.address}:{place.port}"))
            time.sleep(0.05)
    if interface is None and (problem := _loopback(entries)):
        meeting.refuse(store, place, problem)
    store.set("complete", "")


def _read(store: dist.Store, count: int, known: int = 0) -> list[Entry]:
    return [Entry(**json.loads(store.get(f"entry{n}"))) for n in range(known + 1, count + 1)]


def _too_many(place: Place) -> Problem:
    return Problem(f"more than {place.world} ranks came", "choose a MASTER_PORT for each job")
