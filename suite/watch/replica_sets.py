"""Which ranks hold the same, as users write it: ``all``, a number, ``0,2/1,3``, or a mesh."""

from __future__ import annotations

import itertools
import math

from shardproof import axes
from shardproof.errors import Problem, SelectionError
from shardproof.table import grouped


def parse(text: str, world: int) -> tuple[tuple[int, ...], ...]:
    """Sets of ranks.  ``all``: one set; ``N``: every N consecutive ranks; ``shard=2,context=2``: a
    mesh, whose axes say who holds copies; else sets by ``/``.

    :raises SelectionError: it cannot be read, or does not fit ``world`` ranks.
    """
    if text == "all":
        return (tuple(range(world)),)
    try:
        if "=" in text:
            return _by_axis(text, world)
        if text.isdigit():
            size = int(text)
            if size < 1 or world % size:
                raise ValueError(f"{world} ranks cannot be cut into sets of {size}")
            return tuple(tuple(range(at, at + size)) for at in range(0, world, size))
        sets = tuple(
            tuple(sorted(rank for item in part.split(",") for rank in _span(item)))
            for part in text.split("/")
        )
        ranks = [rank for ranks in sets for rank in ranks]
        if len({*ranks}) < len(ranks):
            raise ValueError("a rank is listed twice")
        if max(ranks) >= world:
            raise ValueError(f"rank {max(ranks)} does not exist: the job has {world} ranks")
    except ValueError as error:
        what = f"--replicas: {error}"
        remedy = (
            "write all, a number of consecutive ranks, sets such as 0,2/1,3, or a mesh such as "
            "replicate=2,context=2"
        )
        raise SelectionError(Problem(what, remedy, text)) from None
    return sets


def _by_axis(text: str, world: int) -> tuple[tuple[int, ...], ...]:
    """Ranks that differ along axes of copies only, for parameters of experts as well."""
    sizes = {name.strip(): n for name, _, n in (item.partition("=") for item in text.split(","))}
    if unknown := [name for name in sizes if name not in axes.names()]:
        raise ValueError(f"unknown axis {unknown[0]!r}; known: {', '.join(axes.names())}")
    if not all(size.isdecimal() for size in sizes.values()):
        raise ValueError("the size of an axis is not a number")
    mesh = {name: int(sizes[name]) for name in axes.names() if name in sizes}
    if math.prod(mesh.values()) != world:
        raise ValueError(f"the mesh has {math.prod(mesh.values())} ranks, but the job has {world}")
    copies = axes.replicated(mesh, axes.EXPERT)
    #     shard 2 x context 2 x tensor 2: ranks count along the last axis first
    found = grouped(
        (tuple(n for name, n in zip(mesh, place, strict=True) if name not in copies), rank)
        for rank, place in enumerate(itertools.product(*map(range, mesh.values())))
    )
    return tuple(map(tuple, found.values()))


def _span(item: str) -> range:
    first, dash, last = item.strip().partition("-")
    for word in (first, last) if dash else (first,):
        if not word.strip().isdecimal():
            raise ValueError(
                f"{item.strip()!r} is not a rank" if item.strip() else "a set is empty"
            )
    return range(int(first), int(last if dash else first) + 1)
