"""Context parallelism: every rank of an axis has some positions of each sample.

Problem.  Activations grow with the length of a sequence, the scores of attention with its square.
Neither data nor tensor parallelism divides a sequence in all layers.  Here the ranks of the axis
``context`` have the same samples, and each computes some of their positions.  Embeddings, norms,
MLPs and the loss work position by position and need no message.  Attention alone looks at other
positions, so it alone is replaced: ranks exchange keys and values, or heads.

    what                                where
    parameters, gradients, optimizer    every rank, whole and equal
      state
    inputs                              every rank, whole samples: flags and documents stand there
    activations, targets, weights       some positions, by the option ``cut`` (cuts.py)
    keys and values                     by the option ``method``: gathered, travelling, or by heads
    choices of a router                 every rank, of all positions (integers; choices.py)

    option      a layer forward                              backward
    all_gather  k, v of all positions ->                     <- their gradients, summed, scattered
    ring        C-1 rounds: k, v -> next rank (ring.py)      C-1 rounds of k, v; C of gradients
    all_to_all  positions -> heads; attention; heads ->      the same
                positions (exchanges.py)

    step        each micro-batch   take own positions; forward; loss; backward, with these messages
                last backward      gradients are summed over replicas and context ranks at once: the
                                   buckets of ``ddp.py``, over the axes replicate x context

Targets are those of the whole sample, shifted before anything is cut: the target of a rank's last
position is often another rank's input.  A rank's loss is the sum over its positions; the weights
sum to 1 over the whole batch, so losses and gradients of all ranks add up to the whole ones.

Cost: floating-point bytes a step.  For each layer and micro-batch of B samples of S positions with
K key/value and H query heads of size D, e bytes an element, over the C ranks together:

    all_gather   2 (C-1) C s 2 B K D e     s = ceil(S/C): what is shorter is padded in transit;
                                           section 3.3.2 of Llama 3 (arXiv 2407.21783)
    ring         2 (C-1) S 2 B K D e       keys and values, forward and backward (arXiv 2310.01889)
                 + C S 2 B K D w           their gradients, w bytes: those of float32 or wider
    all_to_all   2 (C-1)/C S 2 B (H + K) D e     section 3.2 of arXiv 2309.14509; K at least C

Recomputed forwards send again.  Once a step: 2 (N-1) bytes of gradients over all N ranks.
Numbers: softmax over the same scores in another order (ring: in float32 or wider), gradients equal
to one device's up to the order of summation; replicas stay equal bit for bit.  In float32 the
exponentials of the kernel for CPUs (block.py) differ from ``torch.exp`` by a few ulp.
Left out: dropout inside of attention, masks other than causal ones and documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.axes import summing
from shardproof.comm import Comm, Mesh
from shardproof.contract import Capabilities, MicroBatch, Role
from shardproof.impls.reference import ddp
from shardproof.impls.reference.context.choices import WholeChoices
from shardproof.impls.reference.context.cuts import CutName, positions
from shardproof.impls.reference.context.exchanges import Gathered, Heads
from shardproof.impls.reference.context.ring import Ring
from shardproof.impls.reference.context.span import find_span
from shardproof.impls.reference.engine.choices import FORMATS, Saved, declared
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.handle import Handle
from shardproof.impls.reference.engine.options import at_least, parse_options

#: Traits of modules that need all positions of a sample, and why.
DECLINES = {
    "rebound_buffer": "a context rank has some positions only, but the module's mean is over all",
    "dropout_stateful": "a context rank has some positions only, but the module draws for all",
}


@dataclass(frozen=True)
class Choices:
    """``method``: how attention gets at other positions; ``cut``: the positions of each rank."""

    method: Literal["all_gather", "ring", "all_to_all"] = "ring"
    cut: CutName = "contiguous"


@dataclass(frozen=True)
class Options(Choices, Saved):
    """The choices, and options of the buckets that sum gradients (ddp.py)."""

    bucket_bytes: int = 25 * 2**20
    first_bucket_bytes: int = 2**20
    recompute_every: int = 0

    def __post_init__(self) -> None:
        at_least("recompute_every", self.recompute_every, 0)
        _ = self.buckets

    @property
    def buckets(self) -> ddp.Options:
        """The options of the sum of gradients; buffers stay with their rank."""
        # Context ranks of a sample count all of its tokens (choices.py): their buffers are equal.
        return ddp.Options(
            bucket_bytes=self.bucket_bytes,
            first_bucket_bytes=self.first_bucket_bytes,
            broadcast_buffers=False,
        )


class ContextParallel:
    """A module that computes this rank's positions, with attention over all of them."""

    all_gather_type: type[Gathered] = Gathered
    ring_type: type[Ring] = Ring
    all_to_all_type: type[Heads] = Heads
    choices_type: type[WholeChoices] = WholeChoices

    def __init__(
        self, module: nn.Module, comm: Comm, options: Choices, roles: Mapping[str, Role]
    ) -> None:
        self.comm, self.options = comm, options
        self.span = self.find_span(module)
        self.method: Ring | Gathered | Heads = getattr(self, f"{options.method}_type")(comm)
        self.cores = [module.get_submodule(n) for n, role in roles.items() if role == "core"]
        for core in self.cores:
            core.forward = partial(self.attend, core)
        layers = [module.get_submodule(n.rpartition(".")[0]) for n in roles if roles[n] == "router"]
        # A layer without places and counts looks at one token at a time, and needs no other rank.
        self.choices = [
            self.choices_type(layer, comm, self.span)
            for layer in layers
            if comm.size > 1 and hasattr(layer, "places") and hasattr(layer, "count")
        ]

    def find_span(self, module: nn.Module) -> Any:
        """The object that the parts of ``module`` share to know their positions.

        :raises Refused: there is none, or a part needs all positions.
        """
        return find_span(module, self.comm.size)

    def attend(self, core: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The attention of ``core`` in place of its forward."""
        own, held = len(self.span.rows), query.shape[2]
        if own == held:
            return self.method.attend(core, query, key, value)
        # Tensor ranks cut sequences, too, and pad what they gather: attention must not see that.
        mixed = self.method.attend(core, *(part[:, :, :own] for part in (query, key, value)))
        return F.pad(mixed, (0, 0, 0, held - own))

    def begin(self, micro: MicroBatch) -> None:
        """Take this rank's positions of ``micro``, before its forward."""
        length = micro.targets.shape[1]
        self.span.parts = self.parts(length, micro.targets.device)
        self.span.rows = self.span.parts[self.comm.rank]
        # Stages behind the first one do not see the inputs, but must know the documents in them.
        self.span.read(micro.inputs)

    def parts(self, length: int, device: Any) -> Sequence[Tensor]:
        """The positions of each rank."""
        size, cut = self.comm.size, self.options.cut
        return [positions(length, size, rank, cut).to(device) for rank in range(size)]

    def cut(self, micro: MicroBatch) -> MicroBatch:
        """``micro`` with the targets and weights of this rank's positions.

        These are the targets of the whole sample: they were shifted before.
        """
        targets, weights = (t[:, self.span.rows] for t in (micro.targets, micro.weights))
        return replace(micro, targets=targets, weights=weights)

    def keep(self, module: nn.Module) -> None:
        """Let go of the routers that are not in ``module``, and of all that their layers hold."""
        held = {id(part) for part in module.modules()}
        for choices in self.choices:
            if id(choices.layer) not in held:
                choices.close()
        self.choices = [choices for choices in self.choices if id(choices.layer) in held]

    def close(self) -> None:
        """Give the module its own attention back."""
        self.span.rows = self.span.parts = None
        while self.cores:
            del self.cores.pop().forward
        while self.choices:
            self.choices.pop().close()


class ReferenceContext(Engine):
    """The strategy as a system under test."""

    strategy = "context"
    depth = "layout"
    options_type = Options
    parallel_type: type[ContextParallel] = ContextParallel
    handle_type: type[ddp.DDP] = ddp.DDP

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The ``context`` profile; no module may need all positions."""
        parse_options(Options, options)
        return declared(
            "context", axes=("replicate", "context"), declines=DECLINES, checkpoints=FORMATS
        )

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        """Cut the positions, and sum gradients over the axes replicate and context."""
        chosen = parse_options(Options, options)
        self.parallel = self.parallel_type(module, mesh.comm("context"), chosen, self.build.roles)
        comm = mesh.comm(*summing(mesh.axes))
        # Gradients are sums over positions as over samples: DDP need not know which it adds.
        return self.handle_type(module, comm, chosen.buckets, self.reducer)

    def loss(self, micro: MicroBatch) -> Tensor:
        """The loss of this rank's positions of one micro-batch."""
        self.parallel.begin(micro)
        return super().loss(micro)

    def loss_of(self, outputs: Tensor, micro: MicroBatch) -> Tensor:
        """The loss of the ``outputs`` of this rank's positions."""
        return super().loss_of(outputs, self.parallel.cut(micro))

    def close(self) -> None:
        """Remove hooks and forwards."""
        super().close()
        self.parallel.close()


IMPLEMENTATION = ReferenceContext
