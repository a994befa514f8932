"""The room that cases need in the folder where their ranks leave what they hold."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence

from shardproof import workloads
from shardproof.case import Case
from shardproof.errors import MachineError
from shardproof.launch.workspace import TASK_BYTES, lacking, workspace_base

#: No case of the suite has more in its work folder (2,772 steps of a small model: 146 MiB).
MOST_BYTES = 160 << 20
#: Tensors of a parameter's size that a rank leaves of a step at most: a gradient before and after
#: clipping, the parameter, and what the optimizer holds.
_TENSORS = 4


def require(cases: Sequence[Case], jobs: int) -> None:
    """Refuse ``cases`` for which work folders have no room, so many at once.

    They are thought to need what the largest of them may need, and the others what they need on
    average: two of the largest hardly ever run at once.

    :raises MachineError: they have none; it has the remedy.
    """
    waiting = [case for case in cases if not case.skip]
    jobs, largest, others = min(jobs, len(waiting)), 0, 0
    # Models need not be made to know that so much is enough.
    if shutil.disk_usage(workspace_base()).free < jobs * MOST_BYTES:
        elements: dict[str, int] = {}
        needs = [bytes_of(case, elements) for case in waiting]
        largest, others = max(needs), (jobs - 1) * math.ceil(sum(needs) / len(needs))
    if jobs and (problem := lacking(1, largest) or lacking(jobs, largest + others)):
        raise MachineError(str(problem))


def bytes_of(case: Case, elements: dict[str, int]) -> int:
    """The most that its ranks leave; ``elements``: of the models that were counted before."""
    if case.workload.name not in workloads.WORKLOADS:  # it trains none, or a user's own
        return TASK_BYTES
    name = f"{case.workload.name} {case.workload.params}"
    if name not in elements:
        # Of any lane: a case that has none in its own is refused, and asked about all the same.
        elements[name] = sum(map(math.prod, workloads.make(case.workload).shapes.values()))
    return min(case.world * (case.steps + 1) * _TENSORS * elements[name] * 8, MOST_BYTES)
