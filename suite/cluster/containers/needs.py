"""The needs of a command other than nodes: packages in the images, and GPUs.

Nodes get their GPUs in order; the head gets all, since it says whether there are enough.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.cluster.containers import image_inputs
from shardproof.cluster.containers.engine import NoCluster
from shardproof.cluster.containers.image_inputs import EVERYTHING, LEAN

RUNTIME = "nvidia"


def require_gpus(engine: Any, torch: str) -> None:
    """Return if containers can have GPUs, and ``torch``, that of the images, can use them.

    :raises NoCluster: they cannot; says what to do.
    """
    if RUNTIME not in engine.info().get("Runtimes", {}):
        raise NoCluster(
            f"the engine gives no GPUs to containers, because it has no runtime {RUNTIME}: install "
            "the NVIDIA container toolkit, run `nvidia-ctk runtime configure --runtime=docker` and "
            "restart the engine; or choose --backend gloo"
        )
    if image_inputs.is_locked(torch):
        raise NoCluster(
            "the images contain a torch without CUDA: to build images for GPUs, run the command "
            f"with the environment variables IMAGE=shardproof-gpu TORCH={torch}+cu130 "
            "TORCH_INDEX=https://download.pytorch.org/whl/cu130"
        )


@dataclass(frozen=True)
class Gpus:
    """So many for each node."""

    per_node: int = 0

    @classmethod
    def of(cls, backends: Collection[str], ranks_per_node: int) -> Self:
        """The need of ``--backend``: a GPU for each rank, or one that the ranks share."""
        asked = (BACKENDS[name] for name in backends if name in BACKENDS)
        return cls(max((backend.devices(ranks_per_node) for backend in asked), default=0))

    def numbers(self, node: int) -> list[int]:
        """Those of ``node``, as the driver counts them."""
        return list(range(node * self.per_node, (node + 1) * self.per_node))

    def requested(self, *nodes: int) -> dict[str, Any]:
        """The request to the engine when it starts a container with the GPUs of these nodes."""
        from docker.types import DeviceRequest

        which = [str(number) for node in nodes for number in self.numbers(node)]
        asked = DeviceRequest(driver=RUNTIME, device_ids=which, capabilities=[["gpu"]])
        return {"device_requests": [asked]} if which else {}


@dataclass(frozen=True)
class Needs:
    """The images, and the GPUs of each node."""

    targets: tuple[str, str] = LEAN
    gpus: Gpus = field(default_factory=Gpus)

    @classmethod
    def of(cls, systems: Iterable[str], backends: Collection[str], ranks_per_node: int = 1) -> Self:
        """The needs of ``systems``, given as names or ids, on these backends."""
        over_mpi = any(b in BACKENDS and BACKENDS[b].mpirun for b in backends)
        everything = over_mpi or any("deepspeed" in name for name in systems)
        return cls(EVERYTHING if everything else LEAN, Gpus.of(backends, ranks_per_node))

    @classmethod
    def of_cases(
        cls, cases: Collection[Case], ranks_per_node: int, asked: Collection[str] = ()
    ) -> Self:
        """The needs of ``cases``, and of the systems that they are compared with.

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
