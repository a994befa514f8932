"""Whether autopsies are right, and only made of what is broken.

*Plans*: random systems, backends, ranks, steps and phases, with a fault of a random kind in one
rank.  What must come of it is known beforehand: the verdict, the rank to blame, the cause in a
word.  *Clean*: random cases of the campaign, in which no rank may be said to wait for ever.  Both
run while every core is kept busy by processes that only burn it.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardproof.backends import BACKENDS
from shardproof.campaign import draws
from shardproof.case import Case, Fault, FaultKind, FaultPhase, WorkloadSpec
from shardproof.contract import OptimizerSpec, Options
from shardproof.launch import process_control

#: Seconds of CPU of a rank, and seconds after which ranks that stand still are given up.
DEADLINE = 10.0
STEPS = 3
#: Where ranks that are not let run are not given up either: the campaign's own deadline.
_BURN = "import sys; sys.stdout.close()\nwhile True: pass"
_OF_PROCESSES: Sequence[FaultKind] = ("kill", "exit", "raise", "stop")


@dataclass(frozen=True)
class _System:
    """A system, and the faults of calls that it shows, each with the phases in which it does."""

    name: str
    mesh: Mapping[str, int]
    options: Options
    layers: int
    calls: Mapping[FaultKind, Sequence[FaultPhase]]


_BUCKETS = {"bucket_bytes": 4096, "first_bucket_bytes": 4096}
SYSTEMS = (
    _System(
        *("reference/ddp", {"replicate": 3}, _BUCKETS, 1),
        {"drop": ["backward"], "swap": ["backward"], "shape": ["backward"]},
    ),
    _System(
        *("reference/naive_ddp", {"replicate": 4}, {}, 1),
        {"drop": ["backward"], "shape": ["backward"]},
    ),
    _System(
        *("reference/zero3", {"shard": 3}, {}, 2),
        {"drop": ["forward", "backward"]},
    ),
    _System(
        *("reference/pipeline", {"pipe": 3}, {"schedule": "1f1b"}, 3),
        {"drop": ["forward", "backward"]},
    ),
    _System(
        *("reference/pipeline", {"pipe": 4}, {"schedule": "gpipe"}, 4),
        {"drop": ["forward"]},
    ),
    _System(
        *("reference/tensor", {"tensor": 3}, {}, 1),
        {"shape": ["forward", "backward"]},
    ),
    _System("reference/hybrid", {"pipe": 2, "shard": 2}, {"data": "zero2"}, 4, {}),
)
_SAYS: Mapping[FaultKind, tuple[str, ...]] = {
    "kill": ("SIGKILL",),
    "exit": ("exit code 7",),
    "raise": ("raised InjectedFault",),
    "stop": ("dead peer: rank", ": its process was stopped"),
    "drop": ("desync: ",),
    "swap": ("desync: ",),
    "shape": ("desync: ",),
}


def planned(count: int, seed: int) -> list[Case]:
    """The first ``count`` random fault plans of ``seed``, each as a case."""
    backends = [name for name in ("in_memory", "gloo", "mpi") if not BACKENDS[name].available()]
    return [_planned(random.Random(f"{seed} plan {n}"), seed, n, backends) for n in range(count)]


def _planned(draw: random.Random, seed: int, number: int, backends: Sequence[str]) -> Case:
    system = draw.choice(SYSTEMS)
    kind = draw.choice([*_OF_PROCESSES, *system.calls, *system.calls])
    phases: Sequence[FaultPhase] = system.calls.get(kind, ("forward", "backward"))
    world = math.prod(system.mesh.values())
    rank, backend = draw.randrange(world), draw.choice(backends)
    verdicts = {"stop": ("hang",), "drop": ("crash", "hang"), "swap": ("crash", "hang")}
    verdicts["shape"] = ("crash", "hang")
    fault = Fault(
        kind,
        rank,
        step=draw.randint(1, STEPS - 1),
        phase=draw.choice(phases),
        verdicts=verdicts.get(kind, ("crash",)),
        blames=rank,
        says=_SAYS[kind],
    )
    shape = "x".join(f"{axis}{size}" for axis, size in system.mesh.items())
    return Case(
        id=f"autopsies-{seed}::{number:03d}::{system.name}::{backend}::{shape}"
        f"::{kind}-rank{rank}-step{fault.step}-{fault.phase}",
        scenario="autopsies",
        implementation=system.name,
        options=system.options,
        backend=backend,
        mesh=system.mesh,
        workload=WorkloadSpec(
            "charnames_gpt",
            global_batch=12,
            micro_batches=4 if "pipe" in system.mesh else 1,
            params={"layers": system.layers, "width": 24, "heads": 12, "vocab": 96},
        ),
        optimizer=OptimizerSpec(),
        lane="fp64",
        checks=("faults",),
        steps=STEPS,
        deadline=DEADLINE,
        fault=fault,
    )


def clean(count: int, seed: int) -> list[Case]:
    """The first ``count`` random clean cases of ``seed``: none may be ``hang``."""
    return draws.first_cases(count, seed)


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Every core is kept busy inside."""
    burning = [
        subprocess.Popen(
            [sys.executable, "-c", _BURN],
            stdout=subprocess.DEVNULL,
            preexec_fn=_end_with(os.getpid()),
        )
        for _ in range(process_control.cores())
    ]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def _end_with(parent: int):  # type: ignore[no-untyped-def]
    return lambda: process_control.die_with_parent(parent)
