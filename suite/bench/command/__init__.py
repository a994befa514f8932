"""``shardproof bench``: what is timed, each kind by a command of its own.

A command reads its options and returns a plan; the group measures it (:func:`run`), or asks it what
it needs of a cluster (:func:`planned`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardproof.bench.command import options as asked
from shardproof.bench.command.dispatch import PAIR, SCALING, SPEED, ByWhatIsTimed, OfOneKind
from shardproof.commands import options

if TYPE_CHECKING:
    from shardproof.bench.command.collectives_plan import CollectivesPlan
    from shardproof.bench.command.plan import TimedPlan

Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCENARIO",
        help="files, folders, or names within scenarios/, such as strong or scaling/strong",
    ),
]


def run(plan: TimedPlan | CollectivesPlan) -> None:
    """Measure ``plan`` here, or on the nodes that this machine is the head of."""
    from shardproof.launch.nodes import Nodes

    raise typer.Exit(plan.on(Nodes.here()).run())


app = typer.Typer(
    cls=ByWhatIsTimed,
    result_callback=run,
    rich_markup_mode=None,
    help="""Measure how fast implementations, checkpoints and collectives are, and how they scale.

    \b
    shardproof bench reference/ddp pytorch/ddp --size 20m --world 2
    shardproof bench                                all pairs in scenarios/speed
    shardproof bench data-parallel -k zero3         the zero3 pairs of one scenario
    shardproof bench peers --budget 15              only what fits in 15 minutes
    shardproof bench scaling                        strong and weak scaling
    shardproof bench strong -k 'pytorch/ddp and ::2::' --fail-on goal
    shardproof bench collectives --world 4          collectives of gloo and of Shardproof
    shardproof bench checkpoint --parameters 200M   time of saves and loads

    You may omit the subcommand: `bench A B` runs `pair`; `bench SCENARIO` runs `speed` or
    `scaling`, depending on the kind of scenario. Each subcommand has its own options and --help.

    \b
    Exit codes: 0 every result was decided
                1 a crash, a hang, or A and B train differently;
                  with --fail-on slower: also the verdict `slower`,
                  with --fail-on goal: also the verdict `below`
                2 bad input
                3 a result is inconclusive, or nothing was timed
    """,
)


@app.command(PAIR, cls=OfOneKind, short_help="Compare two implementations, A and B.")
@options.grouped()
def pair(
    names: Annotated[list[str], typer.Argument(metavar="A B", help="two implementations")],
    *,
    given: asked.OnePair,
    how: asked.How,
    of_steps: asked.OfSteps,
) -> Any:
    """Compare the speed of A and B: blocks of steps in the order A B B A, with both sides alive in
    the same ranks.

    \b
    shardproof bench reference/ddp pytorch/ddp --size 20m --world 2
    shardproof bench reference/ddp pytorch/ddp --option-b gradient_as_bucket_view=true

    Ratios are A over B, from medians of blocks, with the 95 % interval of a paired t on their logs;
    p comes from the exact sign-flip permutation test. A/A compares A with a twin of A and shows the
    noise of this machine. The margin is 5 % or the A/A half-width, whichever is larger.

    \b
    faster, slower     certain, and at least the margin
    same               certain to be within the margin
    small difference   certain, but smaller than the margin
    inconclusive       none of these; the smallest effect that could be seen is printed
    """
    from shardproof.bench.command.plan import of_pair
    from shardproof.bench.command.time_budget import Passes

    return of_pair(names, given, how, of_steps, Passes(not of_steps.no_memory, of_steps.score))


@app.command(SPEED, cls=OfOneKind, short_help="Compare all pairs that are listed in a scenario.")
@options.grouped()
def speed(
    names: Names = None, *, selected: asked.Selected, how: asked.How, of_steps: asked.OfSteps
) -> Any:
    """Compare the pairs listed in scenarios (default: scenarios/speed), as `bench pair` does.

    \b
    shardproof bench data-parallel -k zero3
    shardproof bench --shard 1/4 --results part1       part 1 of 4: see `merge`
    shardproof bench peers --budget 15                 only what fits in 15 minutes

    Among many comparisons some differ by chance: "in this report" marks the differences that remain
    after a correction for this (Holm). A pair whose past duration does not fit into --budget is
    left out, and the output and the run name it; no comparison is cut short.
    """
    from shardproof.bench.command.plan import of_pairs
    from shardproof.bench.command.time_budget import Passes

    passes = Passes(not of_steps.no_memory, of_steps.score)
    return of_pairs(names or [SPEED], selected, how, of_steps, passes)


@app.command(SCALING, cls=OfOneKind, short_help="Compare the speed of 1 rank and of N ranks.")
@options.grouped()
def scaling(names: Names = None, *, selected: asked.Selected, how: asked.How) -> Any:
    """Compare one rank with N ranks, strong and weak (default: all of scenarios/scaling).

    \b
    shardproof bench strong -k 'pytorch/ddp and ::2::' --fail-on goal
    shardproof bench my.yaml --dry-run

    \b
    holds, below       efficiency is certain to reach, or to miss, its target (80 %)
    oversubscribed     more ranks than physical cores: not measured; a modelled figure is printed

    docs/scaling.md has the details.
    """
    from shardproof.bench.command.plan import of_cells

    return of_cells(names or [SCALING], selected, how)


@app.command(cls=OfOneKind, short_help="Measure how fast checkpoints are saved and loaded.")
@options.grouped()
def checkpoint(
    names: Names = None,
    *,
    of: asked.OfCheckpoints,
    selected: asked.Selected,
    how: asked.How,
    goal: asked.Goal,
) -> Any:
    """Compare saves, loads and stalls of checkpoints (default: scenarios/speed/checkpoint.yaml).

    \b
    shardproof bench checkpoint --parameters 200M --blocks 6 --launches 1
    shardproof bench checkpoint -k stall --fail-on goal

    Each timed segment is one save or one load; there is no A/A. Also measures the bytes read when
    one rank fewer loads (at most 1.05 times the bytes needed), and the resident memory above the
    state while saving (at most the largest tensor). Files lie in TMPDIR: that disk is measured.
    """
    from shardproof.bench.command.plan import of_pairs
    from shardproof.bench.command.time_budget import Passes
    from shardproof.bench.sides import sized

    resize = partial(sized, text=of.parameters) if of.parameters else list
    return of_pairs(names or ["checkpoint"], selected, how, goal, Passes(), resize)


@app.command(cls=OfOneKind, short_help="Compare the backend's collectives with Shardproof's.")
@options.grouped()
def collectives(of: asked.OfCollectives) -> Any:
    """Measure, in turn, the backend's collectives and Shardproof's, made of send and recv.

    \b
    shardproof bench collectives                                   gloo, 2 ranks, 4 B to 64 MiB
    shardproof bench collectives --world 4 --ranks-per-node 2      also `hierarchical`
    shardproof bench collectives --algorithm ring --bytes 16MiB --rounds 31

    Nothing is judged. docs/collectives.md has the definitions.
    """
    from shardproof.bench.command.collectives_plan import CollectivesPlan

    return CollectivesPlan(of)


def planned(words: Sequence[str]) -> TimedPlan | CollectivesPlan:
    """The subjects that the ``words`` of a command line have timed; nothing is measured.

    :raises InputError: words that do not fit each other, or what they name.
    """
    group: Any = typer.main.get_command(app)
    name, *rest = group.named(words)
    with group.context_class(group, info_name="shardproof bench") as parent:
        command = group.commands[name]
        with command.make_context(name, rest, parent=parent) as context:
            plan: TimedPlan | CollectivesPlan = command.invoke(context)
            return plan
