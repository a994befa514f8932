"""The bytes and files that a rank of another layout needs, planned from metadata only.

    saved by 3 ranks                  wanted by rank 1 of 2
    rank-00000  [0:4] of w
    rank-00001  [4:8]       --------> [6:12]:  bytes of [6:8] in rank-00001, of [8:12] in rank-00002
    rank-00002  [8:12]

A layout is nothing but a place for each name (``regions.Place``), so ranks, meshes and strategies
need no rules of their own: whatever saved, whatever loads, a rank's place is met with every stored
one of that name, run by run.  No rank reads, or holds, more than it wants; none talks to another.

Cost: bytes wanted, rounded outwards to chunks (4 KiB) at the ends of each run.
Numbers: bits are kept; another dtype is refused, unless the caller asks for a cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardproof.impls.reference.checkpoint.data_file import DTYPES, Entry
from shardproof.impls.reference.checkpoint.reading.regions import Place, runs_of, shared


@dataclass(frozen=True)
class Read:
    """Runs of one stored tensor: first bytes in the stored and in the wanted tensor, and lengths.

    Arrays of equal length; sources ascend.
    """

    entry: Entry
    sources: Any
    targets: Any
    lengths: Any

    @property
    def bytes(self) -> int:
        """The size of all runs."""
        return int(self.lengths.sum())


class Range(NamedTuple):
    """Bytes ``begin`` to ``end`` of a data file."""

    file: str
    begin: int
    end: int


def plan(wanted: Place, stored: Iterable[Entry]) -> list[Read]:
    """The reads for the place ``wanted`` of a name whose ``stored`` entries are one copy.

    :raises ValueError: another shape, or cut into too many runs.
    """
    reads = []
    own = runs_of(wanted)
    for entry in stored:
        if entry.place.shape != wanted.shape:
            raise ValueError(
                f"its shape is {list(entry.place.shape)} in the checkpoint, but "
                f"{list(wanted.shape)} here"
            )
        parts = shared(runs_of(entry.place), own)
        if len(parts.lengths):
            size = DTYPES[entry.dtype].itemsize
            scaled = (parts.in_first * size, parts.in_second * size, parts.lengths * size)
            reads.append(Read(entry, *scaled))
    return reads


def ranges(reads: Sequence[Read]) -> list[Range]:
    """The byte ranges that ``reads`` need, merged and sorted."""
    found = sorted(
        Range(read.entry.file, read.entry.begin + source, read.entry.begin + source + length)
        for read in reads
        for source, length in zip(read.sources.tolist(), read.lengths.tolist(), strict=True)
    )
    joined: list[Range] = []
    for one in found:
        if joined and joined[-1].file == one.file and joined[-1].end >= one.begin:
            one = Range(one.file, joined.pop().begin, one.end)
        joined.append(one)
    return joined


def bytes_by_file(reads: Sequence[Read]) -> Mapping[str, int]:
    """The number of bytes read from each file."""
    found: dict[str, int] = {}
    for read in reads:
        found[read.entry.file] = found.get(read.entry.file, 0) + read.bytes
    return found
