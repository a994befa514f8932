"""The algorithms of ``impls/reference/collectives/`` as collectives that are called one by one.

Options choose them (docs/options.md); what is left to the backend is not offered here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from shardproof.comm import Call, Comm
from shardproof.contract import Capabilities, Collectives, Options
from shardproof.impls.reference.collectives.algorithms import ALGORITHMS, all_reduce
from shardproof.impls.reference.collectives.executor import Running
from shardproof.impls.reference.collectives.schedule import Schedule
from shardproof.impls.reference.engine.choices import Hierarchical, OfBoth
from shardproof.impls.reference.engine.options import parse_options

#: Messages alone pass between the ranks: nobody compares roots and reduce operations, and sizes and
#: dtypes of messages are compared by these backends only.
_COMPARING = ("in_memory", "mpi")
#: Reduce operations that integers alone have.
_BITS = ("band", "bor", "bxor")


class Algorithms(Collectives):
    """All-reduce, reduce-scatter and all-gather over send and recv; broadcast is binomial."""

    depth = "layout"
    running_type: type[Running] = Running

    @classmethod
    def capabilities(cls, options: Options) -> Capabilities:
        parse_options(OfBoth, options)
        return Capabilities(needs=("sends",))

    @classmethod
    def offers(
        cls, options: Options, backend: str, world: int
    ) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        option = parse_options(OfBoth, options)
        told = ("dtype", "shape") if backend in _COMPARING else ()
        taken: dict[str, tuple[str, ...]] = {"form": ("tensor",), "differs": told}
        offered = {"broadcast": taken}
        for name in ("all_reduce", "reduce_scatter", "all_gather"):
            if getattr(option, name) != "backend":
                offered[name] = taken
        if isinstance(option.all_reduce, Hierarchical):
            offered["all_reduce"] = {**taken, "group": ("world",)}
        return offered

    def __init__(self) -> None:
        self.option = OfBoth()

    def choose(self, options: Options) -> None:
        """Choose the algorithms by ``options``."""
        self.option = parse_options(OfBoth, options)

    def perform(self, call: Call) -> Sequence[Any]:
        """As the base class.

        :raises ValueError: a root, reduce operation, size or dtype that no algorithm can take.
        """
        comm = Comm(call.group, "world")
        _check(call, comm.size)
        work = self._started(call, comm)
        if call.asynchronous:
            return [work]
        work.wait()
        return []

    def _started(self, call: Call, comm: Comm) -> Running:
        output = call.outputs[0]
        # Schedules are over elements that lie side by side: others are copied, and put back.
        data = output.detach().contiguous()
        then = partial(_put, data, output)
        if call.operation == "broadcast":
            rounds = ALGORITHMS["broadcast"]["binomial"]
            with_root = cast("Callable[..., Any]", rounds)
            made = with_root(comm.rank, comm.size, data.numel(), call.root)
            return self.running_type(made, data, comm, then=then)
        if call.operation == "all_reduce":
            return self._over(all_reduce(self.option.all_reduce), data, comm, call, then)
        if call.operation == "all_gather":
            _put(call.inputs[0], _part(data, comm, call.inputs[0]))
            schedule = ALGORITHMS["all_gather"][self.option.all_gather]
            return self._over(schedule, data, comm, call, then)
        # The schedule leaves the other chunks of what it works on undefined: a copy is given.
        full = call.inputs[0].detach().clone(memory_format=torch.contiguous_format)
        then = partial(_put, _part(full, comm, output), output)
        schedule = ALGORITHMS["reduce_scatter"][self.option.reduce_scatter]
        return self._over(schedule, full, comm, call, then)

    def _over(
        self,
        schedule: Schedule | None,
        data: Tensor,
        comm: Comm,
        call: Call,
        then: Callable[[], object],
    ) -> Running:
        assert schedule is not None
        rounds = schedule(comm.rank, comm.size, data.numel())
        return self.running_type(rounds, data, comm, call.reduce, then)


def _check(call: Call, size: int) -> None:
    if not 0 <= call.root < size:
        raise ValueError(f"{call.operation}: root {call.root} is not in a group of {size} ranks")
    dtypes = {str(t.dtype).removeprefix("torch.") for t in (*call.inputs, *call.outputs)}
    if len(dtypes) > 1:
        raise ValueError(
            f"{call.operation}: all tensors of a call must have one dtype, not "
            f"{' and '.join(sorted(dtypes))}"
        )
    if call.operation in ("all_reduce", "reduce_scatter"):
        dtype = call.outputs[0].dtype
        numbers = dtype.is_floating_point or dtype.is_complex
        unordered = dtype.is_complex and call.reduce in ("min", "max")
        if unordered or (numbers and call.reduce in _BITS):
            raise ValueError(
                f"{call.operation}: the reduction {call.reduce!r} is not defined for {dtype}"
            )
    if call.inputs:
        whole, part = call.outputs[0].numel(), call.inputs[0].numel()
        if call.operation == "reduce_scatter":
            whole, part = part, whole
        if whole != part * size:
            sizes = f"expected {part * size} elements ({size} parts of {part}), not {whole}"
            raise ValueError(f"{call.operation}: {sizes}")


def _part(full: Tensor, comm: Comm, shard: Tensor) -> Tensor:
    count = shard.numel()
    return full.detach().view(-1)[comm.rank * count : (comm.rank + 1) * count]


@torch.no_grad()
def _put(source: Tensor, target: Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.detach().copy_(source.detach().reshape(target.shape))


IMPLEMENTATION = Algorithms
