"""Faults of a backend that accepts invalid calls, and faults of how it counts.

It counts elements, parts, calls and messages, and tells groups apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardproof.impls.mutants.backend.faulty_group import Done, Faulty, FaultyGroup, Then
from shardproof.impls.mutants.backend.groups import mutant, of


class _ModuloRoot(FaultyGroup):
    def broadcast(self, tensors: Any, *args: Any) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = args[0].rootRank % self.members
        return self.sound.broadcast(tensors, options)


@mutant(
    "backend_root_is_taken_modulo",
    says="mistake root, .*raised no error",
    **of("broadcast"),
)
class RootIsTakenModulo(Faulty):
    """A root outside the group is wrapped around by modulo."""

    group_kind = _ModuloRoot


class _Widened(FaultyGroup):
    def allreduce(self, tensors: Any, *args: Any) -> Any:
        own = tensors[0]
        if not own.dtype.is_floating_point:
            return self.sound.allreduce(tensors, *args)
        wide = own.to(torch.float64)
        return Then(self.sound.allreduce([wide], *args), lambda: own.copy_(wide))


@mutant(
    "backend_dtypes_are_made_equal",
    says="differs dtype, .*raised no error",
    **of("all_reduce"),
)
class DtypesAreMadeEqual(Faulty):
    """Ranks that reduce tensors of different dtypes get no error."""

    group_kind = _Widened


#: Elements of a page.
PAGE = 4096


class _Padded(FaultyGroup):
    def allreduce(self, tensors: Any, *args: Any) -> Any:
        own = tensors[0]
        count = own.numel()
        padded = own.new_zeros((count // PAGE + 1) * PAGE)
        padded[:count].copy_(own.reshape(-1))
        work = self.sound.allreduce([padded], *args)
        return Then(work, lambda: own.copy_(padded[:count].view(own.shape)))


@mutant(
    "backend_sizes_are_rounded_up",
    says="differs shape, .*raised no error",
    zoo=("B10",),
    mesh={"replicate": 4},
    **of("all_reduce"),
)
class SizesAreRoundedUp(Faulty):
    """Whole pages are reduced, so ranks whose tensors differ in size get no error."""

    group_kind = _Padded


class _SkipsEmpty(FaultyGroup):
    def allreduce(self, tensors: Any, *args: Any) -> Any:
        if not tensors[0].numel() and not self.me:
            return Done()
        return self.sound.allreduce(tensors, *args)


@mutant(
    "backend_empty_call_is_skipped_by_one",
    says="all_reduce .* raises (CollectiveMismatch|Deadlock|RankEnded)",
    **of("all_reduce", layouts="dense"),
)
class EmptyCallIsSkippedByOne(Faulty):
    """The first rank skips a call without elements, and the others wait for it."""

    group_kind = _SkipsEmpty


class _SwappedSplits(FaultyGroup):
    def all_to_all_single(
        self, output: Any, given: Any, takes: Any = None, gives: Any = None, *args: Any
    ) -> Any:
        if gives and takes and self.members > 1:
            gives, takes = [*gives[1:], gives[0]], [takes[-1], *takes[:-1]]
        return super().all_to_all_single(output, given, takes, gives, *args)

    alltoall_base = all_to_all_single


@mutant(
    "backend_uneven_splits_are_swapped",
    says="all_to_all .uneven",
    **of("all_to_all", layouts="dense"),
)
class UnevenSplitsAreSwapped(Faulty):
    """The rows of each rank are counted by the split of its neighbour."""

    group_kind = _SwappedSplits


#: Bits of a count.
COUNT_BITS = 11


class _NarrowCount(FaultyGroup):
    def all_gather_single(self, output: Any, given: Any, *args: Any) -> Any:
        count = given.numel() % (1 << COUNT_BITS)
        if count == given.numel():
            return super().all_gather_single(output, given, *args)
        parts = output.view(self.members, -1)[:, :count]
        came = torch.empty(parts.shape, dtype=output.dtype)
        work = super().all_gather_single(came.view(-1), given.view(-1)[:count].clone(), *args)
        return Then(work, lambda: parts.copy_(came))

    _allgather_base = all_gather_single


@mutant(
    "backend_count_is_too_narrow",
    says="long, .*a part was not written",
    zoo=("B17",),
    **of("all_gather", layouts="dense"),
)
class CountIsTooNarrow(Faulty):
    """Elements are counted in eleven bits: beyond 2047 elements only the remainder is sent."""

    group_kind = _NarrowCount


# ------------------------------------------------------------------------------ groups told apart


@mutant(
    "backend_groups_of_one_size_are_one",
    says="group overlapping: rank . raises Deadlock: .*rank 0 waits .* of group 0-1.*of group 1-2",
    zoo=("B14",),
    **of("broadcast", layouts="dense"),
)
class GroupsOfOneSizeAreOne(Faulty):
    """A group is looked up by its size, so a later group of the same size is taken for the
    first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Any] = {}

    def group(self, group: Any, ranks: Sequence[int]) -> Any:
        return self.made.setdefault(len(ranks), super().group(group, ranks))


class _Drifting(FaultyGroup):
    sent: Iterator[int]
    received: Iterator[int]

    def send(self, tensors: Any, target: int, tag: int = 0) -> Any:
        return self.sound.send(tensors, target, tag + 16 * next(self.sent))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        return self.sound.recv(tensors, source, tag + 16 * next(self.received))


@mutant(
    "backend_tags_drift",
    says="send_recv .* raises (Deadlock|RankEnded)",
    zoo=("B07",),
    **of("send_recv", layouts="dense"),
)
class TagsDrift(Faulty):
    """A rank tags messages by one count over all groups."""

    group_kind = _Drifting

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.received = itertools.count(), itertools.count()

    def group(self, group: Any, ranks: Sequence[int]) -> Any:
        made = super().group(group, ranks)
        made.sent, made.received = self.sent, self.received
        return made
