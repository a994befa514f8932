"""The unmodified collectives of ``torch.distributed`` on the groups of any backend.

What runs is the backend's own operation: torch checks arguments, and hands them on.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from shardproof.comm import ANY, Call, Recv, Send
from shardproof.contract import Capabilities, Collectives, Options, Refused

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
_ALL = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter"),
    *("all_to_all", "send_recv", "batch", "barrier"),
)


class TorchCollectives(Collectives):
    """``dist.all_reduce`` and the other operations."""

    depth = "layout"
    hands_on = True

    @classmethod
    def capabilities(cls, options: Options) -> Capabilities:
        if options:
            raise Refused(
                f"unknown option {next(iter(options))!r}; torch's collectives have no options"
            )
        return Capabilities()

    @classmethod
    def offers(
        cls, options: Options, backend: str, world: int
    ) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        return {name: {} for name in _ALL}

    def perform(self, call: Call) -> Sequence[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # coalesced forms are deprecated, and still called
            made: Any = getattr(self, f"_{call.operation}")(call)
        if made is None:
            return []
        return list(made) if isinstance(made, list | tuple) else [made]

    def _all_reduce(self, call: Call) -> Any:
        op, how = _OPS[call.reduce], {"group": call.group, "async_op": call.asynchronous}
        if call.form == "coalesced":
            return dist.all_reduce_coalesced(list(call.outputs), op, **how)  # type: ignore[arg-type]
        return dist.all_reduce(call.outputs[0], op, **how)  # type: ignore[arg-type]

    def _reduce(self, call: Call) -> Any:
        return dist.reduce(
            call.outputs[0],
            op=_OPS[call.reduce],
            group=call.group,
            async_op=call.asynchronous,
            group_dst=call.root,
        )

    def _broadcast(self, call: Call) -> Any:
        if call.form == "coalesced":  # as DDP sends its buffers; there is no asynchronous form
            dist._broadcast_coalesced(call.group, list(call.outputs), 1 << 20, call.root)
            return None
        return dist.broadcast(
            call.outputs[0], group=call.group, async_op=call.asynchronous, group_src=call.root
        )

    def _all_gather(self, call: Call) -> Any:
        outputs, how = list(call.outputs), (call.group, call.asynchronous)
        if call.form == "tensor":
            return dist.all_gather_into_tensor(outputs[0], call.inputs[0], *how)
        if call.form == "coalesced":
            lists = [[output] for output in outputs]
            return dist.all_gather_coalesced(lists, list(call.inputs), *how)
        return dist.all_gather(outputs, call.inputs[0], *how)

    def _reduce_scatter(self, call: Call) -> Any:
        output, op, how = call.outputs[0], _OPS[call.reduce], (call.group, call.asynchronous)
        if call.form == "coalesced":
            with dist._coalescing_manager(call.group, async_ops=call.asynchronous) as together:
                for result, given in zip(call.outputs, call.inputs, strict=True):
                    dist.reduce_scatter_tensor(result, given, op, call.group)
            return together.works if call.asynchronous else None
        if call.form == "tensor":
            return dist.reduce_scatter_tensor(output, call.inputs[0], op, *how)
        return dist.reduce_scatter(output, list(call.inputs), op, *how)

    def _gather(self, call: Call) -> Any:
        return dist.gather(
            call.inputs[0],
            list(call.outputs) or None,
            group=call.group,
            async_op=call.asynchronous,
            group_dst=call.root,
        )

    def _scatter(self, call: Call) -> Any:
        return dist.scatter(
            call.outputs[0],
            list(call.inputs) or None,
            group=call.group,
            async_op=call.asynchronous,
            group_src=call.root,
        )

    def _all_to_all(self, call: Call) -> Any:
        how = {"group": call.group, "async_op": call.asynchronous}
        if call.form == "list":
            return dist.all_to_all(list(call.outputs), list(call.inputs), **how)  # type: ignore[arg-type]
        gives, takes = call.splits or (None, None)
        return dist.all_to_all_single(call.outputs[0], call.inputs[0], takes, gives, **how)  # type: ignore[arg-type]

    def _send_recv(self, call: Call) -> Any:
        works = []
        for one in call.transfers:
            if isinstance(one, Send):
                send = dist.isend if call.asynchronous else dist.send
                works.append(send(one.tensor, group=call.group, tag=one.tag, group_dst=one.peer))
            else:
                recv: Any = dist.irecv if call.asynchronous else dist.recv
                source = None if one.peer == ANY else one.peer
                works.append(recv(one.tensor, group=call.group, tag=one.tag, group_src=source))
        return works if call.asynchronous else None

    def _batch(self, call: Call) -> Any:
        kinds: dict[type[Send | Recv], Any] = {Send: dist.isend, Recv: dist.irecv}
        posted = [
            dist.P2POp(kinds[type(o)], o.tensor, group=call.group, tag=o.tag, group_peer=o.peer)
            for o in call.transfers
        ]
        return dist.batch_isend_irecv(posted) if posted else None

    def _barrier(self, call: Call) -> Any:
        return dist.barrier(group=call.group, async_op=call.asynchronous)


IMPLEMENTATION = TorchCollectives
