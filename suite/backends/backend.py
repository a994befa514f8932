"""The interface of a backend: each is a subclass of :class:`Backend`, in a file of its own.

Reports, scenarios and the command line ask for properties.  So the module of a subclass imports
torch, or the library behind the backend, only inside its methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch.distributed import Store

    from shardproof.backends.disturbances import Disturbances
    from shardproof.backends.errors import Absence, CommError
    from shardproof.errors import Problem

#: Operation -> names of the algorithms that carry it out (``bench/model/alpha_beta.py``).
Algorithms = Mapping[str, Sequence[str]]
#: Operation -> factor -> what is taken of that factor (``cases/kinds/calls/``); ``None``: nothing.
Takes = Mapping[str, Mapping[str, Sequence[str]] | None]


@dataclass(frozen=True)
class Joining:
    """The data that a rank (a thread or a process) needs to join the default process group.

    ``rendezvous`` is a file that does not exist yet, or a store, the same for all ranks.  ``hub``
    is what :meth:`Backend.hub` made for ranks that are threads.  Calls wait at most ``timeout_s``
    seconds.
    """

    rank: int
    world: int
    rendezvous: Path | Store
    timeout_s: float
    ledgers: bool
    hub: Any = None
    disturbances: Disturbances | None = None

    @property
    def timeout(self) -> timedelta:
        """The longest wait of a call."""
        return timedelta(seconds=self.timeout_s)

    @property
    def store(self) -> Store:
        """The store in which the ranks meet."""
        from torch.distributed import FileStore

        place = self.rendezvous
        return FileStore(str(place), self.world) if isinstance(place, Path) else place


class Backend(ABC):
    """A way for ranks to talk, and what the suite must know of it."""

    #: The name in scenarios, case ids and ``--backend``.
    name: str
    #: Whether the ranks are threads of one process; else each is a process.
    threads: bool = False
    #: Where models and batches lie, as torch names the device.
    device: str = "cpu"
    #: Whether several ranks may compute on one device.
    shares_devices: bool = False
    #: Whether an ``mpirun`` makes the processes its ranks.
    mpirun: bool = False
    #: Whether a rank can send a tensor to one other rank, as stages of pipelines do.
    sends: bool = True
    #: Whether any thread of a rank may make calls.
    any_thread: bool = True
    #: Whether a rank burns CPU while it waits inside a call.
    polls: bool = False
    #: Whether sums are left folds in rank order, at any world size.
    adds_in_rank_order: bool = False
    #: Whether one member can leave its groups inside a step while the others live on.
    outlives_members: bool = False
    #: Whether tensors have values; without, only calls, shapes and bytes can be checked.
    has_values: bool = True
    #: Whether the memory ledger sees a tensor freed where the program frees it.
    exact_memory: bool = False
    #: Whether ranks can delay what crosses nodes that a cluster declares far from each other.
    delays_far_nodes: bool = False
    #: Whether ``--backend`` moves the cells of other backends here; else scenarios name it.
    takes_over: bool = True
    #: Whether a scenario calls it with what is known of it, so that no other calls move here.
    has_own_calls: bool = False
    #: The calls that it takes, where it does not take all.
    takes: ClassVar[Takes] = {}
    #: Whether cases are skipped, and no error, where ``--backend`` names it and it is missing.
    skips_if_missing: bool = False
    #: Seconds that a case takes about, where none has run yet (4 ranks, two cores).
    default_seconds: float = 0.8
    #: Whether calls run while ranks compute, and why; ``None``: if a core is left for them.
    hides_latency: bool | None = None
    hides_because: str = ""
    #: Its algorithms, where these are no rings; ``None``: not known, so times are not modelled.
    algorithms: ClassVar[Algorithms | None] = None
    #: What to do where it cannot be used.
    remedy: str = "see docs/add-a-backend.md"

    @abstractmethod
    def available(self, world: int = 1) -> str | None:
        """Why ``world`` ranks cannot use it on this machine; ``None``: they can."""

    def unreachable(self) -> Problem | None:
        """Why ranks on this machine cannot reach each other over it; ``None``: nothing is known.

        Asked after ranks broke.
        """
        return None

    @abstractmethod
    def join(self, joining: Joining) -> None:
        """Initialize the default process group of the calling rank."""

    def leave(self) -> bool:
        """Destroy the groups of the calling rank; whether all of its calls had ended."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        return True

    def ranks(self, world: int) -> Mapping[int, tuple[int, ...]]:
        """The ranks that run, each with all that its record stands for (empty: itself alone)."""
        return dict.fromkeys(range(world), ())

    def hub(self, world: int, timeout_s: float) -> Any:
        """The state that ranks share if they are threads, made before they start."""
        return None

    def is_recording(self) -> bool:
        """Whether a group that the calling process makes now goes through a ledger of calls."""
        return False

    # A native backend notices none of what follows: the launcher ends its ranks.

    def tell_failure(self, error: BaseException) -> None:
        """Wake the ranks that wait: the calling one raised ``error``."""

    def give_up(self, error: CommError) -> None:
        """Raise ``error`` on every rank."""

    def never_coming(
        self, there: Sequence[int], missing: Sequence[int]
    ) -> Mapping[int, Absence] | None:
        """Those of ``missing`` who will never join ``there`` outside of any call.

        ``None``: the backend cannot tell, so what the launcher sees of the ranks decides.

        :raises CommError: a rank has failed.
        """
        return None

    def depart(self) -> None:
        """Take the calling rank out of all groups, where ``outlives_members``."""
        raise NotImplementedError(f"backend {self.name} cannot continue after a rank has left")

    def renew(self) -> None:
        """Let all groups forget calls that were never completed, where ``outlives_members``."""
        raise NotImplementedError(f"backend {self.name} cannot continue after a rank has left")

    # ------------------------------------------------------------------ derived from properties

    def adds_in_order(self, ranks: int) -> bool:
        """Whether sums over ``ranks`` are those of a left fold in rank order."""
        return ranks <= 2 or self.adds_in_rank_order

    def adds_like_one(self, ranks: int) -> bool:
        """Whether such sums have the bits of one process, which computes on a CPU."""
        return self.device == "cpu" and self.adds_in_order(ranks)

    def devices(self, ranks: int) -> int:
        """Accelerators that ``ranks`` of one machine need."""
        if self.device == "cpu":
            return 0
        return 1 if self.shares_devices else ranks
