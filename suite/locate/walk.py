"""The walk from a wrong tensor back to the first operation that is right before and wrong after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardproof.locate.known import Known
from shardproof.locate.recorded import Event, Recording, Region, call_key

#: Events that a walk looks at.
MOST_VISITED = 20_000


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
                if not any(not self.is_right(w) for w in event.writes if w.overlaps(wrong)):
                    continue
                inputs = list(self.inputs(event))
                bad = [(e, r) for e, r in inputs if not self.is_right(r)]
                broke = event.kind == "done" and self.breaks(event)
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
        calls = (self.recordings[r].calls.get(key) for r in event.more["group"] if r in self.recordings)
        own = [call for call in calls if call is not None]
        if event.name in ("send", "recv"):
            other = self.recordings.get(event.more["peer"])
            twin = None if other is None else _twin(other, event)
            return [event] if twin is None else [event, twin]
        return own

    def inputs(self, event: Event) -> Iterator[tuple[Event, Region]]:
        """What ``event`` was made of, with the events that read it."""
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
            ends = call.more["peer"] in (event.rank, -1) and call.more["number"] == event.more["number"]
            if ends:
                return call
    return None


def _flat(regions: Sequence[Region]) -> Tensor | None:
    parts = [region.content for region in regions]
    if not parts or any(p is None or not p.is_floating_point() for p in parts):
        return None
    return torch.cat([p.reshape(-1).to(torch.float64) for p in parts if p is not None])
