"""Linear and embedding layers that are split over the ranks of one axis.

    layer                 each rank holds                        in                   out
    column-parallel       rows of weight and bias                enter(x)             its features
    row-parallel          columns of the weight, the bias whole  its features         leave(y) + b
    vocabulary embedding  rows of the table                      all numbers          leave(y)

A column-parallel layer and the row-parallel layer behind it need no message between them, as long
as what stands there works element by element, or head by head where ranks hold whole heads
(Megatron-LM, arXiv 1909.08053, section 3).  ``enter`` and ``leave`` are conjugate operators: ``f``
and ``f_bar``, or ``g`` and ``g_bar`` where sequences are split between such pairs (arXiv
2205.05198, section 4.2.2).

The bias of a row-parallel layer is added after ``leave``: once, not by every rank.  An embedding
looks up the numbers of its own rows and gives zeros for all others.

Modules stay what they are: their parameters become shards, and their own forward computes with
them, between operators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.comm import Comm
from shardproof.contract import Refused
from shardproof.impls.reference.tensor.cuts import Block, Split
from shardproof.impls.reference.tensor.operators import gather_classes, share

#: A conjugate operator: (tensor, comm) -> tensor.
Operator = Callable[[Tensor, Comm], Tensor]
Compute = Callable[..., Tensor]


def even(name: str, size: int, what: str, comm: Comm) -> tuple[Block, ...]:
    """This rank's equal part of ``size``; :class:`Refused` if it does not divide."""
    if size % comm.size:
        raise refused(name, f"{size} {what}", comm, [n for n in _upto(size) if size % n == 0])
    part = size // comm.size
    return (Block(comm.rank * part, (comm.rank + 1) * part),)


def classes(name: str, size: int, comm: Comm) -> tuple[Block, ...]:
    """This rank's part of a vocabulary: the last ranks may have less, but none is empty."""
    part = share(size, comm.size)
    if part * (comm.size - 1) >= size:
        fits = [n for n in _upto(size) if share(size, n) * (n - 1) < size]
        raise refused(name, f"{size} rows (each rank needs at least 1 row)", comm, fits)
    return (Block(comm.rank * part, min((comm.rank + 1) * part, size)),)


def fused_heads(
    name: str, attention: nn.Module, rows: int, comm: Comm
) -> tuple[tuple[Block, ...], tuple[int, int]]:
    """Queries, keys and values of this rank's heads in ``rows``, and which rows are shared.

    ``attention`` tells ``head_size`` and ``group``, how many query heads share a KV head.  Where
    there are fewer KV heads than ranks, a KV head lives on each rank that has some of its group.
    """
    head, group = int(attention.head_size), int(attention.group)  # type: ignore[arg-type]
    kv_heads = rows // head // (group + 2)
    heads, ranks = kv_heads * group, comm.size

    def fits(n: int) -> bool:
        return heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)

    if not fits(ranks):
        valid = [n for n in _upto(heads) if fits(n)]
        raise refused(name, f"{heads} heads and {kv_heads} KV heads", comm, valid)
    # With more ranks than KV heads several ranks hold the same one, and attend with it for
    # different query heads of its group.
    copies, own = max(1, ranks // kv_heads), max(1, kv_heads // ranks) * head
    queries, keys = heads * head, kv_heads * head
    first, copy = comm.rank // copies * own, comm.rank % copies
    mine = queries // ranks
    blocks = (
        Block(comm.rank * mine, (comm.rank + 1) * mine),
        *(
            Block(start + first, start + first + own, copy, copies)
            for start in (queries, queries + keys)
        ),
    )
    return blocks, (queries, rows) if copies > 1 else (0, 0)


def refused(name: str, what: str, comm: Comm, valid: Iterable[int]) -> Refused:
    """The error that ``name`` with ``what`` cannot be split over ``comm``; ``valid`` can."""
    sizes = ", ".join(map(str, valid))
    return Refused(
        f"mesh axis {comm.axis!r} = {comm.size}: {name!r} has {what}, which cannot be divided "
        f"among {comm.size} ranks; valid: {sizes}"
    )


def _upto(size: int) -> range:
    return range(1, size + 1)


class SplitLayer(ABC):
    """A module with split parameters, and its forward around that of the module.

    ``cuts`` maps the last names of split parameters; :class:`Refused` where they cannot be.
    """

    def __init__(self, name: str, module: nn.Module, comm: Comm) -> None:
        self.name, self.module, self.comm = name, module, comm
        self.cuts: dict[str, Split] = {}

    def split(
        self, leaf: str, dim: int, blocks: tuple[Block, ...], shared: tuple[int, int] = (0, 0)
    ) -> None:
        """Record that the module's parameter ``leaf``, if any, is split along ``dim``."""
        parameter = getattr(self.module, leaf, None)
        if parameter is not None:
            self.cuts[leaf] = Split(tuple(parameter.shape), dim, blocks, shared)

    def wrap(self) -> None:
        """Wrap the module's forward in this one."""
        self.module.forward = partial(self.forward, self.module.forward)

    def close(self) -> None:
        """Restore the module's forward."""
        del self.module.forward

    @abstractmethod
    def forward(self, compute: Compute, *args: Any) -> Tensor:
        """Transform the module's inputs and call ``compute``, its original forward."""


class Column(SplitLayer):
    """Output features split evenly; ``(..., in)`` replicated -> ``(..., own features)``."""

    def __init__(self, name: str, module: nn.Module, comm: Comm, enter: Operator) -> None:
        super().__init__(name, module, comm)
        self.enter = enter
        blocks, shared = self.rows(module.get_parameter("weight").shape[0])
        for leaf in ("weight", "bias"):
            self.split(leaf, 0, blocks, shared)

    def rows(self, size: int) -> tuple[tuple[Block, ...], tuple[int, int]]:
        """This rank's part of ``size`` features, and which of them are shared."""
        return even(self.name, size, "output features", self.comm), (0, 0)

    def forward(self, compute: Compute, *args: Any) -> Tensor:
        """Send only the message of ``enter``."""
        return compute(self.enter(args[0], self.comm))


class Heads(Column):
    """A fused projection to queries, keys and values, split by heads."""

    def __init__(
        self, name: str, module: nn.Module, comm: Comm, enter: Operator, attention: nn.Module
    ) -> None:
        self.attention = attention
        super().__init__(name, module, comm, enter)

    def rows(self, size: int) -> tuple[tuple[Block, ...], tuple[int, int]]:
        """The rows of this rank's heads."""
        return fused_heads(self.name, self.attention, size, self.comm)


class Classes(Column):
    """An output layer over a vocabulary; ``(..., in)`` -> logits of this rank's classes.

    With ``gathered`` all classes on every rank.
    """

    def __init__(
        self, name: str, module: nn.Module, comm: Comm, enter: Operator, gathered: bool
    ) -> None:
        super().__init__(name, module, comm, enter)
        self.gathered = gathered

    def rows(self, size: int) -> tuple[tuple[Block, ...], tuple[int, int]]:
        """A contiguous part of the vocabulary."""
        self.total, blocks = size, classes(self.name, size, self.comm)
        self.own = range(blocks[0].start, blocks[0].stop)
        return blocks, (0, 0)

    def forward(self, compute: Compute, *args: Any) -> Tensor:
        """Logits, gathered if requested."""
        logits = super().forward(compute, *args)
        return gather_classes(logits, self.comm, self.total) if self.gathered else logits


class Row(SplitLayer):
    """Input features split evenly; ``(..., own features)`` -> ``(..., out)``, the bias once."""

    def __init__(self, name: str, module: nn.Module, comm: Comm, leave: Operator) -> None:
        super().__init__(name, module, comm)
        self.leave = leave
        size = module.get_parameter("weight").shape[1]
        self.split("weight", 1, even(name, size, "input features", comm))

    def forward(self, compute: Compute, *args: Any) -> Tensor:
        """Sum over ranks, then add the bias."""
        held, bias = self.module._parameters, self.module._parameters["bias"]
        # Taken away for the call: the module's own forward would add it on every rank, before the
        # sum that then counts it as often.
        held["bias"] = None
        try:
            terms = compute(*args)
        finally:
            held["bias"] = bias
        total = self.leave(terms, self.comm)
        return total if bias is None else total + bias


class Vocabulary(SplitLayer):
    """An embedding whose rows are split; int64 ``(...)`` -> ``(..., width)``."""

    def __init__(self, name: str, module: nn.Module, comm: Comm, leave: Operator) -> None:
        super().__init__(name, module, comm)
        self.leave = leave
        blocks = classes(name, module.get_parameter("weight").shape[0], comm)
        self.split("weight", 0, blocks)
        self.own = range(blocks[0].start, blocks[0].stop)

    def forward(self, compute: Compute, *args: Any) -> Tensor:
        """Rows of this rank, zeros for the others, summed over ranks."""
        # Another rank's numbers look up row 0, for they must not be out of bounds; its values are
        # thrown away below, and with them its gradient.
        place = args[0] - self.own.start
        elsewhere = (place < 0) | (place >= len(self.own))
        rows = compute(place.masked_fill(elsewhere, 0))
        return self.leave(rows.masked_fill(elsewhere[..., None], 0), self.comm)


class Positions(SplitLayer):
    """An embedding of positions under sequence parallelism: int64 ``(..., positions)``, equal on
    all ranks -> ``(..., share, width)`` of this rank, with zeros as padding. The table stays whole.
    """

    def forward(self, compute: Compute, *args: Any) -> Tensor:
        """Send no message."""
        positions: Tensor = args[0]
        size = share(positions.shape[-1], self.comm.size)
        own = compute(positions[..., self.comm.rank * size : (self.comm.rank + 1) * size])
        return F.pad(own, (0, 0, 0, size - own.shape[-2]))


class Placed(SplitLayer):
    """A position-dependent module on a part of the sequence ``(samples, share, ...)``; its
    ``first_position`` is where the part begins.
    """

    def forward(self, compute: Compute, *args: Any) -> Tensor:
        """Send no message."""
        self.module.first_position = self.comm.rank * args[0].shape[1]
        return compute(*args)
