"""Asynchronous SGD: parameter servers apply every gradient on arrival, and no worker waits for all.

Problem.  In data parallelism a step takes as long as its slowest rank.  A parameter server applies
each worker's gradient as it comes, and a worker goes on from what is there: no rank waits, but
gradients are of parameters that others have changed since (Recht et al., arXiv 1106.5730; bounded
staleness: Ho et al., NIPS 2013).

    what                        where
    parameters                  each on one server, which owns it; a copy of an earlier version on
                                every worker
    gradients                   a worker's, of its share of the batch, on their way to the owners
    optimizer state             each parameter's on its owner
    buffers                     every worker, its own

    worker, a step   pull       [1] receive all servers' parameters, each with its version
                     compute    [2] forward and backward of its micro-batches
                     push       [3] send each owner its gradients, who was used, the version read
    server           a turn     [4] a pull is answered with what is there now
                                [5] a push is applied at once; with max_staleness 0 it is kept until
                                    all have come, and the sum is applied
                                [6] a pull of too old a version waits (parts/turns.py)

Staleness is counted in steps: with ``max_staleness`` s a gradient of step t is of parameters that
have all gradients of steps before t - s.  With s = 0 every update is the sum of all gradients of a
step, added in the order of workers: data parallelism, with servers.

Stale gradients of several workers add up in one momentum, which asynchrony makes longer by itself
(Mitliagkas et al., arXiv 1605.09774).  The correction is a momentum, or other optimizer state, of
each worker's own: ``momentum: by_worker`` (Hakimi et al., arXiv 1907.11612, section 3).

A worker that dies takes with it what it has not pushed; the others go on, and nobody waits for it.

In what order pulls and pushes come, and who dies when, is an option, for what comes of it must be
known: servers take turns from one list, so that all of them give one snapshot to a pull, and a run
can be repeated.

Cost: a worker's step moves P down and G up, a server's N - k times that: 2 (N - k) P bytes a step,
with k servers of N ranks; in which step a server meets them follows from the order.  A server holds
what it owns and the optimizer state of it (by worker: once for each), a worker P and G.
Numbers: the history of updates (worker, step, version read, order, parameters), repeated on one
process, gives equal bits.  Buffers are promised by nobody.
Left out: clipping (no global gradient exists), loss scales, servers that die, updates by any order
of arrival that the network makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal

import torch
from torch import Tensor

from shardproof.comm import Mesh
from shardproof.contract import (
    Batch,
    Build,
    Capabilities,
    Event,
    Implementation,
    Kind,
    Observe,
    OptimizerSpec,
    Piece,
    Refused,
    StepResult,
)
from shardproof.impls.reference.engine.optimizer import (
    build_optimizer,
    param_groups,
    set_learning_rate,
    slot_pieces,
)
from shardproof.impls.reference.engine.options import at_least, parse_options
from shardproof.impls.reference.engine.state import broadcast_tensors, load_state, named_state
from shardproof.impls.reference.parts.messages import Message, pack, unpack
from shardproof.impls.reference.parts.turns import ORDERS, Death, Turn, Turns, scripted


@dataclass(frozen=True)
class Options:
    """``max_staleness``: s. ``servers``: k, the first ranks. ``order``: of pulls and pushes.
    ``dies``: a worker, and the number of its pulls and pushes before it dies. ``momentum``: one for
    all workers or one per worker.
    """

    max_staleness: int = 1
    servers: int = 1
    order: str | tuple[int, ...] = "slow"
    dies: Death | None = None
    momentum: Literal["shared", "by_worker"] = "shared"

    def __post_init__(self) -> None:
        at_least("max_staleness", self.max_staleness, 0)
        at_least("servers", self.servers, 1)
        if isinstance(self.order, str) and self.order not in ORDERS:
            names = ", ".join(ORDERS)
            raise Refused(f"option 'order' = {self.order!r}: use {names} or a list of workers")
        if self.momentum == "by_worker" and not self.max_staleness:
            raise Refused(
                "option 'momentum' = 'by_worker' needs an update per worker, but max_staleness = 0 "
                "sums the gradients of all workers; set momentum to 'shared', or max_staleness to 1"
            )
        if self.order == "in_turn" and self.max_staleness:
            raise Refused(
                f"option 'order' = 'in_turn' with max_staleness = {self.max_staleness}: no "
                "gradient is stale in this order; set max_staleness to 0 or set order to 'slow'"
            )

    def arrivals(self, workers: int) -> Iterator[int]:
        """The workers in order of arrival."""
        if self.dies and (workers < 2 or self.dies.worker >= workers):
            raise Refused(
                f"option 'dies.worker' = {self.dies.worker} with {workers} workers: this "
                "worker must exist, and at least 1 other worker must remain; use at least 2 "
                f"workers, and set dies.worker to a number from 0 to {max(workers, 2) - 1}"
            )
        if isinstance(self.order, str):
            return ORDERS[self.order](workers, self.max_staleness)
        return scripted(self.order, workers)


def owned(parameters: Mapping[str, Tensor], servers: int) -> list[list[str]]:
    """The parameters of each server: the largest first, each to the server with the fewest
    elements.

    :raises Refused: a server would have none.
    """
    if servers > len(parameters):
        raise Refused(
            f"option 'servers' = {servers}: each server must hold at least 1 trainable parameter, "
            f"but the model has only {len(parameters)}; valid: up to {len(parameters)}"
        )
    shares: list[list[str]] = [[] for _ in range(servers)]
    sizes = [0] * servers
    for name in sorted(parameters, key=lambda name: -parameters[name].numel()):
        # By number of parameters where sizes are equal: none of them stays without.
        least = min(range(servers), key=lambda server: (sizes[server], len(shares[server])))
        shares[least].append(name)
        sizes[least] += parameters[name].numel()
    return shares


class Server:
    """The parameters that one server owns, and its history."""

    turns_type: type[Turns] = Turns

    def __init__(
        self, owns: Mapping[str, Tensor], spec: OptimizerSpec, workers: int, options: Options
    ) -> None:
        self.owns, self.spec, self.workers, self.options = owns, spec, workers, options
        apart = range(workers) if options.momentum == "by_worker" else (0,)
        self.optimizers = [build_optimizer(spec, param_groups(spec, owns)) for _ in apart]
        arrivals, bound = options.arrivals(workers), options.max_staleness
        self.turns = self.turns_type(arrivals, workers, bound, options.dies)
        self.version = 0
        self.kept: dict[int, Message] = {}  # gradients that wait for others, by worker
        self.log: list[Event] = []

    def answer(self) -> Tensor:  # [4]
        """The answer to a pull."""
        return pack(self.owns, {}, self.version)

    def take(self, turn: Turn, message: Message) -> None:  # [5]
        """Receive a push."""
        self.kept[turn.worker] = message
        event = Event(self.version, turn.worker, turn.step, message.version, tuple(self.owns))
        self.log.append(event)
        self.settle(turn)

    def settle(self, turn: Turn) -> None:
        """Update, unless the kept gradients wait for others."""
        living = {worker for worker in range(self.workers) if self.turns.lives(worker)}
        if self.kept and (self.options.max_staleness or living <= self.kept.keys()):
            self.update(turn.step)

    def update(self, step: int) -> None:
        """Apply the kept gradients in the order of workers."""
        gradients = [self.kept[worker].gradients for worker in sorted(self.kept)]
        optimizer = self.optimizers[max(self.kept) if len(self.optimizers) > 1 else 0]
        for name, parameter in self.owns.items():
            # Not zero but none, or momentum and decay would move unused parameters.
            parts = [part[name] for part in gradients if name in part]
            parameter.grad = reduce(torch.add, parts) if parts else None
        set_learning_rate(optimizer, self.spec, step)
        optimizer.step()
        optimizer.zero_grad()  # or they would keep whole messages
        self.kept.clear()
        self.version += 1


def slot(owner: str, name: str, slot: str, tensor: Tensor) -> Piece:
    """The slot of an optimizer's tensor; that of ``owner`` if each worker has its own."""
    return Piece.whole(f"{name}.{owner}{slot}", tensor)


class ReferenceAsyncSGD(Implementation):
    """The strategy as a system under test."""

    strategy = "parameter_server"
    depth = "layout"
    server_type: type[Server] = Server

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """Stale by design, so the oracle replays its history."""
        chosen = parse_options(Options, options)
        return Capabilities(
            max_staleness=chosen.max_staleness,
            optimizer_state=chosen.momentum,
            exactness="stale",
            oracle="replay",
            buffers="none",
            points=("after_update",),
            features=frozenset({"initial_broadcast", "roles", "events"}),
            declines={
                "clipping": "no global gradient exists",
                "overflow_on_one_rank": "workers update independently",
            },
        )

    @classmethod
    def role(cls, rank: int, world: int, options: Mapping[str, Any]) -> str:
        """The role of a rank: the first ranks are servers."""
        servers = parse_options(Options, options).servers
        if servers >= world:
            valid = f"valid: up to {world - 1}" if world > 1 else "use 2 ranks or more"
            raise Refused(
                f"option 'servers' = {servers}: of {world} ranks, none remains as a worker; {valid}"
            )
        return "server" if rank < servers else "worker"

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        """Start all ranks from rank 0's values; servers take the parameters that they own."""
        if optimizer.scaler is not None:
            raise Refused("optimizer.scaler: async workers cannot skip steps; leave the scaler out")
        self.build, self.comm = build, mesh.comm("replicate")
        self.options = parse_options(Options, options)
        self.module = build(mesh.device)
        if state is not None:
            load_state(self.module, state)
        broadcast_tensors(list(named_state(self.module).values()), self.comm)
        self.named = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.owners = owned(self.named, self.options.servers)
        self.workers = self.comm.size - self.options.servers
        self.server: Server | None = None
        self.clock = -1  # the step under way
        if self.comm.rank < self.options.servers:
            own = self.owners[self.comm.rank]
            rest = {} if self.comm.rank else dict(self.module.named_parameters())
            self.frozen = {name: p for name, p in rest.items() if name not in self.named}
            self.named = {name: self.named[name] for name in own}
            self.server = self.server_type(self.named, optimizer, self.workers, self.options)
            del self.module  # and with it what others own

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """Run a worker's pull, gradient and push, or serve the turns before the next step's."""
        loss = None
        if self.server is None:
            if self.has_turn(2 * batch.step):
                versions = self.pull()
                loss = self.compute(batch)
            if self.has_turn(2 * batch.step + 1):
                self.push(versions)
        else:
            self.clock = batch.step
            while turn := self.server.turns.next(self.clock):
                self.serve(self.server, turn)
        observe("after_update")
        return StepResult(loss=loss)

    def has_turn(self, turn: int) -> bool:
        """Whether this worker lives long enough for its pull or push number ``turn``."""
        dies = self.options.dies
        return (
            dies is None
            or self.comm.rank - self.options.servers != dies.worker
            or turn < dies.turns
        )

    def drain(self) -> None:
        """Serve the workers that are behind."""
        if self.server is not None:
            while turn := self.server.turns.next(self.clock, is_over=True):
                self.serve(self.server, turn)

    @torch.no_grad()
    def serve(self, server: Server, turn: Turn) -> None:
        """Serve one turn."""
        peer = self.options.servers + turn.worker
        flat = server.answer()
        if not turn.is_push:
            self.comm.send(flat, peer)
            server.settle(turn)  # it may have been the last turn of who was waited for
            return
        self.comm.recv(flat, peer)
        gradients, used, version = unpack(flat, server.owns)
        owned_here = zip(gradients.items(), used, strict=True)
        server.take(turn, Message({n: g for (n, g), is_used in owned_here if is_used}, version))

    @torch.no_grad()
    def pull(self) -> list[int]:  # [1]
        """Pull the parameters of all servers, with the version of each."""
        versions = []
        for server, names in enumerate(self.owners):
            like = {name: self.named[name] for name in names}
            flat = pack(like, {}, 0)
            self.comm.recv(flat, server)
            values, _, version = unpack(flat, like)
            for name, value in values.items():
                self.named[name].copy_(value)
            versions.append(version)
        return versions

    def compute(self, batch: Batch) -> Tensor:  # [2]
        """The gradients of this worker's share, and its loss."""
        self.module.zero_grad()
        total = torch.zeros((), dtype=next(self.module.parameters()).dtype)
        for micro in batch.micro_batches:
            loss = self.build.loss(self.module(micro.inputs), micro)
            loss.backward()
            total = total + loss.detach()
        return total

    def push(self, versions: list[int]) -> None:  # [3]
        """Send every server the gradients of the parameters that it owns."""
        for server, (names, version) in enumerate(zip(self.owners, versions, strict=True)):
            like = {name: torch.zeros_like(self.named[name]) for name in names}
            used = {n: g for n in names if (g := self.named[n].grad) is not None}
            self.comm.send(pack(like, used, version), server)

    def events(self) -> list[Event]:
        """The history of this server."""
        return list(self.server.log) if self.server else []

    def local_state(self, kind: Kind) -> list[Piece]:
        """The parameters that a server owns; the first one also shows state that no worker trains.
        Copies are not shown.
        """
        if self.server is None or kind in ("gradients", "buffers"):
            return []
        if kind == "optimizer":
            optimizers = self.server.optimizers
            whose = [f"worker{w}_" for w in range(len(optimizers))] if optimizers[1:] else [""]
            return [
                piece
                for own, optimizer in zip(whose, optimizers, strict=True)
                for piece in slot_pieces(optimizer, partial(slot, own))
            ]
        held = {**self.frozen, **self.server.owns}
        return [Piece.whole(name, tensor.detach()) for name, tensor in held.items()]


IMPLEMENTATION = ReferenceAsyncSGD
