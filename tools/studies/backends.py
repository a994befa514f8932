"""The same cases on several backends: equal bits where promised, and the cost of each backend.

The study takes the cells that ``run --backend mpi`` would, and runs each on all backends, one after
the other and in turns, so that all meet the same machine.  Then it runs those of one backend again
in another order.  Compared are

bits     the digests of all tensors that ranks hold, between the two orders in every lane, and
         between backends in the lanes dyadic (all sums are exact) and bitwise, there where sums
         have one order: both backends add in rank order, or no more than two ranks add
verdicts what a backend declares that it cannot do is a skip, and no case of it
cost     CPU seconds, user and system, of all processes of a case, its leader and judge included
"""

from __future__ import annotations

import random
import resource
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import psutil
import typer

from shardproof import verdicts
from shardproof.axes import parts
from shardproof.backends import BACKENDS
from shardproof.bench import sides
from shardproof.case import Case
from shardproof.cases import kinds
from shardproof.cases.runner import Session
from shardproof.commands import options
from shardproof.commands.console import echo
from shardproof.errors import Problem, SelectionError
from shardproof.scenarios.matrix import on_backend
from shardproof.scenarios.selection import Selection
from shardproof.scenarios.vocabulary import installed

#: CPU seconds of the last backend over those of ``BASE``, the median over cases: at most.
MOST_COST, BASE = 2.0, "gloo"


@dataclass
class Run:
    """One case on one backend; ``digests`` are those of its account, in order."""

    verdict: str
    reason: str
    digests: list[str]
    cpu: float


@dataclass
class Cell:
    """One cell on each backend, and ``again``, in another order of cases, on the last of them."""

    name: str
    world: int
    lane: str
    #: Ranks that add to one sum: stages do not.
    adding: int
    runs: dict[str, Run] = field(default_factory=dict)
    again: Run | None = None


def cells_of(cases: Sequence[Case], backends: Sequence[str]) -> list[tuple[Cell, dict[str, Case]]]:
    """Each cell of ``cases`` on every one of ``backends`` that the scenario expects to pass.

    Worlds are those of the cases.  Cells that are an expected failure or a skip are left out, and
    those that train nothing: they put a backend itself on trial.
    """
    found: dict[str, tuple[Cell, dict[str, Case]]] = {}
    trained = [case for case in cases if kinds.of(case.workload).trains]
    for backend in backends:
        for case in on_backend(trained, backend):
            scenario, system, _, *rest = case.id.split("::")
            name = "::".join([scenario, system, *rest])
            cell = Cell(name, case.world, case.lane, case.world // parts(case.mesh, "layers"))
            found.setdefault(name, (cell, {}))[1][backend] = case
    whole = (pair for pair in found.values() if len(pair[1]) == len(backends))
    return [pair for pair in whole if not any(c.skip or c.xfail for c in pair[1].values())]


def measure(cells: Sequence[tuple[Cell, dict[str, Case]]], seed: int) -> list[Cell]:
    """Run all cells one at a time, in an order drawn by ``seed``."""
    drawn = random.Random(seed)
    with Session(1) as session:
        for number, (cell, cases) in enumerate(drawn.sample(list(cells), len(cells))):
            for backend in drawn.sample(sorted(cases), len(cases)):
                cell.runs[backend] = _run(session, cases[backend])
            echo(f"{number + 1}/{len(cells)} {cell.name}", err=True)
        for number, (cell, cases) in enumerate(drawn.sample(list(cells), len(cells))):
            cell.again = _run(session, list(cases.values())[-1])
            echo(f"again {number + 1}/{len(cells)} {cell.name}", err=True)
    return [cell for cell, _ in cells]


def _run(session: Session, case: Case) -> Run:
    before, found = spent(), list[Run]()

    def note(result: Any, account: dict[str, Any]) -> None:
        digests = list(digests_of(account["figures"]))
        found.append(Run(result.verdict, result.reason, digests, spent() - before))

    session.run([case], lambda _: None, on_account=note)
    return found[0]


def spent() -> float:
    """CPU seconds of all processes started by this one."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = ended.ru_utime + ended.ru_stime
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def digests_of(value: Any) -> Iterator[str]:
    """All tensor digests of an account, in order."""
    if isinstance(value, dict):
        if isinstance(value.get("digest"), str):
            yield value["digest"]
        for part in value.values():
            yield from digests_of(part)
    elif isinstance(value, list):
        for part in value:
            yield from digests_of(part)


def summary(cells: Sequence[Cell], backends: Sequence[str]) -> tuple[list[str], list[str]]:
    """The results as sentences, and the problems."""
    last, lines, wrong = backends[-1], [f"{len(cells)} cells on {', '.join(backends)}"], list[str]()
    for backend in backends:
        ends = Counter(cell.runs[backend].verdict for cell in cells)
        lines.append(f"{backend}: {', '.join(f'{n} {end}' for end, n in ends.most_common())}")
    for cell in cells:
        again = {f"{last}, again": cell.again} if cell.again else {}
        wrong += [
            f"{cell.name} on {backend}: {run.verdict}: {run.reason}"
            for backend, run in {**cell.runs, **again}.items()
            if not run.verdict.startswith(("pass", "skip"))
        ]
    for backend in backends[:-1]:
        exact = [cell for cell in cells if promises_bits(cell, backend, last)]
        both = {c.name: (c.runs[backend].digests, c.runs[last].digests) for c in exact}
        both = {name: (a, b) for name, (a, b) in both.items() if a and b}
        differ = [name for name, (a, b) in both.items() if a != b]
        tensors = sum(len(a) for a, _ in both.values())
        lines.append(
            f"bits of {last} and {backend}, where they are promised: equal in "
            f"{len(both) - len(differ)} of {len(both)} cells ({tensors:,} digests)"
        )
        wrong += [f"{name}: other bits on {last} than on {backend}" for name in differ]
    twice = {c.name: (c.runs[last].digests, c.again.digests) for c in cells if c.again is not None}
    twice = {name: (a, b) for name, (a, b) in twice.items() if a}
    differ = [name for name, (a, b) in twice.items() if a != b]
    lines.append(
        f"bits of {last} in two orders of the cases: equal in {len(twice) - len(differ)} of "
        f"{len(twice)} cells"
    )
    wrong += [f"{name}: other bits in another order of the cases" for name in differ]
    return lines, wrong


def promises_bits(cell: Cell, one: str, other: str) -> bool:
    """Whether a correct system has equal bits on both backends."""
    if cell.lane == "bitwise":
        ordered = BACKENDS[one].adds_in_rank_order and BACKENDS[other].adds_in_rank_order
        return ordered or cell.adding <= 2
    return cell.lane == "dyadic"


def costs(cells: Sequence[Cell], backends: Sequence[str]) -> tuple[list[str], list[str]]:
    """Median CPU seconds of a case by world, if all backends run it; and the excesses."""
    lines, wrong, last = list[str](), list[str](), backends[-1]
    for world in sorted({cell.world for cell in cells}):
        ran = [c for c in cells if c.world == world]
        ran = [c for c in ran if all(r.verdict.startswith("pass") for r in c.runs.values())]
        if not ran:
            continue
        medians = {b: statistics.median(c.runs[b].cpu for c in ran) for b in backends}
        told = ", ".join(f"{seconds:.2f} on {b}" for b, seconds in medians.items())
        line = f"CPU seconds of a case at {world} ranks, median of {len(ran)}: {told}"
        if BASE in medians and last != BASE:
            ratio = medians[last] / medians[BASE]
            line += f"; {last} over {BASE}: {ratio:.2f}"
            if world == 4 and ratio > MOST_COST:
                wrong.append(f"a case on {last} at 4 ranks costs {ratio:.2f} times {BASE}'s CPU")
        lines.append(line)
    return lines, wrong


def run(
    cases: Sequence[Case], backends: Sequence[str], count: int | None, seed: int
) -> tuple[list[str], list[str]]:
    """Sentences and problems of ``count`` cells (``None``: all) drawn by ``seed``.

    :raises SelectionError: there is no such cell.
    """
    cells = cells_of(cases, backends)
    if not cells:
        what = f"no cell that trains a model and is expected to hold on {', '.join(backends)}"
        raise SelectionError(Problem(what, "choose other scenarios or fewer --backend"))
    if count is not None and count < len(cells):
        cells = random.Random(seed).sample(cells, count)
    measured = measure(cells, seed)
    (said, wrong), (cost, dear) = summary(measured, backends), costs(measured, backends)
    return [*said, *cost], [*wrong, *dear]


def command(
    scenario: options.Scenarios = None,
    backend: Annotated[
        list[str] | None,
        typer.Option("--backend", metavar="B", help="the last one is judged [in_memory gloo mpi]"),
    ] = None,
    world: options.World = None,
    expression: options.Expression = "",
    tier: options.Tier = "quick",
    count: Annotated[
        int | None, typer.Option("--cells", metavar="N", min=1, help="so many, drawn [all]")
    ] = None,
    seed: options.Seed = None,
) -> int:
    """Run the same cells on each backend in turn, and on the last one again in another order.

    Exit codes: 0 all hold, have equal bits, and cost at most twice gloo's CPU at 4 ranks; 1 not so.
    """
    chosen = list(dict.fromkeys(backend or ("in_memory", "gloo", "mpi")))
    for name in chosen:
        sides.check_backend(name)
        if reason := BACKENDS[name].available():
            raise SelectionError(Problem(f"--backend: {reason}", "leave it out", name))
    selection = Selection(scenario or (), worlds=world or (), expression=expression, tier=tier)
    cells = selection.cases(installed())
    said, wrong = run(cells, chosen, count, seed or 0)
    for line in [*said, *wrong]:
        echo(line)
    return verdicts.BROKEN if wrong else verdicts.HELD
