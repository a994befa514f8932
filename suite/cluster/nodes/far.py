"""Nodes that are far from each other, where no kernel delays their messages."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardproof.backends.logged import NativeHandle
from shardproof.backends.request import Request


@dataclass(frozen=True)
class FarNodes:
    """Every message between nodes of ``ranks_per_node`` consecutive ranks takes ``seconds`` more.

    A stand-in for a kernel that cannot delay (``netem``): what a call returns comes later, by its
    messages between nodes that wait for one another.  What it returns is the same.
    """

    seconds: float
    ranks_per_node: int

    def __call__(
        self, request: Request, members: Sequence[int], rank: int, work: Any
    ) -> _Late | None:
        """The result of torch's ``work``, delayed; ``None``: no delay."""
        seconds = self.late(request, members, rank)
        return _Late(request, work, seconds) if seconds else None

    def late(self, request: Request, members: Sequence[int], rank: int) -> float:
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


class _Late(NativeHandle):
    """Delay the result of ``work`` by ``seconds``, whichever rank waits for it and when."""

    def __init__(self, request: Request, work: Any, seconds: float) -> None:
        super().__init__(request, work)
        self._there = torch.futures.Future[list[Tensor]]()
        threading.Thread(target=self._under_way, args=(seconds,), daemon=True).start()

    def _under_way(self, seconds: float) -> None:
        try:
            self._work.wait()
            time.sleep(seconds)
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self._there.set_exception(error)  # type: ignore[arg-type]  # torch's own hint is wrong
        else:
            self._there.set_result([tensor for item in self.request.outputs for tensor in item])

    def _settle(self, timeout: float | None) -> None:
        self._there.wait()

    def _future(self) -> Any:
        return self._there

    def is_completed(self) -> bool:
        return bool(self._there.done())
