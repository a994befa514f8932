"""The task of a leader that locates the first difference of one case, and who asks it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardproof.case import Case
from shardproof.launch import process_control
from shardproof.launch.pool import Pool
from shardproof.locate.finding import Finding
from shardproof.locate.located import locate

#: Wall-clock seconds that a location may take: a last resort.
SECONDS = 900.0


@dataclass(frozen=True)
class LocateTask:
    """A case, and the folder that is made for it."""

    case: Case
    folder: Path


def locate_case(task: LocateTask) -> dict[str, Any]:
    """Task of the leader: the finding of one case, as JSON."""
    process_control.keep_freed_memory()
    task.folder.mkdir(parents=True)
    return locate(task.case, task.folder).to_dict()


def locate_all(cases: Sequence[Case], jobs: int = 1) -> Iterator[tuple[Case, Finding | str, float]]:
    """Each case as it ends: its finding, or why there is none, and the seconds that it took."""
    with Pool(jobs, tasks=(locate_case,)) as pool:
        items = [
            (case.id, LocateTask(case, pool.folder / f"located{number}"), SECONDS)
            for number, case in enumerate(cases)
        ]
        with closing(pool.run(locate_case, items)) as ends:
            for end in ends:
                found: Finding | str = end.why_no_value
                if end.value is not None:
                    found = Finding.from_dict(end.value)
                yield end.payload.case, found, end.seconds
