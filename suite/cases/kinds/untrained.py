"""The common part of cases that train no model: the program of a rank, and the legs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof import registry
from shardproof.case import Case
from shardproof.cases.launcher import Launcher, Left, Work, records_of
from shardproof.evidence.assembled import Evidence
from shardproof.evidence.records import RankRecord, WorkloadFacts
from shardproof.launch.process_control import cores
from shardproof.launch.ranks import root_cause
from shardproof.oracle.truth import Truth
from shardproof.registry.declaration import Declaration
from shardproof.registry.stand_ins import import_now

if TYPE_CHECKING:
    from shardproof.cases.kinds.kind import Leg


@dataclass(frozen=True)
class Program(ABC):
    """The program of every rank in one leg; it travels to ranks that were not forked."""

    case: Case

    def __call__(self, rank: int, world: int) -> dict[str, Any]:
        system = registry.load(self.case.implementation)
        declared = Declaration.of(system, self.case.options)
        record = RankRecord(rank, cores(), declared, seal=self.case.seal)
        self.fill(record, system, world)
        return record.to_dict()

    def prepare(self) -> None:
        """Before ranks that are threads start."""
        import_now(self.case)

    @abstractmethod
    def fill(self, record: RankRecord, system: Any, world: int) -> None:
        """Ask ``system``, a class, and note in ``record`` what it does."""


@dataclass
class Legs(Work):
    """Legs of a run, one after the other; the ranks of each get what the leg before left."""

    case: Case
    declaration: Declaration
    legs: Sequence[Leg]

    def run(self, case: Case, launcher: Launcher) -> Left:
        """Run the legs up to the first in which a rank breaks."""
        left = Left([])
        for number, (world, program) in enumerate(self.legs):
            before = left.legs[-1] if left.legs else ()
            name = f"leg{number}" if number else ""
            left.outcomes = launcher.launch(case, program(before), name, world)
            if root_cause(left.outcomes) is not None:
                return Left(left.outcomes)
            left.legs.append(records_of(left.outcomes, self.declaration))
        return left

    def train_oracle(self, left: Left, cache: Path) -> Truth:
        """Nothing: what is right is known without a training."""
        return Truth()

    def evidence(self, left: Left, truth: Truth) -> Evidence:
        """The records of all legs."""
        facts = WorkloadFacts({}, (), (), False, ())
        evidence = Evidence(self.case, left.legs[0], truth, facts, {})
        evidence.later_legs = left.legs[1:]
        return evidence
