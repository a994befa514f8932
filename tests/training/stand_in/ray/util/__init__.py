"""Placement groups; a cluster of one machine."""

from types import SimpleNamespace
from typing import Any


def get_node_ip_address() -> str:
    return "127.0.0.1"


def placement_group(bundles: list[Any], strategy: str) -> Any:
    import ray

    return SimpleNamespace(ready=lambda: "room" if len(bundles) <= ray.CPUS else "no room")


def remove_placement_group(group: Any) -> None:
    pass
