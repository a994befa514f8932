"""The command ``bench``: its options, and which pairs or scaling cells they choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardproof import verdicts
from shardproof.commands.options import FailOn
from shardproof.errors import Problem, SelectionError, nearest

if TYPE_CHECKING:
    from shardproof.bench.subjects import Pair, Subject
    from shardproof.commands.bench_run import Request


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
    results: Annotated[
        Path | None,
        typer.Option("--results", metavar="RUN", help="write into this run folder, new or old"),
    ] = None,
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
    shardproof bench peers --budget 15                 what fits into a quarter of an hour
    shardproof bench scaling                           strong and weak scaling
    shardproof bench strong -k 'pytorch/ddp and ::2::' --fail-on goal

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

    Of many comparisons some differ by chance: "in this report" says which differences stand beside
    all others (Holm); one that does not is inconclusive there. What does not fit into --budget, by
    past durations, is left out, printed and recorded; no comparison is cut short.

    Exit codes: 0 decided (slower is no failure unless --fail-on slower, below none unless --fail-on
    goal), 1 a crash, a hang or sides that do not train the same, 2 bad input, 3 inconclusive or
    nothing timed. What an option cannot change is refused: --fail-on slower where efficiencies are
    measured, --fail-on goal where no pair has a goal, -k beside A and B.
    """
    from shardproof.bench import sides
    from shardproof.bench.subjects import BLOCKS, LAUNCHES, Pair, Side
    from shardproof.bench.time_budget import Passes
    from shardproof.commands.bench_run import Request
    from shardproof.registry import preflight

    request = Request(
        budget, Passes(not no_memory, profile, score), fail_on=frozenset(fail_on or ())
    )
    of_pair = {
        "--option-a": option_a,
        "--option-b": option_b,
        "--mesh-a": mesh_a,
        "--mesh-b": mesh_b,
        "--param": param,
        "--size": size,
        **_typed(context, "workload", "batch", "micro_batches", "optimizer", "dtype"),
    }
    if names and not _are_implementations(names):
        from shardproof.commands import bench_scaling

        if paths := bench_scaling.files(names):
            of_pair |= {"--profile": profile, "--score": score, "--no-memory": no_memory}
            _refuse(of_pair | {"--goal": goal}, "name two implementations, or a scenario of pairs")
            if FailOn.slower in request.fail_on:
                what = "--fail-on slower: scaling has a target, and no side that is slower"
                remedy = "write --fail-on goal: exit code 1 below the target"
                raise SelectionError(Problem(what, remedy, " ".join(names)))
            cells = bench_scaling.chosen(
                paths, expression, backend, world, blocks, launches, deadline
            )
            preflight.check(cell.system.implementation for cell in cells)
            raise typer.Exit(_measure(cells, request, results, dry_run))
    if names is not None and _are_implementations(names):
        if expression:
            remedy = "leave it out: A and B are one pair"
            raise SelectionError(Problem("-k chooses among pairs of scenarios", remedy, expression))
        pairs = [
            Pair(
                name="pair",
                a=Side(
                    names[0],
                    sides.parse_assignments(option_a or (), "--option-a"),
                    sides.parse_mesh(mesh_a, "--mesh-a"),
                ),
                b=Side(
                    names[1],
                    sides.parse_assignments(option_b or (), "--option-b"),
                    sides.parse_mesh(mesh_b, "--mesh-b"),
                ),
                backend=backend or "gloo",
                world=world or 2,
                workload=sides.spec_of(
                    workload,
                    size,
                    sides.parse_assignments(param or (), "--param"),
                    batch,
                    micro_batches,
                    0,
                ),
                optimizer=sides.default_optimizer(optimizer),
                dtype=dtype,
                size=size,
            )
        ]
    else:
        _refuse(of_pair, "write it into the speed scenario, or name two implementations")
        pairs = _chosen(sides.read(names or []), expression)
    changes: dict[str, Any] = {
        "blocks": blocks,
        "launches": launches or min(LAUNCHES, blocks or BLOCKS),
        "goal": goal,
        "backend": backend or None,
        "world": world,
        "deadline": deadline,
    }
    asked = {key: value for key, value in changes.items() if value is not None}
    pairs = [replace(pair, **asked) for pair in pairs]
    for pair in pairs:
        sides.check(pair)
    ids = [pair.id for pair in pairs]
    if twice := [name for name in ids if ids.count(name) > 1]:
        remedy = "give one of them another name"
        raise SelectionError(Problem("two comparisons of one id", remedy, twice[0]))
    if FailOn.goal in request.fail_on and all(pair.goal is None for pair in pairs):
        what, remedy = "--fail-on goal: no pair here has a goal", "give one, e.g. --goal 1.10"
        raise SelectionError(Problem(what, remedy, ids[0]))
    if profile and any(pair.backend == "in_memory" for pair in pairs):
        remedy = "profile on gloo: threads of one process share its clocks"
        raise SelectionError(Problem("--profile needs ranks that are processes", remedy))
    preflight.check(side.implementation for pair in pairs for side in (pair.a, pair.b))
    raise typer.Exit(_measure(pairs, request, results, dry_run))


def _measure(
    subjects: Sequence[Subject],
    request: Request,
    results: Path | None,
    dry_run: bool,
) -> int:
    """Measure ``subjects``, or print what would be measured; the exit code."""
    from shardproof.bench.session import Session
    from shardproof.commands import bench_run, supervision
    from shardproof.runs.durations import Durations

    root = results.parent if results is not None else supervision.RESULTS
    durations = Durations(root / "durations.json")
    if dry_run:
        bench_run.dry_run(subjects, request, durations)
        return verdicts.HELD
    with Session() as session:
        return bench_run.run(session, subjects, request, durations, results)


def _are_implementations(names: Sequence[str]) -> bool:
    """Whether ``names`` are a pair; one name alone is a speed scenario or a mistake."""
    from shardproof import registry
    from shardproof.bench import sides

    timed = sides.known()
    if all(n in timed or n.endswith((".yaml", ".yml")) or Path(n).is_dir() for n in names):
        return False
    known = registry.names()
    alike = [name for name in names if "/" in name or ":" in name or name in known]
    if not alike:
        return False
    if len(names) != 2:
        what = f"a pair has two sides, not {len(names)}"
        raise SelectionError(Problem(what, "name A and B", " ".join(names)))
    for name in names:
        registry.check(name)
    return True


def _typed(context: typer.Context, *parameters: str) -> dict[str, object]:
    """The options of ``parameters`` that were given, by name; not those left at their default."""
    sources = {name: context.get_parameter_source(name) for name in parameters}
    return {
        f"--{name.replace('_', '-')}": context.params[name]
        for name, source in sources.items()
        if source is not None and source.name != "DEFAULT"
    }


def _refuse(given: Mapping[str, object], remedy: str) -> None:
    """Raise for an option that was given and does not belong to what was named."""
    for option, value in given.items():
        if value:
            raise SelectionError(Problem(f"{option} belongs to one pair", remedy, str(value)))


def _chosen(pairs: list[Pair], expression: str) -> list[Pair]:
    from shardproof.scenarios.select import compile_expression

    matches = compile_expression(expression)
    chosen = [pair for pair in pairs if matches(pair.id)]
    if not chosen:
        remedy = nearest(expression, [pair.name for pair in pairs], "pairs")
        raise SelectionError(Problem("-k matches no pair", remedy, expression))
    return chosen
