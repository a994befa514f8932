"""Faults of a backend's operations: roots, groups, strides, sums, completion and messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from shardproof.case import WorkloadSpec
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.backend.faulty_group import (
    Done,
    Faulty,
    FaultyGroup,
    Then,
    flat,
)
from shardproof.impls.pytorch.collectives import TorchCollectives


def of(operation: str, **knobs: Any) -> Mapping[str, Any]:
    """The smallest case that shows a fault of ``operation``."""
    return {"workload": WorkloadSpec("calls", params={"operation": operation, **knobs})}


mutant = declare.family(
    TorchCollectives,
    mesh={"replicate": 3},
    killed_by=("collectives",),
    lane="bitwise",
    steps=0,
)

# --------------------------------------------------------------------------------- roots and ranks


class _FirstRoot(FaultyGroup):
    def broadcast(self, tensors: Any, *args: Any) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self.sound.broadcast(tensors, options)


@mutant(
    "backend_root_is_always_first",
    says="root (middle|last), .*nothing was written",
    **of("broadcast"),
)
class RootIsAlwaysFirst(Faulty):
    """A broadcast takes the first rank's tensor, whatever the root."""

    group_kind = _FirstRoot


class _GlobalRoot(FaultyGroup):
    def scatter(self, outputs: Any, inputs: Any, *args: Any) -> Any:
        if self.ranks[0]:  # a group whose ranks are not the world's
            inputs = [list(reversed(parts)) for parts in inputs]
        return self.sound.scatter(outputs, inputs, *args)


@mutant("backend_group_ranks_are_global", says="the part of rank", **of("scatter"))
class GroupRanksAreGlobal(Faulty):
    """In a sub-group, parts are ordered by a different numbering of the ranks."""

    group_kind = _GlobalRoot


class _OwnSlotFirst(FaultyGroup):
    def allgather(self, outputs: Any, inputs: Any, *args: Any) -> Any:
        shifted = [[*out[1:], out[0]] for out in outputs]
        return self.sound.allgather(shifted, inputs, *args)


@mutant("backend_gather_is_one_slot_on", says="the value of rank|own value", **of("all_gather"))
class GatherIsOneSlotOn(Faulty):
    """The data of each rank lands in the slot of the rank before it."""

    group_kind = _OwnSlotFirst


# ------------------------------------------------------------------------------------------ memory


class _Dense(FaultyGroup):
    def broadcast(self, tensors: Any, *args: Any) -> Any:
        return self.sound.broadcast([flat(tensors[0])], *args)


@mutant(
    "backend_strides_are_ignored",
    says="strided, .*(a part was not written|memory beyond)",
    zoo=("B01",),
    **of("broadcast", layouts="spread"),
)
class StridesAreIgnored(Faulty):
    """A strided tensor is treated as contiguous."""

    group_kind = _Dense


class _NoOffset(FaultyGroup):
    def allreduce(self, tensors: Any, *args: Any) -> Any:
        own = tensors[0]
        start = own.as_strided((own.numel(),), (1,), 0).view(own.shape)
        return self.sound.allreduce([start], *args)


@mutant(
    "backend_offset_is_ignored",
    says="own value|memory beyond the result was written",
    zoo=("B16",),
    **of("all_reduce", layouts="dense"),
)
class OffsetIsIgnored(Faulty):
    """A view is read and written from the beginning of its storage."""

    group_kind = _NoOffset


class _Beyond(FaultyGroup):
    def allreduce(self, tensors: Any, *args: Any) -> Any:
        own = tensors[0]
        end = own.storage_offset() + own.numel()
        after = own.as_strided((1,), (1,), end)
        return Then(self.sound.allreduce(tensors, *args), lambda: after.zero_())


@mutant("backend_writes_one_beyond", says="memory beyond", **of("all_reduce", layouts="dense"))
class WritesOneBeyond(Faulty):
    """The result is rounded up to a whole number of words, so one element too many is written."""

    group_kind = _Beyond


class _InPlaceSlot(FaultyGroup):
    def all_gather_single(self, output: Any, given: Any, *args: Any) -> Any:
        inside = given.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
        if inside and given.numel():
            start = output.storage_offset()
            given = output.as_strided(given.shape, given.stride(), start).clone()
        return super().all_gather_single(output, given, *args)

    _allgather_base = all_gather_single


@mutant("backend_in_place_offset_is_lost", says="the result", zoo=("B04",), **of("all_gather"))
class InPlaceOffsetIsLost(Faulty):
    """An input inside the output is read from the beginning of the output."""

    group_kind = _InPlaceSlot


class _SpoilsInput(FaultyGroup):
    def reduce(self, tensors: Any, *args: Any) -> Any:
        work = self.sound.reduce(tensors, *args)
        root = args[0].rootRank
        return work if self.me == root else Then(work, lambda: tensors[0].zero_())


@mutant(
    "backend_reduce_spoils_other_ranks",
    says="the input of a rank that is not the root",
    **of("reduce", others="kept"),
)
class ReduceSpoilsOtherRanks(Faulty):
    """Ranks other than the root use their input as scratch memory."""

    group_kind = _SpoilsInput


class _AloneNothing(FaultyGroup):
    def allgather(self, outputs: Any, inputs: Any, *args: Any) -> Any:
        if self.members == 1:
            return Done()
        return self.sound.allgather(outputs, inputs, *args)


@mutant("backend_alone_copies_nothing", says="nothing was written", **of("all_gather"))
class AloneCopiesNothing(Faulty):
    """In a group of one rank, nothing is sent and nothing is copied either."""

    group_kind = _AloneNothing


# ------------------------------------------------------------------------------------------- sums


class _Averages(FaultyGroup):
    def allreduce(self, tensors: Any, *args: Any) -> Any:
        work = self.sound.allreduce(tensors, *args)
        own = tensors[0]
        if args[0].reduceOp != dist.ReduceOp.SUM or not own.dtype.is_floating_point:
            return work
        return Then(work, lambda: own.div_(self.members))


@mutant("backend_averages_for_sums", says="expected", zoo=("B02",), **of("all_reduce"))
class AveragesForSums(Faulty):
    """A sum is divided by the number of ranks."""

    group_kind = _Averages


class _HalfPrecision(FaultyGroup):
    def allreduce(self, tensors: Any, *args: Any) -> Any:
        own = tensors[0]
        if own.dtype != torch.float32:
            return self.sound.allreduce(tensors, *args)
        small = (own.to(torch.float16) * 64).to(torch.float8_e4m3fn).to(torch.float32) / 64
        return Then(self.sound.allreduce([small], *args), lambda: own.copy_(small))


@mutant("backend_sums_in_less_precision", says="the result.* expected", **of("all_reduce"))
class SumsInLessPrecision(Faulty):
    """Values are rounded to a few bits before they are sent."""

    group_kind = _HalfPrecision


class _InFloat64(FaultyGroup):
    def allreduce(self, tensors: Any, *args: Any) -> Any:
        own = tensors[0]
        bitwise = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
        # Asked of the operation: an enumeration says that it equals nothing of another type.
        if own.dtype != torch.int64 or any(args[0].reduceOp == one for one in bitwise):
            return self.sound.allreduce(tensors, *args)
        wide = own.to(torch.float64)
        return Then(self.sound.allreduce([wide], *args), lambda: own.copy_(wide))


@mutant(
    "backend_reduces_integers_in_float64",
    says="the result.* expected",
    **of("all_reduce", layouts="dense"),
)
class ReducesIntegersInFloat64(Faulty):
    """Integers are reduced as floating-point numbers, so the last digits beyond 2^53 are lost."""

    group_kind = _InFloat64


class _Remainder(FaultyGroup):
    def allreduce(self, tensors: Any, *args: Any) -> Any:
        own = tensors[0]
        whole = own.numel() // self.members * self.members
        if not own.is_contiguous() or whole == own.numel():
            return self.sound.allreduce(tensors, *args)
        return self.sound.allreduce([own.view(-1)[:whole]], *args)


@mutant(
    "backend_remainder_is_dropped",
    says="expected .* elements",
    zoo=("B11",),
    **of("all_reduce", layouts="dense"),
)
class RemainderIsDropped(Faulty):
    """The elements left over when the length is divided by the number of ranks are not reduced."""

    group_kind = _Remainder


class _NeighboursChunk(FaultyGroup):
    def reduce_scatter(self, outputs: Any, inputs: Any, *args: Any) -> Any:
        turned = [[*parts[1:], parts[0]] for parts in inputs]
        return self.sound.reduce_scatter(outputs, turned, *args)


@mutant("backend_scatters_neighbours_chunk", says="the chunk of rank", **of("reduce_scatter"))
class ScattersNeighboursChunk(Faulty):
    """A rank gets the reduced chunk of its successor."""

    group_kind = _NeighboursChunk


class _FirstOfSeveral(FaultyGroup):
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, *args: Any) -> Any:
        return super().reduce_scatter_single_coalesced(outputs[:1], inputs[:1], *args)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


@mutant(
    "backend_coalesced_call_is_first_alone",
    says="reduce_scatter .coalesced.*nothing was written",
    **of("reduce_scatter", layouts="dense"),
)
class CoalescedCallIsFirstAlone(Faulty):
    """Of several calls made together, only the first takes place."""

    group_kind = _FirstOfSeveral


class _LargestForSmallest(FaultyGroup):
    def reduce(self, tensors: Any, *args: Any) -> Any:
        if args[0].reduceOp == dist.ReduceOp.MIN:
            args[0].reduceOp = dist.ReduceOp.MAX
        return self.sound.reduce(tensors, *args)


@mutant(
    "backend_takes_max_for_min", says="it is the max|own value", **of("reduce", others="undefined")
)
class TakesMaxForMin(Faulty):
    """The minimum is requested and the maximum is returned."""

    group_kind = _LargestForSmallest


# -------------------------------------------------------------------------------------- completion


class _SaysDone(FaultyGroup):
    def allreduce(self, tensors: Any, *args: Any) -> Any:
        work = self.sound.allreduce(tensors, *args)
        return _Early(work)


class _Early(Then):
    def __init__(self, work: Any) -> None:
        super().__init__(work, lambda: None)

    def is_completed(self) -> bool:
        return True


@mutant(
    "backend_says_done_too_soon",
    says="reports completion, before rank . has called: the fault is the backend's",
    **of("all_reduce"),
)
class SaysDoneTooSoon(Faulty):
    """``is_completed`` is true as soon as the call is posted."""

    group_kind = _SaysDone


class _NoWait(FaultyGroup):
    def barrier(self, *args: Any, **options: Any) -> Any:
        return Done(self.sound.barrier(*args, **options))


@mutant(
    "backend_barrier_does_not_wait",
    says="it was over when .* had called it|reports completion",
    zoo=("B08",),
    **of("barrier"),
)
class BarrierDoesNotWait(Faulty):
    """A barrier returns before all ranks have come."""

    group_kind = _NoWait


class _WrongCopy(FaultyGroup):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scratch: dict[Any, Any] = {}

    def broadcast(self, tensors: Any, *args: Any) -> Any:
        own = tensors[0]
        key = own.dtype, own.numel()
        if key not in self.scratch:
            self.scratch[key] = torch.empty(own.numel(), dtype=own.dtype)
        shared = self.scratch[key]
        shared.copy_(own.reshape(-1))
        work = self.sound.broadcast([shared], *args)
        return Then(work, lambda: own.copy_(shared.view(own.shape)))


@mutant("backend_staging_buffer_is_shared", says="expected", zoo=("B13",), **of("broadcast"))
class StagingBufferIsShared(Faulty):
    """Calls in flight share one staging buffer, so both return the data of the later one."""

    group_kind = _WrongCopy


# ---------------------------------------------------------------------------------------- messages


class _NoTags(FaultyGroup):
    def send(self, tensors: Any, target: int, tag: int = 0) -> Any:
        return self.sound.send(tensors, target, 0)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        return self.sound.recv(tensors, source, 0)


@mutant("backend_tags_are_ignored", says="it is the message of tag", **of("send_recv"))
class TagsAreIgnored(Faulty):
    """Messages between two ranks are matched by their order alone."""

    group_kind = _NoTags


class _Swapped(FaultyGroup):
    def alltoall(self, outputs: Any, inputs: Any, *args: Any) -> Any:
        return self.sound.alltoall(outputs, [*inputs[1:], inputs[0]], *args)


@mutant("backend_exchange_is_one_rank_on", says="the tensor from rank", **of("all_to_all"))
class ExchangeIsOneRankOn(Faulty):
    """Every part goes to the rank after its receiver."""

    group_kind = _Swapped


class _LostMessage(FaultyGroup):
    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        own = tensors[0]
        scratch = torch.empty(own.shape, dtype=own.dtype)
        work = self.sound.recv([scratch], source, tag)
        return Then(
            work,
            lambda: own.view(-1)[: own.numel() // 2].copy_(scratch.view(-1)[: own.numel() // 2]),
        )


@mutant(
    "backend_second_half_is_lost",
    says="a part was not written|nothing was written",
    **of("batch", layouts="dense"),
)
class SecondHalfIsLost(Faulty):
    """Only the first half of a message arrives."""

    group_kind = _LostMessage


class _EmptySkips(FaultyGroup):
    def gather(self, outputs: Any, inputs: Any, *args: Any) -> Any:
        work = self.sound.gather(outputs, inputs, *args)
        if self.me != args[0].rootRank:
            return work
        return Then(work, lambda: outputs[0][self.me].fill_(0))


@mutant(
    "backend_root_forgets_itself", says="the tensor from rank .* is", zoo=("B05",), **of("gather")
)
class RootForgetsItself(Faulty):
    """The root of a gather does not put its own part among the others."""

    group_kind = _EmptySkips
