"""The command ``bench``: its options; what they choose: ``choice.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardproof import verdicts
from shardproof.commands import options
from shardproof.commands.options import FailOn

if TYPE_CHECKING:
    from shardproof.bench.command.bench_run import Request
    from shardproof.bench.subjects import Subject


def bench(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="A B | SCENARIO",
            help="two implementations, or timed scenarios (default: all of scenarios/speed)",
        ),
    ] = None,
    expression: Annotated[
        str, typer.Option("-k", metavar="EXPR", help="only pairs or cells whose id matches")
    ] = "",
    backend: Annotated[
        str, typer.Option("--backend", metavar="B", help="communication backend")
    ] = "",
    world: Annotated[
        int | None, typer.Option("--world", metavar="N", min=1, max=1024, help="number of ranks")
    ] = None,
    workload: Annotated[
        str, typer.Option("--workload", metavar="W", help="model and data")
    ] = "charnames_gpt",
    size: Annotated[
        str, typer.Option("--size", metavar="S", help="size preset of the model, e.g. 20m")
    ] = "",
    param: Annotated[
        list[str] | None, typer.Option("--param", metavar="K=V", help="a parameter of the model")
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", metavar="N", min=1, max=4096, help="samples a step, all ranks")
    ] = 16,
    micro_batches: Annotated[
        int, typer.Option("--micro-batches", metavar="M", min=1, max=64, help="per rank and step")
    ] = 1,
    optimizer: Annotated[
        Literal["adamw", "sgd"],
        typer.Option("--optimizer", help="the same kernel on both sides"),
    ] = "adamw",
    dtype: Annotated[str, typer.Option("--dtype", help="dtype of the model")] = "float32",
    option_a: Annotated[
        list[str] | None, typer.Option("--option-a", metavar="K=V", help="option of A; a.b=V nests")
    ] = None,
    option_b: Annotated[
        list[str] | None, typer.Option("--option-b", metavar="K=V", help="option of B")
    ] = None,
    mesh_a: Annotated[
        str, typer.Option("--mesh-a", metavar="AXIS=N,...", help="mesh of A (default: one axis)")
    ] = "",
    mesh_b: Annotated[str, typer.Option("--mesh-b", metavar="AXIS=N,...", help="mesh of B")] = "",
    algorithm: Annotated[
        list[str] | None,
        typer.Option("--algorithm", metavar="A", help="of collectives: only this one (repeatable)"),
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option("--ranks-per-node", metavar="L", min=1, help="of collectives: hierarchical"),
    ] = None,
    sizes: Annotated[
        list[str] | None,
        typer.Option("--bytes", metavar="S", help="of collectives: 4, 64KiB, 16MiB (repeatable)"),
    ] = None,
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="R", min=1, max=1000, help="of collectives")
    ] = 7,
    parameters: Annotated[
        str,
        typer.Option("--parameters", metavar="N", help="of checkpoints: the model's, e.g. 200M"),
    ] = "",
    blocks: Annotated[
        int | None, typer.Option("--blocks", metavar="N", min=2, max=100_000, help="A B B A blocks")
    ] = None,
    launches: Annotated[
        int | None,
        typer.Option("--launches", metavar="L", min=1, max=1000, help="sets of fresh ranks"),
    ] = None,
    goal: Annotated[
        float | None,
        typer.Option("--goal", metavar="R", min=0.01, help="upper end of A over B, at most"),
    ] = None,
    fail_on: Annotated[
        list[FailOn] | None,
        typer.Option("--fail-on", help="exit code 1 for `slower`, or a missed `goal` (target)"),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="afterwards: where a step's time goes, by phase")
    ] = False,
    score: Annotated[
        bool, typer.Option("--score", help="afterwards: each side beside its predicted step")
    ] = False,
    no_memory: Annotated[
        bool,
        typer.Option("--no-memory", help="leave out the passes of each side alone: bytes, energy"),
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="MINUTES", min=0.01, help="leave out what does not fit"),
    ] = None,
    deadline: Annotated[
        float, typer.Option("--deadline", metavar="S", min=1, help="seconds of a launch, at most")
    ] = 900.0,
    results: options.Results = None,
    shard: options.ShardOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what would be timed, and time nothing")
    ] = False,
) -> None:
    """Compare the speed of A and B on this machine: blocks of steps in the order A B B A, with both
    sides alive in the same ranks. With a scaling scenario: one rank beside N (docs/scaling.md).

    \b
    shardproof bench reference/ddp pytorch/ddp --size 20m --world 2
    shardproof bench reference/ddp pytorch/ddp --option-b gradient_as_bucket_view=true
    shardproof bench                                   every pair in scenarios/speed
    shardproof bench data-parallel -k zero3 --profile  one of them, and where its time goes
    shardproof bench --shard 1/4 --results part1       a quarter of them: see `shardproof merge`
    shardproof bench peers --budget 15                 what fits into a quarter of an hour
    shardproof bench scaling                           strong and weak scaling
    shardproof bench strong -k 'pytorch/ddp and ::2::' --fail-on goal
    shardproof bench collectives --world 4             ring, trees, ... beside gloo's own all-reduce
    shardproof bench checkpoint --parameters 200M      saves, loads, stalls beside PyTorch's own

    SCENARIO: a file, a folder, a name (strong) or folder/name (scaling/strong) of scenarios/.

    Ratios are A over B, from medians of blocks, with the 95 % interval of a paired t on their logs;
    p is that of the exact sign-flip permutation. A/A compares A with its own twin and shows the
    noise of this machine. The margin is 5 % or the A/A half-width, whichever is larger.

    \b
    faster, slower     certain, and at least the margin
    same               certain to be within the margin
    small difference   certain, but smaller than the margin
    inconclusive       neither; the smallest effect that could be seen stands beside it

    \b
    holds, below       efficiency is certain to reach, or to miss, its target (80 %)
    oversubscribed     more ranks than physical cores: not measured, a modelled figure beside it

    Pairs of checkpoints time one save or load a segment, without A/A, and count: bytes read where
    one rank less loads (at most 1.05 of those needed), and resident memory above the state while
    saving (at most the largest tensor). Files lie in TMPDIR: that disk is measured.

    Of many comparisons some differ by chance: "in this report" says which differences stand beside
    all others (Holm); one that does not is inconclusive there. What does not fit into --budget, by
    past durations, is left out, printed and recorded; no comparison is cut short.

    Exit codes: 0 decided (slower is no failure unless --fail-on slower, below none unless --fail-on
    goal), 1 a crash, a hang or sides that do not train the same, 2 bad input, 3 inconclusive or
    nothing timed. What an option cannot change is refused: --fail-on slower where efficiencies are
    measured, --fail-on goal where no pair has a goal, -k beside A and B.
    """
    from shardproof.bench.command import choice, collectives
    from shardproof.launch.nodes import Nodes

    nodes = Nodes.here()
    if names == [collectives.NAME]:
        request = collectives.chosen(context, nodes)
        raise typer.Exit(collectives.run(request, results, dry_run))
    subjects, how = choice.chosen(context, nodes)
    raise typer.Exit(_measure(subjects, how, results, dry_run))


def _measure(
    subjects: Sequence[Subject],
    request: Request,
    results: Path | None,
    dry_run: bool,
) -> int:
    """Measure ``subjects``, or print what would be measured; the exit code."""
    from shardproof.bench.command import bench_run
    from shardproof.bench.session import Session
    from shardproof.checks.results import LeftOut
    from shardproof.commands.run import wait_for
    from shardproof.launch.nodes import Nodes
    from shardproof.runs.durations import Durations
    from shardproof.runs.shard import Cut

    durations = Durations.of_user()
    cut = None
    if request.shard is not None:
        groups = {subject.id: " ".join(subject.group) for subject in subjects}
        lines = (LeftOut(each.id, None, each.to_dict(), "").line() for each in subjects)
        cut = Cut.of(lines, groups, request.shard)
        own = cut.names(request.shard.index)
        subjects = [subject for subject in subjects if subject.id in own]
    if dry_run:
        bench_run.dry_run(subjects, request, durations)
        return verdicts.HELD
    wait_for(Nodes.here())
    with Session() as session:
        return bench_run.run(session, subjects, request, durations, results, cut)
