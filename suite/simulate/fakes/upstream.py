"""Patches of places where torch reads tensor values in C++; fake tensors have none.

DDP compares shapes over ranks and sends the initial values before the first step; both are left
out.  It reorders its buckets in the second step by numbers that rank 0 sends; these get values.
FSDP asks for the addresses of tensors.  Objects that ranks send each other keep their bytes.
A module that is moved to where it is stays as it is: torch would swap its fake parameters.

Other upstream systems have patches of their own: ``without_values`` in ``fakes.py``, next to their
adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.fsdp import _flat_param
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import _redistribute, debug
from torch.nn.parallel import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from shardproof import comm
from shardproof.ledgers.program_order import nested_tensors
from shardproof.simulate.fakes.known import kept


class _RealNumbers(TorchDispatchMode):
    """Give values to int32 tensors, which DDP's reducer fills and reads by their address."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and named.get("dtype") is torch.int32:
            # Like the numbers of Comm.agree, it has a twin that the memory ledger counts.
            return comm.control([0] * args[0][0], dtype=torch.int32)
        given = list(nested_tensors((args, named)))
        if given and not any(isinstance(tensor, FakeTensor) for tensor in given):
            with unset_fake_temporarily():
                return func(*args, **named)
        return func(*args, **named)


class _Reducer:
    """DDP's reducer, which reorders its buckets by numbers with values."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> Any:
        with _RealNumbers():
            return self._reducer._rebuild_buckets()


def _object_to_tensor(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """An object's bytes and their number, as known integers."""
    with unset_fake_temporarily():
        made, size = _TO_TENSOR(*given, **named)
    return kept(made), kept(size)


def _tensor_to_object(tensor: Tensor, *given: Any, **named: Any) -> Any:
    """The object whose bytes ``tensor`` holds, if these are known."""
    values = getattr(tensor, "constant", None)
    with unset_fake_temporarily():
        sizes = (one.item() if isinstance(one, Tensor) else one for one in given)
        return _TO_OBJECT(tensor if values is None else values, *sizes, **named)


_TO_TENSOR: Any = getattr(c10d, "_object_to_tensor", None)
_TO_OBJECT: Any = getattr(c10d, "_tensor_to_object", None)


_RESET: Any = getattr(_fsdp_param.FSDPParam, "reset_sharded_param", None)


def _reset_sharded_param(param: Any) -> None:
    """Pad a shard again only if its tensor was replaced; FSDP2 would compare addresses."""
    there = getattr(param._module_info.module, param._module_info.param_name)
    held = getattr(param, "_sharded_param_data", None)
    local = getattr(there, "_local_tensor", None)
    is_fake = isinstance(held, FakeTensor) and isinstance(local, FakeTensor)
    if not is_fake or there is not param.sharded_param or not _share(held, local):
        _RESET(param)


_APPLY: Any = nn.Module._apply


def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Leave ``module`` as it is if ``fn`` gives each of its tensors back."""
    held = [*module.parameters(recurse), *module.buffers(recurse)]
    if any(isinstance(one, FakeTensor) for one in held) and all(fn(one) is one for one in held):
        return module
    made: nn.Module = _APPLY(module, fn, recurse)
    return made


def _share(one: Any, other: Any) -> bool:
    return one.untyped_storage() is other.untyped_storage()


def _forget_ranks() -> None:
    """Empty DTensor's caches, which hold shapes and groups of the previous rank."""
    for clear in (
        getattr(debug, "_clear_sharding_prop_cache", None),
        getattr(_redistribute, "clear_redistribute_planner_cache", None),
        *(getattr(held, "cache_clear", None) for held in vars(_redistribute).values()),
    ):
        if clear is not None:
            clear()


def patches_of(kind: type) -> AbstractContextManager[None]:
    """The patches that the adapter ``kind`` has of its own, in ``fakes.py`` in its folder."""
    name = kind.__module__.rpartition(".")[0] + ".fakes"
    if not name.startswith("shardproof.impls.") or find_spec(name) is None:
        return nullcontext()
    made: AbstractContextManager[None] = import_module(name).without_values()
    return made


@contextmanager
def without_values() -> Iterator[None]:
    """Apply the patches inside."""
    original = distributed.DistributedDataParallel._ddp_init_helper

    def made(self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        self.reducer = _Reducer(self.reducer)

    def nothing(*given: Any, **named: Any) -> None:
        """Do nothing: all ranks are alike."""

    def is_allocated(tensor: Tensor) -> bool:
        """Answer by the size; FSDP1 would ask for the address, which fake tensors do not have."""
        return tensor.untyped_storage().size() > 0

    _forget_ranks()
    with ExitStack() as stack:
        if hasattr(_flat_param, "_data_ptr_allocated"):
            stack.enter_context(patch.object(_flat_param, "_data_ptr_allocated", is_allocated))
        for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
            stack.enter_context(patch.object(distributed, name, nothing))
        if _TO_TENSOR is not None and _TO_OBJECT is not None:
            stack.enter_context(patch.object(c10d, "_object_to_tensor", _object_to_tensor))
            stack.enter_context(patch.object(c10d, "_tensor_to_object", _tensor_to_object))
        if _RESET is not None:
            fsdp2 = _fsdp_param.FSDPParam
            stack.enter_context(patch.object(fsdp2, "reset_sharded_param", _reset_sharded_param))
        stack.enter_context(patch.object(nn.Module, "_apply", _apply))
        owner = distributed.DistributedDataParallel
        stack.enter_context(patch.object(owner, "_ddp_init_helper", made))
        try:
            yield
        finally:
            _forget_ranks()
