"""Whole parameters of which each rank updates a shard: what ZeRO-1 and ZeRO-2 have in common.

Trained parameters lie in flat buckets, in reverse order of registration; that layout never changes,
for the optimizer's state hangs on it.  Each rank owns an equal shard of each bucket: it gets that
shard's gradient, updates it, and gives it to all.

One *round* reduces every bucket once, in one order on all ranks: a full bucket waits for those
before it.  A bucket that was not full on some rank when its backward had ended held up those behind
it: from the next step on it is sent last.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Comm
from shardproof.contract import Kind, OptimizerSpec, Piece, Refused
from shardproof.impls.reference.engine.handle import Handle
from shardproof.impls.reference.engine.norm import NormPart, power_sum
from shardproof.impls.reference.engine.optimizer import param_groups
from shardproof.impls.reference.engine.options import Training, at_least
from shardproof.impls.reference.engine.precision import Precision
from shardproof.impls.reference.engine.state import broadcast_tensors, named_state
from shardproof.impls.reference.parts.buckets import plan_buckets
from shardproof.impls.reference.parts.flat import FlatLayout, Part
from shardproof.impls.reference.parts.reducers import Bucket, Reducer, Work


@dataclass(frozen=True)
class Options(Training):
    """``bucket_bytes`` limits a bucket."""

    bucket_bytes: int = 25 * 2**20

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("bucket_bytes", self.bucket_bytes, 1)
        if self.offload == "parameters":
            raise Refused(
                "option 'offload' = 'parameters': ZeRO-1 and ZeRO-2 compute with whole parameters "
                "on every rank; valid here: none, optimizer"
            )


class OwnedBucket:
    """Parameters ``named`` (of one dtype) as views of one flat tensor, and this rank's shard of it.

    ``values`` has ``layout.padded`` elements in the dtype that is computed with; ``targets`` are
    this rank's parts of it, one-dimensional, by name: what the optimizer updates.  A parameter that
    is not contiguous is no view but a copy: with other strides a product rounds otherwise.
    """

    @torch.no_grad()
    def __init__(self, named: Mapping[str, Tensor], comm: Comm, precision: Precision) -> None:
        self.comm = comm
        self.layout = FlatLayout(named, comm.size)
        self.dtype = precision.reduction(self.layout.dtype)
        self.device = next(iter(named.values())).device
        self.values = self.layout.empty(self.device, precision.compute(self.layout.dtype))
        self.layout.pack(self.values, named)
        #: Parameters with strides of their own, which keep them, beside their place in the bucket.
        self.strided: list[tuple[Tensor, Tensor]] = []
        for name, view in self.layout.views(self.values).items():
            if named[name].is_contiguous():
                named[name].data = view
            else:
                named[name].data = named[name].data.to(view.dtype)
                self.strided.append((named[name].data, view))
        self.parts: dict[str, Part] = {part.name: part for part in self.layout.parts(comm.rank)}
        own = self.layout.shard(self.values, comm.rank)
        self.targets = {name: part.of_shard(own) for name, part in self.parts.items()}
        for target in self.targets.values():
            if target.dtype != self.dtype:
                target.grad_dtype = self.dtype
        self.full: Tensor | None = None
        self.views: dict[str, Tensor] = {}
        self.filled: set[str] = set()
        self.start_round()

    def start_round(self) -> None:
        """Nothing has arrived in this backward, nothing is in flight."""
        self.missing = set(self.layout.names)
        self.sent = False
        self.work: Work | None = None  # while it is in flight: it holds on to its memory

    def flat(self) -> Tensor:
        """This rank's gradients (uninitialized when it is made)."""
        if self.full is None:
            self.full = self.layout.empty(self.device, self.dtype)
            self.views = self.layout.views(self.full)
        return self.full

    def add(self, name: str, gradient: Tensor) -> None:
        """Add ``gradient`` to what the flat gradients have of parameter ``name``."""
        self.flat()
        if name in self.filled:
            self.views[name].add_(gradient)
        else:
            self.views[name].copy_(gradient)
        self.filled.add(name)

    def complete(self) -> Tensor:
        """The flat gradients, zero where this rank has none."""
        flat = self.flat()
        for name, view in self.views.items():
            if name not in self.filled:
                view.zero_()
        return flat

    def release(self) -> None:
        """Let the flat gradients go."""
        self.full, self.views = None, {}
        self.filled.clear()

    def take_values(self) -> None:
        """Into the bucket what only lies beside it."""
        for parameter, view in self.strided:
            view.copy_(parameter)

    def publish(self) -> None:
        """Out of the bucket what also lies beside it."""
        for parameter, view in self.strided:
            parameter.copy_(view)

    def gather(self) -> Work | None:
        """Start giving this rank's shard of the values to all (in place)."""
        if not self.layout.padded:
            return None
        own = self.layout.shard(self.values, self.comm.rank)
        work: Work = self.comm.all_gather(self.values, own, async_op=True)
        return work


class ShardedUpdate(Handle):
    """Base of the handles: buckets, hooks, rounds, agreement on use, pieces."""

    def __init__(
        self, module: nn.Module, comm: Comm, options: Options, reducer: Reducer | None = None
    ) -> None:
        self.module, self.comm, self.reducer = module, comm, reducer or Reducer()
        precision, bucket_bytes = options.precision, options.bucket_bytes
        broadcast_tensors(list(named_state(module).values()), comm)
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        for parameter in module.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(precision.compute(parameter.dtype))
        names, parameters = list(trained), list(trained.values())
        order = list(reversed(range(len(names))))
        plan = plan_buckets(order, parameters, bucket_bytes, bucket_bytes)
        self.buckets = [
            OwnedBucket({names[i]: parameters[i] for i in members}, comm, precision)
            for members in plan
        ]
        self.queue = list(self.buckets)  # the order in which buckets are sent
        self.targets = {n: t for bucket in self.buckets for n, t in bucket.targets.items()}
        self.sending = False
        self.launched = 0
        self.used: set[str] = set()
        self.held_up: set[int] = set()  # buckets that were not full when a backward had ended
        self.late: set[int] = set()
        self.hooks = [
            trained[name].register_post_accumulate_grad_hook(partial(self.arrived, bucket, name))
            for bucket in self.buckets
            for name in bucket.layout.names
        ]

    def param_groups(self, spec: OptimizerSpec) -> list[dict[str, Any]]:
        """This rank's parts, under their parameters' names."""
        return param_groups(spec, self.targets)

    # ------------------------------------------------------------------------------------ a round

    def start_round(self) -> None:
        """From now on full buckets are sent."""
        self.sending, self.launched = True, 0
        for bucket in self.buckets:
            bucket.start_round()

    def arrived(self, bucket: OwnedBucket, name: str, parameter: Tensor) -> None:
        """Hook: a backward has given ``parameter`` its gradient, which moves into the bucket."""
        if bucket.sent:
            raise RuntimeError(
                f"{name!r} received a gradient after its bucket had been sent: a micro-batch is "
                "one forward and one backward; checkpoint with use_reentrant=False or option "
                "'recompute_every'"
            )
        assert parameter.grad is not None
        bucket.add(name, parameter.grad)
        parameter.grad = None
        self.used.add(name)
        if self.sending:
            bucket.missing.discard(name)
            self.send_full_buckets()

    def send_full_buckets(self) -> None:
        """Send in the agreed order, up to the first bucket that still waits for a gradient."""
        while self.launched < len(self.queue) and not self.queue[self.launched].missing:
            self.launch()

    def end_round(self, computed: bool) -> None:
        """Send what backward left; ``computed``: there was a backward in this round."""
        for index, bucket in enumerate(self.buckets):
            if computed and bucket.missing:
                self.held_up.add(index)
        while self.launched < len(self.queue):
            self.launch()
        self.sending = False

    def launch(self) -> None:
        """Send the next bucket."""
        bucket = self.queue[self.launched]
        self.launched += 1
        bucket.sent = True
        if bucket.layout.padded:
            self.send(bucket)

    @abstractmethod
    def send(self, bucket: OwnedBucket) -> None:
        """Start to reduce and scatter the gradients of ``bucket``."""

    def reduce_scatter(self, bucket: OwnedBucket, shard: Tensor) -> None:
        """Start to sum ``bucket`` over the ranks; ``shard`` receives this rank's part."""
        outgoing = Bucket(bucket.complete(), bucket.layout.whole, self.step)
        bucket.work = self.reducer.reduce_scatter(outgoing, self.comm, shard)

    @abstractmethod
    def gradient(self, bucket: OwnedBucket) -> Tensor:
        """This rank's shard of the reduced gradients of ``bucket``."""

    # ------------------------------------------------------------------------------ after the last

    def hand_over(self) -> None:
        """Give the optimizer's targets their gradients, none to what no rank used.

        The ranks agree by integers: who used which parameter, which buckets were held up.
        """
        names = [name for bucket in self.buckets for name in bucket.layout.names]
        votes = [int(name in self.used) for name in names]
        votes += [int(index in self.held_up) for index in range(len(self.buckets))]
        ballot = torch.tensor(votes, dtype=torch.int32, device=self.device)
        self.comm.all_reduce(ballot)
        used = dict(zip(names, ballot.tolist(), strict=False))
        held_up = ballot[len(names) :].tolist()
        for bucket in self.buckets:
            shard = self.gradient(bucket)
            for name, part in bucket.parts.items():
                bucket.targets[name].grad = part.of_shard(shard) if used[name] else None
        self.late |= {index for index, count in enumerate(held_up) if count}

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return next(self.module.parameters()).device

    def gradients(self) -> dict[str, Tensor]:
        """This rank's parts of the final gradients, by name."""
        return {name: t.grad for name, t in self.targets.items() if t.grad is not None}

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        """One sum over this rank's shards; every rank has one, were it of nothing."""
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
        """All get everybody's updated shards."""
        works = [bucket.gather() for bucket in self.buckets]
        for bucket, work in zip(self.buckets, works, strict=True):
            if work is not None:
                work.wait()
            bucket.publish()

    def after_step(self) -> None:
        """Clear gradients; late buckets go to the end of the queue."""
        super().after_step()
        for target in self.targets.values():
            target.grad = None
        self.used.clear()
        self.held_up.clear()
        prompt = [b for index, b in enumerate(self.buckets) if index not in self.late]
        self.queue = prompt + [self.buckets[index] for index in sorted(self.late)]

    # ----------------------------------------------------------------------------------- the state

    def pieces(self, kind: Kind) -> list[Piece]:
        """Parameters and buffers whole, a replica on each rank; of gradients this rank's parts."""
        if kind == "gradients":
            return [self.place(name, "", tensor) for name, tensor in self.gradients().items()]
        found: dict[str, Tensor] = {}
        if kind == "parameters":
            found = dict(self.module.named_parameters())
        elif kind == "buffers":
            found = dict(self.module.named_buffers())
        return [Piece.whole(n, t.detach(), replica=self.comm.rank) for n, t in found.items()]

    def place(self, name: str, slot: str, tensor: Tensor) -> Piece:
        """A part like that of the parameter; a single number (Adam's step) whole."""
        full = f"{name}.{slot}" if slot else name
        if tensor.dim() == 0:
            return Piece.whole(full, tensor, replica=self.comm.rank)
        part = next(bucket.parts[name] for bucket in self.buckets if name in bucket.parts)
        return part.piece(tensor, full)

    @torch.no_grad()
    def loaded(self) -> None:
        """Buckets take what was loaded beside them."""
        for bucket in self.buckets:
            bucket.take_values()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()
