"""Ranks on nodes: what part of what is sent goes from one node to another.

The collective model (``ledgers/traffic.py``) splits without a rest.  Of N ranks on m nodes, m - 1
of N - 1 parts must cross nodes, whichever the operation (all-reduce: 2 (m - 1) n of 2 (N - 1) n
bytes), and hierarchical algorithms get by with that.  A message crosses where its ends lie apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Literal

from shardproof.ledgers.traffic import LoggedCall

#: How the groups along an axis lie: each on one node, no two ranks of any on one, or neither.
Lie = Literal["inside nodes", "across nodes", "partly across nodes"]
#: The model has no fewest bytes for these: they hang on how many ranks a node has.
_UNSPLIT = ("all_to_all", "gather", "scatter")


def sent_across(call: LoggedCall, rank: int, nodes: Sequence[int]) -> Fraction | None:
    """The logical bytes of ``call`` by ``rank`` that go to other nodes; rank r is on ``nodes[r]``.
    ``None``: the model does not split them.

    :raises ValueError: a message without a receiver.
    """
    if call.operation == "send":
        if call.peer is None:
            raise ValueError("a send call has no receiver")
        return call.logical_bytes * (nodes[call.peer] != nodes[rank])
    share = _share(call.operation, call.group, nodes)
    return None if share is None else call.logical_bytes * share


def promised_across(
    operation: str, groups: Iterable[Sequence[int]], nodes: Sequence[int], whole: bool = True
) -> Fraction | None:
    """The share of the bytes of all ``groups`` that crosses; ``None``: they differ, or it depends
    on the receiver. ``whole``: calls are made by all of a group, not by some of it.
    """
    groups = [*groups]
    how = lie(groups, nodes)
    if how != "partly across nodes":
        return Fraction(how == "across nodes")
    if operation == "send" or not whole:
        return None
    shares = {_share(operation, group, nodes) for group in groups}
    return shares.pop() if len(shares) == 1 else None


def promised_messages(
    between: Mapping[tuple[int, int], Fraction],
    groups: Sequence[Sequence[int]],
    nodes: Sequence[int],
) -> Fraction | None:
    """Of messages ``between`` two places of each of ``groups`` the bytes that cross; ``None``:
    there are none, or the two lie on one node in some groups only.
    """
    total, homes = Fraction(0), [[nodes[rank] for rank in group] for group in groups]
    for (one, other), size in between.items():
        apart = {places[one] != places[other] for places in homes}
        if len(apart) > 1:
            return None
        total += size * apart.pop()
    return total if between else None


def _share(operation: str, group: Sequence[int], nodes: Sequence[int]) -> Fraction | None:
    homes = len({nodes[rank] for rank in group})
    if homes in (1, len(group)):
        return Fraction(homes > 1)
    if operation in _UNSPLIT:
        return None
    return Fraction(homes - 1, len(group) - 1)


def lie(groups: Iterable[Sequence[int]], nodes: Sequence[int]) -> Lie:
    """How ``groups`` of several ranks lie."""
    homes = [(len({nodes[rank] for rank in group}), len(group)) for group in groups]
    if all(count == 1 for count, _ in homes):
        return "inside nodes"
    return "across nodes" if all(a == b for a, b in homes) else "partly across nodes"


def groups_along(mesh: Mapping[str, int], axis: str, ranks: int = 0) -> list[tuple[int, ...]]:
    """The groups of ranks that differ along ``axis`` (several: joined by ``+``) of ``mesh``.

    Each is cut into groups of ``ranks`` neighbours (0: it is not).
    """
    along = axis.split("+")
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(itertools.product(*map(range, mesh.values()))):
        beside = tuple(at for name, at in zip(mesh, place, strict=True) if name not in along)
        groups.setdefault(beside, []).append(rank)
    return [
        tuple(group[first : first + (ranks or len(group))])
        for group in groups.values()
        for first in range(0, len(group), ranks or len(group))
    ]
