"""The program of a rank in a case of workload ``epochs``: ask its sampler, record the answers.

Nothing is judged here: ``check.py`` compares what the ranks noted.  Global generators differ from
rank to rank, as they do in training, so a sampler that draws from them shows.
"""

from __future__ import annotations

import itertools
import json
import operator
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.cases.kinds.samples import workload
from shardproof.cases.kinds.untrained import Program
from shardproof.contract import SamplerSpec, Sampling
from shardproof.evidence.records import Drawn, RankRecord
from shardproof.registry.declaration import BrokenContract

#: Added to the seed where another one must give another order: further than epochs go.
OTHER_SEED = 7919
#: Generator -> its state, to see whether a sampler moves it.
GENERATORS: Mapping[str, Callable[[], Any]] = {
    "torch": lambda: torch.get_rng_state().numpy().tobytes(),
    "random": random.getstate,
    "numpy": lambda: pickle.dumps(numpy.random.get_state()),
}


def after(case: Case, leg: int, before: Sequence[RankRecord]) -> SamplesProgram:
    """The program of a leg, whose ranks get the state that the leg ``before`` reported."""
    return SamplesProgram(case, leg, tuple(record.told_state for record in before))


@dataclass(frozen=True)
class SamplesProgram(Program):
    """Ask a sampler for everything of one leg.

    ``states``: what each rank of the leg before told, as JSON; empty in the first one.
    """

    leg: int = 0
    states: tuple[str, ...] = ()

    def fill(self, record: RankRecord, system: Any, world: int) -> None:
        """Note all samples that it gives."""
        asker = _Asker(self, record, system)
        asker.whole_runs()
        if asker.params["resume_at"]:
            asker.leg()


class _Asker:
    def __init__(self, program: SamplesProgram, record: RankRecord, system: Any) -> None:
        self.program, self.case, self.record, self.system = program, program.case, record, system
        self.params = workload.resolve(self.case.workload)
        legs = workload.meshes(self.case)
        self.is_last = program.leg == len(legs) - 1
        self.mesh = legs[program.leg]
        #: Threads share their generators: nobody could say who moved them.
        self.has_own_generators = not BACKENDS[self.case.backend].threads

    def _started(self, more_seed: int = 0) -> Sampling:
        by_rank = workload.coordinates(self.mesh)
        sampler: Sampling = self.system()
        spec = SamplerSpec(
            self.params["samples"],
            rank=by_rank[self.record.rank],
            world=max(by_rank.values()) + 1,
            shuffle=self.params["shuffle"],
            tail=self.params["tail"],
            seed=self.case.workload.seed + more_seed,
        )
        sampler.start(spec, self.case.options)
        return sampler

    def whole_runs(self) -> None:
        """Runs that nothing interrupts; later legs need the epochs that follow theirs."""
        sampler, first_leg = self._started(), self.program.leg == 0
        declines = self.record.declaration.declines
        first = 0 if first_leg or "again" in declines else self.params["resume_epoch"]
        for epoch in range(first, self.params["epochs"]):
            self._note("whole", epoch, sampler)
        if first_leg:
            if "again" not in declines:
                self._note("again", 0, sampler)
            if self.params["shuffle"] and "seed" not in declines:
                self._note("seed", 0, self._started(OTHER_SEED))

    def leg(self) -> None:
        """The requests to a run that stops in this leg, or continues in it."""
        sampler, epoch = self._started(), self.params["resume_epoch"]
        if self.program.leg:
            by_rank = "state_by_rank" in self.record.declaration.features
            mine = self.record.rank % len(self.program.states) if by_rank else 0
            sampler.load_state(json.loads(self.program.states[mine]))
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
        self.record.drawn += [Drawn("leg", epoch, trained_on, state), Drawn("ahead", epoch, read)]

    def _note(self, asked: str, epoch: int, sampler: Sampling) -> None:
        if not self.has_own_generators:
            self.record.drawn.append(Drawn(asked, epoch, list(self._epoch(sampler, epoch))))
            return
        number = 1 + self.record.rank + 1000 * len(self.record.drawn)
        torch.manual_seed(number)
        random.seed(number)
        numpy.random.seed(number)
        before = {name: state() for name, state in GENERATORS.items()}
        samples = list(self._epoch(sampler, epoch))
        moved = [name for name, state in GENERATORS.items() if state() != before[name]]
        if "torch" in moved and GENERATORS["torch"]() == _after_a_loader(number):
            moved.remove("torch")
        self.record.drawn.append(Drawn(asked, epoch, samples, moved=" and ".join(moved)))

    def _epoch(self, sampler: Sampling, epoch: int) -> Iterator[int]:
        """The answer as plain numbers; one that never ends is cut off."""
        given: Iterable[Any] = sampler.epoch(epoch)
        most = 2 * self.params["samples"] + 2
        for sample in itertools.islice(given, most):
            try:
                yield operator.index(sample)
            except TypeError:
                what = f"{self.system.__name__}.epoch({epoch}) gave {sample!r:.60}"
                raise BrokenContract(f"{what}, expected the index of a sample") from None


def _after_a_loader(seed: int) -> bytes:
    """The state of torch's generator when one ``DataLoader`` has begun since it was at ``seed``.

    Each draws a seed for its workers, of which no order depends (``_BaseDataLoaderIter``).
    """
    generator = torch.Generator().manual_seed(seed)
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    return generator.get_state().numpy().tobytes()


def _as_json(state: Any) -> str:
    try:
        return json.dumps(state, sort_keys=True)
    except (TypeError, ValueError) as error:
        what = f"state() gave {state!r:.80}, which is not JSON: {error}"
        raise BrokenContract(what) from error
