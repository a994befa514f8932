"""Differences between ranks, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardproof.backends.errors import name_ranks
from shardproof.watch.found import Tracked

#: Names in one sentence.
NAMED = 3


def described(one: Tracked) -> str:
    shape = "x".join(map(str, one.shape)) or "scalar"
    return f"{one.name} [{shape}]"


def odd(values: Mapping[int, Any]) -> str:
    """Who differs from whom: the largest set of equal ranks is what the others differ from."""
    sets: dict[Any, list[int]] = {}
    for rank, value in values.items():
        sets.setdefault(value, []).append(rank)
    ordered = sorted(sets.values(), key=lambda ranks: (-len(ranks), ranks))
    if len(ordered) == len(values):
        return (
            f"no two of {name_ranks(sorted(values))} are equal"
            if len(values) > 2
            else (f"{name_ranks(ordered[0])} and {name_ranks(ordered[1])}")
        )
    return f"{'; '.join(map(name_ranks, ordered[1:]))} from {name_ranks(ordered[0])}"


def differing(texts: Mapping[int, list[dict[str, str]]]) -> str:
    """The first hyperparameters that differ over ranks, with their values."""
    counts = {rank: len(groups) for rank, groups in texts.items()}
    if len({*counts.values()}) > 1:
        return f"numbers of parameter groups: {odd(counts)}"
    told = []
    for number in range(min(counts.values())):
        for name in sorted({name for groups in texts.values() for name in groups[number]}):
            values = {rank: groups[number].get(name, "none") for rank, groups in texts.items()}
            if len({*values.values()}) > 1:
                by_value: dict[str, list[int]] = {}
                for rank, value in values.items():
                    by_value.setdefault(value, []).append(rank)
                said = ", ".join(f"{v} on {name_ranks(r)}" for v, r in by_value.items())
                told.append(f"{name} of group {number} is {said}")
    return "; ".join(told[:NAMED])
