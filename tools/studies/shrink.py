"""How far planted faults shrink: ``python -m tools.studies shrink``.

Each fault of a fixed sample (by the hash of its name) is planted in a case that is larger than its
own: twice the ranks along each axis that grows, steps for twice as long and at least four, two more
layers, a wider model, a larger batch, traits, and AdamW with clipping where the lane allows them.
What its system cannot do of that is left out, and what hides the fault.  Then that case is shrunk
as ``shardproof shrink`` does it, and the clean parent must pass what is left.

A fault *holds* if at most 2 ranks and at most half of the steps are left.  Every other fault is an
exception, listed with its reason.  CPU seconds are those of all attempts, without the start of the
fork server.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from shardproof import axes, registry, verdicts, workloads
from shardproof.case import Case
from shardproof.cases import kills, kinds
from shardproof.cases.runner import Session
from shardproof.commands import options
from shardproof.commands.console import echo
from shardproof.contract import OptimizerSpec
from shardproof.errors import SelectionError
from shardproof.launch.process_control import cores, spent_below
from shardproof.scenarios.vocabulary import installed
from shardproof.shrink import reductions
from shardproof.shrink.search import Limits, Shrinker

MOST_RANKS, LEAST_HELD, MOST_SECONDS = 2, 0.95, 20.0
#: Traits that say nothing of a case but how much it has.
_ADDED = ("frozen", "unequal_tokens", "module_twice")
#: Seconds of one search, of which no fault needs more.
_LONGEST = 240.0


@dataclass(frozen=True)
class Line:
    """The result of one fault; ``seconds`` are CPU seconds."""

    fault: str
    cause: str
    ranks: tuple[int, int]
    steps: tuple[int, int]
    tried: int
    seconds: float
    parent: str
    why_not: str = ""

    def __str__(self) -> str:
        (ranks, few_ranks), (steps, few_steps) = self.ranks, self.steps
        sizes = f"ranks {ranks} -> {few_ranks}, steps {steps} -> {few_steps}"
        told = self.why_not or "holds"
        return f"{self.fault}: {sizes}, {self.tried} attempts, {self.seconds:.1f} s: {told}"

    @property
    def held(self) -> bool:
        """Whether it is as small as it should be, and only the fault fails."""
        return not self.why_not


def sample(count: int) -> list[str]:
    """The first ``count`` planted faults by the hash of their names."""
    names = registry.mutant_names()
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())[:count]


def grown(case: Case) -> Iterator[Case]:
    """Larger forms of ``case``, the largest first."""
    mesh = {n: 2 * k if n in axes.growing(case.mesh) else k for n, k in case.mesh.items()}
    meshes = [mesh, case.mesh] if case.fault is None else [case.mesh]
    for ranks in meshes:
        for more in ("workload", "optimizer"), ("workload",), ("optimizer",), ():
            larger = replace(case, mesh=ranks)
            if kinds.of(case.workload).trains:
                larger = replace(larger, steps=max(4, 2 * case.steps))
                larger = _with_more(larger, more)
            if larger != case:
                yield larger


def _with_more(case: Case, more: Sequence[str]) -> Case:
    spec = case.workload
    if "workload" in more:
        params = dict(spec.params)
        family = workloads.WORKLOADS[spec.name]
        if "layers" in family.knobs:
            params["layers"] = params.get("layers", family.knobs["layers"].default) + 2
        if "width" in family.knobs:
            params["width"] = 2 * params.get("width", family.knobs["width"].default)
        able = [t for t in _ADDED if spec.name in workloads.TRAITS[t].applies_to]
        traits = tuple(dict.fromkeys((*spec.traits, *able)))
        more_samples = 2 * max(spec.global_batch, 12)
        spec = replace(spec, params=params, traits=traits, global_batch=more_samples, seed=7)
    optimizer = case.optimizer
    if "optimizer" in more and case.lane == "fp64" and optimizer == OptimizerSpec():
        optimizer = OptimizerSpec(
            "adamw", lr=0.003, weight_decay=0.1, warmup_steps=2, clip_norm=1.0
        )
    return replace(case, workload=spec, optimizer=optimizer)


def study_one(session: Session, name: str) -> Line:
    """Grow the case of the fault ``name`` and shrink it."""
    mutant, vocabulary = registry.load_mutant(name), installed()
    own = kills.pair(mutant).case
    shrinker = Shrinker(session, vocabulary, Limits(seconds=_LONGEST))
    try:
        _, wanted = shrinker.confirm(reductions.document.required(own, vocabulary))
        start = _start(shrinker, own, wanted, vocabulary)
        before = _spent()
        shrunk = shrinker.shrink(start)
    except SelectionError as error:
        return Line(name, "", (own.world,) * 2, (own.steps,) * 2, 0, 0.0, "", str(error))
    spent, best = _spent() - before, shrunk.best
    clean, _ = shrinker.confirm(replace(best, implementation=mutant.parent))
    ranks, steps = (start.world, best.world), (start.steps, best.steps)
    why = [f"{best.world} ranks"] if best.world > MOST_RANKS else []
    why += [f"{best.steps} of {start.steps} steps"] if 2 * best.steps > start.steps else []
    if clean.verdict not in verdicts.GREEN:
        why.append(f"the parent is {clean.verdict}: {clean.reason[:200]}")
    why += [f"stopped: {shrunk.stopped}"] if shrunk.stopped else []
    told = clean.verdict, "; ".join(why)
    return Line(name, str(shrunk.cause), ranks, steps, shrunk.tried, spent, *told)


def _start(shrinker: Shrinker, own: Case, wanted: Any, vocabulary: Any) -> Case:
    """The largest form of ``own`` in which the fault is seen and its parent passes."""
    parent = registry.load_mutant(own.implementation).parent
    for larger in grown(own):
        case = reductions.possible(larger, vocabulary)
        if case is None:
            continue
        _, cause = shrinker.confirm(case)
        if cause is None or wanted is None or not wanted.same(cause):
            continue
        clean, _ = shrinker.confirm(replace(case, implementation=parent))
        if clean.verdict in verdicts.GREEN:
            return case
    return own


def _spent() -> float:
    return spent_below(os.getpid())


def summary(lines: Sequence[Line]) -> list[str]:
    """The counts, and each exception with its reason."""
    held, seconds = [line for line in lines if line.held], [line.seconds for line in lines]
    smaller = [f"{sum(o.ranks[1] <= MOST_RANKS for o in lines)} have at most {MOST_RANKS} ranks"]
    halved = sum(2 * line.steps[1] <= line.steps[0] for line in lines)
    smaller.append(f"{halved} have at most half of the steps")
    told = [f"{len(held)} of {len(lines)} faults shrink far enough ({', '.join(smaller)})"]
    told.append(
        f"CPU seconds: median {statistics.median(seconds):.1f}, most {max(seconds):.1f}; "
        f"attempts: median {statistics.median(line.tried for line in lines):.0f}"
    )
    return told + [f"  {line.fault}: {line.why_not}" for line in lines if not line.held]


def run(
    count: Annotated[int, typer.Option("--sample", metavar="N", min=1, help="faults")] = 100,
    skip: Annotated[int, typer.Option("--skip", metavar="N", min=0, help="faults left out")] = 0,
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="MIN", help="start no fault after MIN minutes"),
    ] = None,
    jobs: options.Jobs = None,
    out: Annotated[Path | None, options.output("--out", "write a line per fault (JSON)")] = None,
) -> int:
    """Shrink planted faults from larger cases, and count how small they become.

    Exit codes: 0 both aims met, 1 one missed, 3 the budget left faults out.
    """
    names, lines, began = sample(count)[skip:], list[Line](), time.monotonic()
    with Session(jobs or cores()) as session:
        for name in names:
            if budget is not None and time.monotonic() - began > 60 * budget:
                break
            line = study_one(session, name)
            lines.append(line)
            echo(f"{line}", err=True)
            if out is not None:
                options.write(out, json.dumps([asdict(one) for one in lines], indent=1) + "\n")
    if not lines:
        return verdicts.NOT_DECIDED
    echo("\n".join(summary(lines)))
    if len(lines) < len(names):
        return verdicts.NOT_DECIDED
    enough = sum(line.held for line in lines) >= LEAST_HELD * len(lines)
    quick = statistics.median(line.seconds for line in lines) <= MOST_SECONDS
    return verdicts.HELD if enough and quick else verdicts.BROKEN
