"""``shardproof cluster``: what ``shardproof run`` judges, on containers as nodes."""

from __future__ import annotations

import os
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from shardproof import verdicts
from shardproof.commands import options
from shardproof.commands.console import echo
from shardproof.errors import Problem, SelectionError

#: More would be ranks that wait for cores.
MOST_NODES, MOST_RANKS = 16, 32
_UNITS = {"k": 10, "m": 20, "g": 30}
_RATES = {"mbit": 10**6, "gbit": 10**9}
#: Bits per second; beyond, the kernel counts in other units, and here nothing sends as fast.
_MOST_RATE = 10 * 10**9
#: The least that a node with two ranks needs: each has torch in memory.
_LEAST_MEMORY = 512 << 20

clusters = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def memory(text: str) -> int:
    """Bytes of ``512m`` or ``2g``."""
    found = re.fullmatch(r"(\d{1,6})([kmg]?)", text.lower())
    size = int(found[1]) << _UNITS.get(found[2], 0) if found else 0
    if size < _LEAST_MEMORY:
        least = f"{_LEAST_MEMORY >> 20}m"
        raise typer.BadParameter(f"{text!r} is no size of {least} or more, such as 2g")
    return size


def bandwidth(text: str) -> int:
    """Bits per second of ``100mbit`` or ``1gbit``."""
    found = re.fullmatch(r"(\d{1,5})(mbit|gbit)", text.lower())
    rate = int(found[1]) * _RATES[found[2]] if found else 0
    if not 0 < rate <= _MOST_RATE:
        raise typer.BadParameter(f"{text!r} is no rate of 1mbit to 10gbit, such as 100mbit")
    return rate


Nodes = Annotated[int, typer.Option("--nodes", metavar="K", min=1, max=MOST_NODES, help="nodes")]
RanksPerNode = Annotated[
    int,
    typer.Option(
        "--ranks-per-node",
        metavar="R",
        min=1,
        max=MOST_RANKS,
        help="consecutive ranks on one node; the last axes of a mesh lie inside nodes",
    ),
]


@clusters.command("run")
def run(
    scenarios: options.Scenarios = None,
    nodes: Nodes = 2,
    ranks_per_node: RanksPerNode = 2,
    impl: options.Impl = None,
    backend: options.BackendOption = None,
    world: options.World = None,
    expression: options.Expression = "",
    tier: options.Tier = "quick",
    budget: options.Budget = None,
    jobs: options.Jobs = None,
    results: options.Results = None,
    seed: options.Seed = None,
    cpus: Annotated[
        float | None, typer.Option("--cpus", metavar="C", min=0.05, help="cores of each node")
    ] = None,
    memory_bytes: Annotated[
        int | None,
        typer.Option("--memory", metavar="M", parser=memory, help="of each node, such as 2g"),
    ] = None,
    bits_per_second: Annotated[
        int | None,
        typer.Option(
            "--bandwidth",
            metavar="RATE",
            parser=bandwidth,
            help="that each node sends with, such as 100mbit",
        ),
    ] = None,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="leave the containers, to look into them (`down` ends them)"),
    ] = False,
) -> None:
    """Run cases with ranks in containers, and judge them.

    \b
    shardproof cluster run ddp-gpt                              2 nodes of 2 ranks
    shardproof cluster run zero --nodes 4 --ranks-per-node 1
    shardproof cluster run ddp-gpt --impl mine:MyDDP            a class of your own
    shardproof cluster run my.yaml --cpus 0.5 --memory 2g       capped nodes
    shardproof cluster run ddp-gpt --bandwidth 100mbit          a slow network between nodes

    Builds the images if they are missing or old (from a checkout). The run folder is one that
    verify, report, compare and gate take like any other; run.json tells images, nodes, and which
    rank ran where. Cases of backend in_memory have ranks that are threads: they run in the head.
    Caps are measured before the run; more than 20 % off ends it with exit code 3 and both figures.
    A class or scenario file of your own is mounted read only, with its folder.
    """
    from shardproof.commands.run import with_room
    from shardproof.launch.nodes import nodes as launched
    from shardproof.multinode import cluster, engine
    from shardproof.multinode.caps import Caps
    from shardproof.scenarios.vocabulary import installed

    if "mpi" in (backend or ()) and nodes > 1:
        what = "an mpirun starts ranks on one machine; across nodes nothing starts its daemons"
        raise SelectionError(Problem(what, "choose gloo, or --nodes 1", "--backend mpi"))
    if bits_per_second is not None and nodes == 1:
        what = "nothing is sent between nodes of a cluster of one"
        raise SelectionError(Problem(what, "choose --nodes 2, or leave it out", "--bandwidth"))
    words = options.selection(scenarios, impl, backend, world, expression, tier, seed)
    there = launched.Nodes(launched.FOLDER, nodes, ranks_per_node)
    with_room(words.cases(installed()), there)  # bad input is told before anything is built
    own = _own(scenarios or (), impl or ())
    command = ["run", *(scenarios or ()), "--tier", tier]
    for flag, values in (("--impl", impl), ("--backend", backend), ("--world", world)):
        command += [word for value in values or () for word in (flag, str(value))]
    given = {"-k": expression, "--budget": budget, "-j": jobs, "--seed": seed}
    for flag, value in given.items():
        command += [flag, str(value)] if value not in ("", None) else []
    started = time.time()
    try:
        client = engine.client()
        images = engine.build(client)
        folder = _results(results)
        made = cluster.Cluster(
            name=f"shardproof-{os.getpid()}-{int(started)}",
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            results=folder,
            folder=Path.cwd(),
            images=images,
            own=own,
            caps=Caps(cpus, memory_bytes, bits_per_second),
            command=["shardproof", *sys.argv[1:]],
        )
        code = cluster.run(client, made, [*command, "--results", str(folder)], _say, keep)
    except engine.NoCluster as error:
        _precondition(error)
    raise typer.Exit(code)


@clusters.command("build")
def build(
    force: Annotated[bool, typer.Option("--force", help="also those that are not old")] = False,
) -> None:
    """Build the images if they are missing or old."""
    from shardproof.multinode import engine

    try:
        engine.build(engine.client(), force)
    except engine.NoCluster as error:
        _precondition(error)


@clusters.command("ps")
def ps() -> None:
    """List what clusters there are: containers and networks."""
    from shardproof.multinode import cluster, engine

    try:
        for part in cluster.parts(engine.client()):
            name = cluster.label_of(part)
            state = getattr(part, "status", "network")
            echo(f"{part.name}  {state}  {'goes on' if cluster.goes_on(name) else 'left over'}")
    except engine.NoCluster as error:
        _precondition(error)


@clusters.command("down")
def down(
    name: Annotated[str, typer.Argument(metavar="NAME", help="as `ps` lists it")],
) -> None:
    """End one cluster, whatever it does."""
    from shardproof.multinode import cluster, engine

    if not re.fullmatch(r"shardproof-\d+-\d+", name):
        raise SelectionError(Problem("no name of a cluster", "`shardproof cluster ps`", name))
    try:
        left = cluster.remove(engine.client(), name)
    except engine.NoCluster as error:
        _precondition(error)
    raise typer.Exit(verdicts.NOT_DECIDED if left else verdicts.HELD)


@clusters.command("clean")
def clean(
    everything: Annotated[bool, typer.Option("--all", help="also end runs that go on")] = False,
) -> None:
    """Remove what a killed run left behind, or --keep."""
    from shardproof.multinode import cluster, engine

    try:
        gone = cluster.clean(engine.client(), _say, everything)
    except engine.NoCluster as error:
        _precondition(error)
    raise typer.Exit(verdicts.HELD if gone else verdicts.NOT_DECIDED)


def _say(text: str) -> None:
    echo(text, nl=False)
    sys.stdout.flush()


def _precondition(error: Exception) -> NoReturn:
    echo(f"precondition: {error}", err=True)
    raise typer.Exit(verdicts.NOT_DECIDED)


def _results(given: Path | None) -> Path:
    """The run folder, which is there before anything runs.

    :raises SelectionError: it cannot be written, or holds something else.
    """
    from shardproof.commands.supervision import RESULTS
    from shardproof.runs.run_folder import require_run_or_new

    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder = (given or RESULTS / f"{stamp}-cluster").resolve()
    try:
        require_run_or_new(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"results cannot be written: {error.strerror}"
        raise SelectionError(
            Problem(what, "choose another --results folder", file=str(error.filename or folder))
        ) from None
    return folder


def _own(scenarios: list[str] | tuple[()], impl: list[str] | tuple[()]) -> list[Path]:
    """Folders of the user's that containers have to see.

    :raises SelectionError: those of root are for root only, as whom nothing runs in a container.
    """
    from shardproof.multinode.cluster import OWN_USER

    files = [Path(name).resolve() for name in scenarios if Path(name).exists()]
    folders = {file if file.is_dir() else file.parent for file in files}
    if any(":" in name for name in impl) or files:
        folders.add(Path.cwd())
    for folder in folders:
        if os.geteuid() == 0 and folder.stat().st_mode & 0o005 != 0o005:
            what = f"containers of root's run as user {OWN_USER}, who cannot read this folder"
            remedy = "`chmod o+rx` it, or start this as another user"
            raise SelectionError(Problem(what, remedy, file=str(folder)))
    return sorted(folders)
