"""MPI by mpi4py, over any MPI that mpi4py finds; an ``mpirun`` starts the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from shardproof.backends.backend import Algorithms, Backend, Joining

if TYPE_CHECKING:
    from shardproof.backends.errors import Absence


class Mpi(Backend):
    """A process group of the suite's own (``group.py``), which adds up as ``in_memory`` does."""

    name = "mpi"
    mpirun = True
    any_thread = False
    polls = True
    adds_in_rank_order = True
    exact_memory = True
    hides_latency = False
    hides_because = "bytes move only while a rank waits for them"
    # Part r straight to rank r: as many messages as a ring's, of the same sizes.
    algorithms: ClassVar[Algorithms | None] = {
        "all_reduce": ("ring", "direct"),
        "reduce": ("direct",),
    }
    remedy = "pip install 'shardproof[mpi]', or your system's Open MPI or MPICH with mpi4py"

    def available(self, world: int = 1) -> str | None:
        """Why ranks cannot talk by MPI here; whether there is room for them is asked apart."""
        from shardproof.backends.mpi import found

        return found.problem()

    def join(self, joining: Joining) -> None:
        """Join the processes of an ``mpirun``.

        :raises RuntimeError: MPI gives this process another rank, or another number of ranks.
        """
        _group().join(joining)

    def tell_failure(self, error: BaseException) -> None:
        """Wake the ranks that wait: the calling one raised ``error``."""
        _group().tell_failure(error)

    def never_coming(
        self, there: Sequence[int], missing: Sequence[int]
    ) -> Mapping[int, Absence] | None:
        """Those that make no more calls; of others the launcher knows more."""
        from shardproof.backends.errors import Absence

        ended = _group().ended(missing)
        return {rank: Absence("it has ended", ended=True) for rank in ended} or None

    def leave(self) -> bool:
        """Destroy all groups of this process; whether nothing was left unfinished."""
        return bool(_group().leave())


def _group() -> ModuleType:
    from shardproof.backends.mpi import group

    return group
