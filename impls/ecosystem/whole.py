"""The common part of adapters for systems with whole tensors on every rank: data parallelism.

The system under test broadcasts the initial state, reduces, and divides by the number of ranks; so
nothing here is sent, and the loss is multiplied by that number.  Ranks are processes: these systems
keep their state in module globals and take the default group.  Not a strategy by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from shardproof.comm import Mesh
from shardproof.contract import Batch, Capabilities, Kind, OptimizerSpec, Piece, Refused
from shardproof.impls.pytorch.adapter import Adapter
from shardproof.impls.reference.engine.choices import declared
from shardproof.impls.reference.engine.optimizer import slot_pieces
from shardproof.impls.reference.engine.options import parse_options

#: Traits under which the parameters that take part in a backward vary.
UNUSED = (
    "unused",
    *("conditional_by_rank", "conditional_by_micro_batch", "conditional_last_micro_batch"),
    *("conditional_late_step", "conditional_early_step"),
)
UNEQUAL = {"unequal_micro_batches": "a rank with more micro-batches would wait for the others"}
#: What DDP promises beside the usual, where ``accumulating`` keeps all micro-batches but the last
#: from reducing.
DDP_FEATURES = ("accumulation_without_communication", "buffer_broadcast", "overlap")
#: Of systems on DDP as it is by default.
DDP_DECLINES = dict.fromkeys(UNUSED, "DDP needs find_unused_parameters=True for this") | UNEQUAL


@dataclass(frozen=True)
class NoOptions:
    """No options: the system is tested with its defaults."""


UNSCALED = "this system is tested without loss scaling"


def process_capabilities(package: str, *features: str, **fields: Any) -> Capabilities:
    """The capabilities of a system of the module ``package`` whose ranks are processes."""
    usual = {"backends": ("gloo",), "dtypes": ("float64", "float32"), "packages": (package,)}
    declines = {"loss_scale": UNSCALED, **fields.pop("declines", {})}
    return declared(*features, declines=declines, **(usual | fields))


def check_plain(options: Mapping[str, Any], mesh: Mesh, axis: str, spec: OptimizerSpec) -> None:
    """:class:`Refused` for options, for a mesh other than all ranks along ``axis``, or a scaler."""
    parse_options(NoOptions, options)
    if list(mesh.axes) != [axis]:
        raise Refused(f"this system accepts only the axis {axis!r}; the mesh has {list(mesh.axes)}")
    if spec.scaler is not None:
        raise Refused(f"optimizer.scaler: {UNSCALED}; leave the scaler out")


class Whole(Adapter):
    """Adapter of a system whose ranks hold everything; the system defines ``shard``.

    ``features``: what the system promises beside the usual, by the words of
    ``shardproof.strategies.FEATURES``.  It is held to each, so the adapter names those that it has.
    """

    strategy = "ddp"
    package: ClassVar[str]
    axis: ClassVar[str] = "replicate"
    features: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The common capabilities and ``features``, with the buffers and limits of DDP."""
        parse_options(NoOptions, options)
        usual = {"axes": (cls.axis,), "buffers": "rank0", "declines": DDP_DECLINES}
        return process_capabilities(cls.package, *cls.features, **usual)

    def parse(self, options: Mapping[str, Any], mesh: Mesh) -> None:
        """The options (there are none); the mesh is all ranks."""
        self.loss_factor = float(mesh.world)
        self.options = options

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Do nothing: the system itself makes its ranks start equal."""
        check_plain(self.options, self.mesh, self.axis, self.spec)

    def updated(self) -> dict[str, Tensor]:
        """The trained parameters, under their own names."""
        return {name: p for name, p in self.inner.named_parameters() if p.requires_grad}

    def clip(self, limit: float) -> Tensor:
        """Clip with torch."""
        return nn.utils.clip_grad_norm_(list(self.updated().values()), limit, foreach=False)

    def evaluate(self, batch: Batch) -> Tensor:
        """Evaluate without the wrapper, which may send buffers in every forward."""
        wrapped, self.module = self.module, self.inner
        try:
            return super().evaluate(batch)
        finally:
            self.module = wrapped

    def local_state(self, kind: Kind) -> list[Piece]:
        """Whole tensors, a copy on every rank."""
        if kind == "optimizer":
            return slot_pieces(self.optimizer, self.slot)
        if kind == "buffers":
            return self.buffers()
        named: dict[str, Tensor] = dict(self.inner.named_parameters())
        if kind == "gradients":
            named = {n: p.grad for n, p in self.updated().items() if p.grad is not None}
        return [Piece.whole(n, t.detach(), replica=self.mesh.rank) for n, t in named.items()]

    def slot(self, name: str, slot: str, tensor: Tensor) -> Piece:
        """A slot of the optimizer's state."""
        return Piece.whole(f"{name}.{slot}", tensor, replica=self.mesh.rank)
