"""The program of a rank in a case of workload ``calls``: make calls, compare all memory involved.

What the ranks must tell each other (who is late, who came to a barrier) goes through the store in
which they met, never through what is judged.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardproof import backends
from shardproof.backends.errors import RankEnded
from shardproof.case import Case
from shardproof.cases.kinds.calls import large, workload, wrong
from shardproof.cases.kinds.calls.buffers import Buffer
from shardproof.cases.kinds.calls.check import DIFFERS, RAISED
from shardproof.cases.kinds.calls.tensors import CallGroup, Flight, flight_of
from shardproof.cases.kinds.calls.workload import Cell
from shardproof.cases.kinds.untrained import Program
from shardproof.comm import Call
from shardproof.contract import Collectives
from shardproof.evidence.records import ComparisonRow, RankRecord

#: Seconds that a rank waits for what others tell it in the store.
DEADLINE = 30.0
#: Seconds in which a result may still appear behind a wait that said it was there.
AFTERTHOUGHT = 0.5
#: Seconds by which a late rank calls after it may.
LATE = 0.002


@dataclass(frozen=True)
class CallsProgram(Program):
    """Make the calls of ``cells``."""

    cells: Sequence[Cell]

    def fill(self, record: RankRecord, system: Any, world: int) -> None:
        """Note what came of each call."""
        device = backends.BACKENDS[self.case.backend].device
        # Tensors of calls and of answers are made where the backend's tensors lie.
        with contextlib.nullcontext() if device == "cpu" else torch.device(device):
            _Caller(self.case, record.rank, world, system()).run(self.cells, record.calls)


class _Caller:
    def __init__(self, case: Case, rank: int, world: int, system: Collectives) -> None:
        self.case, self.rank, self.world, self.system = case, rank, world, system
        self.system.choose(case.options)
        self.kept = workload.resolve(case.workload)["others"] == "kept"
        self.store = c10d._get_default_store()
        #: How often a missing result is still waited for.
        self.looks = 3

    def run(self, cells: Sequence[Cell], rows: list[ComparisonRow]) -> None:
        """Make the calls of all ``cells``; the first one that raises is the last."""
        groups = self._groups()
        for index, cell in enumerate(cells):
            judged = self._refused if workload.is_wrong(cell) else self._judged
            rows.append(judged(index, cell, groups[cell["group"]]))
            if rows[-1].phase == RAISED:
                break

    def _groups(self) -> dict[str, list[CallGroup]]:
        """By name, those that this rank is in; all ranks make them in one order."""
        every = tuple(range(self.world))
        first, second = (every[:-1], every[1:]) if self.world > 2 else (every, every)
        wanted: dict[str, list[tuple[int, ...]]] = {"single": [(r,) for r in every]}
        if self.world > 1:
            wanted |= {"part": [every[1:]], "overlapping": [first, second]}
        made = {name: [dist.new_group([*own]) for own in each] for name, each in wanted.items()}
        wanted["world"], made["world"] = [every], [dist.group.WORLD]
        return {
            name: [
                CallGroup(f"{name}{n}", self.system.group(group, own), own, own.index(self.rank))
                for n, (own, group) in enumerate(zip(members, made[name], strict=True))
                if self.rank in own
            ]
            for name, members in wanted.items()
        }

    def _judged(self, index: int, cell: Cell, groups: Sequence[CallGroup]) -> ComparisonRow:
        """A call that is right."""
        owner, name = f"rank {self.rank}", workload.described(cell)
        try:
            with torch.no_grad():
                count, sentence = self._made(index, cell, groups)
        except Exception as error:  # noqa: BLE001 - whatever a backend raises is what is judged
            self.store.add(f"{self.case.id}/raised", 1)
            problem = f"{name}: {owner} raises {_told(error)}"
            return ComparisonRow(index, RAISED, name, owner, problem=problem)
        problem = f"{name}: {owner} {sentence}" if sentence else ""
        row = index, cell["operation"], name, owner, float(count), 0.0
        return ComparisonRow(*row, problem=problem)

    def _refused(self, index: int, cell: Cell, groups: Sequence[CallGroup]) -> ComparisonRow:
        """A call that must raise."""
        owner, name, (group,) = f"rank {self.rank}", workload.described(cell), groups
        phase = DIFFERS if "differs" in cell else cell["operation"]
        if "differs" in cell:  # whoever is behind would be told of it in a call that is right
            self.store.add(f"{self.case.id}/{index}/came", 1)
            self._until(f"{self.case.id}/{index}/came", self.world)
        given = wrong.arguments(cell, group.rank, group.size)
        call = Call(cell["operation"], cell["form"], group.group, **given)
        try:
            with torch.no_grad():
                for work in self.system.perform(call):
                    if work is not None:
                        work.wait()
        except Exception:  # noqa: BLE001 - any error will do
            return ComparisonRow(index, phase, name, owner, 0.0, 0.0)
        problem = f"{name}: the invalid call of {owner} raised no error"
        return ComparisonRow(index, phase, name, owner, 1.0, 0.0, problem=problem)

    def _made(self, index: int, cell: Cell, groups: Sequence[CallGroup]) -> tuple[int, str]:
        """How many elements are wrong, and the first problem in words."""
        if cell.get("layout") == workload.LARGE:
            (group,) = groups
            return large.broadcast(self.system, group.group, group.rank, group.size - 1)
        count = 3 if cell["completion"] == "reversed" else 1
        flights = []
        for number, group in itertools.product(range(count), groups):
            key = f"{self.case.id}/{index}/{number}/{group.name}"
            flights.append(flight_of(cell, group, 8 * number, key, self.kept))
        for flight in flights:
            self._start(cell, flight)
        for flight in reversed(flights):
            for work in reversed(flight.works):
                work.wait()
            self._met(cell, flight)
        found = [self._compared(cell, flight) for flight in flights]
        return next((one for one in found if one[1]), (0, ""))

    # ------------------------------------------------------------------------------ under way

    def _start(self, cell: Cell, flight: Flight) -> None:
        group = flight.group
        waits = cell["completion"] == "late" and group.size > 1
        last = group.rank == flight.late
        if waits and last:
            self._until(f"{flight.key}/asked", len(flight.asks))
            time.sleep(LATE)
        if cell["operation"] == "barrier":
            if last and not waits:
                time.sleep(LATE)
            self.store.add(f"{flight.key}/came", 1)
        how = {"asynchronous": cell["completion"] != "sync", **flight.call}
        given = Call(cell["operation"], cell["form"], group.group, **how)
        flight.works = [work for work in self.system.perform(given) if work is not None]
        if waits and group.rank in flight.asks:
            for _ in range(3):
                if flight.works and all(work.is_completed() for work in flight.works):
                    early = f"before rank {group.ranks[flight.late]} has called"
                    fault = "the fault is the backend's, not the program's"
                    flight.trouble = f"its work handle reports completion {early}: {fault}"
                time.sleep(LATE / 4)
            self.store.add(f"{flight.key}/asked", 1)

    def _until(self, key: str, count: int) -> None:
        """Return when ``count`` ranks have reported to the store.

        :raises RankEnded: one has raised in a call that is right, and tells nothing more.
        """
        deadline, looks = time.monotonic() + DEADLINE, 0
        while self.store.add(key, 0) < count:
            looks += 1
            if looks % 20 == 0 and self.store.add(f"{self.case.id}/raised", 0):
                raise RankEnded(f"fewer than {count} ranks reached {key!r}: another rank failed")
            if time.monotonic() > deadline:
                raise TimeoutError(f"fewer than {count} ranks reached {key!r} in {DEADLINE:g} s")
            time.sleep(LATE / 4)

    def _met(self, cell: Cell, flight: Flight) -> None:
        if cell["operation"] == "barrier":
            came = self.store.add(f"{flight.key}/came", 0)
            if came < (size := flight.group.size) and not flight.trouble:
                flight.trouble = f"it was over when {came} of {size} ranks had called it"

    def _compared(self, cell: Cell, flight: Flight) -> tuple[int, str]:
        ranks = flight.group.ranks
        members = "all ranks" if len(ranks) == self.world else f"ranks {', '.join(map(str, ranks))}"
        where = f"in the group of {members}"
        if "root" in cell:
            where += f", root {ranks[flight.call['root']]}"
        if flight.trouble:
            return 1, f"{where}: {flight.trouble}"
        for buffer in flight.buffers:
            count, sentence = buffer.problem()
            if count and flight.works and self.looks and self._appears(buffer):
                early = "its work handle reported completion too early"
                fault = "which is the backend's fault, not the program's"
                sentence += f"; the right result came later: {early}, {fault}"
            if count:
                return count, f"{where}: {sentence}"
        return 0, ""

    def _appears(self, buffer: Buffer) -> bool:
        """Whether what was missing comes after all, a little later."""
        self.looks -= 1
        deadline = time.monotonic() + AFTERTHOUGHT
        while time.monotonic() < deadline:
            if not buffer.problem()[0]:
                return True
            time.sleep(0.01)
        return False


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
