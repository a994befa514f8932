"""Cells on nodes: over which links their groups go, and where these are probed.

Ranks of one node share a memory, those of two a network.  So alpha and beta of the groups along an
axis are those of a launch in which they lie as in the cell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardproof.ledgers.places import Lie, groups_along, lie


def lies(mesh: Mapping[str, int], ranks_per_node: int) -> dict[str, Lie]:
    """How the groups along each axis of ``mesh`` that is cut lie on nodes of ``ranks_per_node``
    consecutive ranks (0: there are no nodes).
    """
    world = math.prod(mesh.values())
    homes = [rank // (ranks_per_node or world) for rank in range(world)]
    return {axis: lie(groups_along(mesh, axis), homes) for axis, n in mesh.items() if n > 1}


def not_probed(mesh: Mapping[str, int], probed: Mapping[str, int], ranks_per_node: int) -> str:
    """Why a launch on ``probed`` does not tell what the calls of ``mesh`` cost on such nodes;
    empty: it does.
    """
    there = lies(probed, ranks_per_node)
    for axis, here in lies(mesh, ranks_per_node).items():
        if there.get(axis) != here:
            ranks = math.prod(probed.values())
            beside = f", where they lie {there[axis]}" if axis in there else ""
            return (
                f"groups along {axis} lie {here}, and alpha and beta were probed on {ranks} "
                f"ranks{beside or ', which it does not cut'}"
            )
    return ""
