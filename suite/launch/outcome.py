"""How a rank ended, and which rank is to blame.

One failing rank makes the others fail: their peers vanish, so they see closed connections and
time out.  Such **consequences** are kept apart from causes, so that a report names the rank that a
reader should look at.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from shardproof.backends.errors import CollectiveMismatch, CommError, Deadlock, RankFailed
from shardproof.errors import bounded, said
from shardproof.files import DAMAGE, Stored, from_others, read_input, write_whole
from shardproof.launch import frames

Status = Literal["ok", "raised", "exited", "killed", "hung", "over budget", "early"]

_LAUNCH = str(Path(__file__).parent)
_MOST_FRAMES = 16

#: What gloo and the stores say, through plain RuntimeErrors, when a peer is gone or late.
_GONE = re.compile(
    r"connection (closed|reset|refused)|closed by peer|reset by peer|broken pipe|socket closed"
    r"|pair closure|gloo/transport|timed out|socket timeout|wait timeout|operation timeout"
    r"|store.*(timeout|timed)|read error|write error|enforce fail at .*gloo",
    re.IGNORECASE | re.DOTALL,
)
_LATE = re.compile(r"timed out|timeout", re.IGNORECASE)
#: Messages of native groups that name a fault of the calls themselves, not of a peer.
_MISMATCH = re.compile(r"mismatch between collectives|data size doesn't match", re.IGNORECASE)


@dataclass(frozen=True)
class RankOutcome(Stored):
    """How one rank ended.

    ``status``: ``ok``; ``raised`` a Python exception; ``exited`` by ``sys.exit`` or ``os._exit``;
    ``killed`` by a signal not ours, or for memory; ``hung``: ended by us when nothing happened any
    more; ``over budget``: ended by us after too many CPU seconds; ``early``: returned although its
    peers were still calling it.
    ``consequence``: another rank is to blame.  ``last_call`` and ``calls`` (their number) come from
    the heartbeat, ``ended`` is in seconds after the start, ``output`` the tail of what it printed.
    ``blames`` is the rank that a communication error names.  ``error_type`` is the exception's
    name, but ``PeerTimeout`` for whatever a native group raises when a peer is late.
    ``method`` is that of the contract which ran, ``place`` the implementation's innermost frame as
    ``file:line in function``.  ``autopsy``, of the rank to look at first: why ranks wait for ever,
    its ``cause`` in a word, and the rank that did not come (``culprit``).  ``injected``: when the
    suite made a fault here on purpose, in seconds after the start; ``idle_looks``: the watchdog's
    looks since then at which no rank could go on.
    """

    rank: int
    status: Status
    error_type: str = ""
    message: str = ""
    traceback: str = ""
    is_comm_error: bool = False
    exit_code: int | None = None
    signal: int | None = None
    last_call: str = ""
    record: Path | None = None
    consequence: bool = False
    ended: float = 0.0
    calls: int = 0
    output: str = ""
    blames: int | None = None
    method: str = ""
    place: str = ""
    autopsy: str = ""
    cause: str = ""
    culprit: int | None = None
    injected: float | None = None
    idle_looks: int = 0

    def store(self, file: Path) -> None:
        """Write it, for :meth:`stored`."""
        write_whole(file, json.dumps(vars(self), default=str))

    @classmethod
    def stored(cls, file: Path) -> RankOutcome:
        """The outcome that :meth:`store` wrote.

        :raises OSError: there is none.
        :raises ValueError: it is no outcome.
        """
        try:
            return from_others(cls, json.loads(read_input(file)))
        except DAMAGE as error:
            raise ValueError(f"the file is not a valid rank result: {error}") from error

    def sentence(self) -> str:
        """One line: ``rank 2 raised ValueError: ...``."""
        what = {
            "ok": "ended well",
            "raised": f"raised {self.error_type}",
            "exited": f"exited with code {self.exit_code}",
            "killed": "was killed",
            "hung": "hung",
            "over budget": "spent its budget",
            "early": "returned early",
        }[self.status]
        tail = f": {self.message}" if self.message else ""
        return f"rank {self.rank} {what}{tail}"


def of_exception(rank: int, error: BaseException, ended: float) -> RankOutcome:
    """The outcome of a rank whose program raised ``error``."""
    stack = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    # An error of Python's library is its caller's; what crashes there is named by the stack.
    inner = frames.innermost([frame for frame in stack if not frames.is_library(frame[0])])
    place = "" if inner is None else "{}:{} in {}".format(*inner)
    outcome = RankOutcome(
        rank,
        "raised",
        error_type=type(error).__name__,
        message=said(error),
        traceback=bounded(_trimmed(error)),
        ended=ended,
        method=frames.method(stack),
        place=place,
    )
    if isinstance(error, SystemExit):
        code = error.code
        number = code if isinstance(code, int) else 0 if code is None else 1
        message = f"sys.exit({code!r})"
        return replace(outcome, status="exited", message=message, exit_code=number)
    if (comm := _communication_error(error)) is None:
        return outcome
    if not isinstance(comm, CommError) and _LATE.search(said(comm)):
        outcome = replace(outcome, error_type="PeerTimeout")
    blamed = comm.rank if isinstance(comm, RankFailed) else None
    is_consequence = not _is_fault_of_calls(comm)
    return replace(outcome, is_comm_error=True, consequence=is_consequence, blames=blamed)


def mark_consequences(outcomes: Sequence[RankOutcome]) -> list[RankOutcome]:
    """Tell causes from consequences, now that all ranks have ended.

    Hung ranks whose stack ends in a communication call (marked ``is_comm_error``) wait for
    someone: they are consequences if there is anybody to wait for.  If only consequences are left,
    ranks that ended well before the first failure are ``early``, unless the ranks' last calls
    differ where they must agree: native gloo does not notice that.
    """
    settled = list(outcomes)
    failing = [o for o in settled if o.status != "ok"]
    difference = _differing_calls(settled)
    # With a line of its own gloo itself ends the process of a rank.
    aborted = [o for o in failing if o.status == "killed" and _MISMATCH.search(o.message)]
    if difference and aborted:
        first = min(aborted, key=lambda o: (o.ended, o.rank))
        message = f"{difference}; gloo then ended rank {first.rank}: {first.message}"
        kind = CollectiveMismatch.__name__
        settled[settled.index(first)] = replace(first, message=message, error_type=kind)
        return settled
    waiting = [o for o in failing if o.status == "hung" and o.is_comm_error]
    if any(not o.consequence and o not in waiting for o in failing):
        settled = [replace(o, consequence=True) if o in waiting else o for o in settled]
    elif failing:
        # Hung ranks end in the order in which we end them: that says nothing.
        first = min(failing, key=lambda o: (0.0 if o.status == "hung" else o.ended, o.rank))
        if difference:
            message = f"{difference} ({first.message})"
            kind = first.error_type or CollectiveMismatch.__name__
            blamed_call = replace(first, message=message, error_type=kind, consequence=False)
            return [blamed_call if o is first else o for o in settled]
        if first.error_type == "PeerTimeout" or _LATE.search(first.message):
            return settled  # nobody left: the calls waited for each other
        blamed = {o.blames for o in failing if o.blames is not None}
        for i, o in enumerate(settled):
            if o.status == "ok" and o.ended <= first.ended and (not blamed or o.rank in blamed):
                message = f"it returned while {_while(first)}"
                settled[i] = replace(o, status="early", message=message)
    return settled


def root_cause(outcomes: Sequence[RankOutcome]) -> RankOutcome | None:
    """The rank to look at first; ``None`` if all ended well.

    In this order: a rank that failed on its own (the earliest; of several with the same error the
    lowest); mismatched or deadlocked calls; a rank that hung outside communication (fewest calls
    first: it is the one the others wait for); one that returned early; the first failure at all.
    """
    failing = [o for o in outcomes if o.status != "ok"]
    if not failing:
        return None

    causes = [o for o in failing if not o.consequence]
    own = [o for o in causes if not o.is_comm_error and o.status not in ("hung", "early")]
    if own:
        first = min(own, key=lambda o: (o.ended, o.rank))
        alike = [o for o in own if (o.status, o.error_type) == (first.status, first.error_type)]
        return min(alike, key=lambda o: o.rank)
    if faults := [o for o in causes if o.is_comm_error and o.status == "raised"]:
        return min(faults, key=lambda o: (o.ended, o.rank))
    if hung := [o for o in causes if o.status == "hung"]:
        return min(hung, key=lambda o: (o.calls, o.rank))
    early = [o for o in failing if o.status == "early"]
    return min(early or failing, key=lambda o: (o.ended, o.rank))


def _differing_calls(outcomes: Sequence[RankOutcome]) -> str:
    """Two ranks that made the same number of calls, but whose last calls in one group differ."""
    for one in outcomes:
        for other in outcomes[one.rank + 1 :]:
            call, _, group = one.last_call.rpartition(" on ")
            call2, _, group2 = other.last_call.rpartition(" on ")
            if one.calls != other.calls or not call or group != group2 or call == call2:
                continue
            if not any(c.startswith(("send(", "recv(")) for c in (call, call2)):
                calls = f"rank {one.rank} calls {call}; rank {other.rank} calls {call2}"
                return f"the calls on {group} do not match: {calls}"
    return ""


def _while(other: RankOutcome) -> str:
    where = f" in {other.last_call}" if other.last_call else ""
    what = other.message.splitlines()[0] if other.message else other.status
    return f"rank {other.rank} was still{where or ' communicating'} ({what})"


def _communication_error(error: BaseException) -> BaseException | None:
    """The communication error that ``error`` is, or was raised from."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, CommError | dist.DistError | ConnectionError):
            return link
        text = said(link)
        if isinstance(link, RuntimeError) and (_GONE.search(text) or _MISMATCH.search(text)):
            return link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return None


def _is_fault_of_calls(error: BaseException) -> bool:
    if isinstance(error, CommError):
        return isinstance(error, CollectiveMismatch | Deadlock)
    return _MISMATCH.search(said(error)) is not None


def _trimmed(error: BaseException) -> str:
    """The traceback from the implementation's first frame on, 16 frames at most, with causes."""
    whole = traceback.TracebackException.from_exception(error, compact=True)
    todo = [whole]
    while todo:
        part = todo.pop()
        part.stack = _trim(part.stack)
        todo += [cause for cause in (part.__cause__, part.__context__) if cause is not None]
    return "".join(whole.format()).rstrip()


def _trim(stack: traceback.StackSummary) -> traceback.StackSummary:
    kept = list(stack)
    start = next((i for i, f in enumerate(kept) if not frames.is_judge(f.filename)), None)
    if start is None:  # the judge's own program failed: leave out the launcher only
        start = next(
            (i for i, f in enumerate(kept) if not f.filename.startswith(_LAUNCH)), len(kept)
        )
    kept = kept[start:]
    if len(kept) > _MOST_FRAMES:
        half = _MOST_FRAMES // 2
        gap = traceback.FrameSummary("...", 0, f"{len(kept) - 2 * half} more frames", line="")
        kept = [*kept[:half], gap, *kept[-half:]]
    return traceback.StackSummary.from_list(kept)
