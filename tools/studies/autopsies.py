"""Whether autopsies are right, and absent for correct systems.

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
from functools import partial
from typing import Annotated

import typer

from shardproof.backends import BACKENDS
from shardproof.campaign import draws
from shardproof.case import Case, Fault, FaultKind, FaultPhase, WorkloadSpec
from shardproof.commands import options
from shardproof.commands.execution import run_and_exit
from shardproof.contract import OptimizerSpec, Options
from shardproof.errors import Problem, SelectionError
from shardproof.launch import process_control

#: Seconds of CPU of a rank, and seconds after which ranks that stand still are given up.
DEADLINE = 10.0
STEPS = 3
#: Where ranks that are not let run are not given up either: the campaign's own deadline.
_BURN = "import sys; sys.stdout.close()\nwhile True: pass"
_OF_PROCESSES: Sequence[FaultKind] = ("kill", "exit", "raise", "stop")


@dataclass(frozen=True)
class _System:
    """A system and its call faults, each with the phases in which it shows."""

    name: str
    mesh: Mapping[str, int]
    options: Options
    layers: int
    calls: Mapping[FaultKind, Sequence[FaultPhase]]


_BUCKETS = {"bucket_bytes": 4096, "first_bucket_bytes": 4096}
_BACK: Sequence[FaultPhase] = ["backward"]
_BOTH: Sequence[FaultPhase] = ["forward", "backward"]
SYSTEMS = (
    _System(
        *("reference/ddp", {"replicate": 3}, _BUCKETS, 1),
        {"drop": _BACK, "swap": _BACK, "shape": _BACK},
    ),
    _System("reference/naive_ddp", {"replicate": 4}, {}, 1, {"drop": _BACK, "shape": _BACK}),
    _System("reference/zero3", {"shard": 3}, {}, 2, {"drop": _BOTH}),
    _System("reference/pipeline", {"pipe": 3}, {"schedule": "1f1b"}, 3, {"drop": _BOTH}),
    _System("reference/pipeline", {"pipe": 4}, {"schedule": "gpipe"}, 4, {"drop": ["forward"]}),
    _System("reference/tensor", {"tensor": 3}, {}, 1, {"shape": _BOTH}),
    _System("reference/hybrid", {"pipe": 2, "shard": 2}, {"data": "zero2"}, 4, {}),
)
_DESYNC = ("crash", "hang"), ("desync: ",)
#: Verdicts that a fault must give, and what is said of it.
_ENDS: Mapping[FaultKind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "kill": (("crash",), ("SIGKILL",)),
    "exit": (("crash",), ("exit code 7",)),
    "raise": (("crash",), ("raised InjectedFault",)),
    "stop": (("hang",), ("dead peer: rank", ": its process was stopped")),
    "drop": _DESYNC,
    "swap": _DESYNC,
    "shape": _DESYNC,
}


def planned(count: int, seed: int) -> list[Case]:
    """The first ``count`` random fault plans of ``seed``, each as a case."""
    backends = [name for name in ("in_memory", "gloo", "mpi") if not BACKENDS[name].available()]
    return [_planned(random.Random(f"{seed} plan {n}"), seed, n, backends) for n in range(count)]


def _planned(draw: random.Random, seed: int, number: int, backends: Sequence[str]) -> Case:
    system = draw.choice(SYSTEMS)
    kind = draw.choice([*_OF_PROCESSES, *system.calls, *system.calls])
    phases = system.calls.get(kind, _BOTH)
    world = math.prod(system.mesh.values())
    rank, backend = draw.randrange(world), draw.choice(backends)
    verdicts, says = _ENDS[kind]
    fault = Fault(
        kind,
        rank,
        step=draw.randint(1, STEPS - 1),
        phase=draw.choice(phases),
        verdicts=verdicts,
        blames=rank,
        says=says,
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


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core busy inside the context."""
    burning = [
        subprocess.Popen(
            [sys.executable, "-c", _BURN],
            stdout=subprocess.DEVNULL,
            preexec_fn=partial(process_control.die_with_parent, os.getpid()),
        )
        for _ in range(process_control.cores())
    ]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def run(
    plans: Annotated[
        int, typer.Option("--plans", metavar="N", min=0, max=100_000, help="faults to make")
    ] = 20,
    clean_cases: Annotated[
        int, typer.Option("--clean", metavar="N", min=0, max=100_000, help="clean cases")
    ] = 100,
    seed: options.Seed = None,
    budget: options.Budget = None,
    jobs: options.Jobs = None,
    results: options.Results = None,
) -> None:
    """Make random faults in random systems, then run clean ones, on a busy machine.

    A fault whose verdict, rank or sentence is not what its kind must give fails; so does a clean
    case that is said to hang. Every core is kept busy by a process that only burns it.

    \b
    python -m tools.studies autopsies --plans 100 --clean 500 --seed 15
    """
    cases = [*planned(plans, seed or 0), *draws.first_cases(clean_cases, seed or 0)]
    if not cases:
        raise SelectionError(Problem("nothing to run", "give --plans or --clean", "0"))
    with busy_cores():
        run_and_exit(cases, options.SessionOptions(budget=budget, jobs=jobs, results=results))
