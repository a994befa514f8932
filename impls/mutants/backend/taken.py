"""Faults of a backend that takes what it should refuse, and of how it counts parts and calls."""

from __future__ import annotations

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
    says="mistake root, .*which is wrong, and nothing is raised",
    **of("broadcast"),
)
class RootIsTakenModulo(Faulty):
    """A root that is no member of the group is wrapped around."""

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
    says="differs dtype, .*which is wrong, and nothing is raised",
    **of("all_reduce"),
)
class DtypesAreMadeEqual(Faulty):
    """Ranks that reduce tensors of different dtypes are not told."""

    group_kind = _Widened


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
    """The first rank does not make a call that has no elements: the others wait for it."""

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
    """Each rank's rows are counted by the split of the rank beside it."""

    group_kind = _SwappedSplits
