"""Starts the ranks of one case and reads what they leave; what is done in a case."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardproof import tensor_bytes
from shardproof.backends.disturbances import disturbances_of
from shardproof.case import Case
from shardproof.evidence.assembled import Evidence
from shardproof.evidence.held import Shared
from shardproof.evidence.records import RankRecord
from shardproof.files import DAMAGE, open_input
from shardproof.launch.rank_process import Program, RankLaunch
from shardproof.launch.ranks import RankHost, RankOutcome
from shardproof.oracle.truth import Truth
from shardproof.registry.declaration import BrokenContract, Declaration


@dataclass(frozen=True)
class Launcher:
    """Runs the ranks of one case on ``host``, each time in a folder of its own in ``workdir``.

    ``oracles``: the folder of oracles that several cases share.
    """

    workdir: Path
    host: RankHost
    oracles: Path

    def launch(
        self, case: Case, program: Program, name: str = "", world: int = 0, keeps: bool = True
    ) -> list[RankOutcome]:
        """How each rank ended, with the file of what it returned; one that hangs is an outcome.

        ``name``: of the folder; ``world``: number of ranks (0: as in ``case``); ``keeps``: the
        program leaves nothing behind in a process, so that ranks may be used again.
        """
        world = world or case.world
        folder = self.workdir / name
        folder.mkdir(exist_ok=True)
        disturbances = disturbances_of(case.workload.traits, case.fault)
        # Calls the program on every rank, in a process or thread of its own.
        return self.host.run(
            RankLaunch(
                case.backend,
                world,
                program,
                folder,
                case.deadline,
                case.ledgers,
                disturbances,
                memory_bytes=int(case.memory_gib * 2**30),
                one_core=disturbances is None,  # where orders are the point, there are more of them
                fresh=case.fault is not None or not keeps,
            )
        )


def records_of(outcomes: Sequence[RankOutcome], declaration: Declaration) -> list[RankRecord]:
    """The records that the ranks left, held to the ``declaration`` that was heard before the run.

    :raises BrokenContract: a rank, in which the system's code runs, left no such thing.
    """
    records = [_read(outcome.record, outcome.rank) for outcome in outcomes if outcome.record]
    for record in records:
        record.declaration = declaration
    equal: Shared = {}
    for record in records:
        for held in record.held():
            held.share(equal)
    return records


def _read(file: Path, rank: int) -> RankRecord:
    try:
        open_input(file).close()  # no pipe, which would never end
        record = RankRecord.from_dict(tensor_bytes.load(file))
        if record.rank != rank:
            raise ValueError(f"the record belongs to rank {record.rank}")
    except (*DAMAGE, FileNotFoundError) as error:
        why = f"left a record that cannot be read: {error}"
        raise BrokenContract(f"rank {rank} {why}") from error
    return record


@dataclass
class Left:
    """How ranks ended, and the records of each leg of the run; no records where a rank broke."""

    outcomes: list[RankOutcome]
    legs: list[list[RankRecord]] = field(default_factory=list)


class Work(ABC):
    """The work of one case."""

    @property
    def no_oracle_because(self) -> str:
        """Why no oracle can be trained; empty: one can, or none is needed."""
        return ""

    @abstractmethod
    def run(self, case: Case, launcher: Launcher) -> Left:
        """Run the ranks of ``case``, which is as plans want the first run."""

    @abstractmethod
    def train_oracle(self, left: Left, cache: Path) -> Truth:
        """The reference for the records; oracles that several cases share lie in ``cache``."""

    @abstractmethod
    def evidence(self, left: Left, truth: Truth) -> Evidence:
        """The input of the checks."""
