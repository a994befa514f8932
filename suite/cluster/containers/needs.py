"""What a command needs of a cluster beside its nodes: packages in the images, and GPUs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.cluster.containers.gpus import Gpus
from shardproof.cluster.containers.image_inputs import EVERYTHING, LEAN


@dataclass(frozen=True)
class Needs:
    """The images, and the GPUs of each node."""

    targets: tuple[str, str] = LEAN
    gpus: Gpus = field(default_factory=Gpus)

    @classmethod
    def of(cls, systems: Iterable[str], backends: Collection[str], ranks_per_node: int = 1) -> Self:
        """What ``systems``, by names or ids, need on these backends."""
        over_mpi = any(b in BACKENDS and BACKENDS[b].mpirun for b in backends)
        everything = over_mpi or any("deepspeed" in name for name in systems)
        return cls(EVERYTHING if everything else LEAN, Gpus.of(backends, ranks_per_node))

    @classmethod
    def of_cases(
        cls, cases: Collection[Case], ranks_per_node: int, asked: Collection[str] = ()
    ) -> Self:
        """What ``cases`` need, and the systems that they are compared with.

        GPUs are for backends that were ``asked`` for, or can run here: those of a whole matrix are
        skipped where there are none.
        """
        systems = {name for case in cases for name in _systems(case)}
        found = cls.of(systems, {case.backend for case in cases})
        here = {case.backend for case in cases if not case.skip}
        return replace(found, gpus=Gpus.of({*here, *asked}, ranks_per_node))


def _systems(case: Case) -> Iterable[str]:
    relation = case.expect.get("relation")
    other = relation.get("same_as", {}) if isinstance(relation, Mapping) else {}
    return case.implementation, other.get("implementation", "")
