"""``python -m tools.studies NAME``: measurements of the suite itself, kept as evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardproof import verdicts
from shardproof.cluster.shape import Shape, Words
from shardproof.commands import main, options
from shardproof.commands.console import echo
from shardproof.launch.process_control import cores

studies = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="""Measure the suite itself: false alarms, thresholds, its own cost, its models.

    \b
    python -m tools.studies NAME
      calibrate                  errors of clean runs next to the thresholds
      overhead                   what the suite costs a training step
      false-alarms --results R   how often `bench` is wrong on this machine
      model-check                whether the model of step times holds here
      backends                   equal bits and CPU seconds on gloo and mpi
      autopsies                  whether each hang, and only a hang, gets the right cause
      checkpoints 300            random clean saves, loads and reshapes: none may fail
      convergence                whether lossy and stale methods reach a target as soon
      convergence-on-nodes       the same in containers, with a network between them
      elastic                    workers and agents of torchrun are killed
      mutation 200               which systematic faults of the strategies survive
    """,
)


@studies.command(short_help="Measure clean runs beside the thresholds.")
def calibrate(
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="N", min=1, help="clean runs of each dtype")
    ] = 30,
    jobs: options.Jobs = None,
) -> None:
    """Measure the errors of clean runs and write them beside the thresholds.

    Writes suite/checks/calibration.json. Ends with exit code 1 if a threshold was raised above
    policy, or if twice the clean maximum is above it.
    """
    from shardproof.commands.console import make_console, print_line
    from tools.studies import calibrate as measuring

    console = make_console()
    measured = measuring.measure(seeds, jobs or cores(), console.print)
    measured.write()
    wrong = measuring.problems(measured, measuring.thresholds())
    for line in [*measuring.lines(measured), *wrong]:
        print_line(console, line)
    raise typer.Exit(verdicts.BROKEN if wrong else verdicts.HELD)


@studies.command()
def overhead() -> None:
    """Measure the suite's own cost of a step, of a small all-reduce, and of making schedules."""
    from tools.studies.overhead import sentences

    for sentence in sentences():
        echo(sentence)


@studies.command("false-alarms", short_help="How often `bench` errs on this machine.")
def false_alarms(
    results: Annotated[
        Path, typer.Option("--results", metavar="RUN", help="new or old", parser=options.named)
    ],
    alike: Annotated[int, typer.Option("--alike", metavar="N", help="A/A comparisons")] = 100,
    slowed: Annotated[int, typer.Option("--slowed", metavar="N", help="slowed sessions")] = 30,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", metavar="M", help="stop before the session that would pass it"),
    ] = None,
    also: Annotated[
        list[Path] | None,
        typer.Option("--also", metavar="RUN", help="a run whose A/A blocks count, too"),
    ] = None,
) -> None:
    """Compare a system with itself, and with itself made 10 % slower.

    Exit codes: 0 both aims met, 1 one missed, 2 bad input, 3 too few comparisons so far.
    """
    from tools.studies import false_alarms as study

    raise typer.Exit(study.run(results, alike, slowed, minutes, also or ()))


@studies.command("model-check", short_help="Does the alpha-beta model hold here?")
def model_check(
    implementation: Annotated[
        str, typer.Option("--implementation", metavar="NAME", help="family/name")
    ] = "reference/ddp",
    backend: Annotated[str, typer.Option("--backend", metavar="B")] = "gloo",
    world: Annotated[int, typer.Option("--world", metavar="N", help="ranks")] = 2,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", help="at least 2")] = 10,
    out: Annotated[Path | None, options.output("--out", "write the Markdown here, too")] = None,
    records: Annotated[
        Path | None, options.output("--records", "keep what the ranks measured (JSON)")
    ] = None,
) -> None:
    """Predict steps of three models by the alpha-beta model, and measure them.

    Exit codes: 0 all within 15 %, 1 one is not, or the ranks broke, 2 bad input, 3 the machine is
    too restless for a verdict.
    """
    from tools.studies import model_check as study

    raise typer.Exit(study.run(implementation, backend, world, rounds, out, records))


@studies.command(short_help="Equal bits, and CPU seconds, on several backends.")
def backends(
    scenario: options.Scenarios = None,
    backend: Annotated[
        list[str] | None,
        typer.Option("--backend", metavar="B", help="the last one is judged [in_memory gloo mpi]"),
    ] = None,
    world: options.World = None,
    expression: options.Expression = "",
    tier: options.Tier = "quick",
    count: Annotated[
        int | None, typer.Option("--cells", metavar="N", min=1, help="so many, drawn [all]")
    ] = None,
    seed: options.Seed = None,
) -> None:
    """Run the same cells on each backend in turns, and on the last again in another order.

    Exit codes: 0 all hold, have equal bits, and cost at most twice gloo's CPU at 4 ranks; 1 not so.
    """
    from shardproof.backends import BACKENDS
    from shardproof.errors import Problem, SelectionError, nearest
    from shardproof.scenarios.selection import Selection
    from shardproof.scenarios.vocabulary import installed
    from tools.studies import backends as study

    chosen = list(dict.fromkeys(backend or ("in_memory", "gloo", "mpi")))
    for name in chosen:
        if name not in BACKENDS:
            remedy = nearest(name, BACKENDS, "backends")
            raise SelectionError(Problem("--backend: unknown backend", remedy, name))
        if reason := BACKENDS[name].available():
            raise SelectionError(Problem(f"--backend: {reason}", "leave it out", name))
    selection = Selection(scenario or (), worlds=world or (), expression=expression, tier=tier)
    cells = selection.cases(installed())
    said, wrong = study.run(cells, chosen, count, seed or 0, lambda text: echo(text, err=True))
    for line in [*said, *wrong]:
        echo(line)
    raise typer.Exit(verdicts.BROKEN if wrong else verdicts.HELD)


@studies.command(short_help="Random clean saves, loads and reshapes: does any fail?")
@options.grouped()
def checkpoints(
    count: Annotated[int, typer.Argument(metavar="N", min=1, max=100_000)],
    impl: options.Impl = None,
    seed: options.Seed = None,
    *,
    session: options.Session,
) -> None:
    """Judge N random clean histories of saves and loads; one that fails is a false alarm.

    A reference strategy trains, saves once or several times in a format that is drawn, and is
    loaded by the same ranks, on another mesh, as another strategy or in another precision. The
    check `checkpoint` judges it: docs/checkpoints.md.

    
    python -m tools.studies checkpoints 300 --seed 16
    python -m tools.studies checkpoints 50 --impl 'reference/zero*'
    """
    from shardproof.campaign.histories import first_cases
    from shardproof.commands.execution import run_and_exit

    run_and_exit(first_cases(count, seed or 0, impl or ()), session)


@studies.command(short_help="Random fault plans and clean cases while every core is busy.")
def autopsies(
    plans: Annotated[
        int, typer.Option("--plans", metavar="N", min=0, max=100_000, help="faults to make")
    ] = 20,
    clean: Annotated[
        int, typer.Option("--clean", metavar="N", min=0, max=100_000, help="clean cases")
    ] = 100,
    seed: options.Seed = None,
    budget: options.Budget = None,
    jobs: options.Jobs = None,
    results: options.Results = None,
) -> None:
    """Make random faults in random systems, then judge clean ones, on a machine that is busy.

    A fault whose verdict, rank or sentence is not what its kind must give fails; so does a clean
    case that is said to hang. Every core is kept busy by a process that only burns it.

    \b
    python -m tools.studies autopsies --plans 100 --clean 500 --seed 15
    """
    from shardproof.commands.execution import run_and_exit
    from shardproof.errors import Problem, SelectionError
    from tools.studies import autopsies as study

    cases = [*study.planned(plans, seed or 0), *study.clean(clean, seed or 0)]
    if not cases:
        raise SelectionError(Problem("nothing to run", "give --plans or --clean", "0"))
    with study.busy_cores():
        run_and_exit(cases, options.Session(budget=budget, jobs=jobs, results=results))


@studies.command(short_help="Do lossy, local and stale methods reach a target as soon?")
def convergence(
    scenario: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SCENARIO]...", help="files or names [plans of the study]"),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", metavar="M", help="only this one; repeatable")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", metavar="N", min=2, help="so many [the file's]")
    ] = None,
    backend: Annotated[
        str,
        typer.Option("--backend", metavar="B", help="communication backend [the file's]"),
    ] = "",
    jobs: options.Jobs = None,
    results: options.Results = None,
    out: Annotated[
        Path | None, options.output("--out", "write the page here, its drawings beside it")
    ] = None,
    records: Annotated[
        Path | None, options.output("--records", "keep the losses of all trainings (JSON)")
    ] = None,
    again: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="judge these records, train nothing"),
    ] = None,
) -> None:
    """Train methods to a target loss beside dense synchronous training, with the same seeds.

    Compressors, local SGD and asynchronous SGD do not promise the same numbers; this asks what that
    costs. A method is non-inferior if it needs at most `margin` times the steps of the dense
    system, by the 95 % interval of a paired t over seeds. A scenario says what it expects of each
    method, and plants faults that equality cannot see.

    Where ranks are processes (backend gloo, as in the scenario cluster) trainings run one at a
    time, the page tells the seconds of the steps to the target beside the steps, and which method
    is there first. `convergence-on-nodes` trains on nodes with a network between them.

    \b
    python -m tools.studies convergence -j 1 --out convergence.md --records convergence.json
    python -m tools.studies convergence digits --method reference/ddp+topk1 --seeds 4
    python -m tools.studies convergence digits --backend gloo --seeds 4
    python -m tools.studies convergence --from convergence.json --out convergence.md

    Exit codes: 0 every method is what its scenario expects, 1 one is not, 2 bad input, 3 dense
    training misses the target, or ranks broke.
    """
    from shardproof.commands import supervision
    from shardproof.commands.console import make_console
    from shardproof.launch.nodes import Nodes
    from tools.studies.convergence import plan
    from tools.studies.convergence import study as of_studies

    chosen = [
        one.only(method or ()) for one in plan.read(plan.files(scenario or ()), seeds, backend)
    ]
    if (nodes := Nodes.here()) is not None:
        plan.require_room(chosen, nodes)
        options.wait_for(nodes)
    how = chosen, jobs or cores(), out, records, again
    if results is None:
        raise typer.Exit(of_studies.run(*how))
    console = make_console()

    def body(interrupts: supervision.Interrupts) -> int:
        return of_studies.run(*how, folder)

    def stopped() -> str:
        return "stopped: nothing was kept, for not all had been trained"

    with supervision.open_folder(results) as folder:
        raise typer.Exit(supervision.supervised(folder, console, body, stopped))


@studies.command(
    context_settings={"ignore_unknown_options": True},
    short_help="Train to a target loss on containers as nodes.",
)
@options.grouped(ranks_per_node=1)
def convergence_on_nodes(words: Words = None, *, wanted: Shape) -> None:
    """Train to a target loss with ranks in containers: `convergence`, with its options.

    
    python -m tools.studies convergence-on-nodes cluster --bandwidth 100mbit
    python -m tools.studies convergence-on-nodes mine.yaml --nodes 4 --seeds 8
    python -m tools.studies convergence-on-nodes charnames --backend gloo --nodes 3

    Nodes are those of `shardproof cluster bench`. The page tells steps, bytes and seconds to the
    target, and which method is there first; it is convergence.md in the run folder, with its
    drawings and with convergence.json, which `convergence --from` judges again.
    """
    from tools.studies.convergence import on_nodes

    raise typer.Exit(on_nodes.run(convergence, words or (), wanted))


@studies.command(short_help="Plant systematic faults in the reference strategies.")
def mutation(
    count: Annotated[int, typer.Argument(metavar="N", min=1, max=100_000, help="faults")],
    scenario: options.Scenarios = None,
    backend: options.BackendOption = None,
    expression: options.Expression = "",
    tier: options.Tier = "quick",
    seed: Annotated[
        int, typer.Option("--seed", metavar="S", min=0, help="another sample of faults")
    ] = 0,
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="MIN", min=0.01, help="minutes for planting"),
    ] = None,
    most: Annotated[
        int, typer.Option("--cases", metavar="M", min=1, help="cases that each fault is planted in")
    ] = 24,
    left: Annotated[
        Path | None,
        typer.Option("--left", metavar="FILE", help="plant what --out left there, no sample"),
    ] = None,
    jobs: options.Jobs = None,
    out: Annotated[Path | None, options.output("--out", "write what is left here (JSON)")] = None,
) -> None:
    """Change one place of impls/reference at a time, and see whether a case turns red.

    Faults are drawn by seed from all places where an operator applies: a call dropped, made twice,
    moved, or left out once; another op, group, root or dtype; a range, a comparison or a
    constant off by one; a scale or a copy lost; arguments exchanged. Each is planted in up to M
    cases that execute its line until one is red, first in those with the most triggers and
    features, for their seconds, that those before them do not have.

    Told apart: faults in lines that no case executes, and those that a reason of
    tools/studies/mutation/untaken.yaml explains; those without effect in any of the M cases (the
    bits of every tensor, all calls and bytes are as without it); those that only a budget of CPU
    seconds ended. Of a survivor is told what changed and no check minds.

    \b
    python -m tools.studies mutation 200 --seed 3
    python -m tools.studies mutation 50 zero-gpt zero-traits --tier full
    python -m tools.studies mutation 200 --out quick.json
    python -m tools.studies mutation 200 --left quick.json covering --tier full

    With scenarios or -k, faults are drawn from the lines that their cases execute. With --left,
    what an earlier study left over is planted in other cases, N of it at most; its kills and its
    seed count, and what is not planted again keeps its state.

    Exit codes: 0 none survived, 1 some did, 2 bad input, 3 no fault had an effect anywhere.
    """
    from shardproof.scenarios.selection import Selection
    from shardproof.scenarios.vocabulary import installed
    from tools.studies.mutation import earlier, study

    selection = Selection(scenario or (), backends=backend or (), expression=expression, tier=tier)
    before = None if left is None else earlier.read(left)
    cases = study.judged_cases(selection.cases(installed()))
    some = bool(scenario or expression)
    seconds = None if budget is None else budget * 60
    jobs, say = jobs or cores(), _to_stderr
    found = study.run(cases, count, seed, jobs, say, some, seconds, most, before)
    for one in found.left():
        echo(f"{one.text()}\n")
    echo(found.sentence())
    if out is not None:
        options.write(out, json.dumps(found.document(), indent=1) + "\n")
    if not (found.before or {"killed", "survived"} & {*found.counts}):
        raise typer.Exit(verdicts.NOT_DECIDED)
    raise typer.Exit(verdicts.BROKEN if found.counts["survived"] else verdicts.HELD)


def _to_stderr(text: str) -> None:
    echo(text, err=True)


@studies.command(short_help="Workers and agents of torchrun are killed: are the numbers right?")
def elastic(
    history: Annotated[
        list[str] | None,
        typer.Option("--history", metavar="H", help="only this one; repeatable [all]"),
    ] = None,
    runs: Annotated[
        int, typer.Option("--runs", metavar="N", min=1, max=100, help="of each history")
    ] = 2,
    records: Annotated[
        Path | None,
        typer.Option(
            "--records",
            metavar="FOLDER",
            help="keep what ranks and agents wrote",
            parser=options.named,
        ),
    ] = None,
    out: Annotated[Path | None, options.output("--out", "write the table here, too")] = None,
) -> None:
    """Train `reference/elastic` under `torchrun --nnodes=1:4`, and kill workers and agents.

    Real agents on this machine, one a member, meet by c10d and train over gloo. A worker, or an
    agent and its worker, is killed by SIGKILL at a place that a rank announces, and members join.
    torchrun starts all workers anew; they load the last checkpoint. Losses, parameters, optimizer
    state and buffers must be those of one process that is told the same members, to 1e-12 in fp64;
    each sample is trained on once; all runs of a history have equal bits. In `split` and `frozen`
    an agent alone is killed or stopped: its worker and a new group have one folder, and the later
    save must be refused.

    \b
    histories: worker, agent, both, late, split, frozen
    python -m tools.studies elastic --history both --runs 1
    python -m tools.studies elastic --records elastic --out elastic.md

    A run takes half a minute to a minute. Exit codes: 0 all hold, 1 one does not, or agents did
    something else than its history asks for, 2 bad input.
    """
    from shardproof.commands.supervision import Interrupts
    from shardproof.files import write_whole
    from tools.studies import elastic as study

    chosen = study.named(history or ())
    with Interrupts():
        page, code = study.run(chosen, runs, records, lambda text: echo(text, err=True))
    echo(page)
    if out is not None:
        write_whole(out, page + "\n")
    raise typer.Exit(code)


if __name__ == "__main__":
    main.main(studies)
