"""Options by which a strategy chooses its collectives: the backend's own, or one of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from shardproof.impls.reference.engine.options import at_least, parse_options


@dataclass(frozen=True)
class Hierarchical:
    """Ranks ``q * ranks_per_node`` to ``(q + 1) * ranks_per_node - 1`` share node q."""

    algorithm: Literal["hierarchical"] = "hierarchical"
    ranks_per_node: int = 0

    def __post_init__(self) -> None:
        at_least("all_reduce.ranks_per_node", self.ranks_per_node, 1)


AllReduce = (
    Literal[
        "backend",
        "ring",
        "recursive_doubling",
        "rabenseifner",
        "binomial_tree",
        "double_binary_tree",
    ]
    | Hierarchical
)
Ring = Literal["backend", "ring"]


@dataclass(frozen=True)
class OfWholes:
    """``all_reduce``: how ranks that hold the same gradients sum them.

    ``hierarchical`` must know the nodes: ``{algorithm: hierarchical, ranks_per_node: 4}``.
    """

    all_reduce: AllReduce = "backend"


@dataclass(frozen=True)
class OfShards:
    """How gradients are summed into shards, and how shards of parameters are put together."""

    reduce_scatter: Ring = "backend"
    all_gather: Ring = "backend"


@dataclass(frozen=True)
class Collectives(OfShards, OfWholes):
    """All three of them."""


def of(options: object) -> Collectives:
    """The collectives that the ``options`` of a strategy choose."""
    named = {f.name for f in fields(Collectives)}
    return Collectives(**{name: vars(options)[name] for name in named & vars(options).keys()})


def chosen(options: Mapping[str, Any]) -> Collectives:
    """Those that a user names."""
    return parse_options(Collectives, options)
