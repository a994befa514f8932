"""``shardproof cluster``: what ``shardproof`` judges, times and trains, on containers as nodes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from shardproof import verdicts
from shardproof.cluster import shape
from shardproof.commands import options
from shardproof.commands.console import echo
from shardproof.errors import Problem, SelectionError
from shardproof.wings import NodeCommand, wings

if TYPE_CHECKING:
    from shardproof.case import Case
    from shardproof.cluster.containers.caps import Caps
    from shardproof.cluster.containers.needs import Needs
    from shardproof.cluster.nodes.nodes import Nodes

clusters = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


#: Options that are not the cluster's go on to the command in its head.
_PASSING_ON = {"ignore_unknown_options": True}
#: Options of the command in the head that mean nothing there.
_NOT_THERE = {
    "on": "leave it out: leaders run in the head",
    "junit": "leave it out: junit.xml is in the run folder",
    "dry_run": "give it without `cluster`",
    "out": "leave it out: the page is in the run folder",
    "records": "leave it out: they are in the run folder",
    "again": "give it without `cluster`: nothing is trained",
}
#: Names on the command line of parameters that have another one.
_FLAGS = {"again": "from"}


@clusters.command("run", context_settings=_PASSING_ON)
@options.grouped()
def run(
    context: typer.Context,
    words: shape.Words = None,
    *,
    wanted: shape.OfOneRun,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="NAME", help="in the cluster that `up` made, with its nodes"),
    ] = None,
    fault: Annotated[
        str,
        typer.Option(
            "--fault",
            metavar="PLAN",
            help="done in one case, such as kill_node,node=1,case=2,step=1; not with --on",
        ),
    ] = "",
) -> None:
    """Run cases with ranks in containers, and judge them: `shardproof run`, with its options.

    \b
    shardproof cluster run                                      no word: the quick matrix
    shardproof cluster run ddp-gpt                              2 nodes of 2 ranks
    shardproof cluster run zero --nodes 4 --ranks-per-node 1
    shardproof cluster run ddp-gpt --impl mine:MyDDP            a class of your own
    shardproof cluster run my.yaml --cpus 0.5 --memory 2g       capped nodes
    shardproof cluster run ddp-gpt --bandwidth 100mbit          a slow network between nodes
    shardproof cluster run ddp-gpt --backend mpi                Open MPI over the nodes
    shardproof cluster run ddp-gpt --backend nccl               a GPU for each rank
    shardproof cluster run ddp-gpt --on lab                     in the cluster that `up lab` made
    shardproof cluster run ddp-gpt --fault kill_node,node=1     what comes of a node that is killed
    shardproof cluster run ddp-gpt --delay 10 --slow-node 1:cpus=0.5

    Builds the images if they are missing or old (from a checkout): those with DeepSpeed and MPI if
    a case needs one of them. The run folder is one that verify, report, compare and gate take like
    any other; run.json tells images, nodes, and which rank ran where. Cases of backend in_memory
    have ranks that are threads: they run in the head.
    --fault does something where the first rank of a node comes to a step (from 0; default 1) of a
    case (from 1, of those with a rank there): kill (that rank), kill_node, pause_node, cut_node
    (from the network), slow_node, fill_memory, fill_disk, stop_head, stop_client. Words: node=,
    case=, step=, phase=forward|backward|update, seconds= (of a pause or cut; default: to the end).
    Caps are measured before the run; more than 20 % off ends it with exit code 3 and both figures.
    A class or scenario file of your own is mounted read only, with its folder.
    """
    from shardproof.commands import run as in_head
    from shardproof.scenarios.vocabulary import installed

    there = wanted.there
    limits, slowed = wanted.limits(), wanted.slowed()
    given = _meant(in_head.run, words or (), there).params
    goes_on = given["resume"] or given["rerun_failed"]
    cases: list[Case] = []
    if goes_on and wanted.results is None:
        raise SelectionError(Problem("a run to go on with", "name it by --results", "--resume"))
    needs = _needs(given["scenarios"], given["backend"], wanted)
    if not (goes_on or given["campaign"]):  # bad input is told before anything is built
        names = "scenarios", "impl", "backend", "world", "expression", "tier", "seed", "like"
        selection = options.Filters(**{name: given[name] for name in names}).selection()
        cases = selection.cases(installed())
        if on is None:
            cases = in_head.with_room(cases, there)
            needs = needs.of_cases(cases, wanted.ranks_per_node, given["backend"] or ())
    left_out = "--shard" if given["shard"] else "--budget" if given["budget"] else ""
    faults = _planned(cases, there, fault, goes_on, left_out)
    if on is not None and faults is not None and not goes_on:
        what = "faults of nodes are made in a cluster of its own"
        remedy = f"leave --on out, or {'--fault' if fault else 'these cases'}"
        raise SelectionError(Problem(what, remedy, "--on"))
    own = _own(given["scenarios"] or (), given["impl"] or ())
    command = ["run", *(words or ())]
    if on is not None:
        _require_nothing_of_clusters(context)
        named = [*(given["scenarios"] or ()), *(given["impl"] or ())]
        needs = _needs(named, given["backend"], wanted)
        raise typer.Exit(_run_on(on, command, wanted.results, own, needs))
    needs = _with_all_packages(needs, wanted.all_packages or goes_on)
    where = there, wanted.results, own, limits, wanted.keep
    code = in_containers(command, *where, needs, faults, slow=slowed)
    raise typer.Exit(code)


def _planned(
    cases: Sequence[Case], nodes: Nodes, plan: str, goes_on: bool, cut_by: str = ""
) -> dict[str, Any] | None:
    """What the head is told of faults of nodes.

    ``cut_by``: the option that leaves out cases, maybe the one that is to be struck.

    :raises SelectionError: ``plan`` cannot be done.
    """
    from shardproof.cluster import fault_plans

    if plan and cut_by:
        what = f"{cut_by} may leave out the case that is to be struck"
        raise SelectionError(Problem(what, "choose cases by -k instead", f"--fault with {cut_by}"))
    if not goes_on:
        return fault_plans.for_head(cases, nodes.count, nodes.ranks_per_node, plan)
    if plan:
        what = "a run that goes on has its cases already"
        raise SelectionError(Problem(what, "leave one of the two out", "--fault with --resume"))
    return {}  # it may have cases of such faults


#: Parameters of ``run`` that say how its own cluster is.
_OF_CLUSTERS = {
    "nodes": "--nodes",
    "ranks_per_node": "--ranks-per-node",
    "cpus": "--cpus",
    "memory_bytes": "--memory",
    "bits_per_second": "--bandwidth",
    "fault": "--fault",
    "delay_ms": "--delay",
    "slow": "--slow-node",
    "all_packages": "--all-packages",
    "keep": "--keep",
}


def _require_nothing_of_clusters(context: typer.Context) -> None:
    """:raises SelectionError: `run --on` was given what a cluster is made with."""
    for name, flag in _OF_CLUSTERS.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            what, remedy = "--on takes a cluster as it is", f"leave {flag} out"
            raise SelectionError(Problem(what, remedy, flag))


def _run_on(
    name: str, command: Sequence[str], results: Path | None, own: Sequence[Path], needs: Needs
) -> int:
    from shardproof.cluster.containers import standing
    from shardproof.commands.supervision import RESULTS

    full = standing.full_name(name)
    with _engine() as client:
        there = standing.find(client, full)
        there.require_seen(own, (results or RESULTS).resolve())
        there.require_needs(needs)
        typed = ["shardproof", *sys.argv[1:]]
        with _run_folder(results) as folder:
            words = [*command, "--results", str(_made(folder))]
            return there.run(client, words, typed, folder, _say)


def _add(command: NodeCommand) -> None:
    """Add a command of a wing, with its ranks on nodes."""

    @options.grouped(ranks_per_node=1)
    def on_nodes(words: shape.Words = None, *, wanted: shape.OfOneRun) -> None:
        raise typer.Exit(_on_nodes(command, words or (), wanted))

    clusters.command(command.name, help=command.help, context_settings=_PASSING_ON)(on_nodes)


def _on_nodes(command: NodeCommand, words: Sequence[str], wanted: shape.OfOneRun) -> int:
    """Run ``command`` once for each rate between nodes that its ``words`` ask for, into one run
    folder; the gravest exit code.
    """
    there = wanted.there
    wanted.limits()  # refused at once
    slowed, plan = wanted.slowed(), command.planned(words)
    if plan.dry_run:
        _refuse("dry_run")
    asked = [wanted.bits_per_second or 0]
    if wanted.bits_per_second is None:
        asked = [*plan.rates] or asked
    plans = [plan.on(replace(there, rate=rate)) for rate in asked]
    ids = {name for one in plans for name in one.ids}
    backends = {name for one in plans for name in one.backends}
    needs = _with_all_packages(_needs(ids, backends, wanted), wanted.all_packages)
    limits = [replace(wanted, bits_per_second=rate or None).limits() for rate in asked]
    own, typed = _own(plan.names, plan.names), [command.name, *words]
    codes = []
    with _run_folder(wanted.results) as folder:
        for each in limits:
            where = there, folder, own, each, wanted.keep
            try:
                code = in_containers(typed, *where, needs, slow=slowed)
            except typer.Exit as refused:  # told; another rate may be had
                code = refused.exit_code
            codes.append(code)
            if code in (verdicts.BAD_INPUT, verdicts.INTERRUPTED):
                break
    return verdicts.gravest(codes)


for wing in wings():
    for command in wing.node_commands:
        _add(command)


@clusters.command("study", context_settings=_PASSING_ON)
@options.grouped(ranks_per_node=1)
def study(words: shape.Words = None, *, wanted: shape.OfOneRun) -> None:
    """Train to a target with ranks in containers.

    \b
    shardproof cluster study cluster --bandwidth 100mbit        dense, top-k and PowerSGD
    shardproof cluster study mine.yaml --nodes 4 --seeds 8
    shardproof cluster study charnames --backend gloo --nodes 3 --method reference/ddp+topk1

    As `cluster bench` in all else. The page tells steps, bytes and seconds to the target, and which
    method is there first; it is convergence.md in the run folder, with its drawings and with
    convergence.json, which `python -m tools.studies convergence --from` judges again.
    """
    from tools.studies.__main__ import convergence as in_head
    from tools.studies.convergence import plan

    there = wanted.there
    limits, slowed = wanted.limits(), wanted.slowed()
    given = _meant(in_head, words or (), there).params
    names = given["scenario"] or ()
    studies = plan.read(plan.files(names), given["seeds"], given["backend"])
    studies = [one.only(given["method"] or ()) for one in studies]
    plan.require_room(studies, there)
    systems = {run.system for one in studies for method in one.every for run in method.runs}
    backends = {one.first.backend for one in studies}
    needs = _with_all_packages(_needs(systems, backends, wanted), wanted.all_packages)
    own, command = _own(names, sorted(systems)), ["study", "convergence", *(words or ())]
    where = there, wanted.results, own, limits, wanted.keep
    code = in_containers(command, *where, needs, slow=slowed)
    raise typer.Exit(code)


def _needs(names: Iterable[str] | None, backends: Any, wanted: shape.Shape) -> Needs:
    """What the words of a command ask for; ``backends``: one, or several, or none."""
    from shardproof.cluster.containers.needs import Needs

    asked = [backends] if isinstance(backends, str) else list(backends or ())
    return Needs.of(names or (), asked, wanted.ranks_per_node)


def _with_all_packages(needs: Needs, wanted: bool) -> Needs:
    from shardproof.cluster.containers.image_inputs import EVERYTHING

    return replace(needs, targets=EVERYTHING) if wanted else needs


def _meant(command: Callable[..., None], words: Sequence[str], nodes: Nodes) -> Any:
    """The context of ``command`` with these words, which is to run in the head.

    :raises SelectionError: an option that means nothing there.
    """
    alone = typer.Typer(add_completion=False)
    alone.command()(command)
    name = f"shardproof {command.__name__}"
    found: Any = typer.main.get_command(alone).make_context(name, [*words])
    for option in _NOT_THERE:
        if found.params.get(option):
            _refuse(option)
    return found


def _refuse(option: str) -> NoReturn:
    """:raises SelectionError: ``option`` means nothing in the head."""
    flag = f"--{_FLAGS.get(option, option).replace('_', '-')}"
    raise SelectionError(Problem(f"{flag} is not for clusters", _NOT_THERE[option], flag))


def in_containers(
    command: Sequence[str],
    nodes: Nodes,
    results: Path | None,
    own: Sequence[Path],
    limits: Caps | None = None,
    keep: bool = False,
    needs: Needs | None = None,
    faults: Mapping[str, Any] | None = None,
    slow: Mapping[int, Caps] | None = None,
) -> int:
    """Run ``shardproof`` with the words of ``command``, and ``--results``, in a new cluster.

    :raises typer.Exit: containers cannot be had here, or are not as declared; told.
    :raises SelectionError: the run folder cannot be written.
    """
    from shardproof.cluster.containers import cluster, engine, gpus
    from shardproof.cluster.containers.caps import Caps
    from shardproof.cluster.containers.guardian import guarded
    from shardproof.cluster.containers.needs import Needs

    needs = needs or Needs()
    with _engine() as client:
        if needs.gpus.per_node:
            gpus.require(client, engine.torch_of_images())
        images = engine.build(client, targets=needs.targets)
        with _run_folder(results) as folder:
            _made(folder)
            made = cluster.Cluster(
                name=cluster.name_of_a_run(),
                nodes=nodes.count,
                ranks_per_node=nodes.ranks_per_node,
                results=folder,
                folder=Path.cwd(),
                images=images,
                own=own,
                caps=limits or Caps(),
                slow=slow or {},
                gpus=needs.gpus,
                command=["shardproof", *sys.argv[1:]],
                faults=faults,
            )
            with guarded(made.name, folder):
                return cluster.run(client, made, [*command, "--results", str(folder)], _say, keep)


@clusters.command("up")
@options.grouped()
def up(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="by which `run --on` and `down` find it")
    ] = "up",
    *,
    wanted: shape.Shape,
) -> None:
    """Start a cluster that stays while one works; `run --on NAME` runs in it at once.

    \b
    shardproof cluster up lab --nodes 4 --ranks-per-node 1
    shardproof cluster run ddp-gpt --on lab
    shardproof cluster down lab

    It sees the working folder, read only, and writes into its folder results; caps are measured
    now and before each run. Change the suite, and it has to be made anew. It has no GPUs, and
    DeepSpeed and MPI only with --all-packages.
    """
    from shardproof.cluster.containers import cluster, engine, image_inputs, standing
    from shardproof.commands.supervision import RESULTS

    full = standing.full_name(name)
    limits, slowed = wanted.limits(), wanted.slowed()
    own = readable([Path.cwd()])
    with _engine() as client, standing.alone(full) as held:
        standing.require_free(client, full)
        targets = image_inputs.EVERYTHING if wanted.all_packages else image_inputs.LEAN
        images = engine.build(client, targets=targets)
        made = cluster.Cluster(
            name=full,
            nodes=wanted.nodes,
            ranks_per_node=wanted.ranks_per_node,
            results=_made_folder(RESULTS.resolve()),
            folder=Path.cwd(),
            images=images,
            own=own,
            caps=limits,
            slow=slowed,
        )
        standing.up(client, made, _say, held)
    short = full.removeprefix("shardproof-")
    echo(f"{short}: {wanted.there}; `shardproof cluster run --on {short}`")


@clusters.command("build")
def build(
    force: Annotated[bool, typer.Option("--force", help="also those that are not old")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="also those with DeepSpeed and MPI")
    ] = False,
) -> None:
    """Build the images if they are missing or old.

    \b
    IMAGE        first part of their names [shardproof]
    BASE_IMAGE   the image to build on
    TORCH        another torch than the locked one, such as torch==2.14.0
    """
    from shardproof.cluster.containers import engine, image_inputs

    with _engine() as client:
        for targets in (image_inputs.LEAN, image_inputs.EVERYTHING)[: 2 if everything else 1]:
            for image in map(engine.image_name, targets):
                if not force and not engine.is_old(client, image):
                    echo(f"{image} is up to date")
            engine.build(client, force, targets)


@clusters.command("ps")
def ps() -> None:
    """List what clusters there are: containers and networks."""
    from shardproof.cluster.containers import cluster, standing

    with _engine() as client:
        there = cluster.parts(client)
        of_each = cluster.by_name(there)
        for part in there:
            name = cluster.label_of(part)
            state, does = (
                getattr(part, "status", "network"),
                cluster.what_it_does(name, of_each[name]),
            )
            runs = "".join(f"  with {run}" for run in standing.running(client, part))
            folder = standing.folder(part)
            echo(f"{part.name}  {state}  {does}{f' in {folder}' if folder else ''}{runs}")
        if not there:
            echo("no cluster", err=True)


@clusters.command("down")
def down(
    name: Annotated[str, typer.Argument(metavar="NAME", help="as `ps` lists it")],
) -> None:
    """End one cluster, whatever it does."""
    from shardproof.cluster.containers import cluster, standing

    if not cluster.is_of_one_run(name):
        name = standing.full_name(name)
    with _engine() as client:
        if not (there := cluster.parts(client, name)):
            what, remedy = "there is no such cluster", "`shardproof cluster ps` lists what there is"
            raise SelectionError(Problem(what, remedy, name))
        for run in (run for part in there for run in standing.running(client, part)):
            echo(f"{run} went on in it, and ends")
        take_back = standing.take_back(client, name)
        left = cluster.remove(client, name)
        take_back()
    if left:
        echo(f"could not be removed: {', '.join(left)}", err=True)
    else:
        echo(f"removed {name}: {len(there)} containers and networks")
    raise typer.Exit(verdicts.NOT_DECIDED if left else verdicts.HELD)


@clusters.command("clean")
def clean(
    everything: Annotated[bool, typer.Option("--all", help="also end runs that go on")] = False,
) -> None:
    """Remove what a killed run left behind, or --keep."""
    from shardproof.cluster.containers import cluster

    with _engine() as client:
        gone = cluster.clean(client, _say, everything)
    raise typer.Exit(verdicts.HELD if gone else verdicts.NOT_DECIDED)


def _say(text: str) -> None:
    echo(text, nl=False)
    sys.stdout.flush()


@contextlib.contextmanager
def _engine() -> Iterator[Any]:
    """A client of the container engine; what that cannot do ends the command with exit code 3."""
    from shardproof.cluster.containers import cluster, engine

    try:
        client = engine.client()
        with cluster.told_by_the_engine():
            yield client
    except engine.NoCluster as error:
        echo(f"precondition: {error}", err=True)
        raise typer.Exit(verdicts.NOT_DECIDED) from None


@contextlib.contextmanager
def _run_folder(given: Path | None) -> Iterator[Path]:
    """The run folder that ``--results`` gives, or a new one, made as no other command's.

    One that was not there before, and stays empty, is removed afterwards.

    :raises SelectionError: that cannot be made.
    """
    from shardproof.commands.supervision import RESULTS
    from shardproof.runs.run_folder import make_folder

    was_there = given is not None and given.exists()
    if given is not None:
        folder = given.resolve()
    else:
        with _told_unwritable(RESULTS):
            folder = make_folder(RESULTS.resolve(), "-cluster")
    try:
        yield folder
    finally:
        if not was_there:
            with contextlib.suppress(OSError):  # it holds something, or was never made
                folder.rmdir()


def _made(folder: Path) -> Path:
    """The run folder, which is there before anything runs.

    :raises SelectionError: it cannot be written, or holds something else.
    """
    from shardproof.runs.run_folder import require_run_or_new

    require_run_or_new(folder)
    return _made_folder(folder)


def _made_folder(folder: Path) -> Path:
    """:raises SelectionError: it cannot be made."""
    with _told_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _told_unwritable(folder: Path) -> Iterator[None]:
    """:raises SelectionError: what is inside cannot make ``folder``."""
    try:
        yield
    except OSError as error:
        what = f"results cannot be written: {error.strerror}"
        raise SelectionError(
            Problem(what, "choose another --results folder", file=str(error.filename or folder))
        ) from None


def _own(scenarios: Sequence[str], impl: Sequence[str]) -> list[Path]:
    """Folders of the user's that containers have to see.

    :raises SelectionError: see :func:`readable`.
    """
    files = [Path(name).resolve() for name in scenarios if Path(name).exists()]
    folders = {file if file.is_dir() else file.parent for file in files}
    if any(":" in name for name in impl) or files:
        folders.add(Path.cwd())
    return readable(folders)


def readable(paths: Iterable[Path]) -> list[Path]:
    """These folders and files, which containers have to see.

    :raises SelectionError: one of root's is for root only, as whom nothing runs in a container.
    """
    from shardproof.cluster.containers.cluster import OWN_USER

    found = sorted(paths)
    for path in found:
        kind, needed, mode = ("folder", 0o005, "rx") if path.is_dir() else ("file", 0o004, "r")
        if os.geteuid() == 0 and path.stat().st_mode & needed != needed:
            what = f"containers of root's run as user {OWN_USER}, who cannot read this {kind}"
            remedy = f"`chmod o+{mode}` it, or start this as another user"
            raise SelectionError(Problem(what, remedy, file=str(path)))
    return found
