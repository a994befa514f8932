"""One training to a target on its own ranks: the losses, and the bytes sent.

After every ``every`` steps the ranks evaluate one fixed batch, which is shared out over those that
hold the whole model, and vote (``impls/reference/parts/consensus.py``): all of them stop at one
step.  A rank that holds no model that counts, as a worker of a parameter server, votes without
data.

Ranks that are processes with cores of their own tell the seconds of their steps, as far as these
come to an end (``drain``); what they compute to look, the votes and the set-up are left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardproof import registry, workloads
from shardproof.backends import BACKENDS
from shardproof.bench import on_rank
from shardproof.bench.leader_tasks import LaunchFailed, on_ranks
from shardproof.case import WorkloadSpec, data_shares
from shardproof.comm import Mesh
from shardproof.contract import Batch, Implementation, OptimizerSpec, Options, StopRule
from shardproof.files import Exact, Stored
from shardproof.impls.reference.parts.consensus import Consensus
from shardproof.ledgers import program_order, traffic
from shardproof.workloads import Workload

#: What is trained in; the oracle's fp64 would only cost time.
DTYPE = "float32"
#: Phases of a call that is made in a step.
IN_STEP = ("forward", "backward", "update")


@dataclass(frozen=True)
class Run:
    """A system that trains ``workload`` on ``world`` ranks until the loss of the first
    ``judged_on`` samples reaches ``target``, or for ``steps`` steps; ranks evaluate every ``every``
    steps. ``deadline``: CPU seconds of a rank.
    """

    system: str
    options: Options
    workload: WorkloadSpec
    optimizer: OptimizerSpec
    world: int
    target: float
    steps: int
    every: int
    judged_on: int
    deadline: float = 600.0
    backend: str = "in_memory"

    @property
    def budget(self) -> int:
        """The most steps: up to the last evaluation."""
        return self.steps // self.every * self.every

    @property
    def timed(self) -> bool:
        """Whether its ranks may report seconds: threads of one process share its cores."""
        return not BACKENDS[self.backend].threads


@dataclass(frozen=True)
class Trained(Stored):
    """The result of a run.

    ``losses``: after every ``every`` steps.  ``reached``: steps to the target (``None``: it was not
    reached).  ``sent``: bytes that all ranks sent in steps.  ``why``: what ended the training.
    ``problem``: the ranks broke, with the reason.  ``seconds``: of all steps, between two looks the
    slowest rank's (``None``: ranks shared cores).
    """

    losses: list[float] = field(default_factory=list)
    reached: int | None = None
    steps: int = 0
    sent: int = 0
    why: str = ""
    problem: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class RankEnd(Stored):
    """The result of one rank; all except ``sent`` and ``seconds`` is equal on all ranks.

    ``seconds``: of the steps before each look; none where ranks share cores.
    """

    losses: list[float]
    reached: int | None
    steps: int
    sent: Exact
    why: str
    seconds: list[float] = field(default_factory=list)


def train(task: tuple[Run, Path]) -> dict[str, Any]:
    """Task of a leader: a :class:`Trained`, as plain data."""
    run, workdir = task
    try:
        ends = on_ranks(run, workdir, RankEnd, partial(_of_rank, run), ledgers=True)
    except LaunchFailed as failed:
        return Trained(problem=failed.reason).to_dict()
    return together(ends).to_dict()


def _of_rank(run: Run, rank: int) -> RankEnd:
    own_cores = run.timed and on_rank.pin(rank, run.world, threads=False)
    return RankTraining(run, rank, timed=bool(own_cores)).train()


def together(ends: Sequence[RankEnd]) -> Trained:
    """The result of a run from the ``ends`` of its ranks: equal except for bytes and time."""
    first, sent = ends[0], sum((end.sent for end in ends), Fraction(0))
    # As text, for NaN equals nothing.
    told = {str(replace(end, sent=first.sent, seconds=[])) for end in ends}
    assert len(told) == 1, f"ranks parted: {told}"
    seconds = None
    if all(end.seconds for end in ends):  # ranks wait for one another at each look
        seconds = sum(max(looks) for looks in zip(*(end.seconds for end in ends), strict=True))
    return Trained(
        first.losses, first.reached, first.steps, round(sent), first.why, seconds=seconds
    )


class RankTraining:
    """One rank of a run; it reports seconds if ``timed``."""

    def __init__(self, run: Run, rank: int, timed: bool = False) -> None:
        self.run, self.rank, self.timed = run, rank, timed
        cls = registry.load(run.system)
        axis = cls.capabilities(run.options).axes[0]
        self.mesh = Mesh({axis: run.world})
        self.comm = self.mesh.comm(axis)
        ranks = range(run.world)
        workers = [r for r in ranks if cls.role(r, run.world, run.options) == "worker"]
        shares = data_shares({axis: run.world}, ranks, workers)
        self.share, self.shares = shares.get(rank), len(workers)
        self.workload = workloads.make(run.workload, DTYPE)
        self.system = self._set_up(cls)
        self.judging = Judging(run)
        self.log, self.ledger = program_order.current(), traffic.current()
        self.sent = Fraction(0)

    def _set_up(self, cls: type[Implementation]) -> Implementation:
        run, system = self.run, cls()
        everywhere = cls.capabilities(run.options).initial_state == "everywhere"
        state = self.workload.state() if everywhere or self.rank == 0 else None
        build = self.workload.build_for(self.rank, self.share or 0)
        system.setup(build, state, run.optimizer, self.mesh, run.options)
        return system

    def train(self) -> RankEnd:
        """Train, evaluate and vote until the vote ends the run."""
        run, losses, seconds = self.run, list[float](), list[float]()
        rule = StopRule(target=run.target, budget=run.budget // run.every, not_finite="stop")
        votes = Consensus(rule, self.comm)
        began = time.perf_counter()
        for step in range(run.budget):
            self._step(step)
            if (step + 1) % run.every:
                continue
            self.system.drain()
            seconds.append(time.perf_counter() - began)
            ruling = votes.vote(step + 1, *self._measured())
            losses.append(ruling.metric)
            if ruling.ends:
                reached = step + 1 if ruling.metric <= run.target else None
                told = seconds if self.timed else []
                return RankEnd(losses, reached, step + 1, self.sent, ruling.why, told)
            began = time.perf_counter()
        raise AssertionError("the budget ends training")

    def _step(self, step: int) -> None:
        batch = Batch(step, ())
        if self.share is not None:
            batch = self.workload.batch(step, self.shares)[self.share]
        with self.log.step(step) if self.log else nullcontext():
            self.system.step(batch, lambda point: None)
        if self.ledger is not None:
            made = [call for call in self.ledger.calls if call.floating and call.phase in IN_STEP]
            self.sent += sum((call.logical_bytes for call in made), Fraction(0))
            self.ledger.calls.clear()

    def _measured(self) -> tuple[float, float]:
        """The loss of this rank's part of the fixed batch, and the weight of that part."""
        pieces = {piece.name: piece for piece in self.system.local_state("parameters")}
        names = self.workload.parameter_names
        holds = all(n in pieces and pieces[n].tensor.shape == pieces[n].global_shape for n in names)
        holders = [rank for rank, one in enumerate(self.comm.all_gather_object(holds)) if one]
        if not holds:
            return math.nan, 0.0
        parameters = {name: pieces[name].tensor for name in names}
        return self.judging.loss(parameters, holders.index(self.rank), len(holders))


class Judging:
    """The fixed batch, and a module to compute its loss."""

    def __init__(self, run: Run) -> None:
        spec = replace(run.workload, global_batch=run.judged_on, micro_batches=1)
        self.workload: Workload = workloads.make(spec, DTYPE)
        self.build = self.workload.build_for(0)
        self.module: nn.Module = self.build("cpu").eval()

    @torch.no_grad()
    def loss(
        self, parameters: Mapping[str, torch.Tensor], share: int, shares: int
    ) -> tuple[float, float]:
        """The mean loss of a share of the batch (NaN if empty), and the weight of the share."""
        for name, parameter in self.module.named_parameters():
            parameter.copy_(parameters[name])
        micros = self.workload.batch(0, shares)[share].micro_batches
        total = sum(float(self.build.loss(self.module(m.inputs), m)) for m in micros)
        weight = sum(float(m.weights.sum()) for m in micros)
        return total / weight if weight else math.nan, weight
