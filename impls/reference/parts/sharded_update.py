"""The common part of ZeRO-1 and ZeRO-2: whole parameters, and each rank updates a shard of every
bucket.

Trained parameters lie in buckets (owned_bucket.py), in reverse order of registration, for that is
nearly the order in which backward makes gradients.  A *round* reduces every bucket once:

    [r1] start_round        nothing has arrived; from now on full buckets are sent
    [r2] arrived            during backward: a gradient moves into its bucket
    [r3] send_full_buckets  in the order of the queue, up to the first bucket that is not full
    [r4] end_round          after backward: the rest is sent; which buckets were not full is noted
    [r5] publish_gradients  once a step: agree on use, give the optimizer the gradients of its parts

A bucket that was not full on some rank when backward ended has held up those behind it.  From the
next step on it is sent last.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Comm
from shardproof.contract import Kind, OptimizerSpec, Piece
from shardproof.impls.reference.engine.choices import (
    Compressing,
    Followed,
    OfShards,
    Reduction,
    Saved,
    WholeParameters,
)
from shardproof.impls.reference.engine.handle import Handle
from shardproof.impls.reference.engine.norm import NormPart, power_sum
from shardproof.impls.reference.engine.optimizer import param_groups
from shardproof.impls.reference.engine.options import at_least
from shardproof.impls.reference.engine.state import broadcast_tensors, named_state
from shardproof.impls.reference.parts.buckets import plan_buckets
from shardproof.impls.reference.parts.owned_bucket import OwnedBucket
from shardproof.impls.reference.parts.reducers import Reducer


@dataclass(frozen=True)
class Options(OfShards, WholeParameters, Compressing, Followed, Saved):
    """``bucket_bytes`` limits a bucket."""

    bucket_bytes: int = 25 * 2**20

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("bucket_bytes", self.bucket_bytes, 1)

    @property
    def reduction(self) -> Reduction:
        """Into shards, once per step."""
        return Reduction(scattered=True)


class ShardedUpdate(Handle):
    """Base of the handles: buckets, hooks, rounds, agreement on use, pieces."""

    def __init__(
        self, module: nn.Module, comm: Comm, options: Options, reducer: Reducer | None = None
    ) -> None:
        self.module, self.comm, self.reducer = module, comm, reducer or Reducer()
        # Rank 0's values come first: buckets copy what they find.
        broadcast_tensors(list(named_state(module).values()), comm)
        options.precision.cast_frozen(module)
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        names, parameters = list(trained), list(trained.values())
        order = list(reversed(range(len(names))))
        # Laid out once and for all: the optimizer's state hangs on who owns what.
        plan = plan_buckets(order, parameters, options.bucket_bytes, options.bucket_bytes)
        self.buckets = [
            OwnedBucket({names[i]: parameters[i] for i in members}, comm, options.precision)
            for members in plan
        ]
        self.queue = list(self.buckets)  # the order in which buckets are sent
        self.targets = {n: t for b in self.buckets for n, t in b.parameters.targets.items()}
        self.sending = False
        self.sent_count = 0  # buckets of the queue that were sent in this round
        self.used: set[str] = set()  # parameters that this rank used in this step
        self.held_up: set[int] = set()  # buckets that were not full when a backward had ended
        self.late: set[int] = set()  # those of all ranks, of all steps
        self.hooks = [
            trained[name].register_post_accumulate_grad_hook(partial(self.arrived, bucket, name))
            for bucket in self.buckets
            for name in bucket.layout.names
        ]

    def param_groups(self, spec: OptimizerSpec) -> list[dict[str, Any]]:
        """This rank's parts, under their parameters' names."""
        return param_groups(spec, self.targets)

    # ------------------------------------------------------------------------------------ a round

    def start_round(self) -> None:  # [r1]
        """Send full buckets from now on."""
        self.sending, self.sent_count = True, 0
        for bucket in self.buckets:
            bucket.start_round()

    def arrived(self, bucket: OwnedBucket, name: str, parameter: Tensor) -> None:  # [r2]
        """Hook: a backward has completed the gradient of ``parameter``, which moves into the
        bucket.
        """
        if bucket.sent:
            raise RuntimeError(
                f"{name!r} received a second gradient in one micro-batch, after its bucket was "
                "sent: run one forward and one backward per micro-batch; with activation "
                "checkpointing, set use_reentrant=False or use option 'recompute_every'"
            )
        assert parameter.grad is not None
        bucket.add(name, parameter.grad)
        parameter.grad = None  # no second copy: its memory serves the next gradient of backward
        self.used.add(name)
        if self.sending:
            bucket.missing.discard(name)
            self.send_full_buckets()

    def send_full_buckets(self) -> None:  # [r3]
        """Send buckets in the agreed order, up to the first that still waits for a gradient."""
        # A full bucket waits for those before it: all ranks must make the same calls in one order.
        while self.sent_count < len(self.queue) and not self.queue[self.sent_count].missing:
            self.send_next()

    def end_round(self, computed: bool) -> None:  # [r4]
        """Send the remaining buckets; ``computed``: this round had a backward."""
        for index, bucket in enumerate(self.buckets):
            if computed and bucket.missing:
                self.held_up.add(index)
        # Without a gradient of its own this rank still adds zeros: the others wait for it.
        while self.sent_count < len(self.queue):
            self.send_next()
        self.sending = False

    def send_next(self) -> None:
        """Send the next bucket."""
        bucket = self.queue[self.sent_count]
        self.sent_count += 1
        bucket.sent = True
        if bucket.layout.padded_numel:  # a bucket of empty tensors is empty on all ranks
            self.send(bucket)

    def reduce_scatter(self, bucket: OwnedBucket, shard: Tensor) -> None:
        """Start to sum ``bucket`` over the ranks; ``shard`` receives this rank's part."""
        outgoing = bucket.outgoing(self.step)
        bucket.work = self.reducer.reduce_scatter(outgoing, self.comm, shard)

    @abstractmethod
    def send(self, bucket: OwnedBucket) -> None:
        """Start to reduce and scatter the gradients of ``bucket``."""

    @abstractmethod
    def gradient(self, bucket: OwnedBucket) -> Tensor:
        """This rank's shard of the reduced gradients of ``bucket``."""

    # ------------------------------------------------------------------------------ after the last

    def publish_gradients(self) -> None:  # [r5]
        """Give the optimizer's targets their gradients, and none to parameters that no rank used.

        The ranks agree by integers: who used which parameter, which buckets were held up.
        """
        names = [name for bucket in self.buckets for name in bucket.layout.names]
        used = [int(name in self.used) for name in names]
        held_up = [int(index in self.held_up) for index in range(len(self.buckets))]
        votes = self.comm.agree([*used, *held_up], "sum")  # one call for both
        users = dict(zip(names, votes, strict=False))
        for bucket in self.buckets:
            shard = self.gradient(bucket)
            for name, part in bucket.parts.items():
                # Not zero but none, or weight decay and momentum would move unused parameters.
                self.targets[name].grad = part.of_shard(shard) if users[name] else None
        # Taken from the sum, so that all ranks have the same queue in the next step.
        self.late |= {index for index, n in enumerate(votes[len(names) :]) if n}

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.module.parameters()).device

    def gradients(self) -> dict[str, Tensor]:
        """This rank's parts of the final gradients: name -> tensor."""
        return {name: t.grad for name, t in self.targets.items() if t.grad is not None}

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        """One sum over this rank's shards."""
        # A rank whose shards are padding only has a sum as well: adding sums up is a collective.
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for gradient in self.gradients().values():
            total += power_sum(gradient, order)
        return [(total, (self.comm.axis,))]

    @torch.no_grad()
    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply this rank's parts."""
        for gradient in self.gradients().values():
            gradient.mul_(factor.to(gradient.dtype))

    def after_update(self) -> None:
        """Gather the updated shards on every rank."""
        # All in flight before the first wait.
        works = [bucket.gather(self.reducer) for bucket in self.buckets]
        for bucket, work in zip(self.buckets, works, strict=True):
            if work is not None:
                work.wait()
            bucket.parameters.copy_out()

    def after_step(self) -> None:
        """Clear gradients; move late buckets to the end of the order."""
        # Those of the module's parameters are in the buckets already.
        for target in self.targets.values():
            target.grad = None
        self.used.clear()
        self.held_up.clear()
        prompt = [b for index, b in enumerate(self.buckets) if index not in self.late]
        self.queue = prompt + [self.buckets[index] for index in sorted(self.late)]

    # ----------------------------------------------------------------------------------- the state

    def pieces(self, kind: Kind) -> list[Piece]:
        """Whole parameters and buffers, a replica on each rank, and this rank's parts of
        gradients.
        """
        if kind == "gradients":
            return [self.place(name, "", tensor) for name, tensor in self.gradients().items()]
        whole: dict[str, Tensor] = {}
        if kind == "parameters":
            whole = dict(self.module.named_parameters())
        elif kind == "buffers":
            whole = dict(self.module.named_buffers())
        return [Piece.whole(n, t.detach(), replica=self.comm.rank) for n, t in whole.items()]

    def place(self, name: str, slot: str, tensor: Tensor) -> Piece:
        """A part like that of the parameter; a scalar (Adam's step) as a whole."""
        full = f"{name}.{slot}" if slot else name
        if tensor.dim() == 0:
            return Piece.whole(full, tensor, replica=self.comm.rank)
        part = next(bucket.parts[name] for bucket in self.buckets if name in bucket.parts)
        return part.piece(tensor, full)

    @torch.no_grad()
    def loaded(self) -> None:
        """Copy the loaded values into the buckets."""
        for bucket in self.buckets:
            bucket.parameters.copy_in()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()
