"""Faults of parameter servers: lost updates, stale and torn reads, wrong owners."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardproof.contract import Batch, Build, Kind, OptimizerSpec, Piece
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import gpt
from shardproof.impls.reference.async_sgd import Options, ReferenceAsyncSGD, Server
from shardproof.impls.reference.parts.messages import Message, pack
from shardproof.impls.reference.parts.turns import Death, Turn, Turns, in_turn

mutant = declare.family(
    ReferenceAsyncSGD,
    options={"max_staleness": 1, "servers": 2},
    mesh={"replicate": 4},
    steps=4,
    killed_by=("equivalence",),
    says="drained parameters",
)


@mutant("server_loses_an_update")
class LosesAnUpdate(Server):
    """Two concurrent updates collide and one overwrites the other, though both are counted."""

    def take(self, turn: Turn, message: Message) -> None:
        before = {name: tensor.detach().clone() for name, tensor in self.owns.items()}
        super().take(turn, message)
        if (turn.worker, turn.step) == (0, 1):
            for name, tensor in self.owns.items():
                tensor.copy_(before[name])


@mutant(
    "server_drops_what_was_overtaken",
    mesh={"replicate": 3},
    options={"max_staleness": 2, "order": [0, 1, 1, 1, 1, 1, 1, 0]},
)
class DropsWhatWasOvertaken(Server):
    """A gradient that is three or more versions old is counted but not applied."""

    def take(self, turn: Turn, message: Message) -> None:
        overtaken = self.version - message.version > 2
        super().take(turn, replace(message, gradients={}) if overtaken else message)


@mutant("server_applies_twice")
class AppliesTwice(Server):
    """A push that is resent because its answer was late is applied twice."""

    def take(self, turn: Turn, message: Message) -> None:
        super().take(turn, message)
        if (turn.worker, turn.step) == (1, 1):
            self.kept[turn.worker] = message
            self.update(turn.step)
            self.version -= 1


@mutant(
    "server_bound_off_by_one",
    says="2 steps old, but max_staleness allows 1",
    options={"order": [0, 0] * 4},  # the bound is the default
)
class BoundOffByOne(Turns):
    """A pull may be one step staler than the bound allows."""

    def __init__(
        self, arrivals: Iterator[int], workers: int, bound: int, dies: Death | None = None
    ) -> None:
        super().__init__(arrivals, workers, bound + 1, dies)


@mutant(
    "server_ignores_the_bound",
    says="3 steps old, but max_staleness allows 1",
    options={"order": [0, 0] * 4},  # the bound is the default
    zoo=("G14",),
)
class IgnoresTheBound(Turns):
    """No pull ever waits."""

    def may(self, worker: int) -> bool:
        return True


@mutant("server_answers_from_a_cache", says="3 steps old, but max_staleness allows 1", zoo=("G14",))
class AnswersFromACache(Server):
    """Pulls are answered from a copy that is refreshed after 64 updates.

    The version that it tells is right: with a bound that is large enough every number is the one of
    a replay, and only the way to a target shows what staleness costs.
    """

    cached: Tensor | None = None
    since = 0

    def answer(self) -> Tensor:
        if self.cached is None or self.version - self.since >= 64:
            self.cached, self.since = super().answer(), self.version
        return self.cached.clone()


@mutant("server_waits_for_all", says="no gradient was ever stale", zoo=("G14",))
class WaitsForAll(Turns):
    """The bound is always 0, so every pull waits for all workers."""

    def __init__(
        self, arrivals: Iterator[int], workers: int, bound: int, dies: Death | None = None
    ) -> None:
        super().__init__(in_turn(workers, 0), workers, 0, dies)


@mutant(
    "server_frees_all_by_a_death",
    says="3 steps old, but max_staleness allows 1",
    options={"max_staleness": 1, "order": [0, 0] * 4, "dies": {"worker": 1, "turns": 0}},
)
class FreesAllByADeath(Turns):
    """The bound follows the newest worker, so no pull waits after a worker has died."""

    def may(self, worker: int) -> bool:
        return super().may(worker) or not all(map(self.lives, range(len(self.taken))))


@mutant(
    "server_drops_what_the_dead_left",
    options={"max_staleness": 0, "order": "in_turn", "dies": {"worker": 1, "turns": 2}},
)
class DropsWhatTheDeadLeft(Server):
    """A worker dies after its push, and its gradient is discarded."""

    def update(self, step: int) -> None:
        living = {worker: m for worker, m in self.kept.items() if self.turns.lives(worker)}
        self.kept = living
        super().update(step)


@mutant(
    "server_waits_for_the_dead",
    says="2 steps old, but max_staleness allows 0",
    options={"max_staleness": 0, "order": "in_turn", "dies": {"worker": 1, "turns": 2}},
)
class WaitsForTheDead(Server):
    """The sum of a step waits for every worker, including a dead one, so no further update is
    made.
    """

    def settle(self, turn: Turn) -> None:
        if len(self.kept) == self.workers:
            self.update(turn.step)


@mutant(
    "server_momentum_of_the_last_worker",
    options={"max_staleness": 2, "momentum": "by_worker"},
)
class MomentumOfTheLastWorker(Server):
    """A worker's gradient goes into the momentum of the previous worker."""

    def update(self, step: int) -> None:
        self.optimizers = self.optimizers[1:] + self.optimizers[:1]
        super().update(step)


@mutant(
    "server_one_momentum_for_all",
    options={"max_staleness": 2, "momentum": "by_worker"},
)
class OneMomentumForAll(Server):
    """The option has no effect: all workers share one momentum."""

    def __init__(
        self, owns: Mapping[str, Tensor], spec: OptimizerSpec, workers: int, options: Options
    ) -> None:
        super().__init__(owns, spec, workers, options)
        self.optimizers = self.optimizers[:1]


@mutant("server_torn_read", zoo=("G13",))
class TornRead(Server):
    """An answer is copied during an update, so its first parameter is one version older than
    reported.
    """

    before: Tensor | None = None

    def update(self, step: int) -> None:
        self.before = next(iter(self.owns.values())).detach().clone()
        super().update(step)

    def answer(self) -> Tensor:
        first = next(iter(self.owns))
        torn = {} if self.before is None else {first: self.before}
        return pack({**self.owns, **torn}, {}, self.version)


@mutant(
    "server_tells_its_own_version",
    options={"max_staleness": 1, "servers": 2, "order": [0, 0, 0, 1, 0, 1]},
)
class TellsItsOwnVersion(Server):
    """The history records the version that was updated instead of the version of the gradient."""

    def take(self, turn: Turn, message: Message) -> None:
        super().take(turn, replace(message, version=self.version))


@mutant("server_rate_of_its_own_clock", optimizer=OptimizerSpec(warmup_steps=20))
class RateOfItsOwnClock(Server):
    """The learning rate follows the number of updates instead of the step of the gradient."""

    def update(self, step: int) -> None:
        super().update(self.version)


@mutant(
    "server_updates_what_nobody_used",
    workload=gpt("conditional_by_rank"),
)
class UpdatesWhatNobodyUsed(Server):
    """A parameter that a worker did not use is updated with zeros, so its momentum moves it."""

    def take(self, turn: Turn, message: Message) -> None:
        zeros = {name: torch.zeros_like(tensor) for name, tensor in self.owns.items()}
        super().take(turn, replace(message, gradients={**zeros, **message.gradients}))


@mutant("server_owner_of_anothers", says="owned more than once")
class OwnerOfAnothers(ReferenceAsyncSGD):
    """The second server also claims a parameter of the first one."""

    def local_state(self, kind: Kind) -> list[Piece]:
        held = super().local_state(kind)
        if kind == "parameters" and self.comm.rank == 1:
            name = self.owners[0][0]
            theirs = self.build("cpu").get_parameter(name)
            held.append(Piece.whole(name, theirs.detach()))
        return held


@mutant("server_keeps_what_others_own", killed_by=("memory",), says="parameters: ")
class KeepsWhatOthersOwn(ReferenceAsyncSGD):
    """A server keeps the whole model instead of its own parameters."""

    def setup(self, build: Build, *args: Any) -> None:
        def kept(device: str) -> nn.Module:
            self.whole = build(device)
            return self.whole

        super().setup(cast("Build", kept), *args)
        self.build = build


@mutant("server_keeps_gradients", killed_by=("memory",), says="activations and temporaries: ")
class KeepsGradients(Server):
    """A server keeps the sum of gradients between updates."""

    def update(self, step: int) -> None:
        super().update(step)
        for parameter in self.owns.values():
            parameter.grad = torch.zeros_like(parameter)


@mutant(
    "server_answers_twice",
    killed_by=("traffic",),
    says="calls over all ranks, parameter_server promises",
)
class AnswersTwice(ReferenceAsyncSGD):
    """A pull is sent again before its answer arrives, so every answer is sent twice."""

    def serve(self, server: Server, turn: Turn) -> None:
        if not turn.is_push:
            self.comm.send(server.answer(), self.options.servers + turn.worker)
        super().serve(server, turn)

    def pull(self) -> list[int]:
        for rank, names in enumerate(self.owners):
            like = {name: self.named[name] for name in names}
            self.comm.recv(pack(like, {}, 0), rank)
        return super().pull()


@mutant("worker_adds_up_gradients")
class AddsUpGradients(ReferenceAsyncSGD):
    """A worker does not clear its gradients, so the last step's are pushed again."""

    def compute(self, batch: Batch) -> Tensor:
        kept: Mapping[str, Tensor] = {
            name: p.grad.clone() for name, p in self.named.items() if p.grad is not None
        }
        total = super().compute(batch)
        for name, gradient in kept.items():
            if (grad := self.named[name].grad) is not None:
                grad.add_(gradient)
        return total


@mutant("worker_reads_late", says="drained parameters")
class ReadsLate(ReferenceAsyncSGD):
    """A worker reports the pulled version but computes with the previous pull, which is staler than
    reported.
    """

    def pull(self) -> list[int]:
        before = {name: p.detach().clone() for name, p in self.named.items()}
        versions = super().pull()
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(before[name])
        return versions
