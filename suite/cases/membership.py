"""Who takes part: ranks that join and leave between steps, and ranks that get no data.

Most systems have the same members in every step, each with a share of the batch; for them this is
one mesh of all ranks.  Only elastic systems (``Case.membership``) and systems with roles
(``Implementation.role``) need more.
"""

from __future__ import annotations

from collections.abc import Callable

from shardproof import backends
from shardproof.case import DATA_AXES, Case, data_shares
from shardproof.cases import answers
from shardproof.comm import Mesh
from shardproof.contract import Implementation


class Membership:
    """The members of a case as one rank sees them; ``mesh`` is that of the step under way."""

    def __init__(self, case: Case, system: type[Implementation], rank: int) -> None:
        self._case, self._system, self._rank = case, system, rank
        self.mesh = self._mesh_of(self._at(0))

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
        members = self.mesh.ranks
        roles = {r: self._system.role(r, self._case.world, self._case.options) for r in members}
        for role in roles.values():
            answers.asked(self._system, "role(rank, world, options)", role, str, "a str")
        workers = [r for r, role in roles.items() if role == "worker"]
        shares = data_shares(self.mesh.axes, members, workers)
        if self._rank not in shares:
            return None, 0
        share = shares[self._rank]
        if self._case.shares:
            share = self._case.shares[share]
        return share, max(shares.values()) + 1

    def change(
        self,
        step: int,
        implementation: Implementation | None,
        join: Callable[[Mesh], Implementation],
    ) -> Implementation | None:
        """Let members leave and join before ``step``; the implementation that this rank now has.

        Every rank helps to make the groups.  A joiner is set up alone, by ``join``, and meets the
        others in ``reconfigure``.
        """
        members, before = self._at(step), self.mesh.ranks
        if members == before:
            return implementation
        joined = tuple(rank for rank in members if rank not in before)
        left = tuple(rank for rank in before if rank not in members)
        if implementation is not None:
            implementation.drain()
        if self._rank in left and implementation is not None:
            implementation.close()
            implementation = None
        alone = {rank: self._mesh_of((rank,)) for rank in joined}
        self.mesh = self._mesh_of(members)
        if self._rank in joined:
            implementation = join(alone[self._rank])
        if implementation is not None:
            implementation.reconfigure(self.mesh, joined, left)
        return implementation

    def _at(self, step: int) -> tuple[int, ...]:
        changes = {int(first): tuple(ranks) for first, ranks in self._case.membership.items()}
        since = max((first for first in changes if first <= step), default=None)
        return tuple(range(self._case.world)) if since is None else changes[since]

    def _mesh_of(self, members: tuple[int, ...]) -> Mesh:
        axes = dict(self._case.mesh)
        if members != tuple(range(self._case.world)):
            if len(axes) != 1:
                raise ValueError(f"members can change on a mesh of one axis only, not {axes}")
            axes = dict.fromkeys(axes, len(members))
        joint = (DATA_AXES,) if all(axis in axes for axis in DATA_AXES) else ()
        device = backends.BACKENDS[self._case.backend].device
        return Mesh(axes, joint=joint, device=device, ranks=members)
