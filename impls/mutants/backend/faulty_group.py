"""A process group that forwards every call to a correct one, except for the planted fault.

Not registered with torch: functions of ``torch.distributed`` take it as their ``group`` all the
same.  A fault overrides the method of one operation; ``self.sound`` is the group underneath.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.comm import ANY, Call, Recv, Send
from shardproof.impls.pytorch.collectives import TorchCollectives


class FaultyGroup(dist.ProcessGroup):
    """All operations of the check ``collectives``, forwarded to the correct group."""

    def __init__(self, sound: Any, ranks: Sequence[int]) -> None:
        size, rank = dist.get_world_size(sound), dist.get_rank(sound)
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.sound, self.ranks = sound, tuple(ranks)
        self.me, self.members = rank, size

    def rank(self) -> int:
        return self.me

    def size(self) -> int:
        return self.members

    def allreduce(self, tensors: Any, *args: Any) -> Any:
        return self.sound.allreduce(tensors, *args)

    def allreduce_coalesced(self, tensors: Any, *args: Any) -> Any:
        return self.sound.allreduce_coalesced(tensors, *args)

    def reduce(self, tensors: Any, *args: Any) -> Any:
        return self.sound.reduce(tensors, *args)

    def broadcast(self, tensors: Any, *args: Any) -> Any:
        return self.sound.broadcast(tensors, *args)

    def allgather(self, outputs: Any, inputs: Any, *args: Any) -> Any:
        return self.sound.allgather(outputs, inputs, *args)

    def allgather_coalesced(self, outputs: Any, inputs: Any, *args: Any) -> Any:
        return self.sound.allgather_coalesced(outputs, inputs, *args)

    def all_gather_single(self, output: Any, given: Any, *args: Any) -> Any:
        return named(self.sound, "all_gather_single", "_allgather_base")(output, given, *args)

    def reduce_scatter(self, outputs: Any, inputs: Any, *args: Any) -> Any:
        return self.sound.reduce_scatter(outputs, inputs, *args)

    def reduce_scatter_single(self, output: Any, given: Any, *args: Any) -> Any:
        method = named(self.sound, "reduce_scatter_single", "_reduce_scatter_base")
        return method(output, given, *args)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, *args: Any) -> Any:
        names = "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
        return named(self.sound, *names)(outputs, inputs, *args)

    def gather(self, outputs: Any, inputs: Any, *args: Any) -> Any:
        return self.sound.gather(outputs, inputs, *args)

    def scatter(self, outputs: Any, inputs: Any, *args: Any) -> Any:
        return self.sound.scatter(outputs, inputs, *args)

    def alltoall(self, outputs: Any, inputs: Any, *args: Any) -> Any:
        return self.sound.alltoall(outputs, inputs, *args)

    def all_to_all_single(
        self, output: Any, given: Any, takes: Any = None, gives: Any = None, *args: Any
    ) -> Any:
        method = named(self.sound, "all_to_all_single", "alltoall_base")
        return method(output, given, takes or [], gives or [], *args)

    def barrier(self, *args: Any, **options: Any) -> Any:
        return self.sound.barrier(*args, **options)

    def send(self, tensors: Any, target: int, tag: int = 0) -> Any:
        return self.sound.send(tensors, target, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        if source == ANY:
            return self.sound.recv_anysource(tensors, tag)
        return self.sound.recv(tensors, source, tag)

    # Names before torch 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]


def named(group: Any, *names: str) -> Any:
    """The first method of ``group`` whose name is in ``names``."""
    return next(getattr(group, name) for name in names if hasattr(group, name))


class Faulty(TorchCollectives):
    """PyTorch's collectives over groups of a faulty kind."""

    group_kind: ClassVar[type[FaultyGroup]] = FaultyGroup

    def group(self, group: Any, ranks: Sequence[int]) -> Any:
        return self.group_kind(group, ranks)

    def perform(self, call: Call) -> Sequence[Any]:
        if call.operation in ("send_recv", "batch"):  # torch wants a registered group for these
            works = [self._message(call.group, transfer) for transfer in call.transfers]
            if call.asynchronous:
                return works
            for work in works:
                work.wait()
            return []
        if call.operation == "broadcast" and call.form == "coalesced":
            for tensor in call.outputs:
                dist.broadcast(tensor, group=call.group, group_src=call.root)
            return []
        try:
            return super().perform(call)
        except ValueError as error:
            # torch logs what a call raises, looks the group up for that, and does not know it.
            raise error.__context__ or error from None

    @staticmethod
    def _message(group: Any, one: Send | Recv) -> Any:
        post = group.send if isinstance(one, Send) else group.recv
        return post([one.tensor], one.peer, one.tag)


class Then:
    """The work handle of a call that runs ``finish`` once the call is complete."""

    def __init__(self, work: Any, finish: Callable[[], object]) -> None:
        self.work, self.finish = work, finish
        self.ended = False

    def wait(self, *args: Any) -> bool:
        """Wait, then finish."""
        self.work.wait()
        if not self.ended:
            self.ended = True
            with torch.no_grad():
                self.finish()
        return True

    def is_completed(self) -> bool:
        """Whether the underlying work is complete."""
        return bool(self.work.is_completed())


class Done:
    """A work handle that always reports completion."""

    def __init__(self, work: Any = None) -> None:
        self.work = work  # kept alive

    def wait(self, *args: Any) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return true in every case."""
        return True


def flat(tensor: Tensor) -> Tensor:
    """The elements in memory order from the first on; strides are ignored."""
    storage = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return storage.view(tensor.shape)
