"""The meeting place of ranks that are threads of one process.

A call never blocks.  Each rank posts its request under the group's call number; the last to arrive
checks that all requests agree, computes for all in rank order and completes the call for
everybody. Sends and receives meet in queues.  Groups need no rendezvous: a shared group is found
by name, global ranks and how often this rank created one of that key.

Nothing hangs.  A rank blocks only in :meth:`Hub.wait`, so whenever one begins to wait or ends, the
hub can test each waiter's *condition* (a count of blocked ranks would call a woken rank, which has
not run yet, blocked).  If no condition holds, it says who waits in what for whom.  A mismatch, a
rank that raises, a rank that returns early and a timeout wake everybody at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from shardproof.backends import arithmetic, errors
from shardproof.backends.request import Request
from shardproof.comm import PeerGone
from shardproof.errors import said
from shardproof.table import grouped

GroupKey = tuple[str, tuple[int, ...], int]


@dataclass(eq=False)
class Pending:
    """A call under way: a collective of a whole group, or one side of a point-to-point exchange."""

    group: Shared
    number: int
    posts: dict[int, Request] = field(default_factory=dict)
    done: bool = False
    writes: list[list[arithmetic.Write]] = field(default_factory=list)
    #: Group rank of the sender, once a receive is matched.
    source: int = -1

    @property
    def mismatched(self) -> bool:
        """Whether the ranks that arrived differ; known once all have arrived or no more can."""
        return not self.is_exchange and len({r.signature() for r in self.posts.values()}) > 1

    @property
    def is_exchange(self) -> bool:
        return self.number < 0

    def lost(self) -> list[int]:
        """Global ranks that will never come, for they are gone."""
        if self.done or not self.group.gone:
            return []
        return [rank for rank in self.missing() if rank in self.group.gone]

    def missing(self) -> list[int]:
        """Global ranks that have yet to come (a receive from any rank waits for all others)."""
        if not self.is_exchange:
            return [r for i, r in enumerate(self.group.ranks) if i not in self.posts]
        ((own, request),) = self.posts.items()
        if request.peer is None:
            return [r for i, r in enumerate(self.group.ranks) if i != own]
        return [self.group.ranks[request.peer]]

    def take_writes(self, rank: int) -> list[arithmetic.Write]:
        """The results that global ``rank`` has yet to copy into its own outputs (with delay only),
        once.
        """
        if not self.writes:
            return []
        place = 0 if self.is_exchange else self.group.ranks.index(rank)
        taken, self.writes[place] = self.writes[place], []
        return taken

    def call(self, rank: int) -> str:
        """The call of global ``rank`` in words; peers are given as global ranks."""
        request = self.posts[self.group.ranks.index(rank)]
        text = request.text()
        if request.peer is not None and self.group.ranks != tuple(range(len(self.group.ranks))):
            text += f" (peer is global rank {self.group.ranks[request.peer]})"
        number = "" if self.is_exchange else f", its call {self.number}"
        return f"{text} of group {errors.few_spans(self.group.ranks)}{number}"


@dataclass(eq=False)
class Shared:
    """The state that the ranks of one group share."""

    ranks: tuple[int, ...]
    calls: dict[int, Pending] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    #: Unmatched point-to-point calls in the order of their arrival.
    exchanges: deque[Pending] = field(default_factory=deque)
    #: Global ranks of members that are gone.
    gone: set[int] = field(default_factory=set)


class Hub:
    """One world of ``world`` rank threads; they share it, and their starter makes it.

    ``timeout_s`` bounds every wait.  With ``delay`` results become visible only where the program
    waits for them, with ``poison`` receive buffers hold NaN until then: either shows a missing
    wait.
    """

    def __init__(
        self, world: int, timeout_s: float, delay: bool = False, poison: bool = False
    ) -> None:
        if world < 1:
            raise ValueError(f"a world needs at least one rank, not {world}")
        self.world, self.timeout_s = world, timeout_s
        self.delay, self.poison = delay or poison, poison
        self.store = dist.HashStore()
        self.failure: errors.CommError | None = None
        self._lock = threading.Lock()
        self._wakers = [threading.Condition(self._lock) for _ in range(world)]
        self._groups: dict[GroupKey, Shared] = {}
        self._waiting: dict[int, Pending] = {}
        self._ended: set[int] = set()
        self._last = ["nothing yet"] * world

    # ------------------------------------------------------------------------------ life of ranks

    def fail(self, rank: int, error: BaseException) -> None:
        """Rank ``rank`` raised ``error``: everybody else raises :class:`RankFailed`.

        An error that is itself a consequence of a failed call changes nothing.
        """
        with self._lock:
            self._ended.add(rank)
            if self.failure is None:
                name = type(error).__name__
                self._fail(errors.RankFailed(f"rank {rank} raised {name}: {said(error)}", rank))

    def give_up(self, error: errors.CommError) -> None:
        """Raise ``error``, or what went wrong before, on every rank."""
        with self._lock:
            self._fail(error)
            self._raise_failure()

    def depart(self, rank: int) -> None:
        """Rank ``rank`` is gone from its groups: ranks that wait for it raise :class:`PeerGone`."""
        with self._lock:
            for group in self._groups.values():
                if rank in group.ranks:
                    group.gone.add(rank)
            for waker in self._wakers:
                waker.notify_all()

    def renew(self) -> None:
        """Reset all groups, as if no rank had called them or were gone; no rank waits."""
        with self._lock:
            for group in self._groups.values():
                for part in (group.calls, group.counts, group.exchanges, group.gone):
                    part.clear()

    def rank_done(self, rank: int) -> None:
        """Rank ``rank`` returned; a rank that waits for it will never be answered."""
        with self._lock:
            self._ended.add(rank)
            for waiter, pending in list(self._waiting.items()):
                self._check_ended(waiter, pending)
            self._check_deadlock()

    def never_coming(
        self, there: Sequence[int], missing: Sequence[int]
    ) -> dict[int, errors.Absence]:
        """Those of ``missing`` who will never come to ``there``, who wait outside of any call.

        They have ended, or wait for a rank that waits for them.
        """
        with self._lock:
            self._raise_failure()
            if gone := self._ended.intersection(missing):
                return dict.fromkeys(sorted(gone), errors.Absence("it has ended", ended=True))
            held, found = set(there), dict[int, errors.Absence]()
            while grown := {
                rank: errors.Absence(f"it waits in {pending.call(rank)}")
                for rank, pending in self._waiting.items()
                if rank not in held
                and not pending.done
                and not pending.lost()
                and _held(pending, held)
            }:
                held |= set(grown)
                found |= grown
            return {rank: absence for rank, absence in found.items() if rank in missing}

    # -------------------------------------------------------------------------------------- calls

    def group(self, name: str, ranks: tuple[int, ...], nth: int) -> Shared:
        """The shared side of a group; the same object for all its members."""
        with self._lock:
            return self._groups.setdefault((name, ranks, nth), Shared(ranks))

    def post(self, shared: Shared, rank: int, request: Request) -> Pending:
        """Group rank ``rank`` makes a collective call; the last to arrive carries it out."""
        with self._lock:
            self._raise_failure()
            number = shared.counts.get(rank, 0)
            shared.counts[rank] = number + 1
            pending = shared.calls.setdefault(number, Pending(shared, number))
            pending.posts[rank] = request
            self._last[shared.ranks[rank]] = request.text()
            complete = len(pending.posts) == len(shared.ranks)
            if complete:
                if pending.mismatched:
                    self._fail(errors.CollectiveMismatch(_mismatch(pending)))
                    self._raise_failure()
                del shared.calls[number]
        if complete:
            self._compute(pending)
            with self._lock:
                self._complete(pending)
        return pending

    def post_exchange(self, shared: Shared, rank: int, request: Request) -> Pending:
        """Group rank ``rank`` sends or receives; the second to arrive carries it out."""
        with self._lock:
            self._raise_failure()
            own = Pending(shared, -1, {rank: request})
            self._last[shared.ranks[rank]] = request.text()
            other = next((p for p in shared.exchanges if _meets(rank, request, p)), None)
            if other is None:
                shared.exchanges.append(own)
                return own
            shared.exchanges.remove(other)
            sender, receiver = (own, other) if request.operation == "send" else (other, own)
            receiver.source = next(iter(sender.posts))
        self._exchange(sender, receiver)
        with self._lock:
            self._complete(sender)
            self._complete(receiver)
        return own

    def wait(self, rank: int, pending: Pending, timeout_s: float | None = None) -> None:
        """Block global ``rank`` until ``pending`` is done; raises the failure that prevents it."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        with self._lock:
            if pending.done:
                return
            self._raise_failure()
            self._waiting[rank] = pending
            try:
                self._check_ended(rank, pending)
                self._check_deadlock()
                deadline = time.monotonic() + limit
                while not pending.done:
                    self._raise_failure()
                    if lost := pending.lost():
                        text = (
                            f"{errors.name_ranks(lost)} left without joining {pending.call(rank)}"
                        )
                        raise PeerGone(text)
                    left = deadline - time.monotonic()
                    if left <= 0 and pending.mismatched:
                        self._fail(errors.CollectiveMismatch(_mismatch(pending)))
                    elif left <= 0:
                        self._fail(errors.PeerTimeout(self._timed_out(rank, pending, limit)))
                    else:
                        self._wakers[rank].wait(left)
            finally:
                self._waiting.pop(rank, None)

    # ----------------------------------------------------------------------------------- internals

    def _compute(self, pending: Pending) -> None:
        """The results: written, or kept for a rank that waits. No name here outlives the return."""
        requests = [pending.posts[i] for i in range(len(pending.group.ranks))]
        try:
            writes = arithmetic.run(requests)
        except errors.CommError as error:
            with self._lock:
                self._fail(errors.CollectiveMismatch(f"{error}; {_mismatch(pending)}"))
                self._raise_failure()
        pending.writes = [[] for _ in writes]
        if self.delay:
            kept: dict[int, Tensor] = {}
            for rank, own in enumerate(writes):
                for target, value in own:
                    copy = kept.setdefault(id(value), arithmetic.copy(value))
                    pending.writes[rank].append((target, copy))
        else:
            for own in writes:
                arithmetic.write(own)

    def _exchange(self, sender: Pending, receiver: Pending) -> None:
        """Copy now, or for a rank that waits. No name here outlives the return: a thread that has
        not resumed yet would keep the other rank's tensor alive.
        """
        (sent,), (received,) = sender.posts.values(), receiver.posts.values()
        pairs = [(r[0], s[0]) for r, s in zip(received.outputs, sent.inputs, strict=True)]
        if any(r.numel() != s.numel() or r.dtype != s.dtype for r, s in pairs):
            texts = [
                f"rank {side.group.ranks[place]} calls {call.text()}"
                for side in (sender, receiver)
                for place, call in side.posts.items()
            ]
            with self._lock:
                self._fail(errors.CollectiveMismatch(", but ".join(texts)))
                self._raise_failure()
        if self.delay:
            receiver.writes = [[(to, arithmetic.copy(value)) for to, value in pairs]]
        else:
            arithmetic.write(pairs)

    def _complete(self, pending: Pending) -> None:
        """The call is over; a rank that has yet to wait for it keeps no peer's tensors alive."""
        pending.done = True
        for rank in (pending.group.ranks[place] for place in pending.posts):
            if self._waiting.get(rank) is pending:
                self._wakers[rank].notify()
        pending.posts.clear()

    def _fail(self, error: errors.CommError) -> None:
        if self.failure is None:
            self.failure = error
        for waker in self._wakers:
            waker.notify_all()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure.again()

    def _check_ended(self, rank: int, pending: Pending) -> None:
        """Fail if ``rank`` waits for somebody who has ended."""
        if pending.done or not self._ended:
            return
        request = pending.posts[pending.group.ranks.index(rank)]
        if pending.is_exchange and request.peer is None:
            return
        gone = [r for r in pending.missing() if r in self._ended]
        if gone and pending.mismatched:
            self._fail(errors.CollectiveMismatch(_mismatch(pending)))
        elif gone:
            text = f"{errors.name_ranks(gone)} ended without joining {pending.call(rank)}"
            self._fail(errors.RankEnded(f"{text}, where rank {rank} waits", gone[0]))

    def _check_deadlock(self) -> None:
        """Fail if every rank that still runs waits and no waiter's condition holds."""
        # Ranks that neither wait nor have ended run.  A look at all N at each wait would be N^2.
        if len(self._waiting) + len(self._ended) < self.world:
            return
        waits = [self._waiting.get(rank) for rank in range(self.world) if rank not in self._ended]
        if not waits or self.failure is not None:
            return
        if any(call is None or call.done or call.lost() for call in waits):
            return
        mismatched = next((p for p in self._waiting.values() if p.mismatched), None)
        if mismatched is not None:
            self._fail(errors.CollectiveMismatch(_mismatch(mismatched)))
            return
        calls = {
            rank: f"in {call.call(rank)} for {errors.name_ranks(call.missing())}"
            for rank, call in self._waiting.items()
        }
        lines = errors.who_does("wait", calls)
        if ended := sorted(self._ended):
            lines.append(f"{errors.name_ranks(ended)} {'have' if len(ended) > 1 else 'has'} ended")
        self._fail(errors.Deadlock("deadlock: " + "; ".join(lines)))

    def _timed_out(self, rank: int, pending: Pending, limit: float) -> str:
        missing = pending.missing()
        calls = grouped((self._last[rank], rank) for rank in missing)
        lines = [f"the last call of {errors.name_ranks(r)} was {text}" for text, r in calls.items()]
        last = "; ".join(lines[: errors.MOST_CALLS])
        return (
            f"no answer from {errors.name_ranks(missing)} in {limit:g} s: rank {rank} waits in "
            f"{pending.call(rank)}; {last}"
        )


def _held(pending: Pending, held: set[int]) -> bool:
    """Whether a rank that waits for ``pending`` waits for ranks that are ``held``."""
    from_any = pending.is_exchange and next(iter(pending.posts.values())).peer is None
    return (all if from_any else any)(rank in held for rank in pending.missing())


def _meets(rank: int, request: Request, other: Pending) -> bool:
    """Whether ``request`` of ``rank`` and the waiting ``other`` are two sides of one exchange."""
    ((peer, theirs),) = other.posts.items()
    if {request.operation, theirs.operation} != {"send", "recv"} or request.tag != theirs.tag:
        return False
    return request.peer in (None, peer) and theirs.peer in (None, rank)


def _mismatch(pending: Pending) -> str:
    ranks = pending.group.ranks
    calls = {ranks[i]: request.text() for i, request in pending.posts.items()}
    return errors.differing_calls(pending.number, ranks, calls)
