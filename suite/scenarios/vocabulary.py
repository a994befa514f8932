"""The names that scenarios may use.  Installed names are looked up late: that imports torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cache

from shardproof.case import WorkloadSpec
from shardproof.contract import GroupSpec


@dataclass(frozen=True)
class Vocabulary:
    """Valid names.

    ``groups``: the parameter groups that traits suggest.  ``fault_of``: why a workload of known
    names cannot be built, or ``None``.  ``dyadic``: the workloads with a form for that lane.
    """

    implementations: Collection[str]
    backends: Collection[str]
    workloads: Collection[str]
    traits: Collection[str]
    checks: Collection[str]
    groups: Callable[[Iterable[str]], tuple[GroupSpec, ...]] = lambda traits: ()
    fault_of: Callable[[WorkloadSpec], str | None] = lambda spec: None
    dyadic: Collection[str] = ()


class _Implementations(tuple[str, ...]):
    """All that can be listed; a planted fault is one of them only if it is named exactly."""

    def __contains__(self, name: object) -> bool:
        from shardproof import registry

        return super().__contains__(name) or name in registry.mutant_names()


@cache
def installed() -> Vocabulary:
    """The names that scenario files may use on this machine."""
    from shardproof import registry, workloads
    from shardproof.backends import BACKENDS
    from shardproof.cases import kinds
    from shardproof.checks import CHECKS

    def fault_of(spec: WorkloadSpec) -> str | None:
        try:
            kinds.of(spec).check(spec)
        except workloads.WorkloadError as error:
            return str(error)
        return None

    return Vocabulary(
        implementations=_Implementations(registry.names()),
        backends=tuple(BACKENDS),
        workloads=(*workloads.WORKLOADS, *kinds.UNTRAINED),
        traits=tuple(workloads.TRAITS),
        checks=tuple(CHECKS),
        groups=workloads.suggested_groups,
        fault_of=fault_of,
        dyadic=workloads.in_lane("dyadic"),
    )
