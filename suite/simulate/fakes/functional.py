"""Functional collectives of torch, by which DTensor communicates, on tensors without values.

Their kernel makes the result and calls the group.  For fake tensors torch computes only the shape
of the result, so the call is made here, with the arguments that the kernel would pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

#: Makes a call of ``group`` from the operator's arguments before its group, and from its result.
_Make = Callable[[Any, Sequence[Any], Any], Any]


def _all_reduce(group: Any, given: Sequence[Any], result: Any) -> object:
    options = dist.AllreduceOptions()
    options.reduceOp = _reduction(given[1])
    return group.allreduce(_listed(result), options)


def _reduce_scatter(group: Any, given: Sequence[Any], result: Any) -> object:
    options = dist.ReduceScatterOptions()
    options.reduceOp = _reduction(given[1])
    return group.reduce_scatter_single(_listed(result), _listed(given[0]), options)


def _all_gather(group: Any, given: Sequence[Any], result: Any) -> object:
    return group.all_gather_single(_listed(result), _listed(given[0]))


def _all_to_all(group: Any, given: Sequence[Any], result: Any) -> object:
    return group.all_to_all_single(result, given[0], [*given[1]], [*given[2]])


def _broadcast(group: Any, given: Sequence[Any], result: Any) -> object:
    options = dist.BroadcastOptions()
    options.rootRank = given[1]
    return group.broadcast([result], options)


_CALLS: dict[str, _Make] = {
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce,
    "all_reduce_coalesced": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_coalesced": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "broadcast": _broadcast,
}


def call(func: Any, args: Sequence[Any], result: Any) -> None:
    """Make the call of ``func`` if it is a functional collective, or wait for one.

    ``result``: its fake result.

    :raises NotImplementedError: ``func`` is a functional collective that is not known here.
    """
    space, _, name = func._schema.name.partition("::")
    if space != "_c10d_functional":
        return
    if name == "wait_tensor":
        waited(args[0])
        return
    if name not in _CALLS:
        raise NotImplementedError(f"{func} cannot be simulated: its call is not known")
    *given, group = args
    made = group if isinstance(group, dist.ProcessGroup) else _resolve_process_group(group)
    with torch.no_grad():
        handle = _CALLS[name](made, given, result)
    for tensor in _listed(result):
        _under_way[id(tensor.untyped_storage())] = handle


#: Calls by the storage of their result: a later call replaces one that was never waited for.
_under_way: dict[int, Any] = {}


def waited(result: Any) -> None:
    """The program waits for the call that makes ``result``."""
    handle = _under_way.pop(id(result.untyped_storage()), None)
    if handle is not None:
        handle.note_wait()


def let_go() -> None:
    """Forget calls that were never waited for, because they keep tensors."""
    _under_way.clear()


def _reduction(name: str) -> Any:
    return getattr(dist.ReduceOp, name.upper())


def _listed(tensors: Any) -> list[Any]:
    return [*tensors] if isinstance(tensors, (list, tuple)) else [tensors]
