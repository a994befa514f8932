"""A bench session: fresh ranks for every launch, and what they measured.

Cells that differ in their world only are a group.  Every world with a core for each rank is
measured.  The others are refused; their modelled figures come from the launches of the largest
measured world (of none: from one in which a rank computes alone), where alpha and beta were probed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, TypeVar

from shardproof.axes import growing, replicas
from shardproof.backends import BACKENDS
from shardproof.bench import leader_tasks, subjects, telemetry
from shardproof.bench.leader_tasks import Answer, LaunchFailed, Timed
from shardproof.bench.lines import CellProbes, Memory, NoFigures, PairProbes, Sent, SideSummary
from shardproof.bench.model import alpha_beta, scorecard
from shardproof.bench.scaling import modelled
from shardproof.bench.scaling.modelled import not_probed
from shardproof.bench.sides import ON_COMMAND_LINE, natural_mesh
from shardproof.bench.stats import TimedStep
from shardproof.case import split
from shardproof.cases.runner import JUDGING_SECONDS
from shardproof.errors import Problem, SelectionError
from shardproof.files import from_plain
from shardproof.launch.fork_server import Task
from shardproof.launch.nodes import Nodes
from shardproof.launch.pool import Pool, TaskEnd
from shardproof.registry.declaration import Declaration
from shardproof.table import grouped

#: Called with the number of blocks that have ended so far, over all launches.
OnBlocks = Callable[[int], None]
_EXAMINING_SECONDS = 120.0
#: Rounds of steps with and without traffic.
ROUNDS = 6

P = TypeVar("P")
T = TypeVar("T")


@dataclass(eq=False)
class Measured:
    """The measurements of a comparison or a cell so far; complete or not, it can be judged.

    ``meshes`` and ``strategies`` are by side; ``on_threads``: every side also runs where bytes are
    counted exactly.  ``records`` are what ranks returned, one list a launch; ``problem`` is
    (verdict, sentence).  ``seen`` belongs to the launches, ``sides`` are passes of one side alone.
    ``probed`` is what the model of a step needs.

    Of a cell only: ``peak_bytes`` of a step on its worst rank; ``room``, how many ranks fit here;
    ``nodes`` that it is on; ``source``, the cell in whose launches a refused cell's single rank was
    timed (its own, where none fits); ``crowded``: all ranks of a refused cell are timed
    nevertheless, for no other launch goes over its links; ``times_file``, that of raw times, once
    they are kept.
    """

    subject: subjects.Subject
    meshes: dict[str, dict[str, int]] = field(default_factory=dict)
    strategies: dict[str, str] = field(default_factory=dict)
    on_threads: bool = False
    rows: list[TimedStep] = field(default_factory=list)
    records: list[list[subjects.RankTimes]] = field(default_factory=list)
    problem: tuple[str, str] | None = None
    seconds: float = 0.0
    seen: telemetry.Seen = field(default_factory=telemetry.Seen)
    sides: dict[str, SideSummary | NoFigures] = field(default_factory=dict)
    memory: Memory | NoFigures | None = None
    sent: Sent | NoFigures | None = None
    probed: PairProbes | CellProbes | NoFigures | None = None
    peak_bytes: int | None = None
    room: subjects.Room | None = None
    nodes: Nodes | None = None
    source: Measured | None = None
    crowded: bool = False
    times_file: str = ""

    @property
    def timed(self) -> bool:
        """Whether it has launches of its own."""
        return self.problem is None and self.source in (None, self)

    @property
    def refused(self) -> bool:
        """Whether there are fewer cores or GPUs than ranks."""
        return self.room is not None and self.room.oversubscribed(self.subject.world)

    @property
    def together(self) -> bool:
        """Whether a cell's launches have all of its ranks."""
        return self.crowded or not self.refused

    def run(self, side: str) -> subjects.SideRun:
        """A side of it in training."""
        return subjects.side_run(self.subject, side, self.meshes[side])

    def launch(self, number: int, blocks: Iterable[int]) -> subjects.Launch:
        """The launch of that ``number``, which times ``blocks``."""
        if isinstance(self.subject, subjects.Cell):
            mesh, at_once = self.meshes["ranks"], 0
            if self.crowded and self.room is not None:
                at_once = max(1, self.room.ranks // self.room.threads)
            return cell_launch(self.subject, mesh, number, blocks, self.together, at_once)
        if self.subject.action != "step":  # no twin: its state would take half as much again
            sides = {side: self.run(side) for side in subjects.LETTERS}
            orders = {"ab": subjects.ORDERS["ab"]}
            return subjects.Launch(sides, orders, number, list(blocks), action=self.subject.action)
        sides = {side: self.run(side) for side in subjects.SIDES}
        return subjects.Launch(sides, subjects.ORDERS, number, list(blocks), pace="a")


class Session(ExitStack):
    """Measures one launch at a time; leaving the ``with`` block ends every process.

    ``api`` stands in for ``pynvml``.
    """

    def __init__(self, api: Any = None) -> None:
        super().__init__()
        self._api = api
        self._pool = self.enter_context(Pool(1, tasks=(leader_tasks.time_launch,)))
        self._made = 0

    def examine(self, given: Sequence[subjects.Subject]) -> list[Measured]:
        """Ask the implementations what they can do, before anything is timed.

        Of cells, refused ones come last in their group.

        :raises SelectionError: a system refuses its options, or the world cannot be put on its
            axes.
        """
        examined: list[Measured] = []
        for members in grouped((subject.group, subject) for subject in given).values():
            first = members[0]
            sides = {side: first.side(side) for side in first.own_sides}
            answers, gpus = self._examined(first, sides)
            for key, answer in answers.items():
                if answer.refused:
                    what = f"{sides[key].implementation}: {answer.refused}"
                    typed = isinstance(first, subjects.Pair) and first.name == ON_COMMAND_LINE
                    remedy = f"--option-{key}" if typed else "its options in the scenario"
                    raise SelectionError(Problem(what, f"correct {remedy}", first.name))
            items = [Measured(subject) for subject in members]
            for item in items:
                declare(item, answers, gpus)
            examined += in_order(items)
        return examined

    def _examined(
        self, subject: subjects.Subject, sides: Mapping[str, subjects.Side]
    ) -> tuple[dict[str, Answer], int | None]:
        # A cell asks for its group.
        world = 1 if isinstance(subject, subjects.Cell) else subject.world
        task = leader_tasks.Examination(sides, subject.backend, subject.dtype, world)
        end = self._run(leader_tasks.examine, subject.id, task, _EXAMINING_SECONDS)
        if end.value is None:
            why = Answer(missing=f"the measuring process {end.why_no_value}")
            return dict.fromkeys(sides, why), None
        answers = {key: Answer.from_dict(answer) for key, answer in end.value["sides"].items()}
        return answers, end.value["gpus"]

    def time(self, measured: Measured, on_blocks: OnBlocks) -> None:
        """All launches; what has been measured stays, however this is left."""
        subject, began, done = measured.subject, time.monotonic(), 0
        for number, count in enumerate(split(subject.blocks, subject.launches)):
            launch, workdir = measured.launch(number, range(done, done + count)), self.folder()
            report = partial(_report, on_blocks, done, workdir)
            sampler = self._sampler(measured, workdir, report)
            task = leader_tasks.time_launch
            try:
                with sampler:
                    about = (launch, workdir), subject.deadline
                    timed = self.lead(task, Timed, subject.id, *about)
            except LaunchFailed as failed:
                measured.problem = failed.verdict, failed.reason
                return
            finally:
                measured.seen.add(sampler.seen)
                measured.rows += read_times(workdir)
                measured.seconds = time.monotonic() - began
            measured.records.append(timed.ranks)
            if timed.watched is not None and isinstance(subject, subjects.Cell):
                seen = timed.watched, timed.ranks, measured.nodes
                measured.probed = modelled.digest(subject, launch, *seen)
            done += count
            on_blocks(done)

    def measure_memory(self, measured: Measured) -> None:
        """Bytes of a step of each side on its worst rank: those sent, and the peak, exactly where
        all sides run on threads, else the resident memory that passes of one side alone added.
        """
        if not measured.on_threads:
            measured.memory = _resident(measured)
        sides, what = measured.subject.own_sides, "memory" if measured.on_threads else "sent"
        try:
            ranks = (self._one_side(what, subjects.StepBytes, measured, side) for side in sides)
            worst = [reduce(subjects.StepBytes.or_more, of_side) for of_side in ranks]
        except LaunchFailed as failed:
            measured.sent = NoFigures(problem=failed.reason)
            measured.memory = measured.sent if measured.on_threads else measured.memory
            return
        if isinstance(measured.subject, subjects.Cell):
            (measured.peak_bytes,) = (one.held for one in worst)
            return
        a, b = worst
        measured.sent = Sent(a=a.sent, b=b.sent)
        if measured.on_threads:
            memory = Memory(kind="ledger", a=a.held, b=b.held, ratio=a.held / b.held)
            if a.host or b.host:
                spaces = {w: {"a": getattr(a, w), "b": getattr(b, w)} for w in ("device", "host")}
                memory = memory.model_copy(update=spaces)
            measured.memory = memory

    def run_alone(self, measured: Measured) -> None:
        """Each side in untimed passes of its own: bytes."""
        if BACKENDS[measured.subject.backend].threads:
            return
        for letter in subjects.LETTERS:
            try:
                ranks = self._one_side("alone", subjects.AloneRecord, measured, letter)
                measured.sides[letter] = telemetry.of_side(ranks)
            except LaunchFailed as failed:
                measured.sides[letter] = NoFigures(problem=failed.reason)

    def _sampler(
        self, measured: Measured, workdir: Path, also: Callable[[], None] = lambda: None
    ) -> telemetry.Sampler:
        """The watcher of the ranks of ``workdir``, and of GPUs if these compute there; calls
        ``also`` each time.
        """
        backend = measured.subject.backend
        on_gpu = BACKENDS[backend].device == "cuda"
        sampler = telemetry.Sampler(lambda: telemetry.pids_in(workdir), also, on_gpu, self._api)
        if not on_gpu:
            sampler.seen.no_gpu = f"{backend} computes on the CPU"
        return sampler

    def score(self, measured: Measured) -> None:
        """Both sides with their predictions, probed in a separate launch."""
        backend = measured.subject.backend
        others, letters = {}, []
        for letter in subjects.LETTERS:
            if why := scorecard.unscored(backend, measured.meshes[letter]):
                others[letter] = NoFigures(problem=why)
            else:
                letters.append(letter)
        if not letters:
            measured.probed = PairProbes(sides=others)
            return
        try:
            rounds = self.measure_rounds([measured.run(letter) for letter in letters])
        except LaunchFailed as failed:
            measured.probed = NoFigures(problem=failed.reason)
        else:
            probes, steps = scorecard.digest(backend, rounds)
            sides = dict(zip(letters, steps, strict=True)) | others
            measured.probed = PairProbes(sides=sides, **dict(probes))

    def measure_rounds(
        self,
        runs: Sequence[subjects.SideRun],
        rounds: int = ROUNDS,
        ladder: Mapping[str, Sequence[int]] | None = None,
    ) -> subjects.Rounds:
        """Steps of ``runs`` with and without traffic, and the probes that explain them; ``ladder``
        are the payloads to probe by operation (default: those that the steps send).

        :raises LaunchFailed: the ranks broke.
        """
        task = leader_tasks.RoundsToMeasure(runs, rounds, ladder, self.folder())
        seconds = 2 * runs[0].deadline
        return self.lead(leader_tasks.measure_rounds, subjects.Rounds, runs[0].name, task, seconds)

    def _one_side(self, what: str, kind: type[T], measured: Measured, side: str) -> list[T]:
        task = what, measured.run(side), self.folder()
        subject, kinds = measured.subject, list[kind]  # type: ignore[valid-type]
        return self.lead(leader_tasks.one_side, kinds, subject.id, task, subject.deadline)

    def folder(self) -> Path:
        """A new folder of the session, for the files of one launch."""
        self._made += 1
        return self._pool.folder / f"launch{self._made}"

    def lead(self, task: Task[P], kind: type[T], name: str, what: P, seconds: float) -> T:
        """Run ``task`` of :mod:`shardproof.bench.leader_tasks` in a leader; its answer.

        :raises LaunchFailed: there is no answer.
        """
        end = self._run(task, name, what, seconds)
        if end.value is None:
            raise LaunchFailed("inconclusive", f"the measuring process {end.why_no_value}")
        if "problem" in end.value:
            raise LaunchFailed(*end.value["problem"])
        return from_plain(kind, end.value["answer"])

    def _run(self, task: Task[P], name: str, what: P, seconds: float) -> TaskEnd[P]:
        """``seconds`` is the deadline, without the leader's own work."""
        with closing(self._pool.run(task, [(name, what, seconds + JUDGING_SECONDS)])) as ends:
            (end,) = list(ends)
        return end


def declare(item: Measured, answers: Mapping[str, Answer], gpus: int | None) -> None:
    """Fill in what the sides of ``item`` declared, or why it cannot be measured here."""
    subject = item.subject
    declared = {key: a.declaration for key, a in answers.items() if a.declaration is not None}
    item.strategies = {key: declaration.strategy for key, declaration in declared.items()}
    threads = [declaration.runs_on_threads for declaration in declared.values()]
    item.on_threads = len(threads) == len(answers) and all(threads)
    if isinstance(subject, subjects.Cell):
        item.nodes = Nodes.here()
        item.room = subjects.Room.here(gpus, item.nodes)
        axes: Sequence[str] = ()
        missing = answers["ranks"].missing
        if not missing and "ranks" in declared:
            axes = _growing(subject, declared["ranks"])
            missing = _missing_for_cell(subject, axes, declared["ranks"], item.room)
        if missing:
            item.problem = "precondition", f"{subject.title}: {missing}"
        else:
            outer = natural_mesh(axes, subject.world // subject.inner)
            item.meshes["ranks"] = {**outer, **subject.system.mesh}
        return
    for letter in subjects.LETTERS:
        side = subject.side(letter)
        if missing := answers[letter].missing:
            item.problem = "precondition", f"{side.implementation}: {missing}"
            return
        item.meshes[letter] = dict(side.mesh) or natural_mesh(declared[letter].axes, subject.world)
    item.meshes["twin"] = item.meshes["a"]


def _growing(cell: subjects.Cell, declared: Declaration) -> list[str]:
    """The axes that may take the ranks which the axes of the cell leave."""
    if cell.grows:
        return [cell.grows]
    able = growing(declared.axes)
    return [axis for axis in declared.axes if axis in able and axis not in cell.system.mesh]


def _missing_for_cell(
    cell: subjects.Cell, growing: Sequence[str], declared: Declaration, room: subjects.Room
) -> str:
    """Why a cell cannot run, one of whose axes is of ``growing``; empty: it can."""
    if not growing:
        beside = f" besides {', '.join(cell.system.mesh)}" if cell.system.mesh else ""
        return f"has no data axis{beside}, only {', '.join(declared.axes) or 'none'}"
    batch, shares = cell.workload.global_batch, cell.data_coordinates(cell.world)
    few = batch < shares and cell.world <= room.ranks
    axes = [*growing[:1], *cell.system.mesh]
    missing = declared.excludes(cell.backend, cell.dtype, cell.world, axes)
    return missing or (f"{batch} samples are too few for {shares} ranks" if few else "")


def in_order(group: list[Measured]) -> list[Measured]:
    """Those to be measured, then cells that are modelled from the largest of them, or from a launch
    of their own where only that goes over their links.
    """
    sound = [item for item in group if item.problem is None]
    fitting = [item for item in sound if not item.refused]
    refused = [item for item in sound if item.refused]
    sources = fitting[-1:] or refused[:1]
    for item in refused:
        explain = [source for source in reversed(sources) if _has_links_of(source, item)]
        # There is a place for each rank; ranks never share a GPU.
        on_cpu = BACKENDS[item.subject.backend].device != "cuda"
        room = 0 if item.nodes is None or not on_cpu else item.nodes.places
        if not explain and item.subject.world <= room:
            item.crowded, explain = True, [item]
            sources.append(item)
        item.source = (explain or sources)[0]
        if not fitting and item.room is not None and item.room.of.startswith("GPU"):
            why = f"alpha and beta need 2 GPUs, this machine has {item.room.ranks}"
            item.problem = ("precondition", why)  # ranks never share a GPU
    broken = [item for item in group if item not in sound]
    return [*broken, *fitting, *refused]


def _has_links_of(source: Measured, item: Measured) -> bool:
    """Whether the launches of ``source`` go over the links of a refused cell."""
    if item.nodes is None:
        return True
    mesh = item.meshes["ranks"]
    probed = subjects.grown(mesh, source.launch(0, ()).first.world)
    return not not_probed(mesh, probed, item.nodes.ranks_per_node)


def _resident(measured: Measured) -> Memory | NoFigures:
    """Resident memory that each side added on its worst rank: advisory."""
    if not measured.sides:
        return NoFigures(problem="bytes are counted on threads, and one side cannot run there")
    added = {}
    for letter, side in measured.sides.items():
        if isinstance(side, NoFigures):
            return side
        added[letter] = side.resident_bytes
    if min(added.values()) <= 0:
        return NoFigures(problem="the set-up of one side added no resident memory")
    a, b = added["a"], added["b"]
    return Memory(kind="resident", a=a, b=b, ratio=a / b)


def _report(on_blocks: OnBlocks, before: int, workdir: Path) -> None:
    """Say how many blocks the first rank of a launch has ended."""
    path = workdir / "times0.jsonl"
    if path.exists():
        lines = path.read_text().splitlines()
        blocks = {json.loads(line)["block"] for line in lines if line.endswith("}")}
        on_blocks(before + len(blocks - {-1}))


def read_times(workdir: Path) -> list[TimedStep]:
    """The raw times that ranks left in ``workdir``; a line that was cut off is left out."""
    rows = []
    for path in sorted(workdir.glob("times*.jsonl")):
        lines = path.read_bytes().splitlines(keepends=True)
        rows += [TimedStep(**json.loads(line)) for line in lines if line.endswith(b"\n")]
    return rows


def cell_launch(
    cell: subjects.Cell,
    mesh: Mapping[str, int],
    number: int,
    blocks: Iterable[int],
    together: bool,
    at_once: int = 0,
) -> subjects.Launch:
    """One rank and N ranks on ``mesh``; without ``together`` one rank alone, with an idle second
    one (or as many as the axes have whose sizes stay).

    The model is probed in the first launch, where its formulas know the backend; ``at_once`` of the
    ranks compute at once there (0: all).
    """
    if not together:
        cell = cell.at(max(2, cell.inner))
    ranks = subjects.side_run(cell, "ranks", subjects.grown(mesh, cell.world))
    alone = dict.fromkeys(mesh, 1)
    wrapped = replace(ranks, axes=alone, workload=cell.base, first_rank_only=True)
    plain = replace(wrapped, axes=replicas(1), side=subjects.Side(subjects.PLAIN))
    sides = {"plain": plain, "wrapped": wrapped} | ({"ranks": ranks} if together else {})
    probed: dict[int, subjects.SideRun] = {}
    if number == 0 and alpha_beta.algorithms_of(cell.backend):
        probed[cell.samples(cell.world)] = ranks
        if cell.mode == "strong":  # a rank's batch shrinks: one sample gives the fixed part
            single = replace(cell.workload, global_batch=cell.data_coordinates(cell.world))
            probed.setdefault(1, replace(ranks, workload=single))
    orders = {subjects.SCALING: subjects.ORDER if together else subjects.ALONE_ORDER}
    return subjects.Launch(sides, orders, number, list(blocks), probed=probed, at_once=at_once)
