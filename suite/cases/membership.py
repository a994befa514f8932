"""The members of each step: ranks that join, leave and die, and ranks that get no data.

Most systems have the same members in every step, each with a share of the batch; for them this is
one mesh of all ranks.  Only elastic systems (``Case.membership``, ``Case.deaths``) and systems with
roles (``Implementation.role``) need more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from shardproof import backends
from shardproof.axes import joint_groups
from shardproof.backends import faults
from shardproof.case import Case, Death, data_shares
from shardproof.comm import Mesh, PeerGone
from shardproof.contract import BatchRule, Implementation
from shardproof.oracle import members
from shardproof.registry import answers

#: How a step that a member dies in ends on a rank: what it did when the others were to stop.
Attempt = str
#: What sets up a rank that joins alone, and what begins a step that may end nowhere.
Join = Callable[[Mesh], Implementation]
Begin = Callable[[Implementation], object]
DIED, STOPPED, COMMITTED, LIVED = "died", "stopped", "committed", "lived"


class Membership:
    """The members of a case as one rank sees them; ``mesh`` is that of the step under way."""

    def __init__(
        self, case: Case, system: type[Implementation], rank: int, rule: BatchRule = "global"
    ) -> None:
        self._case, self._system, self._rank, self._rule = case, system, rank, rule
        self.steps = members.of(case, rule)
        self.mesh = self._mesh_of(self.steps[0].begin)

    @property
    def includes_me(self) -> bool:
        """Whether this rank takes part in the step under way."""
        return self._rank in self.mesh.ranks

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of the members."""
        return self._rank == self.mesh.ranks[0]

    def share(self) -> tuple[int | None, int]:
        """This rank's share of the batch (``None``: no data), and the number of shares."""
        ranks = self.mesh.ranks
        roles = {r: self._system.role(r, self._case.world, self._case.options) for r in ranks}
        for role in roles.values():
            answers.asked(self._system, "role(rank, world, options)", role, str, "a str")
        workers = [r for r, role in roles.items() if role == "worker"]
        shares = data_shares(self.mesh.axes, ranks, workers)
        if self._rank not in shares:
            return None, 0
        share, orders = shares[self._rank], self._case.shares
        return orders[share] if orders else share, max(shares.values()) + 1

    def place(self, step: int, progress: int | None) -> tuple[int, int]:
        """The first sample of ``step``, and how many there are; ``progress``: what a system says.

        Of members who begin a step in which some die: as if all lived.
        """
        count, started = len(self.mesh.ranks), len(self.steps[0].begin)
        size = members.batch_size(self._case, self._rule, count, started)
        return (self.steps[step].first if progress is None else progress), size

    def change(
        self, step: int, implementation: Implementation | None, join: Join
    ) -> Implementation | None:
        """Let members leave and join before ``step``; the implementation that this rank now has.

        Every rank helps to make the groups.  A joiner is set up alone, by ``join``, and meets the
        others in ``reconfigure``.
        """
        now, before = self.steps[step].begin, self.mesh.ranks
        if now == before:
            return implementation
        joined = tuple(rank for rank in now if rank not in before)
        left = tuple(rank for rank in before if rank not in now)
        if implementation is not None:
            implementation.drain()
            if left:
                implementation.hand_over(left)
        if self._rank in left and implementation is not None:
            implementation.close()
            implementation = None
        alone = {rank: self._mesh_of((rank,)) for rank in joined}
        self.mesh = self._mesh_of(now)
        if self._rank in joined:
            implementation = join(alone[self._rank])
        if implementation is not None:
            implementation.reconfigure(self.mesh, joined, left)
        return implementation

    def attempt(
        self, step: int, implementation: Implementation | None, begin: Begin
    ) -> tuple[Attempt, Implementation | None]:
        """The step in which members die, as far as ``begin`` gets, and the new group of the others.

        How it ended here (empty: this rank was no member), and the implementation that it now has.
        """
        dead = {death.rank: death for death in self._case.deaths if death.step == step}
        end: Attempt = ""
        if implementation is not None:
            end = self._until_death(dead, implementation, begin)
        if end in (DIED, LIVED) and implementation is not None:
            with suppress(Exception):
                implementation.abort()
            implementation = None
        faults.renew(self._rank, self._case.world, f"step {step}")
        self.mesh = self._mesh_of(self.steps[step].members)
        if implementation is not None:
            implementation.reconfigure(self.mesh, (), tuple(dead))
        return end, implementation

    def _until_death(
        self, dead: dict[int, Death], implementation: Implementation, begin: Begin
    ) -> Attempt:
        if self._rank in dead:
            try:
                with faults.dying(dead[self._rank].call):
                    begin(implementation)
            except faults.Died:
                return DIED
            return LIVED
        try:
            begin(implementation)
        except PeerGone:
            return STOPPED
        return COMMITTED

    def _mesh_of(self, ranks: tuple[int, ...]) -> Mesh:
        axes = dict(self._case.mesh)
        if ranks != tuple(range(self._case.world)):
            if len(axes) != 1:
                raise ValueError(f"members can change only on a mesh with one axis, not {axes}")
            axes = dict.fromkeys(axes, len(ranks))
        device = backends.BACKENDS[self._case.backend].device
        return Mesh(axes, joint=joint_groups(axes), device=device, ranks=ranks)
