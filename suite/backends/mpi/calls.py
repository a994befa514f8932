"""The calls of a rank over MPI that are under way, and the waiting for them.

Nothing blocks but :meth:`Calls.wait`, and that polls: every call under way is advanced, then the
core is given up, first for others that want it, then for a time that grows with the wait.  Bytes
move only while some call is polled; nothing is overlapped with computing.  Ranks that wait for long
compare what they wait in through the store.

Imported by ranks only, after ``group.start``: importing it needs mpi4py.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.utils._python_dispatch import _disable_current_modes

from shardproof.backends import errors
from shardproof.backends.mpi.messages import STEPS, Mail, MpiMessage, Steps
from shardproof.backends.request import Request
from shardproof.errors import said

#: Polls that only offer the core to others before a rank sleeps between two of them.
SPINS = 20
#: Of the time that a rank has waited, what it sleeps until the next poll; in seconds at most.
SLEEP_SHARE, LONGEST_SLEEP = 0.1, 0.002
#: Seconds between two looks at what the others say in the store; seconds of waiting from which on
#: a rank says there what it waits in, and for one that has ended.
LOOK_SECONDS, PATIENCE_SECONDS, ENDED_SECONDS = 0.05, 0.5, 0.5

FAILED, ENDED = "failed", "ended"


@dataclass(eq=False)
class CallUnderWay:
    """A call of this rank; ``key`` names a collective one among all ranks."""

    request: Request
    mail: Mail
    #: Global ranks of the group.
    ranks: tuple[int, ...]
    steps: Steps
    key: str = ""
    messages: list[MpiMessage] = field(default_factory=list)
    done: bool = False
    #: Group rank of the sender, once something has come.
    source: int = -1
    told: bool = False

    @property
    def text(self) -> str:
        return f"{self.request.text()} of group {errors.spans(self.ranks)}"

    @property
    def rank(self) -> int:
        """The own global rank."""
        return self.ranks[self.mail.rank]

    def advance(self) -> bool:
        """Go as far as what has arrived allows; whether the call is over."""
        while not self.done and self._complete():
            with torch.no_grad(), _disable_current_modes():
                try:
                    following = next(self.steps, None)
                except errors.CollectiveMismatch as error:
                    what = f"rank {self.rank} calls {self.text}: {error}"
                    raise errors.CollectiveMismatch(what) from error
            self.done = following is None
            self.messages = following or []
        return self.done

    def _complete(self) -> bool:
        if not self.messages:
            return True
        statuses = [message.status for message in self.messages]
        try:
            if not MPI.Request.Testall([m.request for m in self.messages], statuses):
                return False
        except MPI.Exception as error:
            raise self._refused(error) from error
        for message in self.messages:
            if not message.receives:
                continue
            self.source = message.status.Get_source()
            came = message.status.Get_count(MPI.BYTE)
            if came != message.bytes:
                raise self._misfit(f"{came} bytes", message)
        return True

    def _refused(self, error: MPI.Exception) -> errors.CommError:
        codes = [m.status.Get_error() for m in self.messages]
        classes = {error.Get_error_class(), *map(MPI.Get_error_class, codes)}
        if MPI.ERR_TRUNCATE in classes:
            longer = [m for m in self.messages if m.receives]
            return self._misfit("more", longer[0])
        return errors.CommError(f"{self.text}: MPI says {error}")

    def _misfit(self, came: str, message: MpiMessage) -> errors.CollectiveMismatch:
        source = self.source if message.peer == MPI.ANY_SOURCE else message.peer
        return errors.CollectiveMismatch(
            f"rank {self.rank} calls {self.text} and expects {message.bytes} bytes, but "
            f"rank {self.ranks[source]} sends it {came}"
        )

    def missing(self) -> list[int]:
        """Global ranks that this call still waits for."""
        peers = {m.peer for m in self.messages if not m.request.Get_status()}
        if MPI.ANY_SOURCE in peers:
            return [self.ranks[peer] for peer in self.mail.others]
        return [self.ranks[peer] for peer in sorted(peers)]


class Calls:
    """All calls of this rank that are under way; ``store`` is what the ranks tell one another."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._open: list[CallUnderWay] = []
        self._failure: errors.CommError | None = None

    def begin(
        self, request: Request, mail: Mail, ranks: tuple[int, ...], tag: int, key: str
    ) -> CallUnderWay:
        """Begin a call, and let earlier calls progress."""
        self._raise_failure()
        call = CallUnderWay(request, mail, ranks, STEPS[request.operation](request, mail, tag), key)
        self._open.append(call)
        self.advance()
        return call

    def advance(self) -> None:
        """Let every call progress: a peer may wait for any of them.

        :raises CommError: what is wrong with one of them; every call to come raises it as well.
        """
        try:
            self._open = [call for call in self._open if not call.advance()]
        except errors.CommError as error:
            self._failure = error
            raise

    def wait(self, call: CallUnderWay, limit: float) -> None:
        """Block until ``call`` is done; raises the failure that prevents it."""
        began = looked = time.monotonic()
        polls = 0
        while not call.done:
            self._raise_failure()
            self.advance()
            if call.done:
                return
            polls += 1
            if polls < SPINS:
                os.sched_yield()
                continue
            now = time.monotonic()
            waited = now - began
            if now - looked > max(LOOK_SECONDS, waited / 20):
                looked = now
                self._look(call, waited)
            if waited > limit:
                missing = errors.name_ranks(call.missing()) if call.missing() else "any rank"
                where = f"rank {call.rank} waits in {call.text}"
                self._fail(errors.PeerTimeout(f"no answer from {missing} in {limit:g} s: {where}"))
            time.sleep(min(LONGEST_SLEEP, waited * SLEEP_SHARE))

    def end(self, rank: int, limit: float) -> bool:
        """Finish what others may still need; whether that was all.  Then tell that ``rank`` ended.

        What nobody will ever answer stays with MPI, and what it reads and writes stays alive.
        """
        deadline = time.monotonic() + limit
        while self._open and self._failure is None and time.monotonic() < deadline:
            self.advance()
            time.sleep(0.0002)
        if self._open:
            abandoned.extend(self._open)
        self._store.set(f"{ENDED}/{rank}", "1")
        return not self._open and self._failure is None

    def tell_failure(self, rank: int, error: BaseException) -> None:
        """``rank`` raised ``error``: inform ranks that wait; the first error counts."""
        if not isinstance(error, errors.RankFailed):
            text = f"rank {rank} raised {type(error).__name__}: {said(error)}"
            self._store.compare_set(FAILED, "", json.dumps([rank, text]))

    def ended(self, ranks: Sequence[int]) -> list[int]:
        """Those of ``ranks`` that have ended; calls under way continue.

        :raises CommError: a rank has failed, or a call under way.
        """
        self._raise_failure()
        self.advance()
        ended = [rank for rank in ranks if self._store.check([f"{ENDED}/{rank}"])]
        self._see_failure()  # after that look: a rank reports its error before it ends
        return ended

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.again()

    def _see_failure(self) -> None:
        if self._store.check([FAILED]):
            rank, text = json.loads(self._store.get(FAILED))
            self._fail(errors.RankFailed(text, rank))

    def _fail(self, error: errors.CommError) -> None:
        self._failure = error
        raise error

    def _look(self, call: CallUnderWay, waited: float) -> None:
        """Whether the store tells why this call will never be done."""
        self._see_failure()
        if waited < PATIENCE_SECONDS:
            return
        if call.key:
            self._compare(call)
        missing = call.missing()
        gone = [rank for rank in missing if self._store.check([f"{ENDED}/{rank}"])]
        anybody = call.request.operation == "recv" and call.request.peer is None
        if not gone or (anybody and gone != missing):
            return
        # What they sent before they ended is here by now.
        deadline = time.monotonic() + ENDED_SECONDS
        while time.monotonic() < deadline:
            self.advance()
            if call.done:
                return
            time.sleep(LONGEST_SLEEP)
        self._see_failure()
        text = f"{errors.name_ranks(gone)} ended without joining {call.text}"
        self._fail(errors.RankEnded(f"{text}, where rank {call.rank} waits", gone[0]))

    def _compare(self, call: CallUnderWay) -> None:
        """Fail if a rank that waits in the same call of the group calls something else."""
        own: list[Any] = [call.request.text(), zlib.crc32(call.request.agreed().encode())]
        if not call.told:
            call.told = True
            self._store.set(f"{call.key}/{call.rank}", json.dumps(own))
        calls = {call.rank: own}
        for rank in call.ranks:
            if rank != call.rank and self._store.check([f"{call.key}/{rank}"]):
                calls[rank] = json.loads(self._store.get(f"{call.key}/{rank}"))
        if len({digest for _, digest in calls.values()}) < 2:
            return
        texts = {rank: text for rank, (text, _) in calls.items()}
        number = int(call.key.rpartition("/")[2])
        self._fail(errors.CollectiveMismatch(errors.differing_calls(number, call.ranks, texts)))


#: Calls that ended ranks left unfinished: MPI may still write into their tensors.
abandoned: list[CallUnderWay] = []
