"""Nodes: machines or containers on which ranks run.  A wing has them; the core asks it for them.

Also what a command finds in its environment that runs on nodes, and their caps in words.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardproof import wings
from shardproof.errors import Problem, SelectionError

if TYPE_CHECKING:
    from shardproof.case import Case
    from shardproof.launch.ranks import RankHost

#: The variable in which a command finds, as JSON, what started it on nodes (:func:`facts_here`).
ENVIRONMENT = "SHARDPROOF_CLUSTER"
#: The variable in which a rank finds the number of its node.
NODE = "SHARDPROOF_NODE"
#: Nodes, and ranks on each, at most: more would be ranks that wait for cores.
MOST_NODES, MOST_RANKS = 16, 32
#: A rate that is no limit.
UNLIMITED = "unlimited"
_NO_NODES = "fault {}: ranks are not on nodes here; use `shardproof cluster run`"
_UNITS = {"mbit": 10**6, "gbit": 10**9}
#: Bits per second; beyond, the kernel counts in other units, and here nothing sends as fast.
_MOST_RATE = 10 * 10**9


class NodeGone(RuntimeError):
    """A node has ended or does not answer; the message names it."""


@dataclass(frozen=True)
class Nodes(ABC):
    """``count`` nodes for ranks that are processes.

    Consecutive ranks share a node, ``ranks_per_node`` of them, so that the last axes of a mesh lie
    inside nodes.  ``rate``: bits per second that each node sends with; 0: nothing is declared.
    """

    count: int
    ranks_per_node: int
    rate: int = 0

    def __str__(self) -> str:
        return f"{self.count} nodes x {self.ranks_per_node} ranks"

    @property
    def places(self) -> int:
        """Ranks that there is room for."""
        return self.count * self.ranks_per_node

    def has_room(self, backend: str, world: int) -> bool:
        """Whether so many ranks fit; those that are threads stay where their leader is."""
        from shardproof.backends import BACKENDS

        return BACKENDS[backend].threads or world <= self.places

    def with_room(self, cases: Sequence[Case]) -> list[Case]:
        """Those whose ranks fit; those whose messages cannot be delayed here are skipped.

        :raises SelectionError: none fits.
        """
        room = [case for case in cases if self.has_room(case.backend, case.world)]
        if cases and not room:
            least = min(case.world for case in cases)
            what = f"no case fits on {self}: the smallest needs {least} ranks"
            raise SelectionError(Problem(what, "raise --nodes or --ranks-per-node"))
        return [replace(case, skip=case.skip or self.not_far(case.backend)) for case in room]

    def ranks_of(self, node: int, world: int) -> tuple[int, ...]:
        """The ranks on ``node`` in a world of that size."""
        first = node * self.ranks_per_node
        return tuple(range(first, min(first + self.ranks_per_node, world)))

    @staticmethod
    def here() -> Nodes | None:
        """The nodes that this command's ranks run on; ``None``: they run on this machine itself."""
        facts = facts_here()
        return None if facts is None else wings.first(lambda wing: wing.nodes(facts))

    @abstractmethod
    def host(self) -> RankHost:
        """The runner of ranks on these nodes."""

    @abstractmethod
    def wait(self) -> None:
        """Return once every node can run ranks.

        :raises NodeGone: one cannot.
        """

    @abstractmethod
    def not_far(self, backend: str) -> str | None:
        """Why messages of a backend are not delayed as declared; ``None``: they are."""

    @abstractmethod
    def with_faults(self, cases: Sequence[Case]) -> list[Case]:
        """``cases`` with the fault that is planned for this run; those whose own fault cannot be
        made on these nodes are skipped.

        :raises SelectionError: the planned fault cannot be made in these cases.
        """


def facts_here() -> Mapping[str, Any] | None:
    """The nodes on which this command was started; ``None``: it was not.

    ``nodes`` and ``ranks_per_node``; and for ``run.json`` the ``command`` that was typed, its
    ``commit``, and what is ``told`` of the nodes.
    """
    text = os.environ.get(ENVIRONMENT, "")
    return json.loads(text) if text else None


def node_here() -> int | None:
    """The number of the node that this process is on; ``None``: there are no nodes."""
    text = os.environ.get(NODE, "")
    return int(text) if text else None


def without_node_faults(cases: Sequence[Case]) -> list[Case]:
    """``cases``, skipped where their fault strikes a node: there are none."""
    return [
        replace(case, skip=case.skip or _NO_NODES.format(case.fault.kind))
        if case.fault is not None and case.fault.strikes_nodes
        else case
        for case in cases
    ]


def bits_per_second(text: str) -> int:
    """Bits per second of ``100mbit`` or ``1gbit``; 0 of ``unlimited``.

    :raises ValueError: it is no rate.
    """
    if text == UNLIMITED:
        return 0
    found = re.fullmatch(r"(\d{1,5})(mbit|gbit)", text.lower())
    rate = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < rate <= _MOST_RATE:
        raise ValueError(f"{text!r} is not a rate between 1mbit and 10gbit: write e.g. 100mbit")
    return rate


def cap_in_words(name: str, value: float) -> str:
    """A cap of a node, by its name in ``run.json``: ``100 mbit/s`` of ``bits_per_second``."""
    if name == "cpus":
        return f"{value:.3g} core" + ("" if value == 1 else "s")
    if name == "memory_bytes":
        return f"{value / 2**20:.0f} MiB" if value else "no limit of memory"
    if name == "delay_seconds":
        return f"{1e3 * value:.4g} ms a message"
    return f"{value / 1e6:.4g} mbit/s"
