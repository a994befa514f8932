"""``shardproof bench collectives``: the backend's own beside the suite's over send and recv."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer

from shardproof import verdicts
from shardproof.backends import BACKENDS, USUAL_PROCESSES
from shardproof.bench import collective_times, collectives, sides
from shardproof.bench.leader_tasks import LaunchFailed
from shardproof.commands import supervision
from shardproof.commands.console import echo, make_console, print_line
from shardproof.commands.run import wait_for
from shardproof.errors import Problem, SelectionError
from shardproof.launch.nodes import Nodes

#: What the command line calls it, options of its own, and those of ``bench`` that it takes.
NAME = "collectives"
OWN = ("algorithm", "ranks_per_node", "sizes", "rounds")
_TAKEN = ("names", "backend", "world", "deadline", "results", "dry_run", *OWN)


def refuse(context: typer.Context) -> None:
    """:raises SelectionError: an option was given that has no meaning here."""
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if name not in _TAKEN and source is not None and source.name != "DEFAULT":
            what = f"--{name.replace('_', '-')} means nothing for collectives"
            raise SelectionError(Problem(what, "leave it out", str(value)))


def parse_sizes(texts: Sequence[str]) -> tuple[int, ...]:
    """Bytes, as ``4``, ``64KiB`` or ``16MiB``; multiples of 4, for elements are of float32.

    :raises SelectionError: none of these.
    """
    units = {"KiB": 2**10, "MiB": 2**20}
    sizes = set()
    for text in texts:
        number, unit = text, 1
        for name, factor in units.items():
            if text.endswith(name):
                number, unit = text.removesuffix(name), factor
        if not number.isdecimal() or not 4 <= int(number) * unit <= 2**30 or int(number) * unit % 4:
            remedy = "write bytes, e.g. 4, 64KiB or 16MiB: a multiple of 4, at most 1024MiB"
            raise SelectionError(Problem("--bytes takes a size", remedy, text))
        sizes.add(int(number) * unit)
    return tuple(sorted(sizes)) or collectives.SIZES


def chosen(context: typer.Context, nodes: Nodes | None) -> collectives.Request:
    """What the command line of ``context`` has timed; ``nodes``: where its ranks are.

    :raises SelectionError: an option that has no meaning here, or a request that cannot be met.
    """
    refuse(context)
    given: Any = SimpleNamespace(**context.params)
    request = collectives.Request(
        given.backend or USUAL_PROCESSES,
        given.world or (2 if nodes is None else nodes.places),
        tuple(given.algorithm or ()),
        given.ranks_per_node or (0 if nodes is None or nodes.count == 1 else nodes.ranks_per_node),
        parse_sizes(given.sizes or ()),
        given.rounds,
        given.deadline,
    )
    sides.check_backend(request.backend)
    if not BACKENDS[request.backend].sends:
        what = "this backend sends nothing from one rank to one other"
        raise SelectionError(Problem(what, "choose another backend", request.backend))
    if request.world < 2:
        raise SelectionError(Problem("one rank sends nothing", "--world 2, or more", "1"))
    if nodes is not None and request.world > nodes.places:
        what = f"{request.world} ranks do not fit {nodes}"
        raise SelectionError(Problem(what, "give more --nodes or --ranks-per-node"))
    request.check()
    return request


def run(request: collectives.Request, results: Path | None, dry_run: bool) -> int:
    """Time what ``request`` says, or print it; the exit code."""
    ids = [request.id_of(*system) for system in request.systems]
    if dry_run:
        for name in ids:
            echo(name)
        return verdicts.HELD
    wait_for(Nodes.here())
    console = make_console()
    with supervision.open_folder(results) as folder:

        def body(interrupts: supervision.Interrupts) -> int:
            folder.plan_benches(ids)
            where = f"{request.backend}, {request.world} ranks"
            print_line(
                console, f"timing {len(ids)} collectives on {where}, {request.rounds} rounds"
            )
            try:
                lines = collectives.run(request)
            except LaunchFailed as failed:
                print_line(console, f"{failed.verdict}: {failed.reason}")
                return verdicts.BROKEN
            with interrupts.held():
                for line in lines:
                    folder.add(line.to_dict(), "collective")
            console.print(collective_times.summary(lines))
            print_line(console, "every size, and a drawing: report.html")
            return verdicts.HELD

        def interrupted() -> None:
            print_line(console, "stopped: nothing was kept, for no system had all its rounds")

        return supervision.supervised(folder, console, body, interrupted, lambda: None)
