"""Tensor parallelism: every rank has a part of each large layer, and ranks communicate in every
layer.

Problem.  A layer may be too large for one rank, or too slow.  Data parallelism does not help: all
its ranks hold all layers.  So split the layers themselves, and in such a way that the parts need
few messages from each other (Megatron-LM, arXiv 1909.08053, section 3).

Split the first of two matrices by columns and the second by rows.  What lies between them works
element by element (an MLP's GELU) or head by head (attention), and needs no message.  The pair
needs two in all: a sum behind it in forward, and one in front of it in backward.

    what                                    where
    qkv, up, their biases                   rows, split over ranks; qkv by whole heads
    out, down                               columns, split over ranks; their biases on every rank
    token embedding, head                   rows of the vocabulary, split over ranks, unevenly if
                                            need be
    KV heads, fewer than ranks              on each rank that has some of the query heads they serve
    norms, positions, all other modules     every rank
    activations                             between pairs: every rank, whole; within: split.  Under
                                            sequence parallelism between pairs each rank has some
                                            positions, for all of which norms and dropout compute
    optimizer state                         as its parameters

    layer    forward    norm   f  qkv  attention  out  f_bar   norm   f  up  gelu  down  f_bar
             backward      all-reduce . . . . . . . .               all-reduce . . . . . .
    sequence forward    norm   g  qkv  attention  out  g_bar   norm   g  up  gelu  down  g_bar
    loss                each rank's logits -> largest, sums of exponentials: numbers per target
    finish              shared KV heads; under sequence parallelism also what stands on every rank:
                        each rank has a term of the gradient, summed in one call

``f`` and ``f_bar`` are an all-reduce in backward and in forward; ``g`` gathers the sequence and
scatters its gradient's sum, ``g_bar`` the reverse.  Positions that do not divide are padded;
nothing that counts depends on the padding.

Read next ``layers.py`` (how a split layer computes) and ``operators.py`` (its messages).  The rest
can wait: ``split_rules.py`` (which modules are split), ``cuts.py`` (where their elements are),
``loss.py`` (cross-entropy of logits that no rank has all of).

Cost: floating-point bytes a step along the axis.  For each micro-batch of b samples of s positions,
with L layers of width h: 4 L + 2 all-reduces of bsh elements (two a layer forward, two backward:
arXiv 2104.04473, section 3.2; one for the embedding, one for the head's input).  Sequence
parallelism: 4 L + 2 all-gathers and 4 L + 2 reduce-scatters, the same bytes (arXiv 2205.05198,
section 4.2.2; what is gathered in forward is kept, so that backward does not gather it again).  A
split loss: one all-reduce of bs numbers and one of 2 bs (3 bs with label smoothing), else an
all-gather of all logits.  Once a step: 2 (N-1) bytes of gradients that are terms; 8 with clipping.
Memory: P, G and O of split layers over N, of the others whole.
Numbers: sums in another order than one device, equal on all ranks bit for bit.
Left out: mixed precision and offload (a data-parallel strategy around this one has them), gathering
again in backward, dropout that draws in forward under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Comm, Mesh
from shardproof.contract import (
    Build,
    Capabilities,
    Kind,
    MicroBatch,
    OptimizerSpec,
    Piece,
    Refused,
    Role,
)
from shardproof.impls.reference.engine.choices import FORMATS, Saved, declared
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.handle import PLAIN, Comms, Context, Handle
from shardproof.impls.reference.engine.norm import NormPart, power_sum
from shardproof.impls.reference.engine.optimizer import param_groups
from shardproof.impls.reference.engine.options import at_least, parse_options
from shardproof.impls.reference.engine.state import broadcast_tensors, gather_pieces, named_state
from shardproof.impls.reference.tensor import operators
from shardproof.impls.reference.tensor.cuts import Cut, Uncut
from shardproof.impls.reference.tensor.layers import Classes, SplitLayer
from shardproof.impls.reference.tensor.loss import cross_entropy
from shardproof.impls.reference.tensor.split_rules import split_layers

_WHOLE_SEQUENCE = "with option 'sequence_parallel' no rank has a whole sequence here, but "


@dataclass(frozen=True)
class Options(Saved):
    """``sequence_parallel``: between split layers each rank keeps a part of the positions.

    ``loss_parallel``: the loss is computed from logits that stay split (``None``: if it is a
    cross-entropy).  ``sum_each_backward``: gradients of which each rank has a term are summed in
    every backward, for a strategy that takes them from there; else once per step.
    """

    sequence_parallel: bool = False
    loss_parallel: bool | None = None
    sum_each_backward: bool = False
    recompute_every: int = 0

    def __post_init__(self) -> None:
        at_least("recompute_every", self.recompute_every, 0)

    def resolved(self, build: Build) -> Options:
        """The options with ``loss_parallel`` decided; :class:`Refused` if the loss does not allow
        it.
        """
        if self.loss_parallel and build.cross_entropy is None:
            raise Refused(
                "option 'loss_parallel' = True: this workload's loss is not a cross-entropy, so "
                "it needs whole outputs; set loss_parallel to false or null"
            )
        wanted = build.cross_entropy is not None
        return self if self.loss_parallel is not None else replace(self, loss_parallel=wanted)


def apply(
    module: nn.Module, comms: Comms, options: Options, context: Context = PLAIN
) -> TensorParallel:
    """Split ``module`` over ``comms["tensor"]``, starting from rank 0's values.

    ``options`` are resolved.  Afterwards the module's parameters are local ones, under their names.
    """
    return TensorParallel(module, comms["tensor"], options, context.roles)


class TensorParallel(Handle):
    """The handle. ``cuts`` describe the layout of every parameter on the ranks of the axis."""

    def __init__(
        self, module: nn.Module, comm: Comm, options: Options, roles: Mapping[str, Role]
    ) -> None:
        self.module, self.comm, self.options, self.roles = module, comm, options, roles
        # Before anything is split: afterwards no rank has the whole that rank 0 would send.
        broadcast_tensors(list(named_state(module).values()), comm)
        self.layers = self.make_layers() if comm.size > 1 else []
        self.output: Classes | None = None
        self.cuts = {name: self.whole(p) for name, p in module.named_parameters()}
        first = {id(p): name for name, p in module.named_parameters()}
        split: dict[str, Cut] = {}
        for layer in self.layers:
            for leaf, cut in layer.cuts.items():
                name = first[id(layer.module.get_parameter(leaf))]  # a tied one's first
                if split.setdefault(name, cut) != cut:
                    raise Refused(
                        f"{name!r} and {layer.name!r} share one weight, but are split in different "
                        "ways: give both layers the same role, or do not tie their weights"
                    )
            if isinstance(layer, Classes):
                self.output = layer
        wrapped = {f"{layer.name}.{leaf}" for layer in self.layers for leaf in layer.cuts}
        for name, p in module.named_parameters(remove_duplicate=False):
            if first[id(p)] in split and name not in wrapped:
                raise Refused(
                    f"{name!r} is tied to {first[id(p)]!r}, which is split, but the layer of "
                    f"{name!r} is not split: give this layer a role that splits its weight, or do "
                    "not tie the two weights"
                )
        self.cuts |= split
        # The same parameter objects with less in them: ties and hooks on them survive.
        for name, parameter in module.named_parameters():
            parameter.data = self.local(name, parameter.data)
        for layer in self.layers:
            layer.wrap()
        self.hooks = [
            parameter.register_hook(partial(self.summed, name))
            for name, parameter in module.named_parameters()
            if options.sum_each_backward and parameter.requires_grad and parameter.numel()
            if self.cuts[name].term(parameter.detach()) is not None
        ]

    def whole(self, parameter: Tensor) -> Cut:
        """The layout of a parameter that is not split."""
        is_term = self.options.sequence_parallel and self.comm.size > 1
        return Uncut(tuple(parameter.shape), self.comm.rank, self.comm.size, is_term)

    def local(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of ``whole``, the value of parameter ``name``."""
        return self.cuts[name].local(whole)

    def make_layers(self) -> list[SplitLayer]:
        """The split layers in the order of registration."""
        is_sequence, gathered = self.options.sequence_parallel, not self.options.loss_parallel
        return split_layers(self.module, self.roles, self.comm, is_sequence, gathered)

    # ---------------------------------------------------------------------------------- the loss

    def loss(self, build: Build, outputs: Tensor, micro: MicroBatch) -> Tensor:
        """The loss from the output of this module's last layer, equal on all ranks."""
        if self.output is None:
            return build.loss(outputs, micro)
        # What the sequence was padded with has no targets, and must not enter the loss.
        if outputs.shape[1] != micro.targets.shape[1]:
            outputs = outputs[:, : micro.targets.shape[1]]
        if self.output.gathered:
            return build.loss(outputs, micro)
        assert build.cross_entropy is not None
        logits = outputs.reshape(-1, outputs.shape[-1]).to(micro.weights.dtype)
        targets, own = micro.targets.reshape(-1), self.output.own
        losses = cross_entropy(
            logits, targets, build.cross_entropy, own, self.output.total, self.comm
        )
        return (micro.weights.reshape(-1) * losses).sum()

    # ----------------------------------------------------------------------------- the gradients

    def param_groups(self, spec: OptimizerSpec) -> list[dict[str, Any]]:
        """The part of every trained parameter on this rank."""
        return param_groups(spec, dict(self.trained()))

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters that are trained."""
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    @torch.no_grad()
    def finish(self) -> None:
        """Sum gradients that are terms of a sum, one call per dtype."""
        if self.options.sum_each_backward:
            return
        terms: dict[torch.dtype, list[tuple[str, nn.Parameter, Tensor]]] = {}
        for name, parameter in self.trained():
            # Zeros where this rank made no use of it: all ranks must send as much.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            term = self.cuts[name].term(gradient)
            if term is not None:
                terms.setdefault(term.dtype, []).append((name, parameter, term))
        for same in terms.values():
            flat = torch.cat([term.reshape(-1) for _, _, term in same])
            self.comm.all_reduce(flat)
            totals = flat.split([term.numel() for _, _, term in same])
            for (name, parameter, _), total in zip(same, totals, strict=True):
                if parameter.grad is not None:
                    self.cuts[name].take(parameter.grad, total)

    @torch.no_grad()
    def summed(self, name: str, gradient: Tensor) -> Tensor | None:
        """Hook: the whole gradient instead of this rank's term (``None``: it is whole already)."""
        term = self.cuts[name].term(gradient)
        if term is None:
            return None
        total = operators.all_reduce(term, self.comm)
        # A copy: autograd may use the same memory for another tensor's gradient.
        whole = gradient.clone()
        self.cuts[name].take(whole, total)
        return whole

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        """One sum over the pieces that this rank holds first, so every element counts once."""
        device = next(self.module.parameters()).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for piece in self.pieces("gradients"):
            # Some blocks lie on several ranks: each counts on the first of them only.
            if piece.replica == 0:
                total += power_sum(piece.tensor, order)
        return [(total, (self.comm.axis,))]

    @torch.no_grad()
    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient that exists."""
        for _, parameter in self.trained():
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.dtype))

    # --------------------------------------------------------------------------------- the state

    def pieces(self, kind: Kind) -> list[Piece]:
        """Blocks of split tensors; others whole, a copy on each rank."""
        if kind == "buffers":
            buffers = self.module.named_buffers()
            return [Piece.whole(n, t.detach(), replica=self.comm.rank) for n, t in buffers]
        held: Sequence[tuple[str, Tensor | None]] = ()
        if kind == "parameters":
            held = [(name, p.detach()) for name, p in self.module.named_parameters()]
        elif kind == "gradients":
            held = [(name, p.grad) for name, p in self.trained()]
        return [
            piece
            for name, tensor in held
            if tensor is not None
            for piece in self.cuts[name].pieces(name, tensor)
        ]

    def place(self, name: str, slot: str, tensor: Tensor) -> list[Piece]:
        """Blocks like those of the parameter; a scalar (Adam's step) as a whole."""
        full = f"{name}.{slot}"
        if tensor.dim() == 0:
            return [Piece.whole(full, tensor, replica=self.comm.rank)]
        return self.cuts[name].pieces(full, tensor)

    def keep(self, part: nn.Module) -> None:
        """Release everything outside ``part``: other stages of a pipeline.

        Layers there are closed: a module and the forward around it hold each other.
        """
        inside = {id(module) for module in part.modules()}
        self.module = part
        for layer in self.layers:
            if id(layer.module) not in inside:
                layer.close()
        self.layers = [layer for layer in self.layers if id(layer.module) in inside]
        if self.output not in self.layers:
            self.output = None

    def close(self) -> None:
        """Remove hooks and restore the modules' forwards."""
        for hook in self.hooks:
            hook.remove()
        for layer in self.layers:
            layer.close()


class ReferenceTensor(Engine):
    """The strategy as a system under test."""

    strategy = "tensor"
    depth = "layout"
    options_type = Options
    handle_type: type[TensorParallel] = TensorParallel

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The ``tensor`` profile; under sequence parallelism, no module may need all positions."""
        declines = {
            "rebound_buffer": "the module's mean is over all positions",
            "dropout_stateful": "the module draws for all positions",
        }
        is_sequence = parse_options(Options, options).sequence_parallel
        refused = {n: _WHOLE_SEQUENCE + why for n, why in declines.items() if is_sequence}
        return declared("tensor", axes=("tensor",), declines=refused, checkpoints=FORMATS)

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        """Apply the handle along the tensor axis."""
        resolved = parse_options(Options, options).resolved(self.build)
        self.split = self.handle_type(module, mesh.comm("tensor"), resolved, self.build.roles)
        return self.split

    def loss(self, micro: MicroBatch) -> Tensor:
        """Weighted loss of one micro-batch from outputs that may be split."""
        return self.split.loss(self.build, self.module(micro.inputs), micro)

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """Whole tensors, gathered if they are split."""
        return gather_pieces(self.local_state(kind), self.mesh.comm("tensor"))


IMPLEMENTATION = ReferenceTensor
