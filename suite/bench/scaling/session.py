"""Scaling launches: fresh ranks for every one, what they measured, and the evidence of it.

Cells that differ in their world only are a group.  Every world that has a core a rank is measured.
The others are refused; their modelled figures come from the launches of the largest measured world
(of none: from one in which a rank computes alone), where alpha and beta were probed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardproof.bench.evidence import judged_otherwise, write_times
from shardproof.bench.losses import by_coordinate, losses_of
from shardproof.bench.model import alpha_beta
from shardproof.bench.scaling import modelled
from shardproof.bench.scaling.judge import conclude
from shardproof.bench.scaling.matrix import BASES, THREADS, Cell, on_ranks, oversubscribed
from shardproof.bench.session import Bench, OnBlocks, Watch, read_times
from shardproof.bench.sides import natural_mesh
from shardproof.bench.tasks import launched
from shardproof.case import DATA_AXES, split
from shardproof.errors import Problem, SelectionError
from shardproof.launch.process_control import physical_cores
from shardproof.registry.declaration import Answer, ask
from shardproof.runs import run_folder

_EXAMINING_SECONDS = 120.0


@dataclass(eq=False)
class Measured:
    """What a cell has measured so far; complete or not, it can be judged.

    ``room``: how many ``ranks`` fit here, and what they are counted by.  ``source`` is the cell in
    whose launches a refused cell's single rank was timed (its own, where none fits); ``times`` is
    the file of raw times, once it is kept.  ``probed``: see ``bench.scaling.modelled``.
    ``on_threads``: the system also runs where memory is counted exactly.
    """

    cell: Cell
    mesh: dict[str, int]
    room: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    records: list[list[dict[str, Any]]] = field(default_factory=list)
    problem: tuple[str, str] | None = None
    seconds: float = 0.0
    source: Measured | None = None
    strategy: str = ""
    on_threads: bool = False
    probed: dict[str, Any] | None = None
    peak_bytes: int | None = None
    times: str = ""

    @property
    def timed(self) -> bool:
        """Whether launches of its own are to be made."""
        return self.problem is None and self.source in (None, self)

    @property
    def refused(self) -> bool:
        """Whether its ranks would have to share cores."""
        return oversubscribed(self.cell.world, self.room["ranks"], self.room["threads"])


class Scaling:
    """Measures cells, one launch at a time, in the leaders of a :class:`Bench`."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def examine(self, cells: Sequence[Cell]) -> list[Measured]:
        """What fits here, group by group; refused cells come last in theirs.

        :raises SelectionError: a system refuses its options.
        """
        found: list[Measured] = []
        for group in dict.fromkeys(cell.group for cell in cells):
            members = [cell for cell in cells if cell.group == group]
            first = members[0]
            workdir = self._bench.folder()
            payload = {"cell": first.to_dict(), "workdir": str(workdir)}
            told = self._bench.lead(examine, first.id, payload, _EXAMINING_SECONDS)
            if "problem" in told:
                answer = Answer(missing=told["problem"][1])
            else:
                answer = Answer.from_dict(told["answer"])
            if answer.refused:
                remedy = "correct its options in the scenario"
                raise SelectionError(Problem(f"{first.title}: {answer.refused}", remedy))
            room = told.get("room") or _cores()
            found += _in_order([_measured(cell, answer, room) for cell in members])
        return found

    def time(self, measured: Measured, on_blocks: OnBlocks) -> None:
        """All launches of a cell; what has been measured stays, however this is left."""
        cell, began, done, first = measured.cell, time.monotonic(), 0, 0
        if measured.refused:  # a rank alone, and the probes of two
            cell = on_ranks(cell, 2)
        mesh = dict.fromkeys(measured.mesh, cell.world)
        for launch, count in enumerate(split(cell.blocks, cell.launches)):
            workdir = self._bench.folder()
            payload = {
                "cell": cell.to_dict(),
                "mesh": mesh,
                "together": not measured.refused,
                "launch": launch,
                "blocks": list(range(first, first + count)),
                "workdir": str(workdir),
            }
            first += count
            try:
                with Watch(workdir, on_blocks, done):
                    told = self._bench.lead(time_cell, cell.id, payload, cell.deadline)
            finally:
                measured.rows += read_times(workdir)
                measured.seconds = time.monotonic() - began
            if "problem" in told:
                measured.problem = told["problem"]
                return
            measured.records.append(told["records"])
            if "watched" in told:
                measured.probed = modelled.digest(cell, told["watched"], told["records"])
            done += count
            on_blocks(done)

    def memory(self, measured: Measured) -> None:
        """Most bytes that a rank holds in a step, counted exactly by ranks that are threads."""
        cell, workdir = measured.cell, self._bench.folder()
        payload = {"cell": cell.to_dict(), "mesh": measured.mesh, "workdir": str(workdir)}
        told = self._bench.lead(weigh_cell, cell.id, payload, _EXAMINING_SECONDS)
        if "problem" not in told:
            measured.peak_bytes = max(record["ledger"] for record in told["records"])


def _measured(cell: Cell, answer: Answer, room: dict[str, Any]) -> Measured:
    """A cell, and whether the system that gave ``answer`` can run it in ``room``."""
    declared, missing = answer.declaration, answer.missing
    mesh: dict[str, int] = {}
    if declared is not None and not missing:
        axes = [axis for axis in declared.axes if axis in DATA_AXES]
        batch = cell.workload.global_batch
        missing = declared.excludes(cell.backend, cell.dtype, cell.world)
        if not axes:
            missing = f"has no data axis, only {', '.join(declared.axes) or 'none'}"
        elif not missing and batch < cell.world <= room["ranks"]:
            missing = f"{batch} samples do not go round {cell.world} ranks"
        elif not missing:
            mesh = natural_mesh(axes, cell.world)
    problem = ("precondition", f"{cell.title}: {missing}") if missing else None
    return Measured(
        *(cell, mesh, room),
        problem=problem,
        strategy="" if declared is None else declared.strategy,
        on_threads=declared is not None and "in_memory" in declared.backends,
    )


def _in_order(group: list[Measured]) -> list[Measured]:
    """Those to be measured, then those that are modelled from the largest of them."""
    sound = [item for item in group if item.problem is None]
    fitting = [item for item in sound if not item.refused]
    refused = [item for item in sound if item.refused]
    source = fitting[-1] if fitting else refused[0] if refused else None
    for item in refused:
        item.source = source
        if not fitting and item.room["of"].startswith("GPU"):  # ranks never share one
            why = f"alpha and beta are probed on 2 GPUs, this machine has {item.room['ranks']}"
            item.problem = ("precondition", why)
    broken = [item for item in group if item not in sound]
    return [*broken, *fitting, *refused]


def _cores() -> dict[str, Any]:
    count = physical_cores()
    what = "physical core" if count == 1 else "physical cores"
    return {"ranks": count, "of": what, "threads": THREADS}


# ------------------------------------------------------------------------------------ evidence


def result(measured: Measured) -> dict[str, Any]:
    """The line of ``cases.jsonl``; verdict and figures are those of :func:`conclude`."""
    cell = measured.cell
    seen = measured.source or measured
    line: dict[str, Any] = {
        "id": cell.id,
        "mode": cell.mode,
        "implementation": cell.system.implementation,
        "backend": cell.backend,
        "world": cell.world,
        "target": cell.target,
        "cell": cell.to_dict(),
        "mesh": measured.mesh,
        "strategy": measured.strategy,
        "room": measured.room,
        "seconds": round(measured.seconds, 3),
        "problem": None if measured.problem is None else list(measured.problem),
        "measured_in": None if seen is measured else seen.cell.id,
        "probed": seen.probed,
        "peak_bytes": measured.peak_bytes,
        "losses": {},
        "targets_per_step": {},
        "segment_steps": [],
    }
    if seen.records:
        first = seen.records[0]
        sides = [*BASES, *([] if measured.refused else ["ranks"])]
        line["losses"] = {side: losses_of(first, side) for side in sides}
        line["targets_per_step"] = {
            side: sum(by_coordinate(first, side, "targets")) for side in sides
        }
        line["segment_steps"] = [records[0]["segment_steps"] for records in seen.records]
    return line | conclude(line, seen.rows)


def keep(folder: run_folder.RunFolder, measured: Measured) -> dict[str, Any]:
    """Write raw times and the line of a cell; the line.

    A refused cell's raw times are those of its source, which is kept before it.
    """
    line = result(measured)
    seen = measured.source or measured
    if seen is measured and seen.rows:
        seen.times = write_times(folder.path, measured.cell.id, seen.rows)
        folder.seal(seen.times)
    if seen.times:
        line["times"] = seen.times
    folder.add(line, "scaling")
    return line


def verify_line(run: Path, line: Mapping[str, Any]) -> str | None:
    """What a stored cell gives otherwise when it is judged again (``None``: the same)."""
    return judged_otherwise(run, line, conclude)


# --------------------------------------------------------------------------------- in leaders


def examine(payload: Mapping[str, Any]) -> dict[str, Any]:
    """What a system declares, without running it, and how many ranks fit here."""
    from shardproof.backends import BACKENDS

    cell = Cell.from_dict(payload["cell"])
    system = cell.system
    answer = ask(system.implementation, system.options, cell.backend, cell.dtype, 1)
    told: dict[str, Any] = {"answer": answer.to_dict()}
    if BACKENDS[cell.backend].device == "cuda":
        import torch

        gpus = torch.cuda.device_count()
        told["room"] = {"ranks": gpus, "of": "GPU" if gpus == 1 else "GPUs", "threads": 1}
    return told


def time_cell(payload: Mapping[str, Any]) -> dict[str, Any]:
    """One launch; before the first one, a step is watched, so that the model knows its calls."""
    from shardproof.bench.model import probes
    from shardproof.bench.scaling import ranks

    cell, mesh = Cell.from_dict(payload["cell"]), payload["mesh"]
    workdir = Path(payload["workdir"])
    watched: dict[str, Any] | None = None
    if payload["launch"] == 0 and cell.backend in alpha_beta.ALGORITHMS:
        told = launched(
            cell.backend,
            cell.world,
            cell.deadline / 2,
            workdir.with_name(f"{workdir.name}-watched"),
            lambda rank, _: probes.watch(cell.pair(), "a", mesh, rank),
            ledgers=True,
        )
        if "problem" in told:
            return told
        watched = told["records"][0]

    def program(rank: int, _: int) -> dict[str, Any]:
        together, blocks = payload["together"], payload["blocks"]
        launch = payload["launch"]
        return ranks.run(cell, mesh, together, launch, blocks, watched, workdir, rank)

    told = launched(cell.backend, cell.world, cell.deadline, workdir, program)
    return told if watched is None else told | {"watched": watched}


def weigh_cell(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Peak bytes of a step, on threads."""
    from shardproof.bench import timed_ranks

    cell = replace(Cell.from_dict(payload["cell"]), backend="in_memory")
    return launched(
        cell.backend,
        cell.world,
        cell.deadline,
        Path(payload["workdir"]),
        lambda rank, _: timed_ranks.memory(cell.pair(), "a", payload["mesh"], rank),
    )
