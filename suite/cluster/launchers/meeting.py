"""How the ranks of a job meet in its store, and how one of them refuses for all.

Every wait looks for a refusal: a mistake that one rank sees ends all with one sentence, rather
than each at the end of its time.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from shardproof.backends import heartbeat
from shardproof.cluster.launchers import foreign_records
from shardproof.cluster.launchers.place import Place
from shardproof.errors import LaunchError, Problem

#: Seconds that rank 0, with whom the store ends, waits until the others have read a refusal.
READING_SECONDS = 5.0
#: Seconds until a file of another node is seen through a shared folder.
SHARED_SECONDS = 15.0

_REFUSED, _READ, _CAME = "refused", "refused/read", "came"


def refuse(store: dist.Store, place: Place, problem: Problem) -> NoReturn:
    """End the job on all ranks that have come; the first refusal counts."""
    if store.add(f"{_REFUSED}/number", 1) == 1:
        store.set(_REFUSED, json.dumps([problem.what, problem.remedy, problem.value]))
    store.wait([_REFUSED])
    look(store, place)
    raise AssertionError("a refusal that was set is there")


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


def come(store: dist.Store) -> int:
    """Count this rank in; how many have come so far."""
    return int(store.add(_CAME, 1))


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
    late = f"not all {place.world} ranks came to {key!r}"
    wait(store, place, lambda: bool(store.add(key, 0) >= place.world), seconds, late)


def part(store: dist.Store, place: Place, seconds: float) -> None:
    """The store lives in rank 0 (or its agent): it must not end before the others are done with it.

    That all have come is not enough: who polls for it would find the store gone.
    """
    if place.rank != 0:
        store.add("parted", 1)
        return
    late = f"not all {place.world} ranks parted"
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
