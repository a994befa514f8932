"""What ranks tell one another about what they watch: a gloo group of its own, never the script's.

The group is made beside torch's: it has no name there, is no member of any list of groups and uses
its own connections.  Ranks call it in the same order.  Every wait has a deadline; after a failure
the group is of no more use, and :attr:`Exchange.broken` says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.launch import heartbeat
from shardproof.watch.groups import WatchedGloo

#: Seconds that a rank waits for the others, at most: one of them may be saving the model.
WAIT_SECONDS = 180.0


class BrokenExchange(RuntimeError):
    """The others cannot be reached, or did not come in time."""


@dataclass
class Pending:
    """An exchange under way."""

    exchange: Exchange
    work: Any
    parts: list[Tensor]
    given: Tensor

    def result(self) -> list[list[int]]:
        """What each rank gave, by rank.

        :raises BrokenExchange: some rank did not come.
        """
        heartbeat.wait(True)
        try:
            self.work.wait(timedelta(seconds=self.exchange.seconds))
        except RuntimeError as error:
            self.exchange.broken = str(error).splitlines()[0]
            raise BrokenExchange(self.exchange.broken) from error
        finally:
            heartbeat.wait(False)
        return [part.tolist() for part in self.parts]


class Exchange:
    def __init__(self, rank: int, world: int, store: dist.Store, seconds: float) -> None:
        """Meet the other ranks in ``store``.

        :raises BrokenExchange: they cannot be reached.
        """
        self.rank, self.world, self.seconds = rank, world, seconds
        self.broken = ""
        own = dist.PrefixStore("shardproof_watch", store)
        limit = timedelta(seconds=seconds)
        try:
            self._group: Any = WatchedGloo.native_type(own, rank, world, timeout=limit)
        except RuntimeError as error:
            raise BrokenExchange(str(error).splitlines()[0]) from error

    def close(self) -> None:
        """Join the group's threads: one that frees a tensor while Python ends aborts all."""
        self.broken = self.broken or "it is closed"
        self._group = None

    def start(self, numbers: Sequence[int]) -> Pending:
        """Give 64-bit ``numbers``, as many on every rank, and go on.

        :raises BrokenExchange: an earlier exchange failed.
        """
        if self.broken:
            raise BrokenExchange(self.broken)
        given = torch.tensor(numbers, dtype=torch.int64)
        parts = [torch.empty_like(given) for _ in range(self.world)]
        try:
            work = self._group.allgather([parts], [given])
        except RuntimeError as error:
            self.broken = str(error).splitlines()[0]
            raise BrokenExchange(self.broken) from error
        return Pending(self, work, parts, given)

    def all(self, numbers: Sequence[int]) -> list[list[int]]:
        """:meth:`start` and wait."""
        return self.start(numbers).result()

    def texts(self, text: str) -> list[str]:
        """A text of every rank, of any length."""
        data = text.encode("utf-8", "backslashreplace")
        longest = max(size for (size,) in self.all([len(data)]))
        padded = data + bytes(-longest % 8 + longest - len(data))
        words = [
            int.from_bytes(padded[i : i + 8], "little", signed=True)
            for i in range(0, len(padded), 8)
        ]
        rows = self.all(words or [0])
        whole = (b"".join(w.to_bytes(8, "little", signed=True) for w in row) for row in rows)
        return [part.rstrip(b"\0").decode("utf-8", "replace") for part in whole]
