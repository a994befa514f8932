"""The nodes of a cluster as commands in its head see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.cluster import fault_plans
from shardproof.cluster.nodes.asking import FOLDER
from shardproof.cluster.nodes.doors import START_SECONDS, awaited, door
from shardproof.cluster.nodes.ranks import NodeRanks
from shardproof.launch.nodes import NodeGone, Nodes, facts_here


@dataclass(frozen=True)
class ClusterNodes(Nodes):
    """Nodes whose agents have their doors in ``folder``.

    ``far_seconds``: what messages between nodes take more, where ranks and not the kernel delay
    them.
    """

    folder: Path = FOLDER
    far_seconds: float = 0.0

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """Those that this machine is the head of."""
        rate = int(facts.get("told", {}).get("declared", {}).get("bits_per_second", 0))
        far = float(facts.get("far_seconds", 0.0))
        return cls(int(facts["nodes"]), int(facts["ranks_per_node"]), rate, far_seconds=far)

    def host(self) -> NodeRanks:
        """What runs ranks on these nodes."""
        return NodeRanks(self)

    def wait(self) -> None:
        """Return once every agent answers.

        :raises NodeGone: one does not.
        """
        every = [door(self.folder, node) for node in range(self.count)]
        if (late := awaited(every, START_SECONDS)) is not None:
            what = f"node {every.index(late)}: its agent has not come within {START_SECONDS:g} s"
            raise NodeGone(what)

    def not_far(self, backend: str) -> str | None:
        """Why messages of a backend are not delayed as declared; ``None``: they are."""
        known = BACKENDS[backend]
        if not self.far_seconds or known.threads or known.delays_far_nodes:
            return None
        return f"the kernel has no netem, and ranks delay messages of gloo only, not of {backend}"

    def with_faults(self, cases: Sequence[Case]) -> list[Case]:
        """``cases`` with the fault that is planned for this run.

        :raises SelectionError: it cannot be made in these cases.
        """
        return fault_plans.with_planned(cases, facts_here() or {})
