"""Worlds that serve many cases, as the parent sees them: which there are, and which are idle."""

from __future__ import annotations

from pathlib import Path

from shardproof.launch.pool import Pool
from shardproof.launch.rank_keeper import KeeperTask, keep


class KeptWorlds:
    """The parent's side: hands out worlds, one leader at a time each, and ends them.

    A world whose case did not go well is not handed out again.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._made = 0
        self._looked = False
        self._idle: list[tuple[KeeperTask, int]] = []
        self._given: dict[Path, tuple[KeeperTask, int]] = {}

    def take(self, size: int) -> KeeperTask:
        """An idle world of ``size`` ranks, or one that is being started."""
        if not self._looked:
            self._looked = True
            self._pool.fork_server.preload("shardproof.launch.mpi.preloaded")
        self._idle = [w for w in self._idle if self._pool.keeps(w[1]) and not w[0].closed.exists()]
        fitting = [w for w in self._idle if len(w[0].ranks) == size]
        if fitting:
            self._idle.remove(fitting[-1])
            task, ticket = fitting[-1]
        else:
            self._made += 1
            task = KeeperTask(tuple(range(size)), self._pool.folder / f"world{self._made}")
            ticket = self._pool.keep(keep, task)
        self._given[task.folder] = task, ticket
        return task

    def give_back(self, task: KeeperTask, well: bool) -> None:
        """The case is over; ``well``: it held, so the next may come."""
        task, ticket = self._given.pop(task.folder)
        if well:
            self._idle.append((task, ticket))
        else:
            self._pool.drop(ticket)
