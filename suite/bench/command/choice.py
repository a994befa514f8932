"""What a command line of ``bench`` chooses: pairs, or cells of scaling, and how to time them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from shardproof.backends import BACKENDS, USUAL_PROCESSES
from shardproof.bench.command import collectives
from shardproof.commands import options
from shardproof.commands.console import echo
from shardproof.commands.options import FailOn
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.table import number

if TYPE_CHECKING:
    from shardproof.bench.command.bench_run import Request
    from shardproof.bench.subjects import Cell, Pair, Subject
    from shardproof.launch.nodes import Nodes

S = TypeVar("S", "Pair", "Cell")
#: Options that describe one pair on the command line.
_OF_PAIR = (
    *("option_a", "option_b", "mesh_a", "mesh_b", "param", "size"),
    *("workload", "batch", "micro_batches", "optimizer", "dtype"),
)
#: What to write for an option of checkpoints, and whose it is.
_OF_CHECKPOINTS = ("write `bench checkpoint`", "checkpoints")


def chosen(context: typer.Context, nodes: Nodes | None) -> tuple[list[Subject], Request]:
    """What the command line of ``context`` has timed, and how; ``nodes``: where its ranks are.

    :raises InputError: words that do not fit each other, or what they name.
    """
    from shardproof.registry import preflight

    given: Any = SimpleNamespace(**context.params)
    names = list(given.names or ())
    _refuse(context, collectives.OWN, "write `bench collectives`", "collectives")
    request = _request(given)
    typed = _are_implementations(names)
    subjects: list[Subject] = []
    if names and not typed and (paths := _scaling_scenarios(names)):
        cells = _between(_cells(context, given, paths, request), nodes)
        preflight.check(cell.system.implementation for cell in cells)
        subjects += cells
    else:
        pairs = _typed(context, given, names) if typed else _read(context, given, names)
        pairs = _changed(pairs, given, request)
        subjects += pairs
        preflight.check(side.implementation for pair in pairs for side in (pair.a, pair.b))
    return subjects if nodes is None else _with_room(subjects, nodes), request


def _request(given: Any) -> Request:
    from shardproof.bench.command.bench_run import Request
    from shardproof.bench.time_budget import Passes

    return Request(
        given.budget,
        Passes(not given.no_memory, given.profile, given.score),
        fail_on=frozenset(map(FailOn, given.fail_on or ())),
        shard=options.shard_of(given.shard),
    )


def rates(context: typer.Context) -> list[int]:
    """The bits per second that the cells of ``context`` ask for, in their order; 0: all.

    :raises InputError: faulty files, a name that no file has, or cells that ask for none beside
        cells that do.
    """
    from shardproof.launch.nodes import bits_per_second

    given: Any = SimpleNamespace(**context.params)
    names = list(given.names or ())
    if not names or _are_implementations(names) or not (paths := _scaling_scenarios(names)):
        return []
    cells = _cells(context, given, paths, _request(given))
    asked = dict.fromkeys(cell.bandwidth for cell in cells)
    if "" in asked and len(asked) > 1:
        what = "some of these cells ask for bandwidths, others would be timed at each of them"
        raise SelectionError(Problem(what, "time them by two commands", " ".join(names)))
    return [bits_per_second(text) for text in asked if text]


def _between(cells: Sequence[Cell], nodes: Nodes | None) -> list[Cell]:
    """Those that are timed here: of cells between nodes the ones of this network.

    :raises SelectionError: there is none.
    """
    from shardproof.launch.nodes import bits_per_second

    def is_here(cell: Cell) -> bool:
        if not cell.bandwidth:
            return True
        return nodes is not None and bits_per_second(cell.bandwidth) == nodes.rate

    here = [cell for cell in cells if is_here(cell)]
    if not here:
        what = "these cells are between nodes that send with " + ", ".join(
            dict.fromkeys(cell.bandwidth for cell in cells)
        )
        remedy = "`shardproof cluster bench`, with no --bandwidth or one of these"
        raise SelectionError(Problem(what, remedy, cells[0].name))
    if len(here) < len(cells) and nodes is None:
        left = number(len(cells) - len(here), "cell")
        echo(f"{left} between nodes left aside: `shardproof cluster bench` times them", err=True)
    return here


def _with_room(subjects: Sequence[Subject], nodes: Nodes) -> list[Subject]:
    """Those whose ranks fit ``nodes``; a cell that does not is modelled.

    :raises SelectionError: none fits, or messages of one are not delayed as declared.
    """
    from shardproof.bench.subjects import Cell

    def fits(subject: Subject) -> bool:
        return isinstance(subject, Cell) or nodes.has_room(subject.backend, subject.world)

    room = [subject for subject in subjects if fits(subject)]
    if not room:
        least = min(subject.world for subject in subjects)
        what = f"no comparison fits {nodes}: they need {least} or more"
        raise SelectionError(Problem(what, "give more --nodes or --ranks-per-node"))
    for subject in room:
        if why := nodes.not_far(subject.backend):
            raise SelectionError(Problem(why, "leave --delay out, or time gloo", subject.id))
    if len(room) < len(subjects):
        left = number(len(subjects) - len(room), "comparison")
        echo(f"{nodes}: {left} of more ranks left aside", err=True)
    return room


def _typed(context: typer.Context, given: Any, names: Sequence[str]) -> list[Pair]:
    """The pair of the two implementations that were named."""
    from shardproof.bench import sides
    from shardproof.bench.subjects import LETTERS, Pair, Side

    _refuse(context, ("parameters",), *_OF_CHECKPOINTS)
    if given.expression:
        remedy = "leave it out: A and B are one pair"
        what = "-k chooses among pairs of scenarios"
        raise SelectionError(Problem(what, remedy, given.expression))
    _refuse(context, ("shard",), "leave it out: A and B are one pair", "scenarios")
    own = (given.option_a, given.option_b), (given.mesh_a, given.mesh_b)
    a, b = (
        Side(
            name,
            sides.parse_assignments(assigned or (), f"--option-{letter}"),
            sides.parse_mesh(mesh, f"--mesh-{letter}"),
        )
        for letter, name, assigned, mesh in zip(LETTERS, names, *own, strict=True)
    )
    params = sides.parse_assignments(given.param or (), "--param")
    batch = given.batch, given.micro_batches
    pair = Pair(
        name="pair",
        a=a,
        b=b,
        backend=given.backend or USUAL_PROCESSES,
        world=given.world or 2,
        workload=sides.spec_of(given.workload, given.size, params, *batch, 0),
        optimizer=sides.default_optimizer(given.optimizer),
        dtype=given.dtype,
        size=given.size,
    )
    return [pair]


def _read(context: typer.Context, given: Any, names: Sequence[str]) -> list[Pair]:
    """The pairs of speed scenarios."""
    from shardproof.bench import sides
    from shardproof.bench.command import checkpoint

    remedy = "write it into the speed scenario, or name two implementations"
    _refuse(context, _OF_PAIR, remedy)
    pairs = sides.read(names)
    pairs = _matching(pairs, given.expression, "pair", "pairs", [pair.name for pair in pairs])
    return checkpoint.sized(pairs, given.parameters) if given.parameters else pairs


def _changed(pairs: Sequence[Pair], given: Any, request: Request) -> list[Pair]:
    """``pairs`` as options change them.

    :raises InputError: options that do not fit.
    """
    from shardproof.bench import sides
    from shardproof.bench.subjects import BLOCKS, LAUNCHES

    changes: dict[str, Any] = {
        "blocks": given.blocks,
        "launches": given.launches or min(LAUNCHES, given.blocks or BLOCKS),
        "goal": given.goal,
        "backend": given.backend or None,
        "world": given.world,
        "deadline": given.deadline,
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
    if given.profile and any(BACKENDS[pair.backend].threads for pair in pairs):
        remedy = "profile on gloo: threads of one process share its clocks"
        raise SelectionError(Problem("--profile needs ranks that are processes", remedy))
    return pairs


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
    context: typer.Context, given: Any, paths: Sequence[Path], request: Request
) -> list[Cell]:
    """The cells of scaling scenarios, as options change them.

    :raises InputError: faulty files, or options that do not fit.
    """
    from shardproof.bench.scaling import matrix

    remedy = "name two implementations, or a scenario of pairs"
    _refuse(context, (*_OF_PAIR, "profile", "score", "no_memory", "goal"), remedy)
    _refuse(context, ("parameters",), *_OF_CHECKPOINTS)
    if FailOn.slower in request.fail_on:
        what = "--fail-on slower: scaling has a target, and no side that is slower"
        remedy = "write --fail-on goal: exit code 1 below the target"
        raise SelectionError(Problem(what, remedy, " ".join(given.names)))
    cells = matrix.read(paths)
    if given.backend:
        moved = [replace(cell, backend=given.backend) for cell in cells]
        cells = list({cell.id: cell for cell in moved}.values())
    if given.world is not None:
        cells = matrix.with_worlds(cells, [given.world])
    changed = []
    for cell in cells:
        count = given.blocks or cell.blocks
        many = given.launches or min(cell.launches, count)
        changed.append(replace(cell, blocks=count, launches=many, deadline=given.deadline))
        matrix.check(changed[-1])
    titles = [cell.title for cell in changed]
    return _matching(changed, given.expression, "cell", "systems", titles)


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
