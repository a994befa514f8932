"""Nodes that are nowhere, for what the core asks of any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardproof.case import Case
from shardproof.launch.nodes import Nodes
from shardproof.launch.ranks import Forked


@dataclass(frozen=True)
class MadeNodes(Nodes):
    """Their ranks are forked here."""

    def host(self) -> Forked:
        """As on one machine."""
        return Forked()

    def wait(self) -> None:
        """They are there."""

    def not_far(self, backend: str) -> str | None:
        """Nothing is delayed."""
        return None

    def with_faults(self, cases: Sequence[Case]) -> list[Case]:
        """None are planned."""
        return [*cases]
