"""The contribution of this wing: nodes for ranks, judges of cases elsewhere, and a command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from shardproof.wings import CaseHosts, Finding, OnNodes, Wing

if TYPE_CHECKING:
    import typer

    from shardproof.cases.runner import CaseHost
    from shardproof.launch.nodes import Nodes


class Cluster(Wing):
    """Ranks on machines of their own: containers, nodes of other launchers, a Ray cluster."""

    examples = ("shardproof cluster run ddp-gpt --nodes 2         containers act as nodes",)

    def add_commands(self, app: typer.Typer) -> None:
        """Add ``cluster``."""
        from shardproof.cluster import command

        app.add_typer(
            command.clusters,
            name="cluster",
            short_help="Run in containers of this machine that act as nodes.",
        )

    def nodes(self, facts: Mapping[str, Any]) -> Nodes:
        """The nodes of the cluster that this machine is the head of."""
        from shardproof.cluster.nodes.ranks import ClusterNodes

        return ClusterNodes.of(facts)

    def case_hosts(self, where: str) -> CaseHosts:
        """The Ray cluster at ``where``.

        :raises SelectionError: it names none.
        """
        from shardproof.cluster import on_ray

        address = on_ray.address(where)

        def joined(jobs: int | None) -> AbstractContextManager[CaseHost]:
            from shardproof.cluster.on_ray import cluster  # it takes seconds to import torch

            return cluster.joined(address, jobs)

        return joined

    def run_command(self, invocation: Any) -> str | None:
        """``cluster run`` with the nodes and caps that it had."""
        from shardproof.cluster import reruns

        return reruns.run_command(invocation)

    def run_on_nodes(self, command: OnNodes) -> int:
        """Run it in the head of a cluster that is made for it."""
        from shardproof.cluster import command as clusters

        return clusters.run_once(command)

    def findings(self, thorough: bool) -> Iterator[Finding]:
        """The container engine; ``thorough``: also images, ``tc``, Slurm and Ray."""
        from shardproof.cluster import doctor

        return doctor.examine() if thorough else doctor.engine_alone()

    def sections_of_cases(self, run: Any) -> Sequence[Any]:
        """Bytes between nodes, and memory of each."""
        from shardproof.cluster.reported import sections

        return sections(run)


WING = Cluster()
