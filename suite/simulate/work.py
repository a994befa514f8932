"""The operators that a simulated rank computes in its last step, in program order.

Each has its floating-point operations, by torch's own formulas, and the bytes that it reads and
writes.  It gets the number that the rank's log would give to the next event.  Calls, waits and
actions of a pipeline have numbers of that log, so they can be put between operators.

Two lists are kept of the same step.  ``eager`` has every operator by itself.  ``fused`` has all
operators between two matrix products of a layer as one kernel, which reads the tensors from before
it and writes those that remain after it.  Compilers and hand-written kernels lie between the two.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import flop_counter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shardproof.ledgers.memory import operators
from shardproof.ledgers.memory.recorder import MemoryLedger
from shardproof.ledgers.program_order import RankLog, nested_tensors
from shardproof.simulate.fakes import functional, remembered
from shardproof.simulate.fakes.known import DEVICE


class Operator(NamedTuple):
    """``at``: the number of the next event; ``flops`` in ``dtype``; ``size``: bytes that move."""

    at: int
    phase: str
    flops: float
    size: int
    dtype: str
    is_attention: bool = False


@dataclass
class Work:
    """The operators of one step; the module says what the two lists are."""

    eager: list[Operator] = field(default_factory=list)
    fused: list[Operator] = field(default_factory=list)


_aten = torch.ops.aten
#: torch has no formulas for its CPU kernels of attention, which compute the same as those on GPUs.
_KERNELS: dict[str, Any] = {
    "_scaled_dot_product_flash_attention_for_cpu": flop_counter.sdpa_flop,
    "_scaled_dot_product_flash_attention_for_cpu_backward": flop_counter.sdpa_backward_flop,
}
_FORMULAS: dict[Any, Callable[..., Any]] = {
    **flop_counter.flop_registry,
    **{getattr(_aten, name): formula for name, formula in _KERNELS.items()},
}
#: Operators that neither read nor write; that only write; that overwrite without reading.
_NOTHING = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_")
_MAKES = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
_WRITES = ("fill_", "zero_", "copy_", "_foreach_zero_", "_foreach_copy_")
#: Operators that read only a part of their first argument, as large as their result.
_LOOKS_UP = ("embedding", "index_select", "gather", "index", "slice_backward", "select_backward")


@dataclass(frozen=True)
class _Kind:
    """The formula of an operator's FLOPs, and what it reads and changes."""

    formula: Callable[..., Any] | None
    changes: tuple[int, ...]
    moves: bool
    reads: bool
    reads_changed: bool
    looks_up: bool
    is_attention: bool


class WorkLedger(MemoryLedger):
    """The memory ledger, which also notes operators while :attr:`noting` is set."""

    def __init__(self, log: RankLog) -> None:
        super().__init__(lambda: log.phase)
        self.order, self.work, self.noting = log, Work(), False
        self._kinds: dict[Any, _Kind] = {}
        self._run = _Run()

    def __enter__(self) -> WorkLedger:
        #: Whether what leaves this mode goes to the fake mode, and to no other.
        self._is_last = len(_get_current_dispatch_mode_stack()) == 1
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented:
            return result
        kind, *_ = operators.KNOWN[id(func)]
        if kind == operators.WAIT:
            functional.waited(args[0])  # the ledger ends this operator here
        if not self.noting or self._pauses:
            return result
        if kind not in (operators.VIEW, operators.SENDS, operators.WAIT):
            self._note(func, args, kwargs or {}, result)
        return result

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._is_last:
            # The way over torch's dispatcher would end there as well.
            is_known, result = remembered.known(self._fake_mode, func, args, kwargs or {})
            if is_known:
                return result
        return super()._computed(func, args, kwargs)

    def attended(self, flops: float, tensors: Sequence[Tensor]) -> None:
        """Note a fused kernel of attention on ``tensors``, which no operator stands for."""
        if self.noting and not self._pauses and self.order.phase != "observe":
            self._run_ends()
            size = sum(map(_bytes, tensors))
            dtype = str(tensors[0].dtype).removeprefix("torch.")
            self._append(Operator(self.order.now, self.order.phase, flops, size, dtype, True))

    def finish(self) -> Work:
        """End the noting; return the operators noted so far."""
        self._run_ends()
        self.noting = False
        return self.work

    def _append(self, one: Operator) -> None:
        self.work.eager.append(one)
        self.work.fused.append(one)

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        phase = self.order.phase
        kind = self._kinds.get(func) or self._kinds.setdefault(func, _learn(func))
        if phase == "observe" or not kind.moves:
            return
        inputs = [part for t in nested_tensors((args, kwargs)) for part in self._countable(t)]
        outputs = [part for t in nested_tensors(result) for part in self._countable(t)]
        changed = [
            part
            for place in kind.changes
            if place < len(args)
            for t in nested_tensors(args[place])
            for part in self._countable(t)
        ]
        if not inputs and not outputs:
            return  # its tensors are control numbers, which are not part of the model's work
        read = _read(kind, inputs, outputs, changed)
        written = {id(t.untyped_storage()): t for t in (*outputs, *changed)}
        size = sum(map(_bytes, read)) + sum(map(_bytes, written.values()))
        if kind.formula is None:
            dtype = str((outputs or inputs)[0].dtype).removeprefix("torch.")
            one = Operator(self.order.now, phase, 0.0, size, dtype)
            self.work.eager.append(one)
            if self._run.at != (one.at, phase):
                self._run_ends()
            self._run.add(one, self._numbered(read), self._numbered(written.values()))
            return
        self._run_ends()
        flops = float(kind.formula(*args, **kwargs, out_val=result))
        if kind.is_attention and _is_causal(func, args, kwargs):
            flops /= 2  # kernels leave out blocks of scores that are masked
        dtype = str(inputs[0].dtype).removeprefix("torch.")
        self._append(Operator(self.order.now, phase, flops, size, dtype, kind.is_attention))

    def _numbered(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """Bytes of ``tensors`` by the number of their storage, of the largest if they share it."""
        found = dict[int, int]()
        for tensor in tensors:
            if (ref := self._known.get(id(tensor.untyped_storage()))) is not None:
                found[ref.index] = max(found.get(ref.index, 0), _bytes(tensor))
                self._run.refs[ref.index] = ref
        return found

    def _run_ends(self) -> None:
        if self._run.last is not None:
            self.work.fused.append(self._run.as_one())
        self._run = _Run()


@dataclass
class _Run:
    """Operators between two products, with the storages that they read and did not make, and those
    that they write: number of the storage in the log -> most bytes of it in one operator.
    """

    last: Operator | None = None
    read: dict[int, int] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    refs: dict[int, weakref.ref[Any]] = field(default_factory=dict)

    @property
    def at(self) -> tuple[int, str] | None:
        return None if self.last is None else (self.last.at, self.last.phase)

    def add(self, one: Operator, read: Mapping[int, int], written: Mapping[int, int]) -> None:
        """Add the operator ``one``."""
        self.last = one
        for storage, size in read.items():
            if storage not in self.written:
                self.read[storage] = max(self.read.get(storage, 0), size)
        for storage, size in written.items():
            self.written[storage] = max(self.written.get(storage, 0), size)

    def as_one(self) -> Operator:
        """All these operators as one kernel, which writes what is not freed by now."""
        assert self.last is not None
        kept = sum(size for n, size in self.written.items() if self.refs[n]() is not None)
        return self.last._replace(size=sum(self.read.values()) + kept)


def _learn(func: Any) -> _Kind:
    packet = getattr(func, "overloadpacket", func)
    name = packet.__name__
    arguments = func._schema.arguments
    changes = tuple(
        place
        for place, one in enumerate(arguments)
        if one.alias_info is not None and one.alias_info.is_write
    )
    return _Kind(
        formula=_FORMULAS.get(packet),
        changes=changes,
        moves=name not in _NOTHING,
        reads=name not in _MAKES,
        reads_changed=name not in _WRITES,
        looks_up=name in _LOOKS_UP,
        is_attention="dot_product" in name or "attention" in name,
    )


def _read(
    kind: _Kind, inputs: Sequence[Tensor], outputs: Sequence[Tensor], changed: Sequence[Tensor]
) -> list[Tensor]:
    """The tensors that an operator reads, each once."""
    if not kind.reads:
        return []
    given = {(id(t.untyped_storage()), t.storage_offset(), t.shape): t for t in inputs}
    read = [*given.values()]
    if kind.looks_up and read:
        return [*outputs, *read[1:]]
    if not kind.reads_changed:
        known = {id(t.untyped_storage()) for t in changed}
        read = [t for t in read if id(t.untyped_storage()) not in known]
    return read


def _bytes(tensor: Tensor) -> int:
    """Bytes of ``tensor`` in memory; repeated parts (``expand``) count once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return int(count * tensor.element_size())


def _is_causal(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    names = [one.name for one in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(given.get("is_causal"))


#: The ledger of the rank that is simulated.
_current: list[WorkLedger] = []


@contextmanager
def noted_by(ledger: WorkLedger) -> Iterator[None]:
    """Let ``ledger`` note the kernels of attention inside."""
    _current.append(ledger)
    try:
        yield
    finally:
        _current.remove(ledger)


def attention(
    query: Tensor, key: Tensor, value: Tensor, backward: bool, others: Sequence[Tensor] = ()
) -> None:
    """Note causal attention by a fused kernel on ``(samples, heads, rows, size)``.

    Two products of all scores in forward; five in backward, which computes the scores again
    (FlashAttention, arXiv 2205.14135, algorithms 1 and 4).  Half of the scores are masked, and
    their blocks are left out.  ``others``: more tensors that the kernel reads or writes.
    """
    if not _current:
        return
    samples, heads, rows, size = query.shape
    scores = samples * heads * rows * key.shape[2]
    width = 3 * size + 2 * value.shape[3] if backward else size + value.shape[3]
    tensors = [query, key, value, *others]
    _current[0].attended(2.0 * scores * width / 2, tensors)
