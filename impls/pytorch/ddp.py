"""PyTorch's ``DistributedDataParallel``, unmodified.

    what                        where
    parameters, gradients       every rank, whole and equal
    optimizer state             every rank, whole and equal
    buffers                     every rank; rank 0's are copied at the first forward of a step
    buckets                     every rank (``gradient_as_bucket_view``: gradients live in them)

    step     micro-batches but the last   ``no_sync()``: gradients add up locally
             last micro-batch             forward, backward; buckets are reduced meanwhile
             scale, clip, update          local, the same on all ranks

Two compensations: DDP divides by N, so the loss is multiplied by N (for N = 2 both are exact); and
it broadcasts from rank 0 in its constructor, so rank 0 loads the initial state before.

Cost: as ``reference/ddp``: 2 (N-1) trainable bytes + (N-1) float buffer bytes per step, all ranks.
Numbers: the plain sum over ranks, in the backend's order.
Left out: communication hooks, ``join``, mixed precision (a private option).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardproof.axes import summing
from shardproof.comm import Mesh
from shardproof.contract import (
    Batch,
    Build,
    Capabilities,
    Depth,
    Kind,
    MicroBatch,
    Observe,
    OptimizerSpec,
    Piece,
    Refused,
    StepResult,
)
from shardproof.impls.pytorch.checkpoint.options import Saved, offered
from shardproof.impls.pytorch.checkpoint.saves import Saves
from shardproof.impls.pytorch.parts.recompute import checkpoint_units, plain, single_unit
from shardproof.impls.pytorch.parts.scaling import make_scaler, update
from shardproof.impls.reference.engine.choices import declared
from shardproof.impls.reference.engine.optimizer import build_optimizer, param_groups, slot_pieces
from shardproof.impls.reference.engine.options import at_least, parse_options
from shardproof.impls.reference.engine.state import broadcast_tensors, load_state

#: Traits under which what takes part in a backward varies, and those under which it never does.
VARYING = (
    "conditional_by_rank",
    "conditional_by_micro_batch",
    "conditional_last_micro_batch",
    "conditional_late_step",
    "conditional_early_step",
)


@dataclass(frozen=True)
class Options(Saved):
    """DDP's constructor arguments under the same names with its defaults, and recomputation.

    ``compile``: the backend of ``torch.compile`` around DDP.
    """

    bucket_cap_mb: float | None = None
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True
    recompute_every: int = 0
    compile: Literal["none", "aot_eager"] = "none"

    def __post_init__(self) -> None:
        single_unit(self.recompute_every)
        if self.bucket_cap_mb is not None:
            at_least("bucket_cap_mb", self.bucket_cap_mb, 2**-20)
            if self.compile != "none" and self.bucket_cap_mb < 1:
                raise Refused(
                    f"option 'bucket_cap_mb' = {self.bucket_cap_mb} with 'compile': "
                    "torch.compile requires buckets of at least 1 MiB, the size of DDP's first "
                    "bucket; set bucket_cap_mb to 1 or more"
                )

    def declines(self) -> dict[str, str]:
        """Traits that DDP documents as unsupported under these options, with the reason."""
        if self.static_graph:
            return dict.fromkeys(
                VARYING, "static_graph=True promises that every step uses the same parameters"
            )
        if not self.find_unused_parameters:
            reason = "DDP needs find_unused_parameters=True if parameters can be unused"
            return dict.fromkeys(("unused", *VARYING), reason)
        return {}


class PyTorchDDP(Saves):
    """The adapter."""

    strategy = "ddp"
    depth: ClassVar[Depth] = "layout"
    options_type: ClassVar[type[Options]] = Options
    axes: ClassVar[tuple[str, ...]] = ("replicate",)

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The ``ddp`` profile; support for unused parameters depends on the options."""
        chosen = parse_options(cls.options_type, options)
        features, buffers = ["accumulation_without_communication", "overlap"], "per_rank"
        if chosen.broadcast_buffers:
            features, buffers = [*features, "buffer_broadcast"], "rank0"
        saves = offered(chosen.checkpoint)
        usual = {"axes": cls.axes, "declines": chosen.declines()}
        return declared(*features, buffers=buffers, **usual, **saves)

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        """Build, load on rank 0, wrap."""
        self.options, self.mesh = parse_options(self.options_type, options), mesh
        self.build, self.spec = build, optimizer
        self.module: nn.Module = build(mesh.device)
        if state is not None:
            load_state(self.module, state)
        self.prepare(self.module)
        if self.options.recompute_every:
            checkpoint_units(self.module, build.units)
        self.comm = mesh.comm(*summing(mesh.axes))
        if not self.options.broadcast_buffers:  # then DDP leaves out the initial broadcast as well
            broadcast_tensors(list(self.module.buffers()), self.comm)
        self.ddp = self.wrap(self.module)
        self.call: Callable[..., Any] = self.ddp
        if self.options.compile != "none":
            self.call = torch.compile(self.ddp, backend=self.options.compile)
        named = {plain(name): p for name, p in self.module.named_parameters()}
        self.trainable = {name: p for name, p in named.items() if p.requires_grad}
        self.optimizer = self.make_optimizer()
        self.scaler = make_scaler(optimizer, mesh.device)

    def prepare(self, module: nn.Module) -> None:
        """Change the plain ``module`` of this rank before anything wraps it: nothing here."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        """torch's optimizer over all trained parameters."""
        return build_optimizer(self.spec, param_groups(self.spec, self.trainable))

    def wrap(self, module: nn.Module) -> DistributedDataParallel:
        """DDP around ``module``, over its axis."""
        rest: dict[str, Any] = {}
        if not self.options.broadcast_buffers:  # newer versions warn of the argument, so only then
            rest["broadcast_buffers"] = False
        return DistributedDataParallel(
            module,
            process_group=self.comm.group,
            bucket_cap_mb=self.options.bucket_cap_mb,
            find_unused_parameters=self.options.find_unused_parameters,
            static_graph=self.options.static_graph,
            gradient_as_bucket_view=self.options.gradient_as_bucket_view,
            **rest,
        )

    def modules(self) -> list[nn.Module]:
        """DDP, whose prefix torch removes from names."""
        return [self.ddp]

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """Accumulate under ``no_sync``, reduce in the last backward, clip, update."""
        micro_batches = batch.micro_batches
        self.refuse(batch.step, len(micro_batches))
        total = torch.zeros((), dtype=next(self.module.parameters()).dtype)
        for number, micro in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            with nullcontext() if is_last else self.ddp.no_sync():
                loss = self.loss(self.call, micro)
                self.scaler.scale(loss * self.loss_factor()).backward()
            total = total + loss.detach()
        norm, metrics = update(
            self.scaler, self.optimizer, self.spec, self.clip, batch.step, observe
        )
        self.steps_done = batch.step + 1
        return StepResult(loss=total, norm=norm, metrics=metrics)

    def loss(self, call: Callable[..., Any], micro: MicroBatch) -> Tensor:
        """The loss of one micro-batch, by ``call`` of its inputs."""
        return self.build.loss(call(micro.inputs), micro)

    def clip(self, limit: float) -> Tensor:
        """Scale gradients to a norm of at most ``limit``; return the norm before."""
        parameters = list(self.trainable.values())
        return nn.utils.clip_grad_norm_(parameters, limit, foreach=False)

    def loss_factor(self) -> int:
        """The factor that cancels DDP's division by the number of ranks."""
        return self.comm.size

    def refuse(self, step: int, micro_batches: int) -> None:
        """Refuse options that DDP answers with a hang or an internal assertion."""
        if not micro_batches:
            raise Refused(
                f"step {step}: this rank has no micro-batch, so the other ranks would wait in "
                "DDP's collectives; give every rank at least 1 micro-batch"
            )
        if self.options.static_graph and step == 0 and micro_batches > 1:
            raise Refused(
                "option 'static_graph' = True: the first step may have only 1 micro-batch, not "
                f"{micro_batches}, because DDP must synchronize the first backward; use 1 "
                "micro-batch, or set static_graph to false"
            )

    def local_state(self, kind: Kind) -> list[Piece]:
        """Whole tensors under the names of the unwrapped module."""
        if kind == "optimizer":
            return slot_pieces(self.optimizer, self._place)
        named: dict[str, Tensor] = {}
        if kind == "parameters":
            named = dict(self.module.named_parameters())
        elif kind == "buffers":
            named = dict(self.module.named_buffers())
        else:
            named = {n: p.grad for n, p in self.trainable.items() if p.grad is not None}
        rank = self.comm.rank
        return [Piece.whole(plain(n), t.detach(), replica=rank) for n, t in named.items()]

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """Copies of this rank's replica, which is whole."""
        return {piece.name: piece.tensor.clone() for piece in self.local_state(kind)}

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """This rank's share of the loss, without the wrapper, because nothing must be
        communicated.
        """
        self.module.eval()
        try:
            shares = [self.loss(self.module, micro) for micro in batch.micro_batches]
        finally:
            self.module.train()
        return torch.stack(shares).sum() if shares else torch.zeros(())

    def _place(self, name: str, slot: str, tensor: Tensor) -> Piece:
        return Piece.whole(f"{name}.{slot}", tensor, replica=self.comm.rank)


IMPLEMENTATION = PyTorchDDP
