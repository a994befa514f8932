"""What one rank does in a case of workload ``calls``: make calls, compare all memory that they saw.

Every rank knows what all ranks give, so it knows the right answer without asking anybody.  What the
ranks must tell each other (who is late, who came to a barrier) goes through the store in which they
met, never through what is judged.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from shardproof import backends, registry
from shardproof.backends.errors import RankEnded
from shardproof.case import Case
from shardproof.cases import large_call, wrong_calls
from shardproof.cases.call_buffers import (
    Buffer,
    dtype_of,
    made,
    operand,
    reduced,
    shape_of,
)
from shardproof.checks.untrained.collectives import DIFFERS, RAISED
from shardproof.comm import ANY, Call, Recv, Send
from shardproof.contract import Collectives
from shardproof.evidence.records import ComparisonRow, RankRecord
from shardproof.launch.process_control import cores
from shardproof.registry.declaration import Declaration
from shardproof.workloads import calls
from shardproof.workloads.calls import Cell

#: Seconds that a rank waits for what others tell it in the store.
DEADLINE = 30.0
#: Seconds in which a result may still appear behind a wait that said it was there.
AFTERTHOUGHT = 0.5
#: Seconds by which a late rank calls after it may.
LATE = 0.002


@dataclass(frozen=True)
class Group:
    """A group that this rank is a member of, by a name that no other group has."""

    name: str
    group: Any
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


@dataclass
class Flight:
    """One call under way: its tensors, and whom its result takes."""

    call: dict[str, Any]
    buffers: list[Buffer]
    group: Group
    key: str
    #: The member that calls last where one is late, and those whose result needs it.
    late: int = 0
    asks: tuple[int, ...] = ()
    works: Sequence[Any] = ()
    trouble: str = ""


@dataclass(frozen=True)
class CallsProgram:
    """What every rank does; it travels to ranks that were not forked."""

    case: Case
    cells: Sequence[Cell]

    def __call__(self, rank: int, world: int) -> dict[str, Any]:
        device = backends.BACKENDS[self.case.backend].device
        # Tensors of calls and of answers are made where the backend's tensors lie.
        with contextlib.nullcontext() if device == "cpu" else torch.device(device):
            return _Caller(self.case, rank, world).run(self.cells).to_dict()


class _Caller:
    def __init__(self, case: Case, rank: int, world: int) -> None:
        self.case, self.rank, self.world = case, rank, world
        system = registry.load(case.implementation)
        self.declaration = Declaration.of(system, case.options)
        self.system = cast("Collectives", system())
        self.system.choose(case.options)
        self.kept = calls.resolve(case.workload)["others"] == "kept"
        self.store = c10d._get_default_store()
        #: How often a missing result is still waited for.
        self.looks = 3

    def run(self, cells: Sequence[Cell]) -> RankRecord:
        """Make the calls of all ``cells``; the first one that raises is the last."""
        record = RankRecord(self.rank, cores(), self.declaration)
        groups = self._groups()
        for index, cell in enumerate(cells):
            judged = self._refused if calls.is_wrong(cell) else self._judged
            row, goes_on = judged(index, cell, groups[cell["group"]])
            record.calls.append(row)
            if not goes_on:
                break
        return record

    def _groups(self) -> dict[str, list[Group]]:
        """By name, those that this rank is in; all ranks make them in one order."""
        every = tuple(range(self.world))
        first, second = (every[:-1], every[1:]) if self.world > 2 else (every, every)
        wanted: dict[str, list[tuple[int, ...]]] = {"single": [(r,) for r in every]}
        if self.world > 1:
            wanted |= {"part": [every[1:]], "overlapping": [first, second]}
        found: dict[str, list[Group]] = {"world": [self._group("world", dist.group.WORLD, every)]}
        for name, members in wanted.items():
            pairs = [(ranks, dist.new_group(list(ranks))) for ranks in members]
            found[name] = [
                self._group(f"{name}{number}", group, ranks)
                for number, (ranks, group) in enumerate(pairs)
                if self.rank in ranks
            ]
        return found

    def _group(self, name: str, group: Any, ranks: tuple[int, ...]) -> Group:
        return Group(name, self.system.group(group, ranks), ranks, ranks.index(self.rank))

    def _judged(
        self, index: int, cell: Cell, groups: Sequence[Group]
    ) -> tuple[ComparisonRow, bool]:
        """One cell, and whether the next one can be judged."""
        owner, name = f"rank {self.rank}", calls.described(cell)
        try:
            with torch.no_grad():
                wrong, sentence = self._made(index, cell, groups)
        except Exception as error:  # noqa: BLE001 - whatever a backend raises is what is judged
            self.store.add(f"{self.case.id}/raised", 1)
            problem = f"{name}: {owner} raises {_told(error)}"
            return ComparisonRow(index, RAISED, name, owner, problem=problem), False
        problem = f"{name}: {owner} {sentence}" if sentence else ""
        size = float(wrong), 0.0
        return ComparisonRow(index, cell["operation"], name, owner, *size, problem=problem), True

    def _refused(
        self, index: int, cell: Cell, groups: Sequence[Group]
    ) -> tuple[ComparisonRow, bool]:
        """A call that must raise, and whether the next one can be judged."""
        owner, name, (group,) = f"rank {self.rank}", calls.described(cell), groups
        phase = DIFFERS if "differs" in cell else cell["operation"]
        if "differs" in cell:  # whoever is behind would be told of it in a call that is right
            self.store.add(f"{self.case.id}/{index}/came", 1)
            self._until(f"{self.case.id}/{index}/came", self.world)
        given = wrong_calls.arguments(cell, group.rank, group.size)
        call = Call(cell["operation"], cell["form"], group.group, **given)
        try:
            with torch.no_grad():
                for work in self.system.perform(call):
                    if work is not None:
                        work.wait()
        except Exception:  # noqa: BLE001 - any error will do
            return ComparisonRow(index, phase, name, owner, 0.0, 0.0), True
        problem = f"{name}: {owner} makes this call, which is wrong, and nothing is raised"
        return ComparisonRow(index, phase, name, owner, 1.0, 0.0, problem=problem), True

    def _made(self, index: int, cell: Cell, groups: Sequence[Group]) -> tuple[int, str]:
        """How many elements are wrong, and the first problem in words."""
        if cell.get("layout") == calls.LARGE:
            (group,) = groups
            return large_call.broadcast(self.system, group.group, group.rank, group.size - 1)
        count = 3 if cell["completion"] == "reversed" else 1
        flights = [
            self._flight(cell, group, 8 * number, f"{self.case.id}/{index}/{number}/{group.name}")
            for number in range(count)
            for group in groups
        ]
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
        asynchronous = cell["completion"] != "sync"
        given = Call(
            cell["operation"],
            cell["form"],
            group.group,
            asynchronous=asynchronous,
            **flight.call,
        )
        flight.works = [work for work in self.system.perform(given) if work is not None]
        if waits and group.rank in flight.asks:
            for _ in range(3):
                if flight.works and all(work.is_completed() for work in flight.works):
                    flight.trouble = (
                        f"its work says that it is done, before rank {group.ranks[flight.late]} "
                        "has called: the fault is the backend's, not the program's"
                    )
                time.sleep(LATE / 4)
            self.store.add(f"{flight.key}/asked", 1)

    def _until(self, key: str, count: int) -> None:
        """Return when ``count`` ranks have told the store.

        :raises RankEnded: one has raised in a call that is right, and tells nothing more.
        """
        deadline, looks = time.monotonic() + DEADLINE, 0
        while self.store.add(key, 0) < count:
            looks += 1
            if looks % 20 == 0 and self.store.add(f"{self.case.id}/raised", 0):
                raise RankEnded(f"fewer than {count} ranks came to {key!r}: another has raised")
            if time.monotonic() > deadline:
                raise TimeoutError(f"fewer than {count} ranks came to {key!r}")
            time.sleep(LATE / 4)

    def _met(self, cell: Cell, flight: Flight) -> None:
        if cell["operation"] == "barrier":
            came = self.store.add(f"{flight.key}/came", 0)
            if came < flight.group.size and not flight.trouble:
                flight.trouble = (
                    f"it was over when {came} of {flight.group.size} ranks had called it"
                )

    def _compared(self, cell: Cell, flight: Flight) -> tuple[int, str]:
        members = "all ranks" if len(flight.group.ranks) == self.world else "ranks "
        if members == "ranks ":
            members += ", ".join(map(str, flight.group.ranks))
        where = f"in the group of {members}"
        if "root" in cell:
            where += f", root {flight.group.ranks[flight.call['root']]}"
        if flight.trouble:
            return 1, f"{where}: {flight.trouble}"
        for buffer in flight.buffers:
            wrong, sentence = buffer.problem()
            if wrong and flight.works and self.looks and self._appears(buffer):
                sentence += (
                    "; the right result came later: its work said that it was done before it was, "
                    "which is the backend's fault, not the program's"
                )
            if wrong:
                return wrong, f"{where}: {sentence}"
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

    # ------------------------------------------------------------------------- what is called

    def _flight(self, cell: Cell, group: Group, salt: int, key: str) -> Flight:
        root = {"first": 0, "middle": group.size // 2, "last": group.size - 1}.get(
            cell.get("root", ""), 0
        )
        flight = Flight({}, [], group, key)
        others = tuple(member for member in range(group.size) if member != group.size - 1)
        flight.late, flight.asks = group.size - 1, others
        operation = cell["operation"]
        if operation in ("broadcast", "scatter"):
            flight.late = root
            flight.asks = tuple(member for member in range(group.size) if member != root)
        elif operation in ("reduce", "gather"):
            flight.late, flight.asks = (root + 1) % group.size, (root,)
        elif operation in ("send_recv", "batch"):
            flight.late, flight.asks = 0, (1 % group.size,)
        if operation != "barrier":
            _Tensors(cell, flight, salt, root, self.kept).fill()
        return flight


class _Tensors:
    """Fills the tensors of a flight in."""

    def __init__(self, cell: Cell, flight: Flight, salt: int, root: int, kept: bool) -> None:
        self.cell, self.flight, self.group = cell, flight, flight.group
        self.salt, self.root, self.kept = salt, root, kept
        self.size, self.rank = flight.group.size, flight.group.rank
        self.dtype, self.layout = dtype_of(cell["dtype"]), cell["layout"]
        self.reduce = cell.get("reduce")
        self.part = shape_of(self.layout)
        self.whole = shape_of(self.layout, self.size)

    def fill(self) -> None:
        """Buffers, and the arguments of the call."""
        self.flight.call = getattr(self, f"_{self.cell['operation']}")()

    def _values(self, member: int, salt: int = 0, shape: Sequence[int] | None = None) -> Tensor:
        wanted = self.part if shape is None else shape
        return operand(self.dtype, wanted, member, self.salt + salt, self.reduce, self.size)

    def _buffer(
        self,
        role: str,
        values: Tensor | None,
        expected: Tensor | None,
        shape: tuple[int, ...] | None = None,
        layout: str = "",
    ) -> Buffer:
        """A tensor of the call that holds ``values``, later ``expected`` (``None``: the same)."""
        buffer = made(
            role, self.dtype, layout or self.layout, self.part if shape is None else shape
        )
        buffer.fill(values)
        buffer.expect(expected)
        self.flight.buffers.append(buffer)
        return buffer

    def _own(self, buffer: Buffer, values: Tensor) -> None:
        buffer.stories.append((f"it is rank {self._name(self.rank)}'s own value", values))

    def _name(self, member: int) -> int:
        return self.group.ranks[member]

    def _of_ranks(self, buffer: Buffer, values: Sequence[Tensor], what: str = "the value") -> None:
        """Contents that are those of another rank."""
        for member, value in enumerate(values):
            own = f"it is rank {self._name(member)}'s own value"
            other = f"it is {what} of rank {self._name(member)}"
            buffer.stories.append((own if member == self.rank else other, value))

    def _sums(self, buffer: Buffer, values: Sequence[Tensor], own: bool = True) -> None:
        """Contents that are another combination of what the ranks gave."""
        assert self.reduce is not None
        if own and self.size > 1:
            self._own(buffer, values[self.rank])
        for member in range(self.size if self.size > 1 else 0):
            name = f"the value of rank {self._name(member)}"
            rest = [value for other, value in enumerate(values) if other != member]
            buffer.stories.append((f"{name} is missing", reduced(self.reduce, rest)))
            twice = reduced(self.reduce, [*values, values[member]])
            buffer.stories.append((f"{name} counts twice", twice))
        for other in calls.REDUCTIONS:
            if other != self.reduce and calls.reducible(self.cell["dtype"], other):
                buffer.stories.append((f"it is the {other}", reduced(other, values)))

    def _all_reduce(self) -> dict[str, Any]:
        return {"outputs": self._reduced_in_place(None), "reduce": self.reduce}

    def _reduce(self) -> dict[str, Any]:
        return {
            "outputs": self._reduced_in_place(self.root),
            "reduce": self.reduce,
            "root": self.root,
        }

    def _reduced_in_place(self, root: int | None) -> list[Tensor]:
        views = []
        for item in range(2 if self.cell["form"] == "coalesced" else 1):
            values = [self._values(member, item) for member in range(self.size)]
            assert self.reduce is not None
            mine = root is None or root == self.rank
            total = reduced(self.reduce, values) if mine else None
            role = "the result" if mine else "the input of a rank that is not the root"
            buffer = self._buffer(role, values[self.rank], total)
            buffer.undefined = not (mine or self.kept)
            self._sums(buffer, values)
            views.append(buffer.view)
        return views

    def _broadcast(self) -> dict[str, Any]:
        views = []
        for item in range(2 if self.cell["form"] == "coalesced" else 1):
            values = [self._values(member, item) for member in range(self.size)]
            mine = values[self.rank] if self.rank == self.root else None
            buffer = self._buffer("the result", mine, values[self.root])
            self._of_ranks(buffer, values)
            views.append(buffer.view)
        return {"outputs": views, "root": self.root}

    def _all_gather(self) -> dict[str, Any]:
        values = [self._values(member) for member in range(self.size)]
        if self.cell["form"] == "tensor":
            together = _joined(values, self.whole)
            if self.cell["place"] == "inside":
                held = torch.empty(self.whole, dtype=self.dtype)
                held.copy_(made("", self.dtype, "contiguous", self.whole).view)
                _slot(held, self.rank, self.size).copy_(values[self.rank].reshape(-1))
                buffer = self._buffer("the result", held, together, self.whole)
                given = _slot(buffer.view, self.rank, self.size).view(self.part)
            else:
                given = self._buffer("its input", values[self.rank], None).view
                buffer = self._buffer("the result", None, together, self.whole)
            for turn in range(1, self.size):
                order = [values[(member + turn) % self.size] for member in range(self.size)]
                text = f"the parts of the ranks are in another order, {turn} on"
                buffer.stories.append((text, _joined(order, self.whole)))
            return {"inputs": [given], "outputs": [buffer.view]}
        given = self._buffer("its input", values[self.rank], None).view
        return {"inputs": [given], "outputs": self._gathered(values)}

    def _gathered(self, values: Sequence[Tensor]) -> list[Tensor]:
        views = []
        for member, value in enumerate(values):
            role = f"what came of rank {self._name(member)}"
            buffer = self._buffer(role, None, value)
            self._of_ranks(buffer, values)
            views.append(buffer.view)
        return views

    def _reduce_scatter(self) -> dict[str, Any]:
        if self.cell["form"] != "coalesced":
            return self._scattered(0)
        both = [self._scattered(item) for item in range(2)]
        sides = {side: [one[side][0] for one in both] for side in ("inputs", "outputs")}
        return {**sides, "reduce": self.reduce}

    def _scattered(self, item: int) -> dict[str, Any]:
        """Arguments of one reduce-scatter; ``item``: of several under way together."""
        uneven = self.cell["form"] == "uneven"
        shapes = [self._wide((p + 1) % 3) if uneven else self.part for p in range(self.size)]
        given = [
            [self._values(m, 1 + p + 24 * item, shapes[p]) for p in range(self.size)]
            for m in range(self.size)
        ]
        assert self.reduce is not None
        sums = [reduced(self.reduce, [own[part] for own in given]) for part in range(self.size)]
        own = given[self.rank]
        if self.cell["form"] in ("list", "uneven"):
            inputs = [
                self._buffer(f"its input for rank {self._name(p)}", own[p], None, shapes[p]).view
                for p in range(self.size)
            ]
            buffer = self._buffer("the result", None, sums[self.rank], shapes[self.rank])
        else:
            together = _joined(own, self.whole)
            if self.cell.get("place") == "inside":
                after = together.clone()
                _slot(after, self.rank, self.size).copy_(sums[self.rank].reshape(-1))
                whole = self._buffer("the tensor", together, after, self.whole)
                result = _slot(whole.view, self.rank, self.size).view(self.part)
                return {"inputs": [whole.view], "outputs": [result], "reduce": self.reduce}
            inputs = [self._buffer("its input", together, None, self.whole).view]
            buffer = self._buffer("the result", None, sums[self.rank])
        self._sums(buffer, [one[self.rank] for one in given])
        self._of_ranks(buffer, sums, "the chunk")
        return {"inputs": inputs, "outputs": [buffer.view], "reduce": self.reduce}

    def _gather(self) -> dict[str, Any]:
        values = [self._values(member) for member in range(self.size)]
        given = self._buffer("its input", values[self.rank], None).view
        outputs = self._gathered(values) if self.rank == self.root else []
        return {"inputs": [given], "outputs": outputs, "root": self.root}

    def _scatter(self) -> dict[str, Any]:
        values = [self._values(self.root, 1 + part) for part in range(self.size)]
        inputs = []
        if self.rank == self.root:
            inputs = [
                self._buffer(f"its input for rank {self._name(p)}", values[p], None).view
                for p in range(self.size)
            ]
        buffer = self._buffer("the result", None, values[self.rank])
        self._of_ranks(buffer, values, "the part")
        return {"inputs": inputs, "outputs": [buffer.view], "root": self.root}

    def _rows(self, source: int, target: int) -> int:
        """Rows that go from one member to another, in the form ``uneven``."""
        return 0 if self.layout == "empty" else (source + 2 * target + 1) % 4

    def _wide(self, rows: int) -> tuple[int, int]:
        """Shape of a part of so many rows."""
        empty, one = self.layout == "empty", self.layout == "one"
        return 0 if empty else rows, 1 if one else self.part[1]

    def _all_to_all(self) -> dict[str, Any]:
        members, form = range(self.size), self.cell["form"]
        if form == "uneven":
            gives = [self._rows(self.rank, other) for other in members]
            takes = [self._rows(other, self.rank) for other in members]
            wide = self._wide
            sent = [self._values(self.rank, 1 + o, wide(gives[o])) for o in members]
            come = [self._values(o, 1 + self.rank, wide(takes[o])) for o in members]
            given = self._buffer("its input", torch.cat(sent), None, wide(sum(gives)))
            result = self._buffer("the result", None, torch.cat(come), wide(sum(takes)))
            pair = {"inputs": [given.view], "outputs": [result.view]}
            return {**pair, "splits": (gives, takes)}
        sent = [self._values(self.rank, 1 + other) for other in members]
        come = [self._values(other, 1 + self.rank) for other in members]
        if form == "tensor":
            given = self._buffer("its input", _joined(sent, self.whole), None, self.whole)
            together = _joined(come, self.whole)
            result = self._buffer("the result", None, together, self.whole)
            turned = [self._values(self.rank, 1 + other) for other in members]
            text = "every rank kept its own parts"
            result.stories.append((text, _joined(turned, self.whole)))
            return {"inputs": [given.view], "outputs": [result.view]}
        inputs = [
            self._buffer(f"its input for rank {self._name(o)}", sent[o], None).view for o in members
        ]
        return {"inputs": inputs, "outputs": self._gathered(come)}

    def _send_recv(self) -> dict[str, Any]:
        """Each rank to the next one; two messages where they are told apart by tags."""
        tags = (7, 8) if self.cell["form"] == "tagged" else (0,)
        from_any = self.cell["form"] == "any"
        transfers: list[Send | Recv] = []
        for source in range(self.size):
            target = (source + 1) % self.size
            if source == target:
                continue
            messages = [self._values(source, tag) for tag in tags]
            if self.rank == source:
                for tag, message in zip(tags, messages, strict=True):
                    sent = self._buffer("the message sent", message, None)
                    transfers.append(Send(sent.view, target, tag))
            if self.rank == target:
                for tag, message in reversed(list(zip(tags, messages, strict=True))):
                    got = self._buffer(f"the message of tag {tag} received", None, message)
                    for other, content in zip(tags, messages, strict=True):
                        if other != tag:
                            got.stories.append((f"it is the message of tag {other}", content))
                    transfers.append(Recv(got.view, ANY if from_any else source, tag))
        return {"transfers": transfers}

    _batch = _send_recv


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def _joined(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Parts one after the other."""
    return torch.cat([part.reshape(-1) for part in parts]).reshape(shape)


def _slot(whole: Tensor, member: int, size: int) -> Tensor:
    """The part of ``member`` in a contiguous tensor, flat."""
    count = whole.numel() // size
    return whole.view(-1)[member * count : (member + 1) * count]
