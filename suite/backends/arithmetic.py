"""The arithmetic of a collective: takes the requests of all ranks, returns their outputs.

Reductions are left folds in rank order in the tensors' own dtype, hence bitwise
reproducible.  Every rank's own copy is written from one result, so replicas are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shardproof.backends.errors import CollectiveMismatch, name_ranks
from shardproof.backends.request import Chunks, Request, Rows, chunks, wholes
from shardproof.table import grouped

#: ``(destination, value)``: to be copied into the destination, which belongs to one rank.
Write = tuple[Tensor, Tensor]

_FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda a, b: a.add_(b),
    "avg": lambda a, b: a.add_(b),
    "product": lambda a, b: a.mul_(b),
    "min": lambda a, b: torch.minimum(a, b, out=a),
    "max": lambda a, b: torch.maximum(a, b, out=a),
    "band": lambda a, b: a.bitwise_and_(b),
    "bor": lambda a, b: a.bitwise_or_(b),
    "bxor": lambda a, b: a.bitwise_xor_(b),
}


def fold(tensors: list[Tensor], op: str) -> Tensor:
    """Left fold of equally sized ``tensors`` in the given order, as a new dense tensor."""
    total = tensors[0].detach().clone(memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        _FOLDS[op](total, tensor.detach().reshape(total.shape))
    if op == "avg":
        real = total.is_floating_point() or total.is_complex()
        total.div_(len(tensors), rounding_mode=None if real else "trunc")
    return total


def copy(value: Tensor) -> Tensor:
    """A copy of ``value`` for later; the hub's, no memory of the rank that makes it."""
    with torch.no_grad(), _disable_current_modes():
        return value.detach().clone()


def write(writes: list[Write]) -> None:
    """Carry out ``writes``, hidden from autograd: no graph, no version count, as c10d does it."""
    with torch.no_grad(), _disable_current_modes():
        for destination, value in writes:
            # .data has a version counter of its own; detach() would share it
            destination.data.copy_(value.reshape(destination.shape))


def run(requests: list[Request]) -> list[list[Write]]:
    """The writes of each rank; ``requests`` are those of all group ranks in order.

    Values are fresh or stay unchanged by the writes, so that the writes may be done in any order
    and at any later time at which the inputs still hold.  Raises :class:`CollectiveMismatch` when
    sizes do not fit together.
    """
    with torch.no_grad(), _disable_current_modes():
        writes: list[list[Write]] = [[] for _ in requests]
        for rank, destination, value in _OPERATIONS[requests[0].operation](requests):
            if destination.numel() != value.numel() or destination.dtype != value.dtype:
                raise CollectiveMismatch(
                    f"{requests[0].operation}: rank {rank} of the group expects "
                    f"{_shape(destination)}, but receives {_shape(value)}"
                )
            if destination.data_ptr() != value.data_ptr() or not destination.numel():
                writes[rank].append((destination, value))
        return writes


Result = Iterator[tuple[int, Tensor, Tensor]]


def _all_reduce(requests: list[Request]) -> Result:
    for index in range(len(requests[0].inputs)):
        total = fold([r.inputs[index][0] for r in requests], requests[0].reduce or "sum")
        for rank, request in enumerate(requests):
            yield rank, request.outputs[index][0], total


def _reduce(requests: list[Request]) -> Result:
    root = requests[0].root or 0
    return (result for result in _all_reduce(requests) if result[0] == root)


def _broadcast(requests: list[Request]) -> Result:
    root = requests[0].root or 0
    for index in range(len(requests[0].inputs)):
        for rank, request in enumerate(requests):
            if rank != root:
                yield rank, request.outputs[index][0], requests[root].inputs[index][0]


def _all_gather(requests: list[Request]) -> Result:
    for index in range(len(requests[0].inputs)):
        given = [giver.inputs[index][0] for giver in requests]
        if (targets := _whole([r.outputs[index] for r in requests])) and _are_alike(given):
            whole = torch.cat([value.reshape(-1) for value in given])
            yield from ((rank, target, whole) for rank, target in enumerate(targets))
            continue
        for source, giver in enumerate(requests):
            value = giver.inputs[index][0]
            # In place, a rank's input is its own slot of its output; any other overlap is copied.
            if value.data_ptr() != giver.outputs[index][source].data_ptr():
                value = _stable(value, _storages(giver))
            for rank, request in enumerate(requests):
                yield rank, request.outputs[index][source], value


def _reduce_scatter(requests: list[Request]) -> Result:
    for index in range(len(requests[0].outputs)):
        if _are_alike(given := _whole([r.inputs[index] for r in requests])):
            total = chunks(fold(given, requests[0].reduce or "sum"), len(requests))
            yield from ((r, one.outputs[index][0], total[r]) for r, one in enumerate(requests))
            continue
        for rank, request in enumerate(requests):
            parts = [r.inputs[index][rank] for r in requests]
            if len({(p.numel(), p.dtype) for p in parts}) > 1:
                alike = grouped((_shape(part), giver) for giver, part in enumerate(parts))
                sizes = ", ".join(f"{size} on {name_ranks(r)}" for size, r in alike.items())
                raise CollectiveMismatch(f"reduce_scatter: inputs for rank {rank} differ: {sizes}")
            yield rank, request.outputs[index][0], fold(parts, requests[0].reduce or "sum")


def _gather(requests: list[Request]) -> Result:
    root = requests[0].root or 0
    taken = _storages(requests[root])
    for index in range(len(requests[0].inputs)):
        for source, giver in enumerate(requests):
            value = _stable(giver.inputs[index][0], taken)
            yield root, requests[root].outputs[index][source], value


def _scatter(requests: list[Request]) -> Result:
    root = requests[0].root or 0
    taken = _storages(requests[root])
    for index in range(len(requests[0].outputs)):
        for rank, request in enumerate(requests):
            value = _stable(requests[root].inputs[index][rank], taken)
            yield rank, request.outputs[index][0], value


def _all_to_all(requests: list[Request]) -> Result:
    taken, inputs = [_storages(r) for r in requests], [r.inputs[0] for r in requests]
    given = [one.whole.split(one.sizes) if isinstance(one, Rows) else one for one in inputs]
    for rank, target in enumerate(r.outputs[0] for r in requests):
        arriving = [parts[rank] for parts in given]
        # One copy a rank: N copies for each of N ranks would take longer than all the rest.
        shapes = [value.shape for value in arriving]
        if isinstance(target, Rows) and shapes == [(n, *target.row) for n in target.sizes]:
            yield rank, target.whole, torch.cat(arriving)
            continue
        values = zip(target, map(_stable, arriving, taken), strict=True)
        yield from ((rank, place, value) for place, value in values)


_OPERATIONS: dict[str, Callable[[list[Request]], Result]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "barrier": lambda requests: iter(()),
}


def _whole(items: list[Sequence[Tensor]]) -> list[Tensor]:
    """The tensors whose equal parts ``items`` are; empty if one of them is a list."""
    found = [item.whole for item in items if isinstance(item, Chunks)]
    return found if len(found) == len(items) else []


def _are_alike(tensors: list[Tensor]) -> bool:
    """Whether there are ``tensors``, all of one size and dtype."""
    return len({(tensor.numel(), tensor.dtype) for tensor in tensors}) == 1


def _storages(receiver: Request) -> set[int]:
    """Where the outputs of ``receiver`` lie."""
    return {t.untyped_storage().data_ptr() for o in receiver.outputs for t in wholes(o)}


def _stable(value: Tensor, taken: set[int]) -> Tensor:
    """``value``, or a copy of it if it lies in one of the storages ``taken``."""
    return value.clone() if value.untyped_storage().data_ptr() in taken else value


def _shape(tensor: Tensor) -> str:
    return f"{tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}"
