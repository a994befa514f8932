"""The tensors of one judged call: what every member of a group gives, and what it must hold then.

Every rank knows what all ranks give, so it knows the right answer without asking anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardproof.cases.kinds.calls import workload
from shardproof.cases.kinds.calls.buffers import Buffer, dtype_of, made, operand, reduced, shape_of
from shardproof.cases.kinds.calls.workload import Cell
from shardproof.comm import ANY, Recv, Send

Shape = tuple[int, ...]


@dataclass(frozen=True)
class CallGroup:
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
    group: CallGroup
    key: str
    #: The member that calls last where one is late, and those whose result needs it.
    late: int = 0
    asks: tuple[int, ...] = ()
    works: Sequence[Any] = ()
    trouble: str = ""


def flight_of(cell: Cell, group: CallGroup, salt: int, key: str, kept: bool) -> Flight:
    """A call of ``cell`` in ``group``, ready to be made.

    ``salt``: makes its values differ from those of others under way; ``key``: its name in the
    store; ``kept``: a reduce must leave the tensors of all ranks but the root as they are.
    """
    size, operation = group.size, cell["operation"]
    places = {"first": 0, "middle": size // 2, "last": size - 1}
    root = places.get(cell.get("root", ""), 0)
    late, asks = size - 1, range(size)
    if operation in ("broadcast", "scatter"):
        late = root
    elif operation in ("reduce", "gather"):
        late, asks = (root + 1) % size, range(root, root + 1)
    elif operation in ("send_recv", "batch"):
        late, asks = 0, range(1, 2)
    asking = tuple(member for member in asks if member != late)
    flight = Flight({}, [], group, key, late, asking)
    if operation != "barrier":
        flight.call = getattr(_Tensors(cell, flight, salt, root, kept), f"_{operation}")()
    return flight


class _Tensors:
    """Makes the tensors of a flight; there is a method for each operation, named like it."""

    def __init__(self, cell: Cell, flight: Flight, salt: int, root: int, kept: bool) -> None:
        self.cell, self.flight, self.group, self.form = cell, flight, flight.group, cell["form"]
        self.salt, self.root, self.kept = salt, root, kept
        self.size, self.rank = flight.group.size, flight.group.rank
        self.members = range(self.size)
        self.dtype, self.layout = dtype_of(cell["dtype"]), cell["layout"]
        self.reduce: str = cell.get("reduce", "")
        self.part = shape_of(self.layout)
        self.whole = shape_of(self.layout, self.size)

    # ------------------------------------------------------------------------------- buffers

    def _values(self, member: int, salt: int = 0, shape: Sequence[int] | None = None) -> Tensor:
        wanted = self.part if shape is None else shape
        return operand(self.dtype, wanted, member, self.salt + salt, self.reduce, self.size)

    def _of_all(self, salt: int = 0) -> list[Tensor]:
        return [self._values(member, salt) for member in self.members]

    def _buffer(
        self, role: str, values: Tensor | None, expected: Tensor | None, shape: Shape | None = None
    ) -> Buffer:
        """A tensor of the call that holds ``values``, later ``expected`` (``None``: the same)."""
        buffer = made(role, self.dtype, self.layout, self.part if shape is None else shape)
        buffer.fill(values)
        buffer.expect(expected)
        self.flight.buffers.append(buffer)
        return buffer

    def _input(self, values: Tensor, shape: Shape | None = None) -> Tensor:
        return self._buffer("its input", values, None, shape).view

    def _inputs(self, values: Sequence[Tensor]) -> list[Tensor]:
        """One for each member."""
        roles = (f"its input for rank {rank}" for rank in self.group.ranks)
        pairs = zip(roles, values, strict=True)
        return [self._buffer(role, own, None, tuple(own.shape)).view for role, own in pairs]

    def _gathered(self, values: Sequence[Tensor]) -> list[Tensor]:
        """One result from each member."""
        views = []
        for member, value in enumerate(values):
            buffer = self._buffer(f"the tensor from rank {self._name(member)}", None, value)
            self._of_ranks(buffer, values)
            views.append(buffer.view)
        return views

    # ------------------------------------------------- other contents, and what each would mean

    def _name(self, member: int) -> int:
        return self.group.ranks[member]

    def _own(self) -> str:
        return f"it is rank {self._name(self.rank)}'s own value"

    def _of_ranks(self, buffer: Buffer, values: Sequence[Tensor], what: str = "the value") -> None:
        """Contents that are those of another rank."""
        for member, value in enumerate(values):
            other = f"it is {what} of rank {self._name(member)}"
            buffer.stories.append((self._own() if member == self.rank else other, value))

    def _sums(self, buffer: Buffer, values: Sequence[Tensor]) -> None:
        """Contents that are another combination of what the ranks gave."""
        if self.size > 1:
            buffer.stories.append((self._own(), values[self.rank]))
        for member in self.members if self.size > 1 else ():
            name = f"the value of rank {self._name(member)}"
            rest = [value for other, value in enumerate(values) if other != member]
            twice = [*values, values[member]]
            buffer.stories.append((f"{name} is missing", reduced(self.reduce, rest)))
            buffer.stories.append((f"{name} counts twice", reduced(self.reduce, twice)))
        for other in workload.REDUCTIONS:
            if other != self.reduce and workload.reducible(self.cell["dtype"], other):
                buffer.stories.append((f"it is the {other}", reduced(other, values)))

    # ---------------------------------------------------------------------------- operations

    def _all_reduce(self) -> dict[str, Any]:
        return {"outputs": self._in_place(everywhere=True), "reduce": self.reduce}

    def _reduce(self) -> dict[str, Any]:
        outputs = self._in_place(everywhere=False)
        return {"outputs": outputs, "reduce": self.reduce, "root": self.root}

    def _items(self) -> range:
        """Tensors of one call."""
        return range(2 if self.form == "coalesced" else 1)

    def _in_place(self, everywhere: bool) -> list[Tensor]:
        views = []
        for item in self._items():
            values, mine = self._of_all(item), everywhere or self.root == self.rank
            role = "the result" if mine else "the input of a rank that is not the root"
            total = reduced(self.reduce, values) if mine else None
            buffer = self._buffer(role, values[self.rank], total)
            buffer.undefined = not (mine or self.kept)
            self._sums(buffer, values)
            views.append(buffer.view)
        return views

    def _broadcast(self) -> dict[str, Any]:
        views = []
        for item in self._items():
            values = self._of_all(item)
            mine = values[self.rank] if self.rank == self.root else None
            buffer = self._buffer("the result", mine, values[self.root])
            self._of_ranks(buffer, values)
            views.append(buffer.view)
        return {"outputs": views, "root": self.root}

    def _all_gather(self) -> dict[str, Any]:
        values = self._of_all()
        if self.form != "tensor":
            return {"inputs": [self._input(values[self.rank])], "outputs": self._gathered(values)}
        together = _joined(values, self.whole)
        if self.cell["place"] == "inside":
            held = torch.empty(self.whole, dtype=self.dtype)
            held.copy_(made("", self.dtype, "contiguous", self.whole).view)
            _slot(held, self.rank, self.size).copy_(values[self.rank].reshape(-1))
            buffer = self._buffer("the result", held, together, self.whole)
            given = _slot(buffer.view, self.rank, self.size).view(self.part)
        else:
            given = self._input(values[self.rank])
            buffer = self._buffer("the result", None, together, self.whole)
        for turn in range(1, self.size):
            order = [values[(member + turn) % self.size] for member in self.members]
            text = f"the parts of the ranks are in another order, {turn} on"
            buffer.stories.append((text, _joined(order, self.whole)))
        return {"inputs": [given], "outputs": [buffer.view]}

    def _reduce_scatter(self) -> dict[str, Any]:
        both = [self._scattered(item) for item in self._items()]
        sides = {side: [t for one in both for t in one[side]] for side in ("inputs", "outputs")}
        return {**sides, "reduce": self.reduce}

    def _scattered(self, item: int) -> dict[str, list[Tensor]]:
        """Tensors of one reduce-scatter; ``item``: of several under way together."""
        uneven = self.form == "uneven"
        shapes = [self._wide((p + 1) % 3) if uneven else self.part for p in self.members]
        given = [
            [self._values(m, 1 + p + 24 * item, shapes[p]) for p in self.members]
            for m in self.members
        ]
        sums = [reduced(self.reduce, [own[part] for own in given]) for part in self.members]
        own = given[self.rank]
        if self.form in ("list", "uneven"):
            inputs = self._inputs(own)
            buffer = self._buffer("the result", None, sums[self.rank], shapes[self.rank])
        else:
            together = _joined(own, self.whole)
            if self.cell.get("place") == "inside":
                after = together.clone()
                _slot(after, self.rank, self.size).copy_(sums[self.rank].reshape(-1))
                whole = self._buffer("the tensor", together, after, self.whole)
                result = _slot(whole.view, self.rank, self.size).view(self.part)
                return {"inputs": [whole.view], "outputs": [result]}
            inputs = [self._input(together, self.whole)]
            buffer = self._buffer("the result", None, sums[self.rank])
        self._sums(buffer, [one[self.rank] for one in given])
        self._of_ranks(buffer, sums, "the chunk")
        return {"inputs": inputs, "outputs": [buffer.view]}

    def _gather(self) -> dict[str, Any]:
        values = self._of_all()
        given = self._input(values[self.rank])
        outputs = self._gathered(values) if self.rank == self.root else []
        return {"inputs": [given], "outputs": outputs, "root": self.root}

    def _scatter(self) -> dict[str, Any]:
        values = [self._values(self.root, 1 + part) for part in self.members]
        inputs = self._inputs(values) if self.rank == self.root else []
        buffer = self._buffer("the result", None, values[self.rank])
        self._of_ranks(buffer, values, "the part")
        return {"inputs": inputs, "outputs": [buffer.view], "root": self.root}

    def _wide(self, rows: int) -> tuple[int, int]:
        """Shape of a part of so many rows."""
        return 0 if self.layout == "empty" else rows, 1 if self.layout == "one" else self.part[1]

    def _all_to_all(self) -> dict[str, Any]:
        if self.form == "uneven":
            return self._uneven_all_to_all()
        sent = [self._values(self.rank, 1 + other) for other in self.members]
        come = [self._values(other, 1 + self.rank) for other in self.members]
        if self.form == "list":
            return {"inputs": self._inputs(sent), "outputs": self._gathered(come)}
        together = _joined(sent, self.whole)
        given = self._input(together, self.whole)
        result = self._buffer("the result", None, _joined(come, self.whole), self.whole)
        result.stories.append(("every rank kept its own parts", together))
        return {"inputs": [given], "outputs": [result.view]}

    def _uneven_all_to_all(self) -> dict[str, Any]:
        def rows(source: int, target: int) -> int:
            return 0 if self.layout == "empty" else (source + 2 * target + 1) % 4

        wide, members = self._wide, self.members
        gives = [rows(self.rank, other) for other in members]
        takes = [rows(other, self.rank) for other in members]
        sent = [self._values(self.rank, 1 + o, wide(gives[o])) for o in members]
        come = [self._values(o, 1 + self.rank, wide(takes[o])) for o in members]
        given = self._input(torch.cat(sent), wide(sum(gives)))
        result = self._buffer("the result", None, torch.cat(come), wide(sum(takes)))
        return {"inputs": [given], "outputs": [result.view], "splits": (gives, takes)}

    def _send_recv(self) -> dict[str, Any]:
        """Each rank sends to the next one; two messages where tags can distinguish them."""
        tags = (7, 8) if self.form == "tagged" else (0,)
        transfers: list[Send | Recv] = []
        for source in self.members:
            target = (source + 1) % self.size
            if source == target:
                continue
            messages = {tag: self._values(source, tag) for tag in tags}
            if self.rank == source:
                for tag, message in messages.items():
                    sent = self._buffer("the message sent", message, None)
                    transfers.append(Send(sent.view, target, tag))
            if self.rank == target:
                for tag in reversed(tags):
                    got = self._buffer(f"the message of tag {tag} received", None, messages[tag])
                    others = ((o, message) for o, message in messages.items() if o != tag)
                    got.stories += [(f"it is the message of tag {o}", m) for o, m in others]
                    transfers.append(Recv(got.view, ANY if self.form == "any" else source, tag))
        return {"transfers": transfers}

    _batch = _send_recv


def _joined(parts: Sequence[Tensor], shape: Shape) -> Tensor:
    """Parts one after the other."""
    return torch.cat([part.reshape(-1) for part in parts]).reshape(shape)


def _slot(whole: Tensor, member: int, size: int) -> Tensor:
    """The part of ``member`` in a contiguous tensor, flat."""
    count = whole.numel() // size
    return whole.view(-1)[member * count : (member + 1) * count]
