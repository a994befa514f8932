"""Megatron-core's ``ColumnParallelLinear`` and ``RowParallelLinear`` in the suite's GPT.

    qkv, up        ``ColumnParallelLinear`` (a fused qkv by heads)
    out, down      ``RowParallelLinear``
    all the rest   every rank, whole: embeddings, norms, head

Used: the layers over the suite's group, initialised on the CPU.  Megatron's models, optimizer,
clipping and DDP ask for CUDA, as does ``gather_output``, by which a head would be split: the norm
is summed here, the head is whole.  Cost: two all-reduces of the hidden state a block in forward,
two in backward.  Tried with megatron-core 0.16.1.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel

from shardproof.contract import Capabilities, Depth, Kind, Piece, Refused
from shardproof.impls.ecosystem.whole import NoOptions, process_capabilities
from shardproof.impls.pytorch.tensor_parallel import PyTorchTensorParallel
from shardproof.impls.pytorch.tensor_styles import check_sizes, chunk_pieces, reorder_fused
from shardproof.impls.reference.engine.options import parse_options

if importlib.util.find_spec("megatron") is not None:
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear


class MegatronTensor(PyTorchTensorParallel):
    """The adapter; it splits the layers that torch's styles split, except the embedding."""

    strategy = "tensor"
    depth: ClassVar[Depth] = "family"

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The axis ``tensor``."""
        parse_options(NoOptions, options)
        return process_capabilities("megatron", "tensor", axes=("tensor",))

    def shard(self, module: nn.Module) -> nn.Module:
        """Replace every split layer, with this rank's part of its values."""
        self.comm = self.mesh.comm("tensor")
        styles = self.styles(module)
        check_sizes(module, styles, self.comm.size)
        self.orders = reorder_fused(module, styles, self.comm.size)
        self.cut: dict[str, int] = {}
        for name, style in styles.items():
            if name != "head" and isinstance(module.get_submodule(name), nn.Linear):
                self.replace(module, name, isinstance(style, ColwiseParallel))
        self.named = dict(module.named_parameters())
        return module

    @torch.no_grad()
    def replace(self, module: nn.Module, name: str, by_columns: bool) -> None:
        """Replace the layer ``name`` by Megatron's layer of that kind."""
        whole: Any = module.get_submodule(name)
        kind = ColumnParallelLinear if by_columns else RowParallelLinear
        more = {} if by_columns else {"input_is_parallel": True, "skip_bias_add": False}
        start = {"use_cpu_initialization": True, "perform_initialization": False}
        config = ModelParallelConfig(self.comm.size, params_dtype=whole.weight.dtype, **start)
        sizes, group = (whole.in_features, whole.out_features), {"tp_group": self.comm.group}
        layer = kind(*sizes, config=config, init_method=None, bias=True, **group, **more)
        for leaf, part in layer.named_parameters():
            values, dim = getattr(whole, leaf), 0 if by_columns else 1
            if part.shape != values.shape:
                self.cut[f"{name}.{leaf}"] = dim
                values = values.chunk(self.comm.size, dim)[self.comm.rank]
            part.copy_(values).requires_grad_(getattr(whole, leaf).requires_grad)
        layer.register_forward_hook(lambda layer, inputs, outputs: outputs[0])
        module.set_submodule(name, layer)

    def clip(self, limit: float) -> Tensor:
        """Clip by the norm of split gradients, summed over ranks, and of whole ones."""
        owned = [(n, p, p.grad) for n, p in self.updated().items() if p.grad is not None]
        parts = [[g for n, _, g in owned if (n in self.cut) is split] for split in (True, False)]
        split, whole = (nn.utils.get_total_norm(part, foreach=False) ** 2 for part in parts)
        self.comm.all_reduce(split)
        norm = (split + whole).sqrt()
        nn.utils.clip_grads_with_norm_([p for _, p, _ in owned], limit, norm, foreach=False)
        return norm

    def pieces(self, name: str, tensor: Tensor) -> list[Piece]:
        """This rank's rows or columns, of a parameter or of a slot ``<parameter>.<slot>``."""
        owner = name if name in self.named else name.rpartition(".")[0]
        if owner not in self.cut or not tensor.dim():
            return [Piece.whole(name, tensor.detach(), replica=self.mesh.rank)]
        place = self.cut[owner], self.comm.rank, self.comm.size
        return chunk_pieces(name, tensor.detach(), *place, self.orders.get(owner))

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """Whole tensors; Megatron gathers only for its own checkpoints."""
        raise Refused("Megatron's layers cannot gather a full state")


IMPLEMENTATION = MegatronTensor
