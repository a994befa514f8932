"""The walk from a wrong tensor back to the first operation that is right before and wrong after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardproof.locate.known import Known
from shardproof.locate.recorded import Event, Recording, Region, call_key

#: Events that a walk looks at.
MOST_VISITED = 20_000


#: Operators whose results are to be written by others.
_EMPTY = ("aten.empty", "aten.new_empty")
#: Events that are looked at for a right value that a strange one leads to, and how many elements
#: such a value has at least: a few numbers may be right by chance.
MOST_HEALING, LEAST_PROVING = 40, 8
#: Events that are looked at for the line of the system from which a value comes.
MOST_UPSTREAM = 400


@dataclass(frozen=True)
class Suspect:
    """An event whose inputs are right and whose output is not.

    ``at``: the operation or the call; ``result``: where its result appears; ``steps_back``: how
    many events lie between it and the tensor that was seen to be wrong.
    """

    at: Event
    result: Event
    steps_back: int
    #: The inputs do not give the output: the call itself went wrong.
    broke: bool = False


@dataclass
class Walk:
    """Goes back through the recordings of all ranks."""

    recordings: Mapping[int, Recording]
    known: Known
    #: Of each rank the sets of ranks with which it splits computations, itself among them.
    peers: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)
    _terms: dict[tuple[int, int], bool] = field(default_factory=dict)
    _healed: dict[tuple[int, int], bool] = field(default_factory=dict)
    _right: dict[int, bool] = field(default_factory=dict)
    _kept: list[Tensor] = field(default_factory=list)

    def is_right(self, region: Region) -> bool:
        """Whether ``region`` holds right values only (where it was not kept: yes)."""
        tensor = region.content
        if tensor is None or not tensor.is_floating_point():
            return True
        key = id(tensor)
        if key not in self._right:
            self._kept.append(tensor)
            self._right[key] = self.known.is_right(tensor)
        return self._right[key]

    def is_made_right(self, event: Event, wrong: Region) -> bool:
        """Whether what ``event`` wrote of ``wrong`` is right, or a term of a right sum over ranks.

        Ranks that split a computation hold such terms: the oracle has none of them.
        """
        written = [w for w in event.writes if w.overlaps(wrong)]
        if all(self.is_right(w) for w in written) or event.name.startswith(_EMPTY):
            return True
        if event.kind != "op":
            return False
        is_term = (
            len(written) == 1 and len(self.recordings) > 1 and self._is_term(event, written[0])
        )
        return is_term or self._heals(event)

    def _heals(self, event: Event) -> bool:
        """Whether right values come from what ``event`` made: then it was right, though the oracle
        has no such value (a part of an attention that is put together later).
        """
        key = (event.rank, event.number)
        if key not in self._healed:
            self._healed[key] = False
            recording, seen, queue = self.recordings[event.rank], {event.number}, [event]
            while queue and len(seen) < MOST_HEALING and not self._healed[key]:
                now = queue.pop(0)
                for written in now.writes:
                    for reader in recording.readers(written, now.number):
                        if reader.number in seen or reader.step != event.step:
                            continue
                        seen.add(reader.number)
                        if all(self._proves(each) for each in reader.writes):
                            self._healed[key] = True
                        queue.append(reader)
        return self._healed[key]

    def _proves(self, region: Region) -> bool:
        """Whether ``region`` holds many right values that are no zeros."""
        tensor = region.content
        if tensor is None or not tensor.is_floating_point() or tensor.numel() < LEAST_PROVING:
            return False
        return self.is_right(region) and int((tensor != 0).sum()) >= LEAST_PROVING

    def _is_term(self, event: Event, written: Region) -> bool:
        key = (event.rank, event.number)
        if key not in self._terms:
            self._terms[key] = any(
                self.known.is_right(torch.stack(terms).sum(0))
                for terms in self._terms_of(event, written)
            )
        return self._terms[key]

    def twins(self, event: Event) -> list[Event]:
        """The operators of the ranks that share its computation did in the place of ``event``."""
        if event.kind != "op":
            return []
        turn = self.recordings[event.rank].turn(event)
        ranks = {r for peers in self.peers.get(event.rank, ()) for r in peers} - {event.rank}
        found = (self.recordings[r].at_turn(event, turn) for r in ranks if r in self.recordings)
        return [twin for twin in found if twin is not None]

    def upstream(self, event: Event, wanted: Callable[[Event], bool]) -> Event | None:
        """The nearest event that ``event`` was made of, itself first, that is ``wanted``."""
        seen, queue = {(event.rank, event.number)}, [event]
        while queue and len(seen) < MOST_UPSTREAM:
            now = queue.pop(0)
            if wanted(now):
                return now
            cause = self.cause(now)
            for reader, region in self.inputs(now):
                recording = self.recordings[reader.rank]
                views = recording.views(region, cause.number if reader is now else reader.number)
                if (view := next(filter(wanted, views), None)) is not None:
                    return view
                for writer in recording.writers(region, reader.number):
                    if (writer.rank, writer.number) not in seen:
                        seen.add((writer.rank, writer.number))
                        queue.append(self.cause(writer) if wanted(self.cause(writer)) else writer)
        return None

    def _terms_of(self, event: Event, written: Region) -> Iterator[list[Tensor]]:
        """The tensors that peers of ``event`` wrote at the same place, for each set of peers."""
        recording = self.recordings[event.rank]
        at = event.writes.index(written)
        turn = recording.turn(event)
        for peers in self.peers.get(event.rank, ()):
            twins = [self.recordings[r].at_turn(event, turn) for r in peers if r in self.recordings]
            contents = [twin.writes[at].content for twin in twins if twin and len(twin.writes) > at]
            found = [c.to(torch.float64) for c in contents if c is not None]
            same = len({tuple(c.shape) for c in found}) == 1
            if len(found) == len(peers) and same and found[0].is_floating_point():
                yield found

    def suspects(self, start: Event, region: Region) -> list[Suspect]:
        """The events from which what is wrong in ``region``, read by ``start``, comes."""
        found: list[Suspect] = []
        seen: set[tuple[int, int]] = set()
        queue: list[tuple[int, Region, int, int]] = [(start.rank, region, start.number, 0)]
        while queue and len(seen) < MOST_VISITED:
            rank, wrong, before, depth = queue.pop(0)
            for event in self.recordings[rank].writers(wrong, before):
                if (rank, event.number) in seen:
                    continue
                seen.add((rank, event.number))
                if event.kind not in ("op", "done") or self.is_made_right(event, wrong):
                    continue
                inputs = list(self.inputs(event))
                bad = [(e, r) for e, r in inputs if not self.is_right(r)]
                broke = event.kind == "done" and self.breaks(event)
                if not broke and not bad:
                    # A term of a sum is as wrong as the terms of the other ranks.
                    bad = [
                        (e, r) for e in self.twins(event) for r in e.reads if not self.is_right(r)
                    ]
                if broke or not bad:
                    found.append(Suspect(self.cause(event), event, depth, broke))
                    continue
                queue += [(e.rank, r, e.number, depth + 1) for e, r in bad]
        return found

    def cause(self, event: Event) -> Event:
        """The operation, or the call whose results ``event`` shows."""
        if event.kind == "done":
            return self.recordings[event.rank].events[event.more["call"]]
        return event

    def members(self, event: Event) -> list[Event]:
        """The calls of all members that belong to the call ``event``."""
        key = call_key(event)
        calls = (
            self.recordings[r].calls.get(key) for r in event.more["group"] if r in self.recordings
        )
        own = [call for call in calls if call is not None]
        if event.name in ("send", "recv"):
            other = self.recordings.get(event.more["peer"])
            twin = None if other is None else _twin(other, event)
            return [event] if twin is None else [event, twin]
        return own

    def inputs(self, event: Event) -> Iterator[tuple[Event, Region]]:
        """The regions that ``event`` was made of, with the events that read it."""
        if event.kind == "done":
            for call in self.members(self.cause(event)):
                yield from ((call, region) for region in call.reads)
        else:
            yield from ((event, region) for region in event.reads)

    def breaks(self, done: Event) -> bool:
        """Whether the results of a reduction are not what its members gave, reduced."""
        call = self.cause(done)
        if call.name not in ("all_reduce", "reduce_scatter") or call.more["reduce"] != "sum":
            return False
        given = [_flat(member.reads) for member in self.members(call)]
        if len(given) != len(call.more["group"]) or any(one is None for one in given):
            return False
        sizes = {one.numel() for one in given if one is not None}
        got = _flat(done.writes)
        if got is None or len(sizes) != 1:
            return False
        total = torch.stack([one for one in given if one is not None]).sum(0)
        if call.name == "reduce_scatter":
            if len(call.reads) != 1 or got.numel() * len(given) != total.numel():
                return False
            place = call.more["group"].index(call.rank)
            total = total[place * got.numel() : (place + 1) * got.numel()]
        if got.numel() != total.numel():
            return False
        scale = float(total.abs().max()) if total.numel() else 0.0
        return bool(((got - total).abs() > 1e-6 * scale + 1e-300).any() | (~got.isfinite()).any())


def _twin(other: Recording, event: Event) -> Event | None:
    """The other side of a message."""
    wanted = "recv" if event.name == "send" else "send"
    for call in other.calls.values():
        same = call.name == wanted and call.more["group"] == event.more["group"]
        if same and call.more["tag"] == event.more["tag"]:
            ends = (
                call.more["peer"] in (event.rank, -1)
                and call.more["number"] == event.more["number"]
            )
            if ends:
                return call
    return None


def _flat(regions: Sequence[Region]) -> Tensor | None:
    parts = [region.content for region in regions]
    if not parts or any(p is None or not p.is_floating_point() for p in parts):
        return None
    return torch.cat([p.reshape(-1).to(torch.float64) for p in parts if p is not None])
