"""A factor that several numbers of a case may be is told apart by one more run.

On 2 ranks with 2 micro-batches a gradient that is half of the true one was divided by either.  The
same system with 3 micro-batches leaves one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from shardproof import checks
from shardproof.case import Case
from shardproof.checks.causes.fits import known
from shardproof.checks.results import ALIKE
from shardproof.errors import is_exhausted
from shardproof.evidence.assembled import Evidence

#: ``(2 = ranks or micro-batches, as many here: ...)``
_NAMES = re.compile(r"\(([\d.]+) = ([^()]*?)(?:" + re.escape(ALIKE) + r")?\)")
_OR = " or "
#: Most micro-batches of the other run.
_MOST = 7


def tell_apart(evidence: Evidence, run: Callable[[Case], Evidence | None]) -> None:
    """Replace what is ambiguous in the rows of ``evidence`` by what another run leaves of it."""
    found = {
        name: row
        for name, rows in evidence.compared.items()
        for row in rows
        if ALIKE in row.problem
    }
    other = another(evidence) if found else None
    try:
        second = run(replace(other, checks=tuple(found))) if other else None
        again = {name: checks.measure(name, second) for name in found} if second else {}
    except Exception as error:
        if is_exhausted(error):
            raise
        return  # the sentence stays as it was: nothing is decided by the other run
    for name, row in found.items() if again else ():
        told = next((row.problem for row in again[name] if row.problem), "")
        plain = replace(row, problem=resolved(row.problem, told))
        evidence.compared[name] = [plain if one is row else one for one in evidence.compared[name]]


def another(evidence: Evidence) -> Case | None:
    """The case with another number of micro-batches; ``None``: it has no room for one."""
    case = evidence.case
    if case.changes_members or case.fault is not None:
        return None
    workload, taken = case.workload, {*known(evidence).values()}
    room = workload.global_batch // (case.data_coordinates * workload.windows)
    counts = (n for n in range(workload.micro_batches + 1, min(room, _MOST) + 1) if n not in taken)
    if (count := next(counts, None)) is None:
        return None
    steps, workload = min(case.steps, 2), replace(workload, micro_batches=count)
    return replace(case, checkpoint=None, expect={}, steps=steps, workload=workload)


def resolved(sentence: str, other: str) -> str:
    """``sentence`` with those names of its factor that ``other``, of another run, gives as well."""
    first, second = _NAMES.search(sentence), _NAMES.search(other)
    if first is None or second is None:
        return sentence
    names = [name for name in first[2].split(_OR) if name in second[2].split(_OR)]
    if not names:
        return sentence
    alike = ALIKE if len(names) > 1 else ""
    return sentence.replace(first[0], f"({first[1]} = {_OR.join(names)}{alike})")
