"""Nodes that are far from each other, where no kernel delays their messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardproof.backends.request import Request


@dataclass(frozen=True)
class FarNodes:
    """Every message between nodes of ``ranks_per_node`` consecutive ranks takes ``seconds`` more.

    A stand-in for a kernel that cannot delay (``netem``): what a call returns comes later, by its
    messages between nodes that wait for one another.  What it returns is the same.
    """

    seconds: float
    ranks_per_node: int

    def __call__(self, request: Request, members: Sequence[int], rank: int) -> float:
        """Seconds that ``request`` of rank number ``rank`` of ``members`` takes more."""
        nodes = [member // self.ranks_per_node for member in members]
        count = len(set(nodes))
        if request.operation == "recv":  # a message is under way to who waits for it
            peer = request.peer
            far = count > 1 if peer is None else nodes[peer] != nodes[rank]
            return self.seconds * far
        return self.seconds * _crossings(request.operation, len(members), count)


def _crossings(operation: str, ranks: int, nodes: int) -> int:
    """Messages between nodes, one after the other, of a call by gloo's algorithms
    (``bench/model/alpha_beta.py``).
    """
    if nodes == 1 or operation == "send":
        return 0
    around = {"all_reduce": 2, "reduce_scatter": 2, "all_gather": 1, "reduce": 1}
    if operation in around:  # a ring of all ranks crosses as often as there are nodes
        return math.ceil(around[operation] * (ranks - 1) * nodes / ranks)
    if operation in ("broadcast", "barrier"):  # a binomial tree
        return math.ceil(math.log2(nodes))
    return 1  # everybody's messages at once
