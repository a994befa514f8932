"""The hooks of a process while a memory ledger is open; none otherwise.

Three things escape a dispatch mode: ``UntypedStorage.resize_`` does not dispatch (FSDP frees its
parameters with it), optimizers keep their state to themselves, and DTensor runs every operator
once more on fakes to learn shapes.  Patches are process-wide, so one installation serves all
ledgers (one per rank-thread), each of which knows its own storages.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from shardproof.ledgers.memory.recorder import MemoryLedger

_lock = threading.Lock()
_active: tuple[MemoryLedger, ...] = ()
#: Those of each thread that entered one.
_of_thread: dict[int, tuple[MemoryLedger, ...]] = {}
_undo = ExitStack()


def active() -> tuple[MemoryLedger, ...]:
    """The ledgers that are open in this process."""
    return _active


def add(ledger: MemoryLedger, fakes: bool) -> None:
    """Open ``ledger``; the first one installs the patches (``fakes``: DTensor's as well)."""
    global _active
    with _lock:
        if not _active:
            _replace(torch.UntypedStorage, "resize_", _resize)
            _undo.callback(register_optimizer_step_post_hook(_stepped).remove)
        if fakes and not any(other.fakes for other in _active):
            name = "torch.distributed.tensor._sharding_prop"
            propagator = importlib.import_module(name).ShardingPropagator
            # Private: without it the first use of an operator counts DTensor's shape arithmetic.
            if hasattr(propagator, "_propagate_tensor_meta_non_cached"):
                _replace(propagator, "_propagate_tensor_meta_non_cached", _unrecorded)
        _active = (*_active, ledger)
        _of_thread[ledger.thread] = (*_of_thread.get(ledger.thread, ()), ledger)


def remove(ledger: MemoryLedger) -> None:
    """Close ``ledger``; the last one takes all patches off."""
    global _active
    with _lock:
        _active = tuple(other for other in _active if other is not ledger)
        left = tuple(o for o in _of_thread.pop(ledger.thread, ()) if o is not ledger)
        if left:
            _of_thread[ledger.thread] = left
        if not _active:
            _undo.close()


def _concerned() -> tuple[MemoryLedger, ...]:
    """The ledgers that can know what the calling thread has in hand."""
    # A rank-thread holds no other rank's storages: to ask all N ledgers at each call of N ranks
    # would cost N^2.  A thread that autograd or a system started has none, so all are asked.
    return _of_thread.get(threading.get_ident(), _active)


def communicated(tensors: Iterable[Tensor]) -> None:
    """A rank hands ``tensors`` to a process group: backends say so, from any thread."""
    handed = list(tensors) if _active else []
    for ledger in _concerned():
        ledger.touch(handed)


def at_release(tensor: Tensor, tell: Callable[[], None]) -> bool:
    """Call ``tell`` when the storage of ``tensor`` is freed; whether a ledger knows it."""
    known = [ledger.at_release(tensor, tell) for ledger in _concerned()]
    return any(known)


def watch(module: nn.Module) -> None:
    """Label what the modules below ``module`` compute with, in every forward.

    Sharded strategies gather parameters into other storages than those that they own; a hook of the
    suite on the suite's own module sees them in use.  Copies of the module keep the hooks.
    """
    for child in module.modules():
        if child._parameters:
            child.register_forward_pre_hook(_computes)


def _computes(module: nn.Module, inputs: Any) -> None:
    for ledger in _concerned():
        ledger.in_use(module._parameters.values(), "parameters")


def _stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for ledger in _of_thread.get(threading.get_ident(), ()):
        ledger.saw_optimizer(optimizer)


def _resize(original: Callable[..., Any]) -> Callable[..., Any]:
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        for ledger in _concerned():
            ledger.resized(storage)
        return result

    return resize_


def _unrecorded(original: Callable[..., Any]) -> Callable[..., Any]:
    def propagate(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as paused:
            for ledger in _of_thread.get(threading.get_ident(), ()):
                paused.enter_context(ledger.paused())
            return original(*args, **kwargs)

    return propagate


def _replace(owner: type, name: str, wrap: Callable[..., Any]) -> None:
    """Put ``wrap(original)`` in place of ``owner.name`` until the last ledger is closed."""
    original, inherited = getattr(owner, name), name not in vars(owner)
    setattr(owner, name, wrap(original))
    undo = (delattr, owner, name) if inherited else (setattr, owner, name, original)
    _undo.callback(*undo)
