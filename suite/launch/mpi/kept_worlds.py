"""Worlds that serve many cases, as the parent sees them: which there are, and which are idle."""

from __future__ import annotations

from pathlib import Path

from shardproof.launch.mpi.world_keeper import WorldTask, keep
from shardproof.launch.pool import Pool


class KeptWorlds:
    """The parent's side: hands out worlds, one leader at a time each, and ends them.

    A world whose case did not go well is not handed out again.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._made = 0
        self._looked = False
        self._idle: list[tuple[WorldTask, int]] = []
        self._given: dict[Path, tuple[WorldTask, int]] = {}

    def take(self, size: int) -> WorldTask:
        """An idle world of ``size`` ranks, or one that is being started."""
        if not self._looked:
            self._looked = True
            self._pool.fork_server.preload("shardproof.launch.mpi.preloaded")
        self._idle = [w for w in self._idle if self._pool.keeps(w[1]) and not w[0].closed.exists()]
        fitting = [w for w in self._idle if w[0].size == size]
        if fitting:
            self._idle.remove(fitting[-1])
            task, ticket = fitting[-1]
        else:
            self._made += 1
            task = WorldTask(size, self._pool.folder / f"world{self._made}")
            ticket = self._pool.keep(keep, task)
        self._given[task.folder] = task, ticket
        return task

    def give_back(self, task: WorldTask, well: bool) -> None:
        """The case is over; ``well``: it held, so the next may come."""
        task, ticket = self._given.pop(task.folder)
        if well:
            self._idle.append((task, ticket))
        else:
            self._pool.drop(ticket)
