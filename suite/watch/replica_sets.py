"""Which ranks hold the same, as users write it: ``all``, a number, or ``0,2/1,3``."""

from __future__ import annotations

from shardproof.errors import Problem, SelectionError


def parse(text: str, world: int) -> tuple[tuple[int, ...], ...]:
    """Sets of ranks.  ``all``: one set; ``N``: every N consecutive ranks; else sets by ``/``.

    :raises SelectionError: it cannot be read, or does not fit ``world`` ranks.
    """
    if text == "all":
        return (tuple(range(world)),)
    try:
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
            raise ValueError(f"rank {max(ranks)} does not exist in {world} ranks")
    except ValueError as error:
        what = f"--replicas: {error}"
        remedy = "write all, a number of consecutive ranks, or sets such as 0,2/1,3"
        raise SelectionError(Problem(what, remedy, text)) from None
    return sets


def _span(item: str) -> range:
    first, dash, last = item.strip().partition("-")
    for word in (first, last) if dash else (first,):
        if not word.strip().isdecimal():
            raise ValueError(
                f"{item.strip()!r} is not a rank" if item.strip() else "a set is empty"
            )
    return range(int(first), int(last if dash else first) + 1)
