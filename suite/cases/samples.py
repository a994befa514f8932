"""What one rank does in a case of workload ``epochs``: ask its sampler, note what it gives.

Nothing is judged here: ``checks/untrained/data.py`` compares what the ranks noted.  Global
generators differ from rank to rank, as they do in training, so a sampler that draws from them
shows.
"""

from __future__ import annotations

import itertools
import json
import operator
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy
import torch

from shardproof import registry
from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.contract import SamplerSpec, Sampling
from shardproof.evidence.records import Drawn, RankRecord
from shardproof.launch.process_control import cores
from shardproof.registry.declaration import BrokenContract, Declaration
from shardproof.workloads import epochs

#: Added to the seed where another one must give another order: further than epochs go.
OTHER_SEED = 7919
#: Generator -> its state, to see whether a sampler moves it.
GENERATORS: Mapping[str, Callable[[], Any]] = {
    "torch": lambda: torch.get_rng_state().numpy().tobytes(),
    "random": random.getstate,
    "numpy": lambda: pickle.dumps(numpy.random.get_state()),
}


@dataclass(frozen=True)
class SamplesProgram:
    """What every rank does in one leg; it travels to ranks that were not forked.

    ``state``: what the ranks of the leg before told, as JSON; empty in the first one.
    """

    case: Case
    leg: int = 0
    state: str = ""

    def __call__(self, rank: int, world: int) -> dict[str, Any]:
        return _Asker(self, rank).run().to_dict()


class _Asker:
    def __init__(self, program: SamplesProgram, rank: int) -> None:
        self.case, self.rank, self.program = program.case, rank, program
        self.params = epochs.resolve(self.case.workload)
        legs = epochs.meshes(self.case)
        self.is_last = program.leg == len(legs) - 1
        self.mesh = legs[program.leg]
        self.system = registry.load(self.case.implementation)
        self.declaration = Declaration.of(self.system, self.case.options)
        self.drawn: list[Drawn] = []
        #: Threads share their generators: nobody could say who moved them.
        self.has_own_generators = not BACKENDS[self.case.backend].threads

    def run(self) -> RankRecord:
        """Ask for everything of this leg."""
        self._whole_runs()
        if self.params["resume_at"]:
            self._leg()
        return RankRecord(self.rank, cores(), self.declaration, drawn=self.drawn)

    def _started(self, more_seed: int = 0) -> Sampling:
        by_rank = epochs.coordinates(self.mesh)
        sampler = cast("Sampling", self.system())
        spec = SamplerSpec(
            self.params["samples"],
            rank=by_rank[self.rank],
            world=max(by_rank.values()) + 1,
            shuffle=self.params["shuffle"],
            tail=self.params["tail"],
            seed=self.case.workload.seed + more_seed,
        )
        sampler.start(spec, self.case.options)
        return sampler

    def _whole_runs(self) -> None:
        """Runs that nothing interrupts; later legs need the epochs that follow theirs."""
        sampler, first_leg = self._started(), self.program.leg == 0
        for epoch in range(0 if first_leg else self.params["resume_epoch"], self.params["epochs"]):
            self._note("whole", epoch, sampler)
        if first_leg:
            self._note("again", 0, sampler)
            if self.params["shuffle"] and "seed" not in self.declaration.declines:
                self._note("seed", 0, self._started(OTHER_SEED))

    def _leg(self) -> None:
        sampler, epoch = self._started(), self.params["resume_epoch"]
        if self.program.leg:
            sampler.load_state(json.loads(self.program.state))
        else:
            for before in range(epoch):
                self._note("before", before, sampler)
        if self.is_last:
            for number in range(epoch, self.params["epochs"]):
                self._note("leg", number, sampler)
            return
        taken = self.params["resume_at"] * self.params["batch"]
        ahead = self.params["read_ahead"] * self.params["batch"]
        given = self._epoch(sampler, epoch)
        trained_on = list(itertools.islice(given, taken))
        read = list(itertools.islice(given, ahead))
        state = _as_json(sampler.state(taken))
        self.drawn += [Drawn("leg", epoch, trained_on, state), Drawn("ahead", epoch, read)]

    def _note(self, asked: str, epoch: int, sampler: Sampling) -> None:
        if not self.has_own_generators:
            self.drawn.append(Drawn(asked, epoch, list(self._epoch(sampler, epoch))))
            return
        number = 1 + self.rank + 1000 * len(self.drawn)
        torch.manual_seed(number)
        random.seed(number)
        numpy.random.seed(number)
        before = {name: state() for name, state in GENERATORS.items()}
        samples = list(self._epoch(sampler, epoch))
        moved = [name for name, state in GENERATORS.items() if state() != before[name]]
        self.drawn.append(Drawn(asked, epoch, samples, moved=" and ".join(moved)))

    def _epoch(self, sampler: Sampling, epoch: int) -> Iterator[int]:
        """What it gives, as plain numbers; one that never ends is cut off."""
        given: Iterable[Any] = sampler.epoch(epoch)
        most = 2 * self.params["samples"] + 2
        for sample in itertools.islice(given, most):
            try:
                yield operator.index(sample)
            except TypeError:
                what = f"{self.system.__name__}.epoch({epoch}) gave {sample!r:.60}"
                raise BrokenContract(f"{what}, asked is the index of a sample") from None


def _as_json(state: Any) -> str:
    try:
        return json.dumps(state, sort_keys=True)
    except (TypeError, ValueError) as error:
        what = f"state() gave {state!r:.80}, which is no JSON: {error}"
        raise BrokenContract(what) from error
