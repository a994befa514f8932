"""Resolve a factor that several numbers of a case may be, with one more run.

On 2 ranks with 2 micro-batches a gradient that is half of the true one was divided by either.  The
same system with 3 micro-batches leaves one of them.  On a mesh of 2 x 2, which has two axes of one
size, another run has 3 x 2 ranks, where these are threads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from shardproof import axes, checks
from shardproof.backends import BACKENDS
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
    names = {name for row in found.values() for name in _names(row.problem)}
    other = another(evidence, names) if found else None
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


def another(evidence: Evidence, names: Collection[str]) -> Case | None:
    """The case with other numbers of micro-batches or ranks, which differ for most of ``names``.

    ``None``: there is none.
    """
    case = evidence.case
    if case.changes_members or case.fault is not None:
        return None
    made, workload = [], case.workload
    for mesh in _meshes(evidence):
        other = replace(case, mesh=mesh, checkpoint=None, expect={}, steps=min(case.steps, 2))
        sizes = {f"ranks of the axis {axis!r}": size for axis, size in mesh.items()}
        for count in {*range(2, _MOST + 1)} - {workload.micro_batches, *sizes.values()}:
            told = {**known(evidence), **sizes, "ranks": other.world, "micro-batches": count}
            told["ranks x micro-batches"] = other.world * count
            samples = max(workload.global_batch, other.data_coordinates * workload.windows * count)
            cut = replace(workload, micro_batches=count, global_batch=samples)
            apart = {told[name] for name in names if name in told}
            made.append((len(apart), replace(other, workload=cut)))
    return max(made, key=lambda one: one[0], default=(0, None))[1]


def _meshes(evidence: Evidence) -> Iterator[Mapping[str, int]]:
    """That of the case, and those with one rank more along an axis, where ranks are threads."""
    case = evidence.case
    yield case.mesh
    for axis in axes.sharing(case.mesh) if BACKENDS[case.backend].threads else ():
        other = replace(case, mesh={**case.mesh, axis: case.mesh[axis] + 1})
        if case.mesh[axis] > 1 and not evidence.declaration.excludes_case(other, ""):
            yield other.mesh


def _names(sentence: str) -> list[str]:
    """The names of the factor that a sentence tells."""
    found = _NAMES.search(sentence)
    return found[2].split(_OR) if found else []


def resolved(sentence: str, other: str) -> str:
    """``sentence`` with those names of its factor that ``other``, of another run, gives as well."""
    first, left = _NAMES.search(sentence), _names(other)
    names = [name for name in _names(sentence) if name in left]
    if first is None or not names:
        return sentence
    alike = ALIKE if len(names) > 1 else ""
    return sentence.replace(first[0], f"({first[1]} = {_OR.join(names)}{alike})")
