"""Fake tensors as simulations need them: integers that a program makes itself keep their values.

A fake tensor has no values.  But positions, orders of rows and numbers of ranks come from
``torch.arange`` and literals, not from data, and programs read them back (``tolist``, ``nonzero``).
:class:`FakeTensorMode` computes with a tensor that it knows as a constant; this one knows integers
and truth values of the factories below as well, and of more than one element.  What data or
messages write into such a tensor is unknown from then on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from shardproof.simulate import functional

#: Operators that make a tensor from numbers alone.
_FACTORIES = {torch.ops.aten.arange, torch.ops.aten.full, torch.ops.aten.zeros, torch.ops.aten.ones}
#: Most elements of a tensor whose values are kept: a mask of 4,096 rows and columns.
_MOST = 1 << 24


class KnownIntegers(FakeTensorMode):
    """Fake tensors; integers of factories are constants."""

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` on fakes."""
        known = [t for t in args if isinstance(t, FakeTensor) and t.constant is not None]
        if len(known) > 1 and _broadcast(known) > _MOST:
            # torch would compute the result before it sees that it is too large to keep.
            for tensor in known:
                forget(tensor)
        result = super().dispatch(func, types, args, kwargs or {})
        if isinstance(func, OpOverload) and result is not NotImplemented:
            functional.call(func, args, result)
        if getattr(func, "overloadpacket", None) not in _FACTORIES or not _is_exact(result):
            return result
        with no_dispatch():
            values = func(*args, **(kwargs or {}))
        return self.fake_tensor_converter.from_real_tensor(self, values, make_constant=True)


def _is_exact(tensor: Any) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return tensor.device.type == "cpu" and tensor.numel() <= _MOST and not is_number


def _broadcast(tensors: Sequence[Tensor]) -> int:
    """Elements of the shape to which ``tensors`` broadcast; 0: they do not."""
    try:
        return math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))
    except RuntimeError:
        return 0


@contextmanager
def known_integers() -> Iterator[None]:
    """Simulate inside."""
    with patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", _MOST), KnownIntegers():
        yield


def kept(tensor: Tensor) -> Tensor:
    """A fake tensor like ``tensor`` whose values are known; called inside of a simulation."""
    mode = active_fake_mode()
    assert mode is not None
    return mode.fake_tensor_converter.from_real_tensor(mode, tensor, make_constant=True)


def forget(tensor: Tensor) -> None:
    """A message overwrites ``tensor``: its values are no longer known."""
    if isinstance(tensor, FakeTensor) and tensor.constant is not None:
        tensor.fake_mode.fake_tensor_converter.invalidate_constant_aliases(tensor.constant)
