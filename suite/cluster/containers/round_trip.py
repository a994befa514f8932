"""How long a message to another node and the answer take, asked in a cluster's head before a run.

``python -m shardproof.cluster.containers.round_trip`` prints seconds, one figure a node: the median
round trip of a number from its first rank to that of the next node.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardproof import tensor_bytes
from shardproof.backends import USUAL_PROCESSES
from shardproof.launch.nodes import NodeGone, Nodes
from shardproof.launch.rank_process import RankLaunch
from shardproof.launch.ranks import root_cause
from shardproof.launch.workspace import Workspace

#: Messages that count, after some that do not.
_TRIPS, _WARM = 12, 3
#: CPU seconds that a rank has.
_BUDGET = 60.0


def measured(nodes: Nodes) -> list[float]:
    """Seconds of a round trip from each node to the next.

    :raises NodeGone: ranks cannot be started, or broke.
    """
    with Workspace() as folder:
        program = partial(trips, nodes.ranks_per_node)
        launch = RankLaunch(USUAL_PROCESSES, nodes.places, program, folder, _BUDGET, ledgers=False)
        outcomes = nodes.host().run(launch)
        if (cause := root_cause(outcomes)) is not None:
            raise NodeGone(cause.sentence())
        records = [tensor_bytes.load(each.record) for each in outcomes if each.record is not None]
    return [seconds for record in records for seconds in record["seconds"]]


def trips(ranks_per_node: int, rank: int, world: int) -> dict[str, Any]:
    """On every rank: in turn, each node's first rank sends to that of the next node."""
    firsts = range(0, world, ranks_per_node)
    found = []
    for first in firsts:
        other = (first + ranks_per_node) % world
        number = torch.zeros(1)
        dist.barrier()
        seconds = []
        for _ in range(_WARM + _TRIPS):
            began = time.perf_counter()
            if rank == first:
                dist.send(number, other)
                dist.recv(number, other)
                seconds.append(time.perf_counter() - began)
            elif rank == other:
                dist.recv(number, first)
                dist.send(number, first)
        found += [statistics.median(seconds[_WARM:])] if rank == first else []
    return {"seconds": found}


def main() -> None:
    """Print what nodes measure."""
    nodes = Nodes.here()
    if nodes is None:
        sys.exit("this machine is not the head of a cluster")
    try:
        print(*measured(nodes))
    except NodeGone as error:
        sys.exit(str(error))


if __name__ == "__main__":
    from shardproof.cluster.containers import (
        round_trip,  # by its name: what ranks run travels to them
    )

    round_trip.main()
