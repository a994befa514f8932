"""``shardproof simulate``: count the bytes of one rank of a large world by running its code."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardproof import axes
from shardproof.commands import assigned, options
from shardproof.commands.console import echo, is_json, make_console, print_line
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.table import number
from shardproof.verdicts import BROKEN, HELD

if TYPE_CHECKING:
    from shardproof.costs.shapes import Shape
    from shardproof.simulate.own import OwnSource
    from shardproof.simulate.rank import SimulatedRank
    from shardproof.simulate.sources import ShapeSource

_SEE_MODELS = "name a model of `shardproof estimate --models`"
#: Forms of attention: the scores are computed again in backward, or kept.
_FORMS = ("flash", "math")


def simulate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="a name of `shardproof estimate --models`, or package.module:build",
        ),
    ] = "",
    impl: Annotated[
        str, typer.Option("--impl", metavar="NAME", help="implementation (default: reference/fsdp)")
    ] = "",
    mesh: Annotated[
        str, typer.Option("--mesh", metavar="A=N,...", help="size of each axis, e.g. shard=64")
    ] = "",
    accounting: Annotated[
        str,
        typer.Option(
            "--accounting", metavar="ID", help="precision and optimizer: A32, A16, M18, B8 or S4"
        ),
    ] = "A32",
    batch: assigned.Samples = 1,
    seq: assigned.Positions = 0,
    micro_batches: assigned.MicroBatches = 1,
    layers: Annotated[
        int, typer.Option("--layers", min=0, help="number of layers (0: the model's own)")
    ] = 0,
    attention: Annotated[
        str,
        typer.Option(
            "--attention", metavar="FORM", help="flash, or math, which keeps the matrix of scores"
        ),
    ] = "",
    recompute: Annotated[
        int, typer.Option("--recompute", min=0, help="recompute every N layers (0: none)")
    ] = 0,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="K=V", help="set an option of --impl: schedule=1f1b"),
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="show this rank, not the fullest one")
    ] = None,
    machine: Annotated[
        str,
        typer.Option("--machine", metavar="NAME", help="a100, h100, h200, b200, here (measured)"),
    ] = "h100",
    node: Annotated[
        int, typer.Option("--node", min=0, help="ranks in a node (0: the machine's own number)")
    ] = 0,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE.svg",
            help="draw memory over the step into this file",
            callback=options.writable,
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against", metavar="RUN", help="simulate the cases of this run, and compare"
        ),
    ] = None,
    faults: Annotated[
        bool,
        typer.Option("--faults", help="plant each fault that appears only at scale, and judge it"),
    ] = False,
) -> None:
    """Run the real code of one rank of a large world, on tensors without values.

    \b
    shardproof simulate llama-7b --impl reference/fsdp --mesh shard=64
    shardproof simulate llama-7b --impl pytorch/fsdp2 --mesh shard=64 --accounting A16
    shardproof simulate gpt2 --impl reference/pipeline --mesh pipe=4 --micro-batches 8 --rank 3
    shardproof simulate gpt3-175b --impl reference/hybrid --mesh shard=8,tensor=8 --layers 12
    shardproof simulate llama-7b --mesh shard=64 --machine a100 --node 8 --plot memory.svg
    shardproof simulate mypackage.model:build --impl pytorch/fsdp2 --mesh shard=64
    shardproof simulate --against results/RUN
    shardproof simulate --faults

    The ledgers of memory and traffic count what the rank allocates and sends, to the byte; a GB is
    10^9 bytes. Two steps are run, and the second is shown: the first creates the optimizer state.
    The ranks at the ends of each axis are simulated, and the fullest is shown; --json has all of
    them. `shardproof estimate` computes bytes from formulas instead (docs/simulate.md).

    Each rank is compared with the formulas of its strategy, tolerance 0: bytes held and sent. Exit
    code 1: a promise is broken.

    Seconds come from a model of --machine: a roofline for each operator, latency and bandwidth for
    each call. A call is hidden while compute does not wait for it. --plot draws bytes by class.

    --against compares the bytes and calls of each rank of a stored run with those of the same rank
    simulated. Exit code 1: one differs; 3: no case can be compared.

    --faults simulates each planted fault and its parent. Exit code 1: a fault does not break the
    promise that it names, or a parent breaks one.
    """
    if faults:
        if model or mesh or against is not None:
            what = "--faults names its own models and meshes, so others have no effect"
            given = model or f"--mesh {mesh}" if model or mesh else f"--against {against}"
            raise SelectionError(Problem(what, "leave them out, or leave --faults out", given))
        from shardproof.simulate.planted.command import plant

        raise typer.Exit(plant())
    if against is not None:
        if model or mesh:
            what = "--against simulates the cases of a run, so a model and a mesh have no effect"
            given = model or f"--mesh {mesh}"
            raise SelectionError(Problem(what, "leave both out, or leave --against out", given))
        from shardproof.simulate.compared import compare_run

        raise typer.Exit(compare_run(against))
    from shardproof.costs import shapes

    impl = impl or shapes.USUAL
    source = _source(model, impl, mesh, accounting, layers, attention, recompute, option or ())
    source = replace(source, work=shapes.BatchSize(batch, seq, micro_batches))
    world = math.prod(source.axes.values())
    if rank is not None and rank >= world:
        what = f"--rank is outside of the mesh, which has {world:,} ranks"
        raise SelectionError(Problem(what, f"give 0 to {world - 1:,}", str(rank)))
    source.require_shared(accounting)

    from shardproof.simulate import figures, machines
    from shardproof.simulate.seconds import KERNELS, StepTime, step_seconds

    ranks = figures.looked_at(source.axes)
    if rank is not None:
        # A stage receives numbers from its neighbours; a rank without stages can run alone.
        stages = axes.parts(source.axes, "layers")
        ranks = sorted({*ranks, rank}) if stages > 1 else [rank]
    on = machines.machine(machine, node)
    made = _simulated(source, ranks)
    times: dict[str, StepTime] = {k: step_seconds(made, on, source.axes, k) for k in KERNELS}
    if rank is not None:
        made = [one for one in made if one.rank == rank]
    found = [figures.figures(one, source.axes) for one in made]
    wrong, left_out = _promises(source, made, accounting)
    most = max(found, key=lambda each: each.peak)
    shown = " x ".join(f"{axis} {size:,}" for axis, size in source.axes.items())
    title = f"{source.name} on {shown}, {impl}: rank {most.rank:,}"
    if plot is not None:
        _draw(plot, title, next(one for one in made if one.rank == most.rank))
    console = make_console()
    if is_json():
        exact = *figures.exact_tables(found), figures.exact_time_table(times, on)
        for table in (*exact, figures.broken_table(wrong), figures.left_out_table(left_out)):
            console.print(table)
        raise typer.Exit(BROKEN if wrong else HELD)
    console.print(figures.memory_table(title, most, _notes(source, found, accounting)))
    console.print(figures.held_table(most))
    console.print(figures.traffic_table(most))
    console.print(figures.time_table(times, on))
    if wrong:
        console.print(figures.broken_table(wrong))
    judged = [part for part in ("memory", "traffic") if part not in left_out]
    if judged and not wrong:
        print_line(console, f"{' and '.join(judged)} as promised: {number(len(made), 'rank')}")
    if left_out:
        print_line(console, f"not judged, no formula for one rank: {', '.join(left_out)}")
    raise typer.Exit(BROKEN if wrong else HELD)


def _promises(
    source: ShapeSource | OwnSource, made: Sequence[SimulatedRank], accounting: str
) -> tuple[list[str], list[str]]:
    """The broken promises, and the parts of memory and traffic that are not judged."""
    from shardproof.costs import NoCostModel
    from shardproof.simulate.promised import broken, not_judged
    from shardproof.simulate.sources import ShapeSource

    try:
        # Formulas need the roles of a model's layers.
        if isinstance(source, ShapeSource):
            return broken(source, made, accounting), not_judged(source, made, accounting)
    except NoCostModel:
        pass
    return [], ["memory", "traffic"]


def _draw(file: Path, title: str, made: SimulatedRank) -> None:
    """Draw the memory of ``made`` over its last step into ``file``."""
    from shardproof.simulate.picture import picture

    options.write(file, picture(title, made.log, len(made.calls) - 1))


def _notes(source: ShapeSource | OwnSource, found: Sequence[Any], accounting: str) -> list[str]:
    """The notes below the first table: the model, the precision, the simulated ranks."""
    from shardproof.costs import shapes

    notes = [
        *source.about(),
        f"{accounting}: {shapes.accountings()[accounting]['says']}",
        "each class at its own peak; at one moment: the memory that the rank needs",
    ]
    if len(found) > 1:
        least = min(found, key=lambda each: each.peak)
        most = max(found, key=lambda each: each.peak)
        other = f"rank {least.rank:,} needs least, {least.peak / 1e9:,.3f} GB"
        told = other if least.peak < most.peak else "all need the same"
        notes.append(f"{len(found)} ranks were simulated: {told}; --rank N shows another")
    return notes


# -------------------------------------------------------------------------------- the request


def _source(
    model: str,
    impl: str,
    mesh: str,
    accounting: str,
    layers: int,
    attention: str,
    recompute: int,
    option: Sequence[str],
) -> ShapeSource | OwnSource:
    """The training that the words of the command line name.

    :raises SelectionError: one of them is unknown, or the implementation does not take it.
    """
    if not model:
        raise SelectionError(Problem("MODEL is missing", _SEE_MODELS))
    from shardproof.costs import shapes
    from shardproof.simulate import asked, own

    given, chosen = assigned.mesh(mesh), assigned.assigned(option, "--option", "schedule=1f1b")
    if recompute:
        chosen["recompute_every"] = recompute
    if ":" not in model:
        shape = _shape(shapes.model(model), layers, attention)
        return asked.source(shape, impl, given, accounting, chosen)
    if layers or attention:
        what = "--layers and --attention belong to the models of `shardproof estimate --models`"
        raise SelectionError(Problem(what, "leave both out", model))
    return asked.source(own.model_at(model), impl, given, accounting, chosen)


def _shape(shape: Shape, layers: int, attention: str) -> Shape:
    """``shape`` with so many layers and that form of attention, where they are given."""
    from shardproof.simulate import asked

    shape = asked.round_off(shape)
    if attention and attention not in _FORMS:
        what = "unknown form of attention"
        raise SelectionError(Problem(what, nearest(attention, _FORMS, "forms"), attention))
    if layers:
        shape = replace(shape, name=f"{shape.name} with {layers} layers", parameters=0)
    return replace(shape, layers=layers or shape.layers, attention=attention or shape.attention)


# ------------------------------------------------------------------------------------- the run


def _simulated(source: ShapeSource | OwnSource, ranks: Sequence[int]) -> list[SimulatedRank]:
    """The simulated ``ranks``; says on standard error which one runs.

    :raises SelectionError: the implementation cannot run on tensors without values.
    """
    from shardproof.simulate import asked
    from shardproof.simulate.rank import simulate as run

    world, begun, since = math.prod(source.axes.values()), 0, time.monotonic()

    def began(rank: int) -> None:
        nonlocal begun
        begun += 1
        if not is_json():
            passed = time.monotonic() - since
            of = f"{begun} of {len(ranks)}" if begun <= len(ranks) else "again"
            text = f"simulating rank {rank:,} of {world:,} ({of}), {passed:.0f} s"
            echo(text, err=True)

    try:
        return run(source, ranks, began)
    except Exception as error:
        raise SelectionError(asked.refused(source.implementation, error)) from error
