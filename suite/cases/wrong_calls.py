"""The tensors of calls that must raise (``suite/workloads/wrong_calls.py``), small and dense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardproof.comm import Recv, Send
from shardproof.workloads.calls import Cell

#: Elements of a part.
PART = 4
_OTHER = torch.float64


def arguments(cell: Cell, rank: int, size: int) -> dict[str, Any]:
    """What member ``rank`` of ``size`` gives to a wrong call."""
    if "differs" in cell:
        return _differing(
            cell["operation"], cell["differs"] if rank == size - 1 else "", size, rank
        )
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
        return {**right, "root": size, "inputs": right["inputs"][:1], "outputs": []} | (
            {"outputs": right["outputs"][:1], "inputs": []} if operation != "gather" else {}
        )
    if mistake == "reduce":  # no number has bits
        return {**right, "reduce": "band"}
    if mistake == "complex":  # no complex number is larger than another
        return {**right, "reduce": "max", "outputs": [_ones(dtype=torch.complex64)]}
    if mistake == "splits":
        gives, takes = right["splits"]
        return {**right, "splits": ([*gives[:-1], gives[-1] + 1], takes)}
    # The rest is about the side that has a part for each rank.
    side = "inputs" if operation in ("reduce_scatter", "scatter") else "outputs"
    return {**right, side: _changed(right[side], mistake, size)}


def _changed(tensors: Sequence[Tensor], mistake: str, size: int) -> list[Tensor]:
    if mistake == "count":
        return [*tensors, _ones()]
    if mistake == "dtype":
        return [t.to(_OTHER) for t in tensors]
    more = 1 if len(tensors) == size and tensors[0].numel() == PART else size
    return [_ones(t.numel() + more) for t in tensors]


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
