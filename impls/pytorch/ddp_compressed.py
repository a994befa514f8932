"""PyTorch's ``DistributedDataParallel`` with one of torch's compression hooks.

    method            what the hook does with a bucket of all gradients, a step
    fp16_hook         rounds to fp16, divides by N, adds up in fp16
    bf16_hook         the same in bf16; asks for NCCL
    powersgd_hook     two dense steps; then low rank of every matrix that becomes half as large
    batched_hook      the same of one square matrix that is made of all gradients

The loss is multiplied by N, as for plain DDP, since these hooks divide.  ``bucket_cap_mb`` is 64:
with several buckets PowerSGD aborts or hangs on gloo, and so it does beside the call by which
``find_unused_parameters`` agrees on what was used (docs/findings.md): that is refused.

Cost: 2 (N-1) bytes of what the hook sends: 2 n for fp16; for PowerSGD r (n1 + n2) elements of each
matrix and the rest (torch, default_hooks.py and powerSGD_hook.py; Vogels et al., arXiv 1905.13727,
algorithm 1; a ring's volume: ZeRO, arXiv 1910.02054, section VII-A).
Numbers: as the emulations below.  The sum of fp16 over three ranks and more hangs on the backend's
order, so equal numbers are promised on two.  What PowerSGD keeps on a rank is what the *mean* of
all lacks, not what this rank did not send (epfml/powersgd, issue 3); over ranks that adds up to the
same.
Where: PowerSGD draws its first factors from the process's generator, which ranks that are threads
would take turns at, each with other factors: it is left out of ``in_memory``.
Left out: emulation of ``batched_hook``, which cannot run (docs/findings.md); residuals in
checkpoints, since the state of a hook is the caller's to save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from shardproof.contract import Capabilities, OptimizerSpec, Refused
from shardproof.impls.pytorch.ddp import Options as DDPOptions
from shardproof.impls.pytorch.ddp import PyTorchDDP
from shardproof.impls.reference.engine.options import at_least, parse_options

Method = Literal["fp16_hook", "bf16_hook", "powersgd_hook", "batched_hook"]
#: Dtype of the hooks that round.
CASTS = {"fp16_hook": torch.float16, "bf16_hook": torch.bfloat16}
#: Traits that PowerSGD's hook cannot make a matrix of.
NO_MATRIX = {
    "scalar": "IndexError: the hook uses a parameter's first dimension as the rows of a matrix",
    "empty": "RuntimeError: the hook cannot infer the columns of a matrix that has no rows",
    "non_contiguous": "the hook gets the gradient of a transposed parameter in memory order, so "
    "it compresses a different matrix (docs/findings.md, 58)",
}
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Compress:
    """``rank``: columns of a factor; ``start``: dense steps before PowerSGD begins."""

    method: Method = "fp16_hook"
    rank: int = 1
    start: int = 2

    def __post_init__(self) -> None:
        at_least("compress.rank", self.rank, 1)
        at_least("compress.start", self.start, 2)


@dataclass(frozen=True)
class Options(DDPOptions):
    """DDP's options, and the hook."""

    bucket_cap_mb: float | None = 64
    compress: Compress = field(default_factory=Compress)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.find_unused_parameters and self.compress.method not in CASTS:
            raise Refused(
                f"option 'find_unused_parameters' = True with {self.compress.method}: the order "
                "of DDP's collective for unused parameters and the hook's collectives can differ "
                "between ranks (docs/findings.md, 19); set find_unused_parameters to false"
            )


class DDPCompressed(PyTorchDDP):
    """The adapter for DDP with a registered hook."""

    options_type: ClassVar[type[Options]] = Options
    options: Options

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """DDP's capabilities, compared with the emulation."""
        exact, chosen = super().capabilities(options), parse_options(Options, options).compress
        lossy = replace(exact, exactness="lossy", oracle="emulated")
        if chosen.method == "bf16_hook":
            return replace(lossy, backends=("nccl",))
        if chosen.method in CASTS:
            return lossy
        lossy = replace(lossy, needs=(*lossy.needs, "processes"))
        if chosen.method == "powersgd_hook":
            return replace(lossy, declines={**lossy.declines, **NO_MATRIX})
        return lossy

    @classmethod
    def emulator(cls, options: Mapping[str, Any]) -> CastHook | PowerSGDHook:
        """The emulation of the hook on exact gradients."""
        chosen = parse_options(Options, options).compress
        if chosen.method in CASTS:
            return CastHook(CASTS[chosen.method])
        return PowerSGDHook(chosen)

    def setup(self, *args: Any) -> None:
        """Set up like DDP; the hook's state has no place for a loss scale that changes."""
        spec: OptimizerSpec = args[2]
        if spec.scaler is not None:
            raise Refused(
                "option 'compress' with a loss scaler: the compression error of one step is "
                "added to the gradients of the next step, which may have a different loss scale; "
                "leave out 'compress' or the scaler"
            )
        super().setup(*args)

    def wrap(self, module: nn.Module) -> DistributedDataParallel:
        """DDP with the hook."""
        ddp, chosen = super().wrap(module), self.options.compress
        hooks: dict[Method, Callable[..., Any]] = {
            "fp16_hook": default_hooks.fp16_compress_hook,
            "bf16_hook": default_hooks.bf16_compress_hook,
            "powersgd_hook": powerSGD_hook.powerSGD_hook,
            "batched_hook": powerSGD_hook.batched_powerSGD_hook,
        }
        state: Any = self.comm.group
        if chosen.method not in CASTS:
            state = powerSGD_hook.PowerSGDState(
                self.comm.group,
                matrix_approximation_rank=chosen.rank,
                start_powerSGD_iter=chosen.start,
            )
        ddp.register_comm_hook(state, hooks[chosen.method])
        return ddp


class CastHook:
    """Rounded, divided, and summed one by one in ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, step: int, parts: Sequence[Tensors]) -> Tensors:
        ranks, total = len(parts), {}
        for name, like in parts[0].items():
            sent = [(part[name] * ranks).to(self.dtype).div_(ranks) for part in parts]
            sum_ = sent[0]
            for other in sent[1:]:
                sum_ = sum_ + other
            total[name] = sum_.to(like.dtype)
        return total


class PowerSGDHook:
    """Low-rank matrices; residuals are relative to the mean."""

    def __init__(self, chosen: Compress) -> None:
        self.chosen = chosen
        self.residuals: list[Tensors] = []
        self.factors: Tensors = {}

    def __call__(self, step: int, parts: Sequence[Tensors]) -> Tensors:
        ranks = len(parts)
        given = [{name: g * ranks for name, g in part.items()} for part in parts]
        if step < self.chosen.start:
            return {name: self.mean(given, name) for name in given[0]}
        for own, kept in zip(given, self.residuals, strict=False):
            for name in own:
                own[name] = own[name] + kept[name]
        low = {name: sizes for name, g in given[0].items() if (sizes := self.matrix(g))}
        if not self.factors:
            self.draw(low, given[0])
        applied = {
            name: self.project(given, name, low[name]) if name in low else self.mean(given, name)
            for name in given[0]
        }
        self.residuals = [{name: own[name] - applied[name] for name in own} for own in given]
        return applied

    def mean(self, given: Sequence[Tensors], name: str) -> Tensor:
        """The mean over ranks."""
        return sum((own[name] for own in given[1:]), given[0][name]) / len(given)

    def matrix(self, gradient: Tensor) -> tuple[int, int, int] | None:
        """Rows, columns and rank; ``None`` if it is sent uncompressed."""
        n1, n2 = gradient.shape[0], math.prod(gradient.shape[1:])
        r = min(self.chosen.rank, n1, n2)
        return (n1, n2, r) if 2 * r * (n1 + n2) < n1 * n2 else None

    def draw(self, low: Mapping[str, tuple[int, int, int]], like: Tensors) -> None:
        """First factors: one seed, shape by shape, in the order in which gradients arrive.

        DDP lays its buckets out in that order after the first step.
        """
        seed = numpy.random.RandomState(0).randint(1_000_000_000)
        source = torch.Generator().manual_seed(int(seed))
        shapes = list(low.values())
        for name in sorted(low, key=lambda name: shapes.index(low[name])):  # a stable order
            _, n2, r = low[name]
            self.factors[name] = torch.randn(n2, r, generator=source, dtype=like[name].dtype)

    def project(self, given: Sequence[Tensors], name: str, sizes: tuple[int, int, int]) -> Tensor:
        """The mean over ranks, projected on the directions of the sum."""
        matrices = [own[name].reshape(sizes[:2]) for own in given]
        total = sum(matrices[1:], matrices[0])
        basis = torch.linalg.qr(total @ torch.linalg.qr(self.factors[name]).Q).Q
        self.factors[name] = total.T @ basis / len(given)
        return (basis @ self.factors[name].T).view(given[0][name].shape)


IMPLEMENTATION = DDPCompressed
