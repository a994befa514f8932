"""``shardproof simulate``: what a rank of a large world holds and sends, by running its code."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated

import typer

from shardproof.commands.console import echo, is_json, make_console
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.estimate.command import _assigned, _mesh


def simulate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="a name of `shardproof estimate --models`")
    ] = "",
    impl: Annotated[
        str, typer.Option("--impl", metavar="NAME", help="implementation, e.g. reference/fsdp")
    ] = "reference/fsdp",
    mesh: Annotated[
        str, typer.Option("--mesh", metavar="A=N,...", help="size of each axis, e.g. shard=64")
    ] = "",
    accounting: Annotated[
        str,
        typer.Option("--accounting", metavar="ID", help="precision: A32, A16, M18, B8 or S4"),
    ] = "A32",
    batch: Annotated[int, typer.Option("--batch", min=1, help="samples of a micro-batch")] = 1,
    seq: Annotated[
        int, typer.Option("--seq", min=0, help="positions of a sample (0: the model's)")
    ] = 0,
    micro_batches: Annotated[
        int, typer.Option("--micro-batches", min=1, help="micro-batches of each rank in a step")
    ] = 1,
    layers: Annotated[
        int, typer.Option("--layers", min=0, help="number of layers (0: the model's)")
    ] = 0,
    attention: Annotated[
        str, typer.Option("--attention", metavar="FORM", help="flash, or math: keeps all scores")
    ] = "",
    recompute: Annotated[
        int, typer.Option("--recompute", min=0, help="compute every N layers again (0: none)")
    ] = 0,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="K=V", help="option of --impl, e.g. offload=optimizer"),
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="this rank only (default: the fullest)")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="RUN", help="hold simulated ranks against this run"),
    ] = None,
) -> None:
    """Run the real code of one rank of a large world, on tensors without values.

    \b
    shardproof simulate llama-7b --impl reference/fsdp --mesh shard=64
    shardproof simulate llama-7b --impl pytorch/fsdp2 --mesh shard=64 --recompute 1
    shardproof simulate gpt3-175b --impl reference/hybrid --mesh shard=8,tensor=8 --layers 12
    shardproof simulate --against results/RUN

    Both ledgers count what the rank allocates and what it sends, to the byte. A GB is 10^9
    bytes. Of the ranks at the ends of each axis the fullest is shown. Two steps run; the second
    one is shown. --against simulates every trained case of a run, and compares bytes of each
    class, peaks of each phase and all calls with those of the real ranks, tolerance 0.
    """
    if against is not None:
        from shardproof.simulate.compared import compare_run

        raise typer.Exit(compare_run(against))
    from shardproof.simulate import figures
    from shardproof.simulate.rank import simulate as run

    source = _source(
        model, impl, mesh, accounting, batch, seq, micro_batches, layers, attention, recompute,
        option or [],
    )
    world = math.prod(source.axes.values())
    if rank is not None and rank >= world:
        what = f"the mesh has {world} ranks"
        raise SelectionError(Problem(what, f"give a number below {world}", f"--rank {rank}"))
    ranks = [rank] if rank is not None else sorted({*figures.looked_at(source.axes)})
    if not is_json():
        echo(f"simulating {len(ranks)} of {world:,} ranks ...", err=True)
    found = [figures.figures(made) for made in run(source, ranks)]
    most = max(found, key=lambda each: each.peak)
    console = make_console()
    shown = " x ".join(f"{axis} {size}" for axis, size in source.axes.items())
    title = f"{model} on {shown}, {impl}: rank {most.rank}"
    if is_json():
        return console.print(figures.exact_table(found))
    for table in (
        figures.memory_table(title, most),
        figures.held_table(most),
        figures.traffic_table(most),
    ):
        console.print(table)
    return None
