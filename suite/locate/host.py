"""A host that runs ranks with a recorder on each, and keeps what they recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardproof import registry
from shardproof.launch.informant import Informant
from shardproof.launch.rank_process import Program, RankLaunch
from shardproof.launch.ranks import Forked, RankHost, RankOutcome
from shardproof.locate.recorded import Recording, read
from shardproof.locate.recording import Recorder, watch

#: Bytes of the copies of all ranks, which share this machine.
MOST_BYTES = 1 << 32


@dataclass(frozen=True)
class Recorded:
    """``program`` of a rank, recorded up to step ``last`` into ``folder``."""

    program: Program
    system: str
    last: int
    folder: Path

    def prepare(self) -> None:
        """Before ranks that are threads start."""
        watch(registry.load(self.system))
        getattr(self.program, "prepare", lambda: None)()

    def __call__(self, rank: int, world: int) -> Any:
        watch(registry.load(self.system))
        recorder = Recorder(self.last, MOST_BYTES // world)
        try:
            with recorder:
                return self.program(rank, world)
        finally:
            recorder.store(file_of(self.folder, rank))


@dataclass
class RecordingHost(RankHost):
    """Forks ranks for each launch of a case of ``system``; ``launches``: their recordings by the
    name of the launch's folder, in the order in which they ran.
    """

    system: str
    last: int
    launches: dict[str, list[Recording]] = field(default_factory=dict)

    def run(self, launch: RankLaunch) -> list[RankOutcome]:
        """Run the program of ``launch`` under a recorder on every rank."""
        program = Recorded(launch.program, self.system, self.last, launch.workdir)
        outcomes = Forked().run(replace(launch, program=program, fresh=True))
        self.launches[launch.workdir.name] = _read_all(launch.workdir, launch.ranks)
        return outcomes

    def informant(self, workdir: Path, seconds: float) -> Informant:
        """As anywhere."""
        return Forked().informant(workdir, seconds)


def file_of(folder: Path, rank: int) -> Path:
    """The file of the recording of ``rank``."""
    return folder / f"rank{rank}.recording"


def _read_all(folder: Path, ranks: Sequence[int]) -> list[Recording]:
    files = [(rank, file_of(folder, rank)) for rank in ranks]
    return [read(file, rank) for rank, file in files if file.is_file()]
