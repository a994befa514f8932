"""Writes the memory log of one rank while it runs.

A dispatch mode sees the storage of every operator's result; a weak reference to the storage tells
when its last user let go; ``ledgers.memory.installed`` catches what does not dispatch.
Events are only appended here and judged later, by :mod:`~shardproof.ledgers.memory.log`.

The mode belongs to the thread that enters it, so rank-threads have a ledger each, and what one of
them does for all under ``_disable_current_modes`` is nobody's.  Autograd's device threads inherit
it.  Not seen: temporaries inside a C++ kernel, allocators' rounding, threads that a rank starts.
Under :class:`FakeTensorMode` enter the ledger *inside* it; only its fakes are counted, as if real.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
    _pop_mode_temporarily,
)

from shardproof.ledgers.memory import installed, operators
from shardproof.ledgers.memory.log import FILE, LABELS, MemoryLog, Origin, Storage
from shardproof.ledgers.program_order import nested_tensors

if TYPE_CHECKING:
    from shardproof.contract import Piece

_PIECE_LABELS = {"optimizer": "optimizer_state"}
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


class _Ref(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage that knows its place in the log and its last known size, and
    whom to tell when it is freed.
    """

    __slots__ = ("index", "key", "size", "told")
    index: int
    key: int
    size: int
    told: tuple[Callable[[], None], ...]


class MemoryLedger(TorchDispatchMode):
    """The open log of one rank: ``with MemoryLedger(phase) as ledger: ...``, once.

    ``phase()`` names the phase of the moment (``setup|forward|backward|update|observe``); it is
    called on the rank's own threads only.  Set :attr:`step` before each step (-1 is set-up).
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        super().__init__()
        self.log = MemoryLog()
        self.step = -1
        self.thread = 0
        self.fakes = False
        self._phase = phase
        self._now = ("", -1)
        self._fake_mode: FakeTensorMode | None = None
        self._known: dict[int, _Ref] = {}
        self._pauses = 0
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    # ------------------------------------------------------------------------- for the suite

    def __enter__(self) -> MemoryLedger:
        if self.thread:
            raise RuntimeError("this memory ledger was already used in a `with`: make a new ledger")
        self.thread = threading.get_ident()
        modes = _get_current_dispatch_mode_stack()
        self._fake_mode = next((m for m in modes if isinstance(m, FakeTensorMode)), None)
        self.fakes = self._fake_mode is not None
        installed.add(self, self.fakes)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        installed.remove(self)
        self._known.clear()

    def mark(self, name: str) -> None:
        """Name this moment, for :meth:`MemoryLog.bytes`."""
        self._turn()
        self.log.marks.append((name, self.step, len(self.log.events)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Allocations inside are the suite's; frees and resizes are still seen."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def unseen(self) -> AbstractContextManager[object]:
        """Mark copies of the suite, which are not kept; frees are still seen."""
        return _pop_mode_temporarily() if _get_current_dispatch_mode() is self else nullcontext()

    def classify(
        self,
        pieces: Mapping[str, Sequence[Piece]] | None = None,
        modules: Iterable[nn.Module] = (),
        optimizers: Iterable[torch.optim.Optimizer] = (),
    ) -> list[str]:
        """Label live storages by what is seen to lie in them; call it at every observation.

        ``pieces`` are what ``local_state`` returns, by kind (also ``"masters"``).  Slots named
        ``*.master...`` and what an optimizer updates but no module holds are masters.  Optimizers
        of torch that stepped on this thread are known already.  Returns the pieces that lie in no
        storage of the rank, because they were computed for the observation.
        """
        self._turn()
        unmatched = []
        for kind, of_kind in (pieces or {}).items():
            label = _PIECE_LABELS.get(kind, kind)
            for piece in of_kind:
                slot = piece.name.rpartition(".")[2]
                is_master = label == "optimizer_state" and slot.startswith("master")
                held = piece.tensor if piece.source is None else piece.source
                if not self.claim([held], "masters" if is_master else label):
                    unmatched.append(f"{kind} {piece.name}")
        for module in modules:
            parameters = list(module.parameters())
            self.claim(parameters, "parameters")
            self.claim((p.grad for p in parameters), "gradients")
            self.claim(module.buffers(), "buffers")
        for optimizer in {*optimizers, *self._optimizers}:
            for slots in optimizer.state.values():
                values = slots.values() if isinstance(slots, dict) else ()
                self.claim((v for v in values if isinstance(v, Tensor)), "optimizer_state")
            for group in optimizer.param_groups:
                self.claim(group["params"], "masters", weak=True)
        return unmatched

    # --------------------------------------------------------------- for installed and backends

    def claim(self, tensors: Iterable[Tensor | None], label: str, weak: bool = False) -> bool:
        """Label the storages of ``tensors``; of two labels the first in ``LABELS`` stays.

        ``weak`` labels only what has none.  Returns whether all lie in storages of the rank.
        """
        matched = True
        for tensor in tensors:
            for part in self._countable(tensor) if tensor is not None else ():
                storage = part.untyped_storage()
                ref = self._known.get(id(storage))
                ref = ref or self._born(part, storage, "", "before", _of_file(storage))
                matched &= self._label(ref, label, weak)
        return matched

    def in_use(self, tensors: Iterable[Tensor | None], label: str) -> None:
        """Label ``tensors`` of a rank in this process; those of another rank are not known here."""
        for ref in self._refs(tensors):
            self._label(ref, label)

    def touch(self, tensors: Iterable[Tensor]) -> None:
        """``tensors`` of a rank in this process went into a process group."""
        for ref in self._refs(tensors):
            self.log.storages[ref.index].communicated = True

    def at_release(self, tensor: Tensor, tell: Callable[[], None]) -> bool:
        """Call ``tell`` when the storage of ``tensor`` is freed; whether it is this rank's."""
        refs = [*self._refs([tensor])]
        for ref in refs:
            ref.told = (*ref.told, tell)
        return bool(refs)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """``storage`` has another size now."""
        if (ref := self._known.get(id(storage))) is not None:
            self._turn()
            self._size(ref, storage.nbytes())

    def saw_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` made a step on this rank."""
        self._optimizers.add(optimizer)

    # ---------------------------------------------------------------------------- the mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # that wrapper costs as much as the rest of the mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for cls in types:
            # Wrappers (DTensor) go first and come back here as the tensors that they hold.
            if cls is not FakeTensor and cls.__torch_dispatch__ is not _NO_DISPATCH:
                return NotImplemented
        kind, name, _ = operators.KNOWN.get(id(func)) or operators.learn(func)
        if kind == operators.WAIT and self.fakes:
            return args[0]
        result = self._computed(func, args, kwargs)
        if kind == operators.VIEW:
            return result
        self._turn()
        if kind == operators.COPY:
            self._copied(args[0], args[1])
        if kind in (operators.IN_PLACE, operators.COPY):
            return result
        for tensor in (result,) if isinstance(result, Tensor) else nested_tensors(result):
            for part in self._countable(tensor):
                storage = part.untyped_storage()
                if (ref := self._known.get(id(storage))) is None:
                    given = kind == operators.EITHER and self._given(storage, args, kwargs)
                    mapped = kind in (operators.EITHER, operators.FOREIGN) and _of_file(storage)
                    self._born(part, storage, name, "before" if given else "own", mapped)
                elif ref.size != (size := storage.nbytes()):
                    self._size(ref, size)
        if kind == operators.DUPLICATE:
            self._copied(result, args[0])
        if kind == operators.SENDS:
            self.touch(nested_tensors((args, kwargs, result)))
        return result

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)

    def _given(self, storage: torch.UntypedStorage, args: Any, kwargs: Any) -> bool:
        """Whether ``storage`` was the operator's input, so that the operator did not make it."""
        return any(
            storage is part.untyped_storage()
            for tensor in nested_tensors((args, kwargs))
            for part in self._countable(tensor)
        )

    def _copied(self, targets: Any, sources: Any) -> None:
        """Floating-point values copied between memory spaces, as bytes of the device."""
        phase, step = self._now
        if self.fakes or self._pauses or phase == "observe":
            return
        pairs = zip(nested_tensors(targets), nested_tensors(sources), strict=False)
        for target, source in pairs:
            to_host, from_host = _on_host(target, source), _on_host(source, target)
            if to_host == from_host or not source.is_floating_point():
                continue
            direction, on_device = ("down", source) if to_host else ("up", target)
            size = target.numel() * on_device.element_size()
            key = (step, phase, direction)
            self.log.moved[key] = self.log.moved.get(key, 0) + size

    def _refs(self, tensors: Iterable[Tensor | None]) -> Iterator[_Ref]:
        for tensor in tensors:
            for part in self._countable(tensor) if tensor is not None else ():
                if (ref := self._known.get(id(part.untyped_storage()))) is not None:
                    yield ref

    def _label(self, ref: _Ref, label: str, weak: bool = False) -> bool:
        storage = self.log.storages[ref.index]
        current = storage.label
        if current is None or (not weak and LABELS.index(label) < LABELS.index(current)):
            storage.label = label
        return storage.origin != "observed"

    def _born(
        self,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        operation: str,
        origin: Origin,
        mapped: bool,
    ) -> _Ref:
        phase, step = self._now
        if origin == "own" and phase == "observe":
            origin = "observed"
        elif self._pauses:
            origin = "before"
        ref = _Ref(storage, self._freed)
        ref.index, ref.key, ref.size, ref.told = len(self.log.storages), id(storage), -1, ()
        device = FILE if mapped else str(tensor.device)
        self.log.storages.append(Storage(device, operation, phase, step, origin))
        self._known[ref.key] = ref
        self._size(ref, storage.nbytes())
        return ref

    def _freed(self, ref: _Ref) -> None:
        # Any thread may drop the last reference; appending is atomic.
        self._known.pop(ref.key, None)
        self._size(ref, 0)
        for tell in ref.told:
            tell()

    def _size(self, ref: _Ref, size: int) -> None:
        ref.size = size
        self.log.events.append((ref.index, size, *self._now))

    def _turn(self) -> None:
        """Take note if another phase began."""
        phase = self._phase()
        if phase != self._now[0] or self.step != self._now[1]:
            self._now = (phase, self.step)
            self.log.events.append((-1, 0, *self._now))

    def _countable(self, tensor: Tensor) -> Sequence[Tensor]:
        """The tensors whose storages hold ``tensor``: none for fakes among real ones, and so on."""
        if type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided:
            return () if self.fakes else (tensor,)
        if isinstance(tensor, FakeTensor):
            own = tensor.fake_mode is self._fake_mode and tensor.device.type != "meta"
            return (tensor,) if own else ()
        if type(tensor).__torch_dispatch__ is not _NO_DISPATCH:
            inner = (getattr(tensor, name) for name in _flattened(tensor))
            return [p for t in inner if isinstance(t, Tensor) for p in self._countable(t)]
        if self.fakes or tensor.device.type == "meta":
            return ()
        if tensor.layout is torch.strided:
            return (tensor,)
        return (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else ()


def _of_file(storage: torch.UntypedStorage) -> bool:
    """Whether ``storage`` is mapped from a file, however it was made."""
    return storage.device.type in ("cpu", "meta") and getattr(storage, "filename", None) is not None


def _on_host(tensor: Tensor, other: Tensor) -> bool:
    """Whether ``tensor`` lies in host memory: with an accelerator the CPU, else in files."""
    if tensor.device.type != "cpu":
        return False
    if other.device.type not in ("cpu", "meta"):
        return True
    return tensor.layout is torch.strided and _of_file(tensor.untyped_storage())


def _flattened(wrapper: Any) -> Sequence[str]:
    """Names of the attributes in which a tensor subclass keeps its tensors."""
    return wrapper.__tensor_flatten__()[0] if hasattr(wrapper, "__tensor_flatten__") else ()
