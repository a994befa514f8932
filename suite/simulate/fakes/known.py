"""Fake tensors for simulations: integers that a program makes itself keep their values.

A fake tensor has no values.  Positions, orders of rows and numbers of ranks, however, come from
``torch.arange`` and literals, not from data, and programs read them back (``tolist``, ``nonzero``).
:class:`FakeTensorMode` computes with a tensor that it knows as a constant.  :class:`KnownIntegers`
also knows integers and booleans of the factories below, of any shape up to ``_MOST`` elements.  If
data or a message is written into such a tensor, its values become unknown.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from shardproof.ledgers.program_order import RankLog
from shardproof.simulate.fakes import functional, remembered

DEVICE = torch.ops.prim.device.default
#: Operators that make a tensor from numbers alone.
_FACTORIES = {torch.ops.aten.arange, torch.ops.aten.full, torch.ops.aten.zeros, torch.ops.aten.ones}
#: Most elements of a tensor whose values are kept: a mask of 4,096 rows and columns.
_MOST = 1 << 24
#: Storages that would be mapped from a file.
_MAPPED: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


class Decided:
    """Decisions that values would make at the current step of ``log``.

    ``is_finite(step)``: whether gradients are finite.
    """

    def __init__(self, is_finite: Callable[[int], bool], log: RankLog) -> None:
        self._is_finite, self.log, self._reads = is_finite, log, False

    def is_finite(self) -> bool:
        """Whether the tensor that is tested now is finite."""
        return self._is_finite(self.log.number)

    @property
    def reports(self) -> bool:
        """Whether numbers that are read now are only results, such as those of an evaluation."""
        return self._reads or self.log.phase == "observe"

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Treat numbers that are read inside as results only."""
        self._reads = True
        try:
            yield
        finally:
            self._reads = False


class KnownIntegers(FakeTensorMode):
    """Fake tensors; integers of factories are constants.

    A number that is only reported, and decides nothing, reads as 0.  ``decided``: what values would
    decide; ``None``: nothing.
    """

    def __init__(self, decided: Decided | None) -> None:
        super().__init__()
        self.decided = decided
        #: Device -> the attributes of its tensors that have no constant.
        self.attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # that wrapper costs as much as a remembered result

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return self.dispatch(func, types, args, kwargs)

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` on fake tensors."""
        if func is DEVICE and type(args[0]) is FakeTensor:
            # A quarter of all operators: autograd asks each tensor for its device.
            return args[0].device
        if func is torch.ops.aten.from_file.default:
            # A mapped file is simulated as host memory of the same size.
            size, dtype = kwargs["size"] if "size" in kwargs else args[2], kwargs["dtype"]
            made = torch.ops.aten.empty.memory_format
            tensor: Any = super().dispatch(made, types, ([size],), {"dtype": dtype})
            _MAPPED.add(tensor.untyped_storage())
            return tensor
        if func is torch.ops.aten._local_scalar_dense.default and args[0].constant is None:
            if self.decided is not None and self.decided.reports:
                return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
            if _filename(args[0].untyped_storage()):
                return 1.0  # torch's optimizers read one number there: the count of their steps
        known = [t for t in args if isinstance(t, FakeTensor) and t.constant is not None]
        if len(known) > 1 and _broadcast(known) > _MOST:
            # torch would compute the result before it sees that it is too large to keep.
            for tensor in known:
                forget(tensor)
        key = None if known else remembered.key_of(func, args, kwargs or {})
        if key is not None:
            is_known, again = remembered.recall(self, key, args)
            if is_known:
                return again
        result: Any = super().dispatch(func, types, args, kwargs or {})
        if isinstance(func, OpOverload) and result is not NotImplemented:
            functional.call(func, args, result)
            if (at := _mask_of(func)) is not None and at < len(args):
                # Some fake kernels also make gradients that were not requested.
                result = tuple(
                    one if asked else None for one, asked in zip(result, args[at], strict=True)
                )
        if getattr(func, "overloadpacket", None) not in _FACTORIES or not _is_exact(result):
            if key is not None:
                remembered.remember(key, args, result)
            return result
        with no_dispatch():
            values = func(*args, **(kwargs or {}))
        return self.fake_tensor_converter.from_real_tensor(self, values, make_constant=True)


@cache
def _mask_of(func: OpOverload) -> int | None:
    """The place of the argument that says which gradients an operator makes."""
    names = [argument.name for argument in func._schema.arguments]
    return names.index("output_mask") if "output_mask" in names else None


def _filename(storage: torch.UntypedStorage) -> str | None:
    return "a file" if storage in _MAPPED else None


def _is_exact(tensor: Any) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return tensor.device.type == "cpu" and tensor.numel() <= _MOST and not is_number


def _broadcast(tensors: Sequence[Tensor]) -> int:
    """Elements of the shape to which ``tensors`` broadcast; 0: they do not."""
    try:
        return math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))
    except RuntimeError:
        return 0


def _finite(decided: Decided | None) -> Callable[[Tensor], Tensor]:
    original = torch.Tensor.isfinite

    def isfinite(tensor: Tensor) -> Tensor:
        found = original(tensor)
        if decided and isinstance(found, FakeTensor) and found.numel() <= _MOST:
            with no_dispatch():
                found.constant = torch.full((), decided.is_finite()).expand(found.shape)
        return found

    return isfinite


@contextmanager
def known_integers(decided: Decided | None = None) -> Iterator[None]:
    """Make tensors fake inside, with known integers."""
    most = patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", _MOST)
    # The ledger and systems ask a storage for its file, and the attribute cannot be set on one.
    mode = KnownIntegers(decided)
    files = patch.object(torch.UntypedStorage, "filename", property(_filename))
    with most, files, patch.object(Tensor, "isfinite", _finite(decided)), mode:
        yield


def kept(tensor: Tensor) -> Tensor:
    """A fake tensor like ``tensor`` whose values are known; called inside of a simulation."""
    mode = active_fake_mode()
    assert mode is not None
    return mode.fake_tensor_converter.from_real_tensor(mode, tensor, make_constant=True)


def forget(tensor: Tensor) -> None:
    """Forget the values of ``tensor``, which a message overwrites."""
    if isinstance(tensor, FakeTensor) and tensor.constant is not None:
        tensor.fake_mode.fake_tensor_converter.invalidate_constant_aliases(tensor.constant)


def tell(tensor: Tensor, values: Tensor) -> None:
    """Record that a message wrote ``values`` into ``tensor``."""
    if isinstance(tensor, FakeTensor):
        tensor.constant = values
        tensor.fake_mode.fake_tensor_converter.add_constant_storage_mapping(tensor)
