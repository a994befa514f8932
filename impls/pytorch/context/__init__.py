"""PyTorch's ring attention (``torch.distributed.tensor.experimental``) under DDP.

    what                           where
    parameters, gradients, state   every rank, whole and equal, as in ``pytorch/ddp``
    inputs                         every rank, whole samples
    positions                      by torch's load balancer: 2C chunks, rank i has i and 2C-1-i
                                   (``enable_load_balance: false``: the i-th of C chunks)

    attention   forward    C-1 blocks of keys and values come by, in one all-gather or in C-1
                           all-to-alls (``rotate_method``); partial results are merged
                backward   the same blocks come by once more; their gradients travel with them, in
                           C all-to-alls
    step        DDP over replicate x context: gradients are summed in the last backward

torch's own entry, ``context_parallel``, replaces kernels of GPUs only: on CPUs it raises for a
causal mask.  So this adapter calls what lies below it, the templates of forward and backward, with
the attention operator of CPUs; sharding, balancing, merging and messages are torch's.  They read
their options from one object of the process, hence every forward sets them.

``convert_to_f32`` is torch's, and true by default: partial results and gradients are added in
float32, also those of a float64 model, which loses 9 digits (docs/findings.md, 65).

Two compensations: keys and values of fewer heads are repeated, because the operators take equal
numbers; the loss is multiplied by what DDP divides by.

Cost: ``torch_context.payload_bytes``.
Numbers: as ``reference/context``; with ``convert_to_f32`` sums are rounded to float32.
Left out: masks other than the causal one, lengths that the chunks do not divide, FSDP around it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardproof.contract import Capabilities, MicroBatch
from shardproof.impls.pytorch import ddp
from shardproof.impls.pytorch.parts.positions import DECLINES, Positions, check_length

upstream: Any
try:
    # Private, and in other versions elsewhere: the templates and the balancer are not public.
    from torch.distributed.tensor.experimental._context_parallel import _attention as upstream

    _FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    _BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    _LACKS = ""
except (ImportError, AttributeError) as error:
    _LACKS = f"torch {torch.__version__} has no ring attention for CPUs ({error})"
#: The dimension of positions of queries, keys and values.
_POSITIONS = 2


@dataclass(frozen=True)
class Options(ddp.Options):
    """torch's options of the ring under their names, with its defaults, and those of DDP."""

    rotate_method: Literal["allgather", "alltoall"] = "allgather"
    enable_load_balance: bool = True
    convert_to_f32: bool = True


class CutPositions(ddp.PyTorchDDP):
    """DDP over replicate x context around a model whose attention is an upstream system's."""

    axes: ClassVar[tuple[str, ...]] = ("replicate", "context")
    #: Traits that this attention does not support, and why.
    lacks: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """Those of DDP along both axes; no module may need all positions."""
        usual = super().capabilities(options)
        declines = {**usual.declines, **DECLINES, **cls.lacks}
        return replace(usual, features=usual.features | {"context"}, declines=declines)

    def prepare(self, module: nn.Module) -> None:
        """Replace the attention of ``module``, before units are wrapped."""
        self.positions = Positions(module, self.build.roles, self.attend, self.mesh.size("context"))

    def loss(self, call: Callable[..., Any], micro: MicroBatch) -> Tensor:
        """The loss of this rank's positions of one micro-batch."""
        return super().loss(call, self.positions.take(micro, self.rows(micro)))

    @abstractmethod
    def rows(self, micro: MicroBatch) -> Tensor:
        """The positions of this rank."""

    @abstractmethod
    def attend(self, core: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The attention of ``core`` over the positions of all ranks."""

    def close(self) -> None:
        """Give the model its own attention back."""
        super().close()
        self.positions.close()


class PyTorchContext(CutPositions):
    """The adapter."""

    strategy = "torch_context"
    options_type: ClassVar[type[Options]] = Options
    lacks: ClassVar[Mapping[str, str]] = {
        "packed": "torch's ring has a causal mask, and none for documents"
    }
    options: Options

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """Those of DDP along both axes, on CPUs: the attention operator is theirs."""
        return replace(super().capabilities(options), needs=("cpu",), lacks=_LACKS)

    @property
    def ring(self) -> DeviceMesh:
        """The mesh of this rank's ring."""
        return self.mesh.device_mesh["context"]

    def rows(self, micro: MicroBatch) -> Tensor:
        """The positions that torch gives this rank."""
        options, size = upstream._cp_options, self.ring.size()
        upstream.set_rotate_method(self.options.rotate_method)
        options.convert_to_f32 = self.options.convert_to_f32
        options.enable_load_balance = self.options.enable_load_balance
        parts = 2 * size if self.options.enable_load_balance else size
        length = check_length(micro, parts, "torch's ring takes blocks of equal length")
        device = micro.targets.device
        balancer = upstream._create_default_load_balancer(length, size, device)
        every = torch.arange(length, device=device)
        (own,) = upstream._context_parallel_shard(self.ring, [every], [0], balancer)
        assert isinstance(own, Tensor)
        return own

    def attend(self, core: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The attention of ``core`` over the positions of all ranks."""
        shared = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(shared, 1) for part in (key, value))
        mixed: Tensor = _Ring.apply(query, key, value, self.ring.get_group())
        return mixed


class _Ring(torch.autograd.Function):
    """torch's templates as autograd sees them; on GPUs DTensor's dispatcher calls them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup) -> Tensor:
        result, lse = upstream._templated_ring_attention(
            group, _POSITIONS, _FORWARD, query, key, value, is_causal=True
        )
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.group = group
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, lse = ctx.saved_tensors
        of_heads = upstream._templated_ring_attention_backward(
            ctx.group,
            _POSITIONS,
            _BACKWARD,
            gradients[0],
            "grad_out",
            query,
            key,
            value,
            result,
            lse,
            is_causal=True,
            dropout_p=0.0,
        )
        return (*of_heads[:3], None)


IMPLEMENTATION = PyTorchContext
