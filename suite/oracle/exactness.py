"""The exactness budget of the dyadic lane: how many bits exact sums need, call by call.

The whole global batch runs through the model as one micro-batch in fp64, and every operation on the
way is looked at.  If all terms of a sum are multiples of ``q`` and their absolute values add up to
``s``, every partial sum in every order is a multiple of ``q`` of at most ``s``: it takes
``log2(s / q)`` bits, and nothing is ever rounded where these fit.  One micro-batch holds the terms
of every cut of the batch.  A system that multiplies the loss by the number of ranks N and divides
by it later needs ``log2 N`` bits more.

An operation that is not known to be exact (a division, an exponential, a norm) exceeds any budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardproof.contract import OptimizerSpec
from shardproof.files import Stored
from shardproof.oracle.optimizers import build_optimizer, set_learning_rate
from shardproof.workloads import Workload

#: Bits of the mantissa, the hidden one included.
MANTISSA = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
_UNBOUNDED = 10_000

_PRODUCTS = {"mul", "mul_", "mm", "bmm", "addmm"}
_SUMS = {*("sum", "embedding_dense_backward", "scatter_add", "scatter_add_", "neg", "index_put")}
_ADDITIONS = {"add", "add_", "sub", "sub_", "rsub"}
_SELECTIONS = {
    *("clamp", "trunc", "floor", "relu", "hardtanh", "hardtanh_backward", "threshold_backward"),
    *("gather", "embedding", "_to_copy", "index", "where", "maximum", "minimum"),
}
#: Move values, or make zeros, ones and integers.
_MOVES = {
    *("view", "_unsafe_view", "t", "transpose", "permute", "expand", "clone", "copy_", "detach"),
    *("new_zeros", "zeros_like", "ones_like", "empty_like", "slice", "select", "cat", "squeeze"),
    *("unsqueeze", "stack", "fill_", "zero_", "as_strided", "alias", "lift_fresh", "new_empty"),
    *("_reshape_alias", "zeros", "ones", "full", "scalar_tensor", "squeeze_", "detach_", "empty"),
    *("slice_backward", "select_backward", "new_empty_strided", "unbind", "split"),
}


@dataclass(frozen=True)
class Budget(Stored):
    """Bits that the widest operation needs (``where``), without the number of ranks."""

    bits: int
    where: str

    def problem(self, dtype: str, world: int) -> str:
        """Why ``dtype`` on ``world`` ranks is too narrow; empty if it is wide enough."""
        ranks = (world - 1).bit_length()
        have = MANTISSA[dtype]
        if self.bits >= _UNBOUNDED:
            return f"not exact in any dtype: {self.where}"
        if self.bits + ranks > have:
            need = f"{self.bits} bits and {ranks} for {world} ranks"
            return f"exact sums need {need}, {dtype} has {have}; the widest is {self.where}"
        return ""


def budget(workload: Workload, optimizer: OptimizerSpec, steps: int) -> Budget:
    """The budget of ``steps`` steps; ``workload`` in fp64."""
    if optimizer.clip_norm is not None:
        return Budget(_UNBOUNDED, "clipping divides by a norm")
    if optimizer.name != "sgd":
        return Budget(_UNBOUNDED, f"{optimizer.name} divides by a square root")
    build = workload.build_for(0)
    module = build()
    workload.load(module)
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    torch_optimizer = build_optimizer(optimizer, named)
    meter = _Meter()
    for step in range(steps):
        whole = workload.whole_batch(step)
        meter.phase = f"step {step}"
        with meter:
            build.loss(module(whole.inputs), whole).backward()
            set_learning_rate(torch_optimizer, optimizer, step)
            torch_optimizer.step()
        torch_optimizer.zero_grad(set_to_none=True)
    return Budget(meter.bits, meter.where)


class _Meter(TorchDispatchMode):
    """Looks at every operation on floating-point tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.bits, self.where, self.phase = 0, "nothing", ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        needed = 0
        if name in _PRODUCTS:
            needed = self._product(func, name, args)
        elif name in _ADDITIONS:
            needed = self._addition(args, kwargs.get("alpha", 1))
        elif name in _SUMS and _is_float(args[0]):
            sizes = [value.abs() if _is_float(value) else value for value in args]
            grain = min(_quantum(value) for value in args if _is_float(value))
            needed = _bits(func(*sizes, **kwargs), grain)
        out = func(*args, **kwargs)
        if name in _SELECTIONS and _is_float(out):
            needed = _bits(out.abs(), _quantum(out))  # a row of an embedding may be negative
        elif name not in _PRODUCTS | _ADDITIONS | _SUMS | _MOVES and _is_float(out):
            needed = _UNBOUNDED
        if needed > self.bits:
            shape = tuple(out.shape) if isinstance(out, Tensor) else ()
            self.bits, self.where = needed, f"{name} {shape} in {self.phase}"
        return out

    def _product(self, func: Any, name: str, args: Sequence[Any]) -> int:
        if name == "addmm":
            bias, left, right = args[:3]
            grain = min(_quantum(bias), _quantum(left) + _quantum(right))
            return _bits(func(bias.abs(), left.abs(), right.abs()), grain)
        left, right = args[:2]
        if not (_is_float(left) or _is_float(right)):
            return 0
        grain = _quantum(left) + _quantum(right)
        if name == "mul_" or not isinstance(right, Tensor):
            return _bits(left.abs() * abs(right), grain)
        return _bits(func(left.abs(), right.abs()), grain)

    def _addition(self, args: Sequence[Any], alpha: Any) -> int:
        left, right = args[:2]
        if not (_is_float(left) or _is_float(right)):
            return 0
        grain = min(_quantum(left), _quantum(right) + _quantum(alpha))
        return _bits(abs(left) + abs(right) * abs(alpha), grain)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _quantum(value: Any) -> int:
    """The largest exponent ``e`` such that ``value`` holds multiples of ``2 ** e`` only."""
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
    tensor = tensor.detach().to(torch.float64)
    tensor = tensor[tensor != 0]
    if not tensor.numel():
        return _UNBOUNDED
    mantissa, exponent = torch.frexp(tensor)
    whole = (mantissa * 2.0**53).to(torch.int64)
    zeros = torch.log2((whole & -whole).to(torch.float64)).to(torch.int64)
    return int((exponent - 53 + zeros).min())


def _bits(size: Any, grain: int) -> int:
    """Bits of numbers up to ``size`` in steps of ``2 ** grain``."""
    largest = float(size.max()) if isinstance(size, Tensor) and size.numel() else 0.0
    return math.floor(math.log2(largest)) + 1 - grain if largest else 0
