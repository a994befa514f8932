"""GPUs for nodes: whether the engine hands them to containers, and which node gets which.

Nodes get theirs in order; the head gets all, since it says whether there are enough.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

from shardproof.backends import BACKENDS
from shardproof.cluster.containers import image_inputs
from shardproof.cluster.containers.engine import NoCluster

RUNTIME = "nvidia"


def require(engine: Any, torch: str) -> None:
    """Return if containers can have GPUs, and ``torch``, that of the images, can use them.

    :raises NoCluster: they cannot; says what to do.
    """
    if RUNTIME not in engine.info().get("Runtimes", {}):
        raise NoCluster(
            f"the engine hands no GPUs to containers: it has no runtime {RUNTIME}; install the "
            "NVIDIA container toolkit, `nvidia-ctk runtime configure --runtime=docker`, start the "
            "engine again; or choose --backend gloo"
        )
    if image_inputs.is_locked(torch):
        raise NoCluster(
            "the images have a torch for CPUs: build others, such as IMAGE=shardproof-gpu "
            f"TORCH={torch}+cu130 TORCH_INDEX=https://download.pytorch.org/whl/cu130"
        )


@dataclass(frozen=True)
class Gpus:
    """So many for each node."""

    per_node: int = 0

    @classmethod
    def of(cls, backends: Collection[str], ranks_per_node: int) -> Self:
        """What ``--backend`` asks for: a GPU for each rank, or one that the ranks share."""
        asked = (BACKENDS[name] for name in backends if name in BACKENDS)
        return cls(max((backend.devices(ranks_per_node) for backend in asked), default=0))

    def numbers(self, node: int) -> list[int]:
        """Those of ``node``, as the driver counts them."""
        return list(range(node * self.per_node, (node + 1) * self.per_node))

    def of_node(self, node: int) -> dict[str, Any]:
        """What the engine is asked for as it starts ``node``."""
        return _requested(self.numbers(node))

    def of_head(self, nodes: int) -> dict[str, Any]:
        """The same of the head of so many nodes."""
        return _requested([number for node in range(nodes) for number in self.numbers(node)])


def _requested(numbers: list[int]) -> dict[str, Any]:
    from docker.types import DeviceRequest

    if not numbers:
        return {}
    which = [str(number) for number in numbers]
    asked = DeviceRequest(driver=RUNTIME, device_ids=which, capabilities=[["gpu"]])
    return {"device_requests": [asked]}
