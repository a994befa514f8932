"""Pieces that travelled from a rank to a test as plain data, put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardproof.contract import Piece
from shardproof.evidence.assembled import Assembled, assemble


def assembled(per_rank: Mapping[int, Iterable[Mapping[str, Any]]]) -> Assembled:
    """``per_rank[rank]`` lists the fields of that rank's pieces."""
    return assemble({rank: [Piece(**row) for row in rows] for rank, rows in per_rank.items()})
