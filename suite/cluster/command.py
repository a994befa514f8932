"""``shardproof cluster``: what ``shardproof`` judges and times, on containers as nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardproof import verdicts
from shardproof.cluster import head
from shardproof.cluster.shape import Shape, Words
from shardproof.commands import options
from shardproof.commands.console import echo
from shardproof.errors import Problem, SelectionError
from shardproof.wings import wings

if TYPE_CHECKING:
    from shardproof.case import Case
    from shardproof.cluster.containers.needs import Needs
    from shardproof.wings import NodeCommand, OnNodes

clusters = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="""Run in containers of this machine that act as nodes: docs/containers.md.

    \b
    shardproof cluster run ddp-gpt --nodes 2               ranks on two nodes
    shardproof cluster bench strong --bandwidth 100mbit    speed over a slow network
    shardproof cluster build                               build the images only
    shardproof cluster clean                               remove leftovers
    """,
)


@clusters.command("run", context_settings=head.PASSING_ON)
@options.grouped()
def run(
    words: Words = None,
    *,
    wanted: Shape,
    fault: Annotated[
        str,
        typer.Option(
            "--fault",
            metavar="PLAN",
            help="fault in one case, such as kill_node,node=1,case=2,step=1",
        ),
    ] = "",
) -> None:
    """Run and judge cases with ranks in containers. The options of `shardproof run` also work.

    \b
    shardproof cluster run                                      the quick matrix
    shardproof cluster run ddp-gpt                              2 nodes with 2 ranks each
    shardproof cluster run zero --nodes 4 --ranks-per-node 1
    shardproof cluster run ddp-gpt --impl mine:MyDDP            your own class
    shardproof cluster run my.yaml --cpus 0.5 --memory 2g       capped nodes
    shardproof cluster run ddp-gpt --bandwidth 100mbit          a slow network between nodes
    shardproof cluster run ddp-gpt --backend mpi                Open MPI over the nodes
    shardproof cluster run ddp-gpt --backend nccl               a GPU for each rank
    shardproof cluster run ddp-gpt --fault kill_node,node=1     the effect of a killed node
    shardproof cluster run ddp-gpt --delay 10 --slow-node 1:cpus=0.5

    Images that are missing or old are built (from a checkout), with DeepSpeed and MPI if a case
    needs one of them. `verify`, `report`, `compare` and `gate` accept the run folder like any
    other; run.json lists images, nodes, and the node of each rank. Ranks of backend in_memory are
    threads: these cases run in the head container.
    --fault strikes when the first rank of a node reaches a step (from 0; default 1) of a case
    (number from 1, among the cases of this node): kill (this rank), kill_node, pause_node, cut_node
    (from the network), slow_node, fill_memory, fill_disk, stop_head, stop_client. Its keys: node=,
    case=, step=, phase=forward|backward|update, seconds= (of a pause or cut; default: to the end).
    Limits are measured before the run. If a limit is missed by more than 20 %, the command prints
    both values and ends with exit code 3.
    A class or scenario file of your own is mounted read only, with its folder.
    """
    from shardproof.commands import run as in_head

    words = words or []
    wanted.limits(), wanted.slowed()  # refused at once
    given = head.meant(in_head.run, words).params
    if given["resume"] or given["rerun_failed"]:
        if wanted.results is None:
            raise SelectionError(Problem("no run is given", "add --results FOLDER", "--resume"))
        if fault:
            what = "a resumed run cannot have a new fault"
            raise SelectionError(
                Problem(what, "leave out --fault or --resume", "--fault with --resume")
            )
        needs = head.needs_of((), given["backend"], wanted)
        wanted = replace(wanted, all_packages=True)
        faults: dict[str, Any] | None = {}  # it may have such cases
    else:
        needs, faults = _chosen(given, wanted, fault)
    seen = head.own_folders(given["scenarios"] or (), given["impl"] or ())
    raise typer.Exit(head.run(["run", *words], wanted, needs, seen, faults))


def _chosen(
    given: Mapping[str, Any], wanted: Shape, fault: str
) -> tuple[Needs, dict[str, Any] | None]:
    """The needs of the cases that `run` chooses with the options ``given``, and the faults of nodes
    for the head.

    :raises SelectionError: none fits, or ``fault`` cannot be made in them.
    """
    from shardproof.cluster import fault_plans

    cut_by = "--shard" if given["shard"] else "--budget" if given["budget"] else ""
    if fault and cut_by:
        what = f"{cut_by} may leave out the case of the fault"
        raise SelectionError(Problem(what, "choose cases by -k", f"--fault with {cut_by}"))
    needs = head.needs_of(given["scenarios"], given["backend"], wanted)
    cases: list[Case] = []
    if not given["campaign"]:
        names = "scenarios", "impl", "backend", "world", "expression", "tier", "seed", "like"
        filters = options.Filters(**{name: given[name] for name in names})
        cases = wanted.there.with_room(filters.cases())
        needs = needs.of_cases(cases, wanted.ranks_per_node, given["backend"] or ())
    return needs, fault_plans.for_head(cases, wanted.nodes, wanted.ranks_per_node, fault)


def run_once(command: OnNodes) -> int:
    """Run a command on nodes that are made for it; its exit code."""
    from shardproof.cluster.containers.needs import Needs

    needs = Needs.of_cases(command.cases, command.ranks_per_node)
    wanted = Shape(
        nodes=command.nodes, ranks_per_node=command.ranks_per_node, results=command.results
    )
    return head.run(command.words, wanted, needs, command.seen)


def _add(command: NodeCommand) -> None:
    """Add a command of a wing, with its ranks on nodes."""

    @options.grouped(ranks_per_node=1)
    def on_nodes(words: Words = None, *, wanted: Shape) -> None:
        raise typer.Exit(_on_nodes(command, words or (), wanted))

    clusters.command(command.name, help=command.help, context_settings=head.PASSING_ON)(on_nodes)


def _on_nodes(command: NodeCommand, words: Sequence[str], wanted: Shape) -> int:
    """Run ``command`` once for each rate between nodes that its ``words`` ask for, into one run
    folder; the gravest exit code.
    """
    wanted.limits(), wanted.slowed()  # refused at once
    plan = command.planned(words)
    if plan.dry_run:
        head.refuse("dry_run")
    asked = [wanted.bits_per_second or 0]
    if wanted.bits_per_second is None:
        asked = [*plan.rates] or asked
    plans = [plan.on(replace(wanted.there, rate=rate)) for rate in asked]
    ids = {name for one in plans for name in one.ids}
    backends = {name for one in plans for name in one.backends}
    needs = head.needs_of(ids, backends, wanted)
    seen, typed = head.own_folders(plan.names, plan.names), [command.name, *words]
    capped = [replace(wanted, bits_per_second=rate or None) for rate in asked]
    for each in capped:
        each.limits()  # refused before the first is started
    codes = []
    with head.run_folder(wanted.results) as folder:
        for each in capped:
            try:
                code = head.run(typed, replace(each, results=folder), needs, seen)
            except typer.Exit as refused:  # told; another rate may be had
                code = refused.exit_code
            codes.append(code)
            if code in (verdicts.BAD_INPUT, verdicts.INTERRUPTED):
                break
    return verdicts.gravest(codes)


for wing in wings():
    for command in wing.node_commands:
        _add(command)


@clusters.command("build")
def build(
    force: Annotated[
        bool, typer.Option("--force", help="also rebuild images that are up to date")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="also build images with DeepSpeed and MPI")
    ] = False,
) -> None:
    """Build the images if they are missing or old.

    \b
    IMAGE        first part of their names [shardproof]
    BASE_IMAGE   the image to build on
    TORCH        torch instead of the locked one, such as torch==2.14.0
    """
    from shardproof.cluster.containers import engine, image_inputs

    with head.engine_here() as client:
        for targets in (image_inputs.LEAN, image_inputs.EVERYTHING)[: 2 if everything else 1]:
            for image in map(engine.image_name, targets):
                if not force and not engine.is_old(client, image):
                    echo(f"{image} is up to date")
            engine.build(client, force, targets)


@clusters.command("clean")
def clean(
    everything: Annotated[bool, typer.Option("--all", help="also end active runs")] = False,
) -> None:
    """Remove leftovers of killed runs and of --keep."""
    from shardproof.cluster.containers import cluster

    with head.engine_here() as client:
        gone = cluster.clean(client, head.say, everything)
    raise typer.Exit(verdicts.HELD if gone else verdicts.NOT_DECIDED)
