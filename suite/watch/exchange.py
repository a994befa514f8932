"""The exchange between watched ranks: a gloo group of its own, never the script's.

The group is made beside torch's: it has no name there, is no member of any list of groups and uses
its own connections.  Ranks call it in the same order.  Every wait has a deadline; after a failure
the group is of no more use, and :attr:`Exchange.broken` says why.

The script's store is needed to meet, and let go then: where a script destroys its groups, its store
has to end as it does unwatched.  A wait ends early where another rank is seen to wait for this one.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.backends import heartbeat
from shardproof.backends.gloo import Gloo

#: Seconds that a rank waits for the others, at most: one of them may be saving the model.
WAIT_SECONDS = 180.0
#: Between two looks whether the others have come: the first, and the longest.
_FIRST_SLEEP, _LONGEST_SLEEP = 0.0002, 0.02
#: Seconds between two looks whether another rank waits for this one, and looks that must see it:
#: another thread of this rank may be on its way to that call.
_EVIDENCE_SECONDS, _EVIDENCE_LOOKS = 1.0, 3


class BrokenExchange(RuntimeError):
    """The others cannot be reached, or did not come in time."""


class _Lent(dist.Store):
    """A store as long as it is lent: gloo keeps what it is given, and would keep the script's."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store: Any = store

    def take_back(self) -> None:
        self._store = None

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, *given: Any) -> None:
        self._store.wait(*given)

    def has_extended_api(self) -> bool:
        return False


@dataclass
class Pending:
    """An exchange under way."""

    exchange: Exchange
    work: Any
    parts: list[Tensor]
    given: Tensor

    def result(self) -> list[list[int]]:
        """The value that each rank gave, by rank.

        :raises BrokenExchange: some rank did not come, or waits for this one.
        """
        heartbeat.wait(True)
        try:
            self._come()
            self.work.wait(timedelta(seconds=self.exchange.seconds))
        except RuntimeError as error:
            self.exchange.give_up(self, str(error).splitlines()[0])
            raise BrokenExchange(self.exchange.broken) from error
        finally:
            heartbeat.wait(False)
        return [part.tolist() for part in self.parts]

    def _come(self) -> None:
        """Return when the others have come.

        :raises BrokenExchange: they did not.
        """
        began = looked = time.monotonic()
        sleep, why, looks = _FIRST_SLEEP, "", 0
        while not self.work.is_completed():
            now = time.monotonic()
            if now - began > self.exchange.seconds:
                raise BrokenExchange(f"a rank did not join within {self.exchange.seconds:.0f} s")
            if now - looked > _EVIDENCE_SECONDS:
                looked, before, why = now, why, self.exchange.is_awaited()
                looks = looks + 1 if why and why == before else 1
                if why and looks == _EVIDENCE_LOOKS:
                    raise BrokenExchange(why)
            time.sleep(sleep)
            sleep = min(2 * sleep, _LONGEST_SLEEP)


class Exchange:
    """Rows of numbers that the ranks of a script send one another."""

    def __init__(
        self,
        rank: int,
        world: int,
        store: dist.Store,
        seconds: float,
        is_awaited: Callable[[], str] = str,
    ) -> None:
        """Meet the other ranks in ``store``.

        ``is_awaited``: says which rank waits for this one inside a call of the script's; ``""``:
        none does.  A rank that waited here for that rank would make both wait.

        :raises BrokenExchange: they cannot be reached.
        """
        self.rank, self.world, self.seconds = rank, world, seconds
        self.is_awaited = is_awaited
        self.broken = ""
        self._given_up: list[Pending] = []
        own = _Lent(dist.PrefixStore("shardproof_watch", store))
        limit = timedelta(seconds=seconds)
        try:
            self._group: Any = Gloo().group.native_type(own, rank, world, timeout=limit)
        except RuntimeError as error:
            raise BrokenExchange(str(error).splitlines()[0]) from error
        finally:
            own.take_back()

    def close(self) -> None:
        """Join the group's threads: one that frees a tensor while Python ends aborts all.

        A thread of an exchange that was given up may never end.  Nothing that it holds is freed
        then, and nobody waits for it: the process is about to end.
        """
        self.broken = self.broken or "the exchange is closed"
        for kept in [self._group, *self._given_up] if self._under_way() else ():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        self._group, self._given_up = None, []

    def give_up(self, pending: Pending, why: str) -> None:
        """Drop ``pending`` and all later exchanges: they are not read."""
        self.broken = why
        self._given_up.append(pending)

    def _under_way(self) -> bool:
        return not all(pending.work.is_completed() for pending in self._given_up)

    def start(self, numbers: Sequence[int]) -> Pending:
        """Give 64-bit ``numbers``, as many on every rank, and continue.

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
