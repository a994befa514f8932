"""The form of a cluster as it is typed: nodes, ranks, caps and a slow node."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardproof.commands import options
from shardproof.errors import Problem, SelectionError
from shardproof.launch.nodes import MOST_NODES, MOST_RANKS

if TYPE_CHECKING:
    from shardproof.cluster.containers.caps import Caps
    from shardproof.launch.nodes import Nodes

_UNITS = {"k": 10, "m": 20, "g": 30}
#: The least that a node with two ranks needs: each has torch in memory.
_LEAST_MEMORY = 512 << 20
_LEAST_CORES = 0.05


def memory(text: str) -> int:
    """Bytes of ``512m`` or ``2g``."""
    found = re.fullmatch(r"(\d{1,15})([kmg]?)", text.lower())
    size = int(found[1]) << _UNITS.get(found[2], 0) if found else 0
    if size < _LEAST_MEMORY:
        least = f"{_LEAST_MEMORY >> 20}m"
        raise typer.BadParameter(f"{text!r} is not a valid size: give {least} or more, such as 2g")
    if size > (has := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        raise typer.BadParameter(f"{text!r} is too large: this machine has {has >> 20}m")
    return size


def cores(text: str) -> float:
    """Of ``2`` or ``0.5``."""
    if not re.fullmatch(r"\d{1,6}(\.\d{1,9})?", text) or float(text) < _LEAST_CORES:
        raise typer.BadParameter(f"{text!r} is not valid: give {_LEAST_CORES} cores or more")
    if float(text) > (has := os.cpu_count() or 1):
        raise typer.BadParameter(f"{text!r} is too large: this machine has {has} cores")
    return float(text)


def bandwidth(text: str) -> int:
    """Bits per second of ``100mbit`` or ``1gbit``; 0 of ``unlimited``."""
    from shardproof.launch.nodes import bits_per_second

    try:
        return bits_per_second(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def slow_node(text: str) -> tuple[int, Caps]:
    """The node and what it has, of ``1:cpus=0.5`` or ``1:bandwidth=10mbit``."""
    from shardproof.cluster.containers.caps import Caps

    found = re.fullmatch(r"(\d{1,2}):(cpus|bandwidth)=(\S+)", text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not of the form N:cpus=C or N:bandwidth=RATE")
    node, name, value = int(found[1]), found[2], found[3]
    if name == "bandwidth":
        if not (rate := bandwidth(value)):
            raise typer.BadParameter(f"{value!r} does not slow the node: give a rate, e.g. 10mbit")
        return node, Caps(bits_per_second=rate)
    return node, Caps(cpus=cores(value))


Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="WORD", help="arguments, as for the same command on one machine"),
]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The typed options of a cluster: its nodes, their limits, a slower one, the place of
    results.
    """

    nodes: Annotated[
        int, typer.Option("--nodes", metavar="K", min=1, max=MOST_NODES, help="number of nodes")
    ] = 2
    ranks_per_node: Annotated[
        int,
        typer.Option(
            "--ranks-per-node",
            metavar="R",
            min=1,
            max=MOST_RANKS,
            help="consecutive ranks on one node; the last axes of a mesh lie inside nodes",
        ),
    ] = 2
    cpus: Annotated[
        float | None, typer.Option("--cpus", metavar="C", parser=cores, help="cores of each node")
    ] = None
    memory_bytes: Annotated[
        int | None,
        typer.Option(
            "--memory", metavar="M", parser=memory, help="memory of each node, such as 2g"
        ),
    ] = None
    bits_per_second: Annotated[
        int | None,
        typer.Option(
            "--bandwidth",
            metavar="RATE",
            parser=bandwidth,
            help="rate at which each node sends, such as 100mbit",
        ),
    ] = None
    delay_ms: Annotated[
        float | None,
        typer.Option(
            "--delay",
            metavar="MS",
            min=1,
            max=10_000,
            help="milliseconds added to each message between nodes",
        ),
    ] = None
    slow: Annotated[
        Any,
        typer.Option(
            "--slow-node",
            metavar="N:CAP",
            parser=slow_node,
            help="limit of node N, such as 1:cpus=0.5 or 1:bandwidth=10mbit",
        ),
    ] = None
    all_packages: Annotated[
        bool,
        typer.Option("--all-packages", help="add DeepSpeed and MPI, even if no case needs them"),
    ] = False
    results: options.Results = None
    keep: Annotated[
        bool,
        typer.Option("--keep", help="keep the containers for inspection (`clean` removes them)"),
    ] = False

    @property
    def there(self) -> Nodes:
        """Its nodes."""
        from shardproof.cluster.nodes.ranks import ClusterNodes

        return ClusterNodes(self.nodes, self.ranks_per_node)

    def limits(self) -> Caps:
        """:raises SelectionError: a network between nodes, where there is one node."""
        from shardproof.cluster.containers.caps import Caps

        for flag, value in (("--bandwidth", self.bits_per_second), ("--delay", self.delay_ms)):
            if value is not None and self.nodes == 1:
                what = "a cluster of one node sends nothing between nodes"
                raise SelectionError(Problem(what, f"choose --nodes 2, or leave {flag} out", flag))
        delay = None if self.delay_ms is None else self.delay_ms / 1e3
        return Caps(self.cpus, self.memory_bytes, self.bits_per_second or None, delay)

    def slowed(self) -> dict[int, Caps]:
        """:raises SelectionError: there is no such node, or no other."""
        if self.slow is None:
            return {}
        node, caps = self.slow
        what, remedy = f"there is no node {node}", f"valid: 0 to {self.nodes - 1}"
        if self.nodes == 1:
            what = "a single node cannot be slower than others"
            remedy = "choose --nodes 2, or leave --slow-node out"
        elif node < self.nodes:
            return {node: caps}
        raise SelectionError(Problem(what, remedy, "--slow-node"))
