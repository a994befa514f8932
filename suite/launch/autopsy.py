"""The cause of ranks that wait: from the last action of each rank to one cause and one sentence.

A collective needs all members of its group, a message its two ends.  So each rank that waits names
those that it waits for; whoever of them does not wait itself keeps all the others.  If all wait in
a ring, the calls do not match: that rank is named which left the order of calls of its own step
before, where one alone did.

Pure: :mod:`shardproof.launch.diagnosis` and ``shardproof watch`` say how each rank stands.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardproof.backends.errors import (
    MOST_CALLS,
    all_do,
    differing_calls,
    members_of,
    name_ranks,
    spans,
)
from shardproof.backends.heartbeat import ORDERED, Noted
from shardproof.launch.frames import SUITE
from shardproof.table import grouped

#: ``dead peer``: it is gone or stopped; ``rendezvous``: it never came to the making of a group;
#: ``desync``: it lives, and makes other calls or none; ``lost node``: its node is paused, or cut
#: off.
Cause = Literal["desync", "dead peer", "rendezvous", "lost node"]
How = Literal["gone", "stopped", "ended", "stands", "computes", "waits", "joins"]
#: Who is the reason rather: one that is gone explains one that only stands.
_GRAVEST: tuple[How, ...] = ("gone", "stopped", "ended", "stands", "computes")
_PEER = re.compile(r"^(?:send\(to|recv\(from) (\d+|any rank)")


@dataclass(frozen=True)
class Standing:
    """How one rank stood when nothing happened any more.

    ``how``: it is ``gone`` (killed, exited or raised), ``stopped``, has ``ended`` its program,
    ``stands`` outside of calls, ``computes``, ``waits`` in a call or ``joins`` a group that is
    being made.  ``words``: how it is gone.  ``calls`` and ``order`` are those of its heartbeat;
    ``awaited`` is the call that it waits in, if known.  ``place``: ``in f (file:line)``, or empty.
    """

    rank: int
    how: How
    words: str = ""
    calls: Sequence[Noted] = ()
    awaited: Noted | None = None
    place: str = ""
    order: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Autopsy:
    """Why ranks wait for ever; ``rank`` is ``None`` where nothing tells one from another."""

    cause: Cause
    sentence: str
    rank: int | None


@dataclass(frozen=True)
class Mismatch:
    """Call ``number`` of a group, from 0, that its members made differently."""

    group: Sequence[int]
    number: int
    calls: Mapping[int, Noted]

    @property
    def rank(self) -> int:
        """The first of those that differ from most; of two halves the one without the first."""
        sides = grouped((call.digest, rank) for rank, call in sorted(self.calls.items()))
        return min(sides.values(), key=lambda ranks: (len(ranks), -ranks[0]))[0]

    def __str__(self) -> str:
        texts = {rank: _split(call)[0] for rank, call in self.calls.items()}
        return differing_calls(self.number, self.group, texts)


def mismatch(calls: Mapping[int, Sequence[Noted]]) -> Mismatch | None:
    """The first call of a group that two ranks made differently; ``None``: none that is known."""
    made: dict[tuple[int, int], dict[int, Noted]] = {}
    for rank, noted in calls.items():
        for call in noted:
            if call.number:
                made.setdefault((call.group, call.number), {})[rank] = call
    differ = {
        key: ranks for key, ranks in made.items() if len({c.digest for c in ranks.values()}) > 1
    }
    if not differ:
        return None
    # Numbers of one group follow one another; of several groups the earliest call counts.
    first = min(differ, key=lambda key: min(call.sequence for call in differ[key].values()))
    found = differ[first]
    return Mismatch(_members(next(iter(found.values()))), first[1] - 1, found)


def find_mismatch(standings: Sequence[Standing]) -> Autopsy | None:
    """The first call that ranks made differently; ``None``: there is none."""
    differs = mismatch({one.rank: one.calls for one in standings})
    if differs is None:
        return None
    those = {one.rank: one for one in standings if one.rank in differs.calls}
    strayed = _strayed(those, those)
    rank = differs.rank if strayed is None else strayed
    other = next(
        r for r, call in differs.calls.items() if call.digest != differs.calls[rank].digest
    )
    known = {r: those[r].place for r in (rank, other)}
    # Of the rank that is not blamed only a line of the user's own helps.
    places = [f"rank {r} {at}" for r, at in known.items() if at and (r == rank or SUITE not in at)]
    sentence = f"desync: {differs}" + (f" ({', '.join(places)})" if places else "")
    return Autopsy("desync", sentence, rank)


def of_node(standings: Sequence[Standing], ranks: Collection[int], node: str) -> Autopsy:
    """Ranks that wait for those of a node that cannot be reached; ``node`` says it in words."""
    there = {one.rank: one for one in standings}
    waits = {rank: call for rank, one in there.items() if (call := _awaited(one, there))}
    wait = {rank: call for rank, call in waits.items() if rank not in ranks} or waits
    told = ""
    if wait:
        first = min(wait)
        same = [rank for rank in wait if _key(wait[rank]) == _key(wait[first])]
        told = f"; {all_do('wait', same)} in {_named(wait[first])}{_at(there[first])}"
    return Autopsy("lost node", f"lost node: {node}{told}", min(ranks))


def find(standings: Sequence[Standing]) -> Autopsy | None:
    """Why these ranks wait; ``None``: no rank waits for another, as far as is known."""
    if differing := find_mismatch(standings):
        return differing
    ranks = {one.rank: one for one in standings}
    if (joining := [one.rank for one in standings if one.how == "joins"]) and len(ranks) > 1:
        return _rendezvous(ranks, joining)
    waits = {one.rank: call for one in standings if (call := _awaited(one, ranks)) is not None}
    if astray := {rank: call for rank, call in waits.items() if _is_astray(call)}:
        return _nobody(astray, ranks)
    lacks = {rank: _missing(rank, call, ranks) for rank, call in waits.items()}
    lacks = {rank: missing for rank, missing in lacks.items() if missing}
    if not lacks:
        return _stopped(ranks)
    late = Counter(rank for missing in lacks.values() for rank in missing)
    free = [rank for rank in late if rank not in lacks]
    if (stopped := _stopped(ranks)) and stopped.rank not in late:
        return stopped  # ranks of its process were stopped with it, in the midst of anything
    if free:
        culprit = min(free, key=lambda r: (_GRAVEST.index(_how(ranks[r])), -late[r], r))
        dead = ranks[culprit].how in ("gone", "stopped")
        cause: Cause = "dead peer" if dead else "desync"
        return Autopsy(cause, f"{cause}: {_told(culprit, ranks, waits, lacks)}", culprit)
    most = [rank for rank in late if late[rank] == max(late.values())]
    # A collective has more members to be right than a message has ends.
    of_groups = {rank for one, missing in lacks.items() if waits[one].number for rank in missing}
    alone = _strayed(ranks, late)
    if alone is None:
        alone = next((min(those) for those in (most, of_groups) if len(those) == 1), None)
    if alone is not None:
        return Autopsy("desync", f"desync: {_told(alone, ranks, waits, lacks)}", alone)
    ring = [
        f"rank {rank} waits in {_named(waits[rank])} for {name_ranks(sorted(missing))}"
        f"{_at(ranks[rank])}"
        for rank, missing in sorted(lacks.items())[:MOST_CALLS]
    ]
    if len(lacks) > len(ring):
        ring.append(f"{len(lacks) - len(ring)} other ranks wait alike")
    tail = "each waits for another, and none of them arrived"
    return Autopsy("desync", f"desync: {'; '.join(ring)}; {tail}", None)


def _stopped(ranks: Mapping[int, Standing]) -> Autopsy | None:
    """A rank that is stopped while no other has come to a call that needs it."""
    rank = next((rank for rank, one in ranks.items() if one.how == "stopped"), None)
    if rank is None:
        return None
    sentence = f"dead peer: rank {rank} cannot continue: {_instead(ranks[rank], None)}"
    return Autopsy("dead peer", sentence, rank)


def _how(one: Standing) -> How:
    return one.how if one.how in _GRAVEST else "stands"


def _rendezvous(ranks: Mapping[int, Standing], joining: Sequence[int]) -> Autopsy | None:
    absent = [rank for rank in ranks if rank not in joining]
    if not absent:
        return None
    culprit = min(absent, key=lambda r: (_GRAVEST.index(_how(ranks[r])), r))
    head = f"{all_do('wait', joining)} for a group to be made{_at(ranks[joining[0]])}"
    tail = f"{name_ranks(absent)} never came: {_instead(ranks[culprit], None)}"
    return Autopsy("rendezvous", f"rendezvous: {head}; {tail}", culprit)


def _awaited(one: Standing, ranks: Mapping[int, Standing]) -> Noted | None:
    """The call that the rank waits in: as it noted, or else its first that somebody lacks."""
    if one.how != "waits" or not one.calls:
        return None
    if one.awaited is not None:
        return one.awaited
    lacking = (c for c in one.calls if c.number and _missing(one.rank, c, ranks))
    return next(lacking, one.calls[-1])


def _missing(rank: int, call: Noted, ranks: Mapping[int, Standing]) -> list[int]:
    """The ranks that have not come to ``call`` of ``rank``."""
    members = _members(call)
    if call.number:
        reached = {
            one: max((c.number for c in ranks[one].calls if c.group == call.group), default=0)
            for one in members
            if one in ranks
        }
        return [one for one, number in reached.items() if number < call.number]
    match = _PEER.match(call.text)
    if match is None:
        return []
    if match[1].isdigit():
        return [members[int(match[1])]]
    return [one for one in members if one != rank and one in ranks]


def _is_astray(call: Noted) -> bool:
    """Whether it is a message to or from a rank that its group does not have."""
    match = _PEER.match(call.text)
    return match is not None and match[1].isdigit() and int(match[1]) >= len(_members(call))


def _nobody(astray: Mapping[int, Noted], ranks: Mapping[int, Standing]) -> Autopsy:
    """Ranks that wait for a rank that is none."""
    each = [
        f"rank {rank} waits in {_named(call)}{_at(ranks[rank])}, a group of {len(_members(call))}"
        for rank, call in sorted(astray.items())[:MOST_CALLS]
    ]
    return Autopsy("desync", f"desync: {'; '.join(each)}: the group has no such rank", min(astray))


def _strayed(ranks: Mapping[int, Standing], among: Iterable[int]) -> int | None:
    """The one rank that left its own order of calls; ``None``: none did, or several."""
    for leniently in (False, True):
        strayed = [rank for rank in among if _left_its_order(ranks[rank].order, leniently)]
        if len(strayed) == 1:
            return strayed[0]
    return None


def _left_its_order(order: Sequence[tuple[int, int]], leniently: bool) -> bool:
    """Whether the calls of the step under way are others than those of the step before it.

    ``leniently``: that one may have had calls of another kind beside, as first steps have.
    """
    step = order[-1][0] if order else -1
    if step < 1 or (len(order) == ORDERED and order[0][0] >= step - 1):
        return False
    before, now = ([text for at, text in order if at == one] for one in (step - 1, step))
    if leniently:
        before = [text for text in before if text in now]
    common = min(len(before), len(now))
    return before[:common] != now[:common]


def _told(
    culprit: int,
    ranks: Mapping[int, Standing],
    waits: Mapping[int, Noted],
    lacks: Mapping[int, Collection[int]],
) -> str:
    direct = [rank for rank, missing in lacks.items() if culprit in missing]
    first = waits[direct[0]]
    same = [rank for rank in direct if _key(waits[rank]) == _key(first)]
    others = [rank for rank in lacks if rank not in (*same, culprit)]
    head = f"{all_do('wait', same)} in {_named(first)}{_at(ranks[same[0]])}"
    blocked = culprit in lacks or ranks[culprit].awaited is not None
    made = _instead(ranks[culprit], waits.get(culprit) if blocked else None)
    in_turn = f"; {all_do('wait', others)} in turn" if others else ""
    return f"{head}; rank {culprit} never came: {made}{in_turn}"


def _key(call: Noted) -> tuple[str, int]:
    """The key that one call has on two ranks."""
    return call.text, call.number


def _instead(one: Standing, waits: Noted | None) -> str:
    last = f"its last call: {_named(one.calls[-1])}" if one.calls else "it made no call"
    if waits is not None:
        made = "" if waits == one.calls[-1] else f", {last}"
        return f"it waits in {_named(waits)}{_at(one)}{made}"
    how = {
        "gone": f"it {one.words}",
        "stopped": "its process was stopped",
        "ended": "it has returned",
        "computes": "it computes",
    }.get(one.how, "it stands")
    return f"{how}{_at(one)}, {last}"


def _split(call: Noted) -> tuple[str, str]:
    text, _, group = call.text.rpartition(" on ")
    return text, group


def _members(call: Noted) -> list[int]:
    return members_of(_split(call)[1])


def _named(call: Noted) -> str:
    text, _ = _split(call)
    number = f"call {call.number - 1} of " if call.number else ""
    return f"{text}, {number}group {spans(_members(call))}"


def _at(one: Standing) -> str:
    return f" {one.place}" if one.place else ""
