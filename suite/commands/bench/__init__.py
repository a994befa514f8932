"""The command ``bench``: its options, and which pairs, scaling cells or collectives they choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from shardproof import verdicts
from shardproof.commands import options
from shardproof.commands.options import FailOn
from shardproof.errors import Problem, SelectionError, nearest

if TYPE_CHECKING:
    from shardproof.bench.subjects import Cell, Pair, Subject
    from shardproof.commands.bench_run import Request


S = TypeVar("S", "Pair", "Cell")
#: Options that describe one pair on the command line.
_OF_PAIR = (
    *("option_a", "option_b", "mesh_a", "mesh_b", "param", "size"),
    *("workload", "batch", "micro_batches", "optimizer", "dtype"),
)
#: What to write for an option of checkpoints, and whose it is.
_OF_CHECKPOINTS = ("write `bench checkpoint`", "checkpoints")


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
    from shardproof.bench import sides
    from shardproof.bench.subjects import BLOCKS, LAUNCHES, LETTERS, Pair, Side
    from shardproof.bench.time_budget import Passes
    from shardproof.commands.bench import checkpoint, collectives
    from shardproof.commands.bench_run import Request
    from shardproof.registry import preflight

    if names == [collectives.NAME]:
        from shardproof.bench.collectives import Request as ToTime

        collectives.refuse(context)
        raise typer.Exit(
            collectives.run(
                ToTime(
                    backend or "gloo",
                    world or 2,
                    tuple(algorithm or ()),
                    ranks_per_node or 0,
                    collectives.parse_sizes(sizes or ()),
                    rounds,
                    deadline,
                ),
                results,
                dry_run,
            )
        )
    _refuse(context, collectives.OWN, "write `bench collectives`", "collectives")
    request = Request(
        budget,
        Passes(not no_memory, profile, score),
        fail_on=frozenset(fail_on or ()),
        shard=options.shard_of(shard),
    )
    typed = names is not None and _are_implementations(names)
    if names and not typed and (paths := _scaling_scenarios(names)):
        remedy = "name two implementations, or a scenario of pairs"
        _refuse(context, (*_OF_PAIR, "profile", "score", "no_memory", "goal"), remedy)
        _refuse(context, ("parameters",), *_OF_CHECKPOINTS)
        if FailOn.slower in request.fail_on:
            what = "--fail-on slower: scaling has a target, and no side that is slower"
            remedy = "write --fail-on goal: exit code 1 below the target"
            raise SelectionError(Problem(what, remedy, " ".join(names)))
        cells = _cells(paths, backend, world, blocks, launches, deadline)
        cells = _matching(cells, expression, "cell", "systems", [cell.title for cell in cells])
        preflight.check(cell.system.implementation for cell in cells)
        raise typer.Exit(_measure(cells, request, results, dry_run))
    if names is not None and typed:
        _refuse(context, ("parameters",), *_OF_CHECKPOINTS)
        if expression:
            remedy = "leave it out: A and B are one pair"
            raise SelectionError(Problem("-k chooses among pairs of scenarios", remedy, expression))
        _refuse(context, ("shard",), "leave it out: A and B are one pair", "scenarios")
        given = zip(LETTERS, names, (option_a, option_b), (mesh_a, mesh_b), strict=True)
        a, b = (
            Side(
                name,
                sides.parse_assignments(options or (), f"--option-{letter}"),
                sides.parse_mesh(mesh, f"--mesh-{letter}"),
            )
            for letter, name, options, mesh in given
        )
        params = sides.parse_assignments(param or (), "--param")
        pairs = [
            Pair(
                name="pair",
                a=a,
                b=b,
                backend=backend or "gloo",
                world=world or 2,
                workload=sides.spec_of(workload, size, params, batch, micro_batches, 0),
                optimizer=sides.default_optimizer(optimizer),
                dtype=dtype,
                size=size,
            )
        ]
    else:
        remedy = "write it into the speed scenario, or name two implementations"
        _refuse(context, _OF_PAIR, remedy)
        pairs = sides.read(names or [])
        pairs = _matching(pairs, expression, "pair", "pairs", [pair.name for pair in pairs])
        if parameters:
            pairs = checkpoint.sized(pairs, parameters)
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
    from shardproof.checks.results import LeftOut
    from shardproof.commands import bench_run
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
    with Session() as session:
        return bench_run.run(session, subjects, request, durations, results, cut)


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


def _scaling_scenarios(names: Sequence[str]) -> list[Path]:
    """The scaling scenarios that ``names`` name; none if they are all of pairs.

    :raises SelectionError: an unknown name, or scenarios of both kinds.
    """
    from shardproof.bench import sides
    from shardproof.scenarios.load import timed

    paths = sides.files(names)
    scaling = [path for path in paths if timed(path) == "scaling"]
    if scaling and len(scaling) < len(paths):
        remedy = "name scenarios of pairs in one command and those of scaling in another"
        raise SelectionError(Problem("two kinds of scenario", remedy, " ".join(names)))
    return scaling


def _cells(
    paths: Sequence[Path],
    backend: str,
    world: int | None,
    blocks: int | None,
    launches: int | None,
    deadline: float,
) -> list[Cell]:
    """The cells of scaling scenarios, as options change them.

    :raises InputError: faulty files, or options that do not fit.
    """
    from shardproof.bench.scaling import matrix

    cells = matrix.read(paths)
    if backend:
        moved = [replace(cell, backend=backend) for cell in cells]
        cells = list({cell.id: cell for cell in moved}.values())
    if world is not None:
        cells = matrix.with_worlds(cells, [world])
    changed = []
    for cell in cells:
        count = blocks or cell.blocks
        many = launches or min(cell.launches, count)
        changed.append(replace(cell, blocks=count, launches=many, deadline=deadline))
        matrix.check(changed[-1])
    return changed


def _refuse(
    context: typer.Context, parameters: Sequence[str], remedy: str, owner: str = "one pair"
) -> None:
    """Raise for one of ``parameters`` that was given, and does not belong to what was named."""
    for name in parameters:
        source, value = context.get_parameter_source(name), context.params[name]
        if source is not None and source.name != "DEFAULT" and value:
            option = "--bytes" if name == "sizes" else f"--{name.replace('_', '-')}"
            raise SelectionError(Problem(f"{option} belongs to {owner}", remedy, str(value)))


def _matching(
    subjects: Sequence[S], expression: str, noun: str, nouns: str, names: Sequence[str]
) -> list[S]:
    """The ``subjects``, whose ``names`` are ``nouns``, with ids that ``expression`` matches."""
    from shardproof.scenarios.select import compile_expression

    matches = compile_expression(expression)
    chosen = [subject for subject in subjects if matches(subject.id)]
    if not chosen:
        remedy = nearest(expression, names, nouns)
        raise SelectionError(Problem(f"-k matches no {noun}", remedy, expression))
    return chosen
