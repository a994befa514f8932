"""The traffic ledger: every call that a rank makes to a process group, native C++ calls included.

Logical bytes follow the collective model (what an algorithm of least volume must send, summed over
the group; N ranks, n payload bytes): all-reduce 2(N-1)n; all-gather (N-1) x total output;
reduce-scatter (N-1) x total input; broadcast and reduce (N-1)n; gather and scatter (N-1) shards;
all-to-all what leaves each rank; send n.  Each rank records the share that it sends, symmetric
collectives 1/N each, as an exact fraction: floats fail at N = 3.  Sources: Thakur, Rabenseifner and
Gropp 2005; ring and Rabenseifner algorithms reach these volumes.

What goes over the wire is another figure: gloo's reduce-scatter moves the bytes of an all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from shardproof.files import Exact, Stored
from shardproof.ledgers.program_order import PerRank, Phase, RankLog, inside_backward

#: What :attr:`LoggedCall.released` is of a tensor that is still there.
NEVER = -1


@dataclass(slots=True)
class LoggedCall(Stored):
    """One call to a process group (a coalesced call of two dtypes makes two entries).

    ``payload_bytes`` is the n of the model; ``logical_bytes`` this rank's share of what is sent.
    ``peer``: the global rank that a message is for, or comes from; ``None``: no message, or from
    anyone.  ``issued`` and ``waited`` are event numbers of the rank's log (``waited`` is ``None``
    if nobody ever waited); ``units_before`` is its unit clock at the issue.  ``strided``: a tensor
    of it was not contiguous.  ``released``: of a message, the number of the next event when the
    storage of its tensor was freed, :data:`NEVER` where it was not; ``None``: nobody looked, for no
    memory ledger was open.
    """

    sequence: int
    operation: str
    group: tuple[int, ...]
    axis: str
    dtype: str
    payload_bytes: int
    logical_bytes: Exact
    phase: Phase
    inside_backward: bool
    units_before: int
    issued: int
    waited: int | None = None
    floating: bool = True
    peer: int | None = None
    strided: bool = False
    released: int | None = None


@dataclass
class TrafficLedger:
    """Calls of one rank in program order."""

    log: RankLog
    calls: list[LoggedCall] = field(default_factory=list)

    def record(
        self,
        operation: str,
        group: tuple[int, ...],
        axis: str,
        loads: list[tuple[str, bool, int, Fraction]],
        peer: int | None = None,
        strided: bool = False,
    ) -> list[LoggedCall]:
        """Note a call; ``loads``: ``(dtype, floating, payload bytes, share sent)`` per dtype."""
        issued, sequence = self.log.tick(), len(self.calls)
        made = [
            LoggedCall(
                sequence=sequence,
                operation=operation,
                group=group,
                axis=axis,
                dtype=dtype,
                payload_bytes=payload,
                logical_bytes=share,
                phase=self.log.phase,
                inside_backward=inside_backward(),
                units_before=self.log.units,
                issued=issued,
                floating=floating,
                peer=peer,
                strided=strided,
            )
            for dtype, floating, payload, share in loads
        ]
        self.calls.extend(made)
        return made

    def waited(self, calls: list[LoggedCall]) -> None:
        """Note that the program waits for ``calls`` now (the first time counts)."""
        if calls and calls[0].waited is None:
            number = self.log.tick()
            for call in calls:
                call.waited = number

    def released(self, calls: list[LoggedCall], number: int | None = None) -> None:
        """Note that the storage that ``calls`` were made with is freed now, on whatever thread."""
        for call in calls:
            call.released = self.log.now if number is None else number


def share_sent(operation: str, size: int, rank: int, root: int | None, payload: int) -> Fraction:
    """Logical bytes that group rank ``rank`` of ``size`` sends (see the module's model).

    For an all-to-all the payload is what leaves the rank, its own chunk not counted.
    """
    if operation in ("send", "all_to_all"):
        return Fraction(payload)
    if operation == "all_reduce":
        return Fraction(2 * (size - 1) * payload, size)
    if operation in ("all_gather", "reduce_scatter"):
        return Fraction((size - 1) * payload, size)
    if operation in ("broadcast", "scatter"):
        return Fraction((size - 1) * payload if rank == root else 0)
    if operation in ("reduce", "gather"):
        return Fraction(payload if rank != root else 0)
    if operation in ("recv", "barrier"):
        return Fraction(0)
    raise ValueError(f"no traffic model for {operation!r}")


#: The ledger of the calling rank (``None`` with ledgers off); ``install`` sets it for the calling
#: thread, or with ``process`` for the whole process.
_LEDGER: PerRank[TrafficLedger] = PerRank()
current, install = _LEDGER.get, _LEDGER.set
