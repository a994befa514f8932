"""A member that dies inside a step, while its rank lives on to help to make the next groups.

Only ``in_memory`` can let go of one member: a native group that lost one may fail or wait,
depending on who is where.  The others learn of it where they wait for a call that the dead has not
made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardproof import comm
from shardproof.backends import base, in_memory
from shardproof.backends.base import Handle
from shardproof.backends.request import Request


class Died(BaseException):
    """Raised in the member that is to die: no system that catches errors keeps it alive."""


class _Dying:
    """The calls that are left to the calling rank."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def call(self, request: Request, group: object, issue: Callable[[Request], Handle]) -> Handle:
        """Issue ``request``, unless the rank dies of it."""
        if not self.left:
            in_memory.depart()
            raise Died
        self.left -= 1
        return issue(request)


@contextmanager
def dying(call: int) -> Iterator[None]:
    """The calling rank dies inside, right before its call number ``call``."""
    base.INJECTION.set(_Dying(call), process=False)
    try:
        yield
    finally:
        base.INJECTION.set(None, process=False)


def renew(rank: int, world: int, place: str) -> None:
    """Let all groups forget calls that were never completed; every rank of the world comes here."""
    ranks, text = range(world), f"the new groups after {place}"
    comm.meet(ranks, rank, f"{place}/gone", text)
    if rank == 0:
        in_memory.renew()
    comm.meet(ranks, rank, f"{place}/renewed", text)
