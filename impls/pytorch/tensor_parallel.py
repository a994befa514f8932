"""PyTorch's tensor parallelism (``torch.distributed.tensor.parallel``), unmodified.

    what                              where
    token embedding, qkv, up, head    rows, cut over ``tensor`` (a fused qkv by heads: three blocks)
    attention's out, down             columns, cut over ``tensor``; their biases whole
    norms, position embedding         every rank
    gradients, optimizer state        as the parameters; Adam's step counter on every rank
    modules that torch has no style   every rank, plain tensors
    for, buffers

    forward    embedding, out, down   all-reduce of the hidden state  (``sequence_parallel``:
                                      reduce-scatter over positions; an all-gather before qkv, up
                                      and head)
               head                   all-gather of the logits  (``loss_parallel``: none; three
                                      all-reduces of a number a target in the loss)
    backward   qkv, up, head          all-reduce of the hidden state's gradient  (reduce-scatter; an
                                      all-gather behind out, down and the embedding)
    finish     what torch left as partial sums is reduced: ``sequence_parallel`` leaves those of
               norms and positions, one all-reduce a tensor
    clip       ``torch.nn.utils.get_total_norm``, DTensors and plain tensors apart
    update     torch's optimizer on DTensors: local shards only

``loss_parallel`` changes handlers of a dispatcher that the whole process shares: where ranks are
threads the first one switches it on, the last one off.

Cost: ``torch_tensor_parallel.payload_bytes``.
Numbers: sums over ranks in the backend's order; ``RowwiseParallel`` divides its bias by the ranks
and adds it on each, so that it is rounded where they are no power of two.  The softmax of
``loss_parallel`` is another formula than torch's own: other bits even on one rank.
Left out: data axes (``pytorch/hybrid`` has them), several KV heads' worth of ranks to one KV head.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel
from torch.nn import functional as F

from shardproof.comm import Mesh
from shardproof.contract import (
    Build,
    Capabilities,
    Depth,
    Kind,
    MicroBatch,
    OptimizerSpec,
    Piece,
    Refused,
)
from shardproof.impls.pytorch.adapter import Adapter
from shardproof.impls.pytorch.checkpoint.options import NO_DTENSOR, Saved, offered
from shardproof.impls.pytorch.tensor_styles import (
    apply_styles,
    copy_number,
    dtensor_pieces,
    plan_styles,
    require_split_layers,
    settle_gradient,
)
from shardproof.impls.reference.engine.choices import declared
from shardproof.impls.reference.engine.optimizer import slot_pieces
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.engine.state import broadcast_tensors

UNEQUAL = "SequenceParallel assumes that all ranks have the same number of positions"


@dataclass(frozen=True)
class Options(Saved):
    """``sequence_parallel``: norms and sums share the positions. ``loss_parallel``: the loss uses
    logits that stay split on the vocabulary. With ``own_loss`` it is the workload's own loss,
    called with these logits, like a script whose loss has a further term.
    """

    sequence_parallel: bool = False
    loss_parallel: bool = False
    own_loss: bool = False


class PyTorchTensorParallel(Adapter):
    """The adapter."""

    strategy = "torch_tensor_parallel"
    depth: ClassVar[Depth] = "layout"
    options_type: ClassVar[type[Any]] = Options
    options: Any

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The ``torch_tensor_parallel`` profile."""
        chosen = parse_options(Options, options)
        declines = {"variable_lengths": UNEQUAL} if chosen.sequence_parallel else {}
        saves = offered(chosen.checkpoint, denies=NO_DTENSOR)
        return declared("tensor", axes=("tensor",), declines=declines, **saves)

    def parse(self, options: Mapping[str, Any], mesh: Mesh) -> None:
        """The options; the mesh has ranks along one axis."""
        self.options = parse_options(self.options_type, options)
        if "tensor" not in mesh.axes:
            raise Refused(
                f"parallelize_module needs the axis 'tensor'; this mesh has {list(mesh.axes)}"
            )

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast along the one axis: ``SequenceParallel`` expects equal norms on all ranks."""
        broadcast_tensors(tensors, self.mesh.comm("tensor"))

    def shard(self, module: nn.Module) -> nn.Module:
        """Put every module under its torch style."""
        if self.options.loss_parallel and not self.options.own_loss:
            check_loss(self.build)
        styles = self.styles(module)
        self.orders = apply_styles(module, styles, self.mesh.device_mesh["tensor"])
        self.named = dict(module.named_parameters())
        check_scaler(self.spec, self.updated())
        return module

    def styles(self, module: nn.Module) -> dict[str, ParallelStyle]:
        """Dotted name -> style; :class:`Refused` for a model without split layers."""
        options = self.options
        styles = plan_styles(
            module, self.build.units, options.sequence_parallel, options.loss_parallel
        )
        require_split_layers(module, styles)
        return styles

    def updated(self) -> dict[str, Tensor]:
        """The trainable parameters."""
        return {name: p for name, p in self.named.items() if p.requires_grad}

    def row_orders(self) -> Mapping[str, Sequence[int]]:
        """The order of rows of fused projections."""
        return self.orders

    def loss(self, micro: MicroBatch) -> Tensor:
        """The loss of whole logits, or of the ranks' shares of them."""
        if self.options.sequence_parallel:
            positions = self.module.get_parameter("embed.position.weight").shape[0]
            check_length(micro.inputs, positions, self.mesh.size("tensor"))
        outputs = self.module(micro.inputs)
        if not self.options.loss_parallel:
            return self.build.loss(outputs, micro)
        if self.options.own_loss:
            with LOSS_PARALLEL(), implicit_replication():  # targets and weights are whole
                loss: Any = self.build.loss(outputs, micro)
                return loss.full_tensor() if isinstance(loss, DTensor) else loss
        with LOSS_PARALLEL():
            return parallel_loss(outputs, micro, self.build)

    def accumulating(self, is_last: bool) -> AbstractContextManager[object]:
        """The context of a micro-batch: torch requires backward inside ``loss_parallel``."""
        return LOSS_PARALLEL() if self.options.loss_parallel else nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Run backward; products with weights need such gradients too."""
        with implicit_replication() if self.options.own_loss else nullcontext():
            super().backward(loss)

    def finish(self) -> None:
        """Lay out gradients like their parameters."""
        for parameter in self.updated().values():
            settle_gradient(parameter)

    def clip(self, limit: float) -> Tensor:
        """torch's own clipping; it takes DTensors or plain tensors, but not both at once."""
        return clip_mixed(list(self.updated().values()), limit)

    def local_state(self, kind: Kind) -> list[Piece]:
        """Local shards, and whole tensors of every rank."""
        if kind == "optimizer":
            slots = slot_pieces(self.optimizer, lambda n, s, t: Piece.whole(f"{n}.{s}", t))
            return [part for slot in slots for part in self.pieces(slot.name, slot.tensor)]
        if kind == "buffers":
            return self.buffers()
        named: Mapping[str, Tensor] = self.named
        if kind == "gradients":
            named = {n: p.grad for n, p in self.named.items() if p.grad is not None}
        return [part for name, tensor in named.items() for part in self.pieces(name, tensor)]

    def pieces(self, name: str, tensor: Tensor) -> list[Piece]:
        """The pieces of a parameter, or of a slot ``<parameter>.<slot>``."""
        if not isinstance(tensor, DTensor):
            return [Piece.whole(name, tensor.detach(), replica=self.mesh.rank)]
        owner = name if name in self.named else name.rpartition(".")[0]
        return dtensor_pieces(name, tensor, self.orders.get(owner), copy_number(tensor))

    @torch.no_grad()
    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """Parameters gathered by DTensor, fused rows in their true order; buffers of this rank."""
        if kind == "buffers":
            return {piece.name: piece.tensor.clone() for piece in self.buffers()}
        if kind != "parameters":
            raise Refused(
                f"full_state({kind!r}): this system can gather only parameters and buffers"
            )
        full = {}
        for name, tensor in self.named.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
            full[name] = torch.empty_like(whole)
            full[name][self.orders.get(name, ...)] = whole
        return full


def check_length(inputs: Tensor, positions: int, ranks: int) -> None:
    """:class:`Refused` unless ranks get equal numbers of positions of ``inputs`` ``(samples,
    length)``.

    What lies behind the first ``positions`` of them is no position.
    """
    length = min(inputs.shape[-1], positions)
    if length % ranks:
        raise Refused(
            f"option 'sequence_parallel' = true: {length} positions cannot be cut into equal "
            f"parts for the {ranks} ranks of the axis 'tensor', but SequenceParallel assumes "
            "inputs of equal length on all ranks; set sequence_parallel to false"
        )


def check_loss(build: Build) -> None:
    """:class:`Refused` for a loss that torch cannot compute from split logits."""
    if build.cross_entropy is None:
        raise Refused(
            "option 'loss_parallel' = true: torch says 'Currently only the cross-entropy loss "
            "is supported', but this workload has another loss; set loss_parallel to false"
        )
    smoothing = build.cross_entropy.label_smoothing
    if smoothing:
        raise Refused(
            f"option 'loss_parallel' = true with label_smoothing = {smoothing}: torch says "
            "'label_smoothing: Currently not supported'; set loss_parallel to false"
        )


def check_scaler(spec: OptimizerSpec, updated: Mapping[str, Tensor]) -> None:
    """:class:`Refused` if torch's scaler would get both DTensors and plain tensors."""
    plain = [name for name, tensor in updated.items() if not isinstance(tensor, DTensor)]
    if spec.scaler is not None and plain:
        raise Refused(
            f"optimizer.scaler: {plain[0]!r} is a plain tensor, but GradScaler does not "
            "support a mix of plain tensors and DTensors "
            "(aten._amp_foreach_non_finite_check_and_unscale_); leave the scaler out"
        )


def parallel_loss(outputs: Tensor, micro: MicroBatch, build: Build) -> Tensor:
    """``sum(weights * cross entropy)`` of logits ``(..., classes)`` split on the classes.

    Computed in the dtype of the weights; the same number on every rank.
    """
    form = build.cross_entropy
    assert form is not None, "checked when the option was read"
    losses = F.cross_entropy(
        outputs.reshape(-1, outputs.shape[-1]).to(micro.weights.dtype),
        micro.targets.reshape(-1),
        reduction="none",
        ignore_index=form.ignore_index,
    )
    whole = losses.to_local() if isinstance(losses, DTensor) else losses
    return (micro.weights.reshape(-1) * whole).sum()


def clip_mixed(parameters: Sequence[Tensor], limit: float) -> Tensor:
    """Scale gradients to a global norm of at most ``limit``; return the norm before, on every
    rank.
    """
    owners = [p for p in parameters if p.grad is not None]
    kinds: dict[bool, list[Tensor]] = {True: [], False: []}
    for owner in owners:
        if owner.grad is not None:
            kinds[isinstance(owner.grad, DTensor)].append(owner.grad)
    norms = [nn.utils.get_total_norm(kind, foreach=False) for kind in kinds.values() if kind]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(whole))
    nn.utils.clip_grads_with_norm_(owners, limit, total, foreach=False)
    return total


class SharedContext:
    """A context of the whole process: the first thread enters it, the last one leaves it."""

    def __init__(self, context: Any) -> None:
        self.context, self.lock = context, threading.Lock()
        self.inside, self.stack = 0, ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter the context, possibly together with other threads."""
        with self.lock:
            if not self.inside:
                self.stack.enter_context(self.context())
            self.inside += 1
        try:
            yield
        finally:
            with self.lock:
                self.inside -= 1
                if not self.inside:
                    self.stack.close()


#: torch keeps the handlers of the loss in the one dispatcher of the process.
LOSS_PARALLEL = SharedContext(loss_parallel)


IMPLEMENTATION = PyTorchTensorParallel
