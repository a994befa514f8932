"""How the ranks of a job meet in its store, and how one of them refuses for all.

Every wait looks for a refusal: a mistake that one rank sees ends all with one sentence, rather
than each at the end of its time.

A *roll call* finds mistakes of a launch that no rank sees by itself.  Each rank writes into the
store who it is; whoever came first reads all and refuses a job that cannot come together
(:func:`mistake`), or tells while it waits who is missing.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from shardproof.backends import heartbeat
from shardproof.cluster.launchers import foreign_records
from shardproof.cluster.launchers.foreign_records import Host
from shardproof.cluster.launchers.place import Place, is_loopback, telling
from shardproof.errors import LaunchError, Problem
from shardproof.table import grouped

#: Seconds that rank 0, with whom the store ends, waits until the others have read a refusal.
READING_SECONDS = 5.0
#: Seconds until a file of another node is seen through a shared folder.
SHARED_SECONDS = 15.0

#: Seconds without a newcomer after which one rank a node is a mistake, not a slow start.
SETTLED_SECONDS = 20.0

_REFUSED, _READ, _CAME = "refused", "refused/read", "came"


def refuse(store: dist.Store, place: Place, problem: Problem) -> NoReturn:
    """End the job on all ranks that have come; the first refusal counts."""
    if store.add(f"{_REFUSED}/number", 1) == 1:
        store.set(_REFUSED, json.dumps([problem.what, problem.remedy, problem.value]))
    store.wait([_REFUSED])
    look(store, place)
    raise AssertionError("a refusal is set")


def look(store: dist.Store, place: Place) -> None:
    """:raises LaunchError: some rank has refused."""
    if not store.check([_REFUSED]):
        return
    problem = Problem(*json.loads(store.get(_REFUSED)))
    store.add(_READ, 1)
    if place.rank == 0:
        until = time.monotonic() + READING_SECONDS
        with contextlib.suppress(dist.DistError):
            while store.add(_READ, 0) < store.add(_CAME, 0) and time.monotonic() < until:
                time.sleep(0.05)
    raise LaunchError(problem)


def wait(
    store: dist.Store, place: Place, done: Callable[[], bool], seconds: float, late: str
) -> None:
    """Return once ``done``; raise ``TimeoutError(late)`` after ``seconds``."""
    deadline, pause = time.monotonic() + seconds, 0.005
    heartbeat.wait(True)
    while not done():
        look(store, place)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{late} in {seconds:g} s")
        time.sleep(pause)
        pause = min(0.5, 1.1 * pause)  # a rank that waits long does not compute
    heartbeat.wait(False)


def meet(store: dist.Store, place: Place, key: str, seconds: float) -> None:
    """Return when all ranks have come; raise ``TimeoutError`` that says how many did not."""
    store.add(key, 1)
    late = f"not all {place.world} ranks reached {key!r}"
    wait(store, place, lambda: bool(store.add(key, 0) >= place.world), seconds, late)


def part(store: dist.Store, place: Place, seconds: float) -> None:
    """The store lives in rank 0 (or its agent): it must not end before the others are done with it.

    That all have come is not enough: who polls for it would find the store gone.
    """
    if place.rank != 0:
        store.add("parted", 1)
        return
    late = f"not all {place.world} ranks have left"
    wait(store, place, lambda: bool(store.add("parted", 0) >= place.world - 1), seconds, late)


def agree(store: dist.Store, place: Place, ids: Sequence[str]) -> None:
    """All ranks must run the same cases: other files on one node would end in a riddle.

    :raises LaunchError: they were given others, on all ranks.
    """
    if place.rank == 0:
        store.set("cases", json.dumps(list(ids)))
    first = json.loads(store.get("cases"))
    if first != list(ids):
        odd = sorted(set(first) ^ set(ids)) or ["the order"]
        remedy = "install the same version and the same scenario files on every node"
        what = f"rank {place.rank} and rank 0 were given different cases"
        refuse(store, place, Problem(what, remedy, odd[0]))


def see_plan(store: dist.Store, place: Place, records: Path) -> None:
    """All ranks must write into the folder that rank 0 judges.

    :raises LaunchError: this one does not see the plan of rank 0, on all ranks.
    """
    digest, until = store.get("plan").decode(), time.monotonic() + SHARED_SECONDS
    while foreign_records.plan_digest(records) != digest:
        if time.monotonic() > until:
            what = f"rank {place.rank} does not see in --records what rank 0 wrote there"
            remedy = "name a folder that all nodes share"
            refuse(store, place, Problem(what, remedy, str(records)))
        time.sleep(0.2)
    meet(store, place, "plan seen", 4 * SHARED_SECONDS)


@dataclass(frozen=True)
class Entry:
    """The identity that a rank reports."""

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
        """The entry of the rank at ``place``, which this process is."""
        loopback = place.served is None and is_loopback(place.address)
        host, local = socket.gethostname(), (place.local_rank, place.local_world)
        return cls(place.rank, place.world, host, place.address, *local, loopback)


def mistake(entries: Sequence[Entry], settled: bool = False) -> Problem | None:
    """The problem of a job of ``entries``; ``settled``: no rank has arrived for a while."""
    return _worlds(entries) or _twice(entries) or (_one_a_node(entries) if settled else None)


def _worlds(entries: Sequence[Entry]) -> Problem | None:
    first = entries[0]
    for entry in entries:
        if entry.world != first.world:
            what = (
                f"rank {first.rank} ({first.host}) was started with {first.world} ranks, "
                f"rank {entry.rank} ({entry.host}) with {entry.world}"
            )
            return Problem(what, "on every node, set WORLD_SIZE to the total number of ranks")
    return None


def _twice(entries: Sequence[Entry]) -> Problem | None:
    seen: dict[int, Entry] = {}
    for entry in entries:
        other = seen.setdefault(entry.rank, entry)
        if other is entry:
            continue
        what, here = f"two processes have rank {entry.rank}", entry.host
        if other.host == here:
            remedy = (
                "set RANK to node * ranks per node + LOCAL_RANK; if an old job still uses this "
            )
            return Problem(f"{what}, both on {here}", f"{remedy}MASTER_PORT, choose another one")
        remedy = "give every node a different rank (torchrun: --node-rank; by hand: RANK)"
        return Problem(f"{what}, on {other.host} and on {here}", remedy)
    return None


def _one_a_node(entries: Sequence[Entry]) -> Problem | None:
    """Ranks 0 and 4 of 8, each alone on its node: started once a node instead of four times."""
    ranks, world = sorted(entry.rank for entry in entries), entries[0].world
    apart = len({entry.host for entry in entries}) == len(entries) > 1
    told = any((entry.local_world or 1) > 1 for entry in entries)
    step = world // len(entries)
    if told or not apart or step < 2 or ranks != list(range(0, world, step)):
        return None
    what = f"one process was started per node, as ranks {spans(ranks)} of {world}"
    return Problem(what, f"start {step} processes per node, e.g. torchrun --nproc-per-node {step}")


def _loopback(entries: Sequence[Entry]) -> Problem | None:
    """Only asked of entries of all ranks: they met, but gloo would go by the loopback."""
    for entry in entries:
        if entry.loopback and len({other.host for other in entries}) > 1:
            what = f"MASTER_ADDR is the loopback on {entry.host}, but the job has several machines"
            remedy = "correct /etc/hosts there, or set MASTER_ADDR to an IP address"
            return Problem(what, remedy, entry.address)
    return None


def missing(entries: Sequence[Entry]) -> list[int]:
    """Numbers of ranks that have not come."""
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
    number = int(store.add(_CAME, 1))
    store.set(f"entry{number}", json.dumps(asdict(entry)))
    if number > place.world:  # the others may be under way
        remedy = "choose a different MASTER_PORT for each job"
        many = Problem(f"more than {place.world} ranks joined the job", remedy)
        refuse(store, place, mistake(_read(store, number)) or many)
    if number > 1:
        late = "the first rank did not report all ranks as present"
        until = seconds + READING_SECONDS
        wait(store, place, lambda: store.check(["complete"]), until, late)
        return
    _lead(store, place, seconds, interface)


def hosts(store: dist.Store, world: int) -> list[Host]:
    """Where the ranks of a job are that has answered, by their lowest ranks."""
    entries = sorted(_read(store, world), key=lambda entry: entry.rank)
    ranks = grouped((entry.host, entry.rank) for entry in entries)
    return [Host(name, on_it) for name, on_it in ranks.items()]


def _lead(store: dist.Store, place: Place, seconds: float, interface: str | None) -> None:
    entries: list[Entry] = []
    newest = began = time.monotonic()

    def absent() -> str:
        here = f"; MASTER_ADDR={place.address} is this machine" if entries[0].loopback else ""
        late = spans(missing(entries))
        return f"rank {place.rank} waits for {late} of {place.world} ranks{here}"

    with telling(absent) as tell:
        while len(entries) < place.world:
            count = int(store.add(_CAME, 0))
            if count > len(entries):
                entries += _read(store, count, len(entries))
                newest = time.monotonic()
            settled = time.monotonic() - newest > SETTLED_SECONDS
            if problem := mistake(entries, settled):
                refuse(store, place, problem)
            look(store, place)
            tell()
            if time.monotonic() - began > seconds:
                what = f"ranks {spans(missing(entries))} of {place.world} have not arrived"
                remedy = "start them, or let their machines reach MASTER_ADDR and MASTER_PORT"
                refuse(store, place, Problem(what, remedy, f"{place.address}:{place.port}"))
            time.sleep(0.05)
    if interface is None and (problem := _loopback(entries)):
        refuse(store, place, problem)
    store.set("complete", "")


def _read(store: dist.Store, count: int, known: int = 0) -> list[Entry]:
    return [Entry(**json.loads(store.get(f"entry{n}"))) for n in range(known + 1, count + 1)]
