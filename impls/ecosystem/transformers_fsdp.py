"""transformers' ``DistributedConfig`` with ``fsdp_size`` and ``dp_replicate_size``: FSDP2, HSDP.

    built model   ``prepare_distribute_model`` makes the meshes, ``maybe_distribute_model`` applies
                  the model's plans: what ``from_pretrained(distributed_config=...)`` does between
                  building a model and reading its weights
    a layer       one unit of ``fully_shard``; final norm and head one that stays whole in backward
    clip          ``Trainer``'s for gradients on several meshes: norms mesh by mesh

All ranks build and load the same values, of which each keeps its part.  transformers averages over
the ranks with own samples, so the loss is multiplied by their number.  Tried with transformers
5.24.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from shardproof.axes import sharing
from shardproof.contract import Capabilities, Depth, Refused
from shardproof.impls.adapter import Adapter
from shardproof.impls.ecosystem.whole import UNEQUAL, NoOptions, process_capabilities
from shardproof.impls.reference.engine.options import parse_options

#: The sizes of a ``DistributedConfig``, by axis of the mesh.
SIZES = {"replicate": "dp_replicate_size", "shard": "fsdp_size", "tensor": "tp_size"}


class TransformersFSDP(Adapter):
    """The adapter."""

    strategy = "fsdp"
    depth: ClassVar[Depth] = "family"
    axes: ClassVar[tuple[str, ...]] = ("replicate", "shard")
    features: ClassVar[tuple[str, ...]] = ("wrapped_units",)

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """Every rank loads the initial state, as every rank reads a checkpoint."""
        parse_options(NoOptions, options)
        usual: dict[str, Any] = {"axes": cls.axes, "buffers": "none", "declines": UNEQUAL}
        return process_capabilities(
            "transformers", *cls.features, initial_state="everywhere", **usual
        )

    def sizes(self) -> dict[str, int]:
        """The arguments of ``DistributedConfig``."""
        return {SIZES[axis]: size for axis, size in self.mesh.axes.items()}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Distribute ``model`` by its plans."""
        from transformers import PreTrainedModel
        from transformers.distributed import DistributedConfig

        if not isinstance(model, PreTrainedModel):
            raise Refused(
                "transformers can distribute only its PreTrainedModel; use the workload "
                "shardproof.impls.ecosystem.tiny_moe:tiny_moe"
            )
        with self.mesh.environment():
            config, _, meshes = model.prepare_distribute_model(DistributedConfig(**self.sizes()))
            self.model = model.maybe_distribute_model(model, config, meshes)
        self.divided_by = float(self.mesh.size(*sharing(self.mesh.axes)))
        return self.model

    def clip(self, limit: float) -> Tensor:
        """Clip with the function of ``Trainer``, which uses no trainer."""
        from transformers import Trainer

        norm: Tensor = Trainer._mixed_mesh_grad_norm(None, self.model, limit)
        return norm


IMPLEMENTATION = TransformersFSDP
