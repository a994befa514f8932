"""Calls that must raise: what is wrong with them, by operation and form.

A *mistake* is one that a rank can see by itself; all members of the group make it alike.  A call
that *differs* is right on each rank and wrong together: the last rank gives another dtype, more
elements, fewer (``short``), another root or another reduce operation.  Tensors are small and dense.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardproof.comm import Recv, Send

Cell = Mapping[str, str]
Taken = Mapping[str, Sequence[str]]

_LISTS = ("count", "shape", "dtype")
#: Operation -> form -> mistakes, in the group of all ranks; ``group single`` where one rank alone
#: gives what is wrong, and the others would wait for it.
_MISTAKES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "all_reduce": {"tensor": ("reduce", "complex")},
    "reduce": {"tensor": ("root", "reduce", "complex")},
    "broadcast": {"tensor": ("root",)},
    "all_gather": {"tensor": ("shape", "dtype"), "list": _LISTS},
    "reduce_scatter": {"tensor": ("shape", "dtype", "reduce"), "list": _LISTS},
    "gather": {"list": ("root", *_LISTS)},
    "scatter": {"list": ("root", *_LISTS)},
    "all_to_all": {"tensor": ("shape", "dtype"), "uneven": ("splits",), "list": _LISTS},
    "send_recv": {"tensor": ("self", "peer", "source")},
    "batch": {"tensor": ("self", "peer", "source")},
    "barrier": {},
}
#: Operation -> what differs between ranks.
_DIFFERS: Mapping[str, Sequence[str]] = {
    "all_reduce": ("dtype", "shape", "reduce"),
    "reduce": ("root", "dtype", "shape", "reduce"),
    "broadcast": ("shape", "root", "dtype"),
    "all_gather": ("shape", "dtype"),
    "reduce_scatter": ("dtype", "reduce", "shape"),
    "gather": ("root", "dtype"),
    "scatter": ("dtype", "root"),
    "all_to_all": ("dtype",),
    "send_recv": ("short", "shape", "dtype"),
    "batch": ("short", "dtype", "shape"),
    "barrier": (),
}
#: What a scenario may choose: mistakes of messages by their own, as some backends live on none.
MISTAKES = ("all", "none", "self", "peer")
DIFFERS = ("one", "none")


def mistakes(operation: str, chosen: str, taken: Taken) -> Iterator[Cell]:
    """The mistaken calls of an operation of which a system takes ``taken``."""
    kept = {"all": None, "none": (), "self": ("self",), "peer": ("peer", "source")}[chosen]
    for form, names in _MISTAKES[operation].items():
        if form not in taken.get("form", (form,)):
            continue
        for name in names:
            if name not in taken.get("mistake", (name,)) or (kept is not None and name not in kept):
                continue
            alone = operation in ("gather", "scatter") and name != "root"
            group = "single" if alone else "world"
            yield {"operation": operation, "form": form, "mistake": name, "group": group}


def differing(operation: str, world: int, chosen: str, taken: Taken) -> Iterator[Cell]:
    """The one call in which the last rank differs, in another way at each world; or none.

    It comes last: no call of that group can match after it.
    """
    ways = [name for name in _DIFFERS[operation] if name in taken.get("differs", (name,))]
    if world == 1 or not ways or chosen == "none":
        return
    form = next(iter(_MISTAKES[operation]))
    way = ways[world % len(ways)]
    yield {"operation": operation, "form": form, "differs": way, "group": "world"}


# ------------------------------------------------------------------------------ their tensors

#: Elements of a part.
PART = 4
_OTHER = torch.float64


def arguments(cell: Cell, rank: int, size: int) -> dict[str, Any]:
    """The input that member ``rank`` of ``size`` gives to an invalid call."""
    if "differs" in cell:
        way = cell["differs"] if rank == size - 1 else ""
        return _differing(cell["operation"], way, size, rank)
    return _mistaken(cell["operation"], cell["form"], cell["mistake"], size, rank)


def _ones(count: int = PART, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(count, dtype=dtype)


def _mistaken(operation: str, form: str, mistake: str, size: int, rank: int) -> dict[str, Any]:
    if operation in ("send_recv", "batch"):
        peer = rank if mistake == "self" else size
        one = Recv(_ones(), peer) if mistake == "source" else Send(_ones(), peer)
        return {"transfers": [one]}
    right = _right(operation, form, size, rank)
    if mistake == "root":
        kept, left = ("inputs", "outputs") if operation == "gather" else ("outputs", "inputs")
        return {**right, "root": size, kept: right[kept][:1], left: []}
    if mistake == "reduce":  # no number has bits
        return {**right, "reduce": "band"}
    if mistake == "complex":  # no complex number is larger than another
        return {**right, "reduce": "max", "outputs": [_ones(dtype=torch.complex64)]}
    if mistake == "splits":
        gives, takes = right["splits"]
        return {**right, "splits": ([*gives[:-1], gives[-1] + 1], takes)}
    # The rest is about the side that has a part for each rank.
    side = "inputs" if operation in ("reduce_scatter", "scatter") else "outputs"
    tensors: list[Tensor] = right[side]
    if mistake == "count":
        return {**right, side: [*tensors, _ones()]}
    if mistake == "dtype":
        return {**right, side: [t.to(_OTHER) for t in tensors]}
    more = 1 if len(tensors) == size and tensors[0].numel() == PART else size
    return {**right, side: [_ones(t.numel() + more) for t in tensors]}


def _right(operation: str, form: str, size: int, rank: int, root: int = 0) -> dict[str, Any]:
    """A call that nothing is wrong with."""
    parts = [_ones() for _ in range(size)]
    whole = [_ones(PART * size)] if form in ("tensor", "uneven") else parts
    if operation == "all_to_all":
        right: dict[str, Any] = {"inputs": whole, "outputs": [t.clone() for t in whole]}
        return {**right, "splits": ([PART] * size, [PART] * size)} if form == "uneven" else right
    if operation in ("all_gather", "gather"):
        collects = operation == "all_gather" or rank == root
        return {"inputs": [_ones()], "outputs": whole if collects else [], "root": root}
    if operation in ("reduce_scatter", "scatter"):
        gives = operation == "reduce_scatter" or rank == root
        return {"inputs": whole if gives else [], "outputs": [_ones()], "root": root}
    if operation in ("send_recv", "batch"):
        to, source = (rank + 1) % size, (rank - 1) % size
        pair = [Send(_ones(), to), Recv(_ones(), source)]
        # One rank receives first: blocking messages do not wait for each other.
        return {"transfers": pair[::-1] if rank == 0 else pair}
    return {"inputs": [], "outputs": [_ones()], "root": root}


def _differing(operation: str, way: str, size: int, rank: int) -> dict[str, Any]:
    """A right call, but for what the last rank does in another ``way`` ("": nothing)."""
    form = "list" if operation in ("gather", "scatter") else "tensor"
    root = 1 % size if way == "root" else 0
    given = _right(operation, form, size, rank, root)
    if way == "reduce":
        return {**given, "reduce": "max"}
    change = {
        "dtype": lambda tensor: tensor.to(_OTHER),
        "short": lambda tensor: tensor[1:],
        "shape": lambda tensor: _ones(tensor.numel() // PART * (PART + 1)),
    }.get(way, lambda tensor: tensor)
    if "transfers" in given:  # what it sends
        changed = [
            Send(change(one.tensor), one.peer) if isinstance(one, Send) else one
            for one in given["transfers"]
        ]
        return {"transfers": changed}
    sides = {side: [change(t) for t in given[side]] for side in ("inputs", "outputs")}
    return {**given, **sides}
