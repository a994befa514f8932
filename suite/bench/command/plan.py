"""The plan of a ``bench`` command line: pairs, or cells of scaling, and how to time them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from shardproof import verdicts
from shardproof.backends import USUAL_PROCESSES
from shardproof.bench import sides
from shardproof.bench.command.options import FailOn, Goal, How, OnePair, Selected
from shardproof.bench.command.time_budget import Passes
from shardproof.bench.scaling import matrix
from shardproof.bench.subjects import BLOCKS, LAUNCHES, LETTERS, Cell, Pair, Side, Subject
from shardproof.commands import options
from shardproof.commands.console import echo
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.registry import preflight
from shardproof.runs.shard import Cut, Shard
from shardproof.scenarios.select import compile_expression
from shardproof.table import number

if TYPE_CHECKING:
    from shardproof.launch.nodes import Nodes

S = TypeVar("S", Pair, Cell)


@dataclass(frozen=True)
class TimedPlan:
    """Pairs or cells to time, ``how``, and with which ``passes``; ``shard``: only a part of all.

    ``names``: the words that chose them; ``began``: the start of a budget, by ``time.monotonic``.
    """

    names: Sequence[str]
    subjects: Sequence[Subject]
    how: How
    passes: Passes = field(default_factory=Passes)
    shard: Shard | None = None
    began: float = field(default_factory=lambda: time.monotonic())

    @property
    def dry_run(self) -> bool:
        """Whether nothing is timed."""
        return self.how.dry_run

    @property
    def ids(self) -> list[str]:
        """The ids of what is timed, which name its systems."""
        return [subject.id for subject in self.subjects]

    @property
    def backends(self) -> set[str]:
        """The backends that ranks run on."""
        return {subject.backend for subject in self.subjects}

    @property
    def rates(self) -> list[int]:
        """The bits per second between nodes that cells ask for, in their order; 0: all there are.

        :raises SelectionError: cells that ask for none beside cells that do.
        """
        from shardproof.launch.nodes import bits_per_second

        asked = dict.fromkeys(s.bandwidth for s in self.subjects if isinstance(s, Cell))
        if "" in asked and len(asked) > 1:
            what = "some of the chosen cells set a bandwidth and others do not"
            raise SelectionError(Problem(what, "run them in two commands", self.subjects[0].name))
        return [bits_per_second(text) for text in asked if text]

    def on(self, nodes: Nodes | None) -> TimedPlan:
        """The part of it that can be timed on ``nodes`` (``None``: on this machine).

        :raises InputError: none of it can, or an implementation cannot be loaded.
        """
        cells = [subject for subject in self.subjects if isinstance(subject, Cell)]
        subjects: Sequence[Subject] = _between(cells, nodes) if cells else self.subjects
        preflight.check(subject.side(s).implementation for subject in subjects for s in LETTERS)
        return replace(self, subjects=subjects if nodes is None else _with_room(subjects, nodes))

    def run(self) -> int:
        """Measure, or print what would be measured; the exit code.

        :raises SelectionError: there are fewer groups than parts, or a system refuses its options.
        """
        from shardproof.bench.command import measuring
        from shardproof.bench.session import Session
        from shardproof.checks.results import LeftOut
        from shardproof.launch.nodes import Nodes
        from shardproof.runs.durations import Durations

        plan, cut, durations = self, None, Durations.of_user()
        if self.shard is not None:
            groups = {subject.id: " ".join(subject.group) for subject in self.subjects}
            lines = (LeftOut(s.id, None, s.to_dict(), "").line() for s in self.subjects)
            cut = Cut.of(lines, groups, self.shard)
            own = cut.names(self.shard.index)
            plan = replace(self, subjects=[s for s in self.subjects if s.id in own])
        if self.dry_run:
            measuring.dry_run(plan, durations)
            return verdicts.HELD
        options.wait_for(Nodes.here())
        with Session() as session:
            return measuring.run(session, plan, durations, cut)


def of_pair(
    names: Sequence[str], given: OnePair, how: How, goal: Goal, passes: Passes
) -> TimedPlan:
    """The pair of the two implementations that are named.

    :raises InputError: an unknown name, or a value that does not fit.
    """
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
        name=sides.ON_COMMAND_LINE,
        a=a,
        b=b,
        backend=how.backend or USUAL_PROCESSES,
        world=how.world or 2,
        workload=sides.spec_of(given.workload, given.size, params, *batch, 0),
        optimizer=sides.default_optimizer(given.optimizer),
        dtype=given.dtype,
        size=given.size,
    )
    return TimedPlan(names, _changed([pair], how, goal), how, passes)


def of_pairs(
    names: Sequence[str],
    selected: Selected,
    how: How,
    goal: Goal,
    passes: Passes,
    sized: Callable[[Sequence[Pair]], Sequence[Pair]] = lambda pairs: pairs,
) -> TimedPlan:
    """The pairs of speed scenarios; ``sized`` may give them other models.

    :raises InputError: faulty files, an unknown name, or options that do not fit.
    """
    pairs = sides.read(names)
    pairs = _matching(pairs, selected.expression, "pair", "pairs", [pair.name for pair in pairs])
    pairs = _changed(sized(pairs), how, goal)
    return TimedPlan(names, pairs, how, passes, options.shard_of(selected.shard))


def of_cells(names: Sequence[str], selected: Selected, how: How) -> TimedPlan:
    """The cells of scaling scenarios.

    :raises InputError: faulty files, or options that do not fit.
    """
    if FailOn.slower in (how.fail_on or ()):
        what = "--fail-on slower does not apply to scaling, which has a target"
        remedy = "write --fail-on goal, which gives exit code 1 below the target"
        raise SelectionError(Problem(what, remedy, " ".join(names)))
    cells = matrix.read(sides.files(names))
    if how.backend:
        moved = [replace(cell, backend=how.backend) for cell in cells]
        cells = list({cell.id: cell for cell in moved}.values())
    if how.world is not None:
        cells = matrix.with_worlds(cells, [how.world])
    changed = []
    for cell in cells:
        count = how.blocks or cell.blocks
        many = how.launches or min(cell.launches, count)
        changed.append(replace(cell, blocks=count, launches=many, deadline=how.deadline))
        matrix.check(changed[-1])
    titles = [cell.title for cell in changed]
    chosen = _matching(changed, selected.expression, "cell", "systems", titles)
    return TimedPlan(names, chosen, how, shard=options.shard_of(selected.shard))


def _changed(pairs: Sequence[Pair], how: How, goal: Goal) -> list[Pair]:
    """``pairs`` as options change them.

    :raises InputError: options that do not fit.
    """
    changes: dict[str, Any] = {
        "blocks": how.blocks,
        "launches": how.launches or min(LAUNCHES, how.blocks or BLOCKS),
        "goal": goal.goal,
        "backend": how.backend or None,
        "world": how.world,
        "deadline": how.deadline,
    }
    asked = {key: value for key, value in changes.items() if value is not None}
    pairs = [replace(pair, **asked) for pair in pairs]
    for pair in pairs:
        sides.check(pair)
    ids = [pair.id for pair in pairs]
    if twice := [name for name in ids if ids.count(name) > 1]:
        remedy = "give one of these comparisons another name"
        raise SelectionError(Problem("two comparisons have the same id", remedy, twice[0]))
    if FailOn.goal in (how.fail_on or ()) and all(pair.goal is None for pair in pairs):
        what, remedy = "--fail-on goal: no pair here has a goal", "add one, e.g. --goal 1.10"
        raise SelectionError(Problem(what, remedy, ids[0]))
    return pairs


def _between(cells: Sequence[Cell], nodes: Nodes | None) -> list[Cell]:
    """Those that are timed here: of cells between nodes the ones of this network.

    :raises SelectionError: there is none.
    """
    from shardproof.launch.nodes import bits_per_second

    rate = None if nodes is None else nodes.rate
    here = [c for c in cells if not c.bandwidth or bits_per_second(c.bandwidth) == rate]
    if not here:
        asked = ", ".join(dict.fromkeys(cell.bandwidth for cell in cells))
        what = f"these cells need nodes with a bandwidth of {asked}"
        remedy = f"use `shardproof cluster bench`, with --bandwidth {asked} or without --bandwidth"
        raise SelectionError(Problem(what, remedy, cells[0].name))
    if len(here) < len(cells) and nodes is None:
        left = number(len(cells) - len(here), "cell")
        echo(f"{left} between nodes skipped: time them with `shardproof cluster bench`", err=True)
    return here


def _with_room(subjects: Sequence[Subject], nodes: Nodes) -> list[Subject]:
    """Those whose ranks fit ``nodes``; a cell that does not is modelled.

    :raises SelectionError: none fits, or messages of one are not delayed as declared.
    """
    room = [s for s in subjects if isinstance(s, Cell) or nodes.has_room(s.backend, s.world)]
    if not room:
        least = min(subject.world for subject in subjects)
        what = f"no comparison fits on {nodes}: the smallest needs {least} ranks"
        raise SelectionError(Problem(what, "raise --nodes or --ranks-per-node"))
    for subject in room:
        if why := nodes.not_far(subject.backend):
            raise SelectionError(Problem(why, "omit --delay, or use --backend gloo", subject.id))
    if len(room) < len(subjects):
        left = number(len(subjects) - len(room), "comparison")
        echo(f"{nodes}: {left} skipped: they need more ranks", err=True)
    return room


def _matching(
    subjects: Sequence[S], expression: str, noun: str, nouns: str, names: Sequence[str]
) -> list[S]:
    """The ``subjects``, whose ``names`` are ``nouns``, with ids that ``expression`` matches."""
    matches = compile_expression(expression)
    chosen = [subject for subject in subjects if matches(subject.id)]
    if not chosen:
        remedy = nearest(expression, names, nouns)
        raise SelectionError(Problem(f"-k matches no {noun}", remedy, expression))
    return chosen
