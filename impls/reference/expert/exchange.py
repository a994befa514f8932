"""Dispatch, experts, combine: rows travel to the ranks of their experts and back.

    rows       a a b c c d      numbers of experts, sorted; two experts a rank
    counts  -> 2 1 | 2 1        integers first: no rank knows what it will get
    dispatch   a a b | c c d    all-to-all; rank 0 has a and b of all ranks
    experts    a a a b b        sorted by expert: rank 0's rows of a, rank 1's rows of a, ...
    combine    back in the order in which they came, then in the order in which they were asked for

Both all-to-alls are their own reverse in backward: gradients take the way back.  An exchange that
sends nothing is made all the same, because every rank of the group must make as many calls.

Under recomputation forward runs twice, and so do both all-to-alls.  The second time the counts of
the first hold: nothing is counted again, and a choice that differs is an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardproof.comm import Comm


class AllToAll(torch.autograd.Function):
    """``sent`` rows to each rank, ``received`` rows from each; backward the other way round."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, comm: Comm, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        """The rows that come in, by rank."""
        ctx.comm, ctx.sent, ctx.received = comm, sent, received
        return moved(rows, comm, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradients of the rows that went out."""
        return moved(gradients[0], ctx.comm, ctx.received, ctx.sent), None, None, None


def moved(rows: Tensor, comm: Comm, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """The rows that come in for ``rows``."""
    output = rows.new_empty(sum(received), *rows.shape[1:])
    comm.all_to_all(output, rows.contiguous(), list(received), list(sent))
    return output


def reaches(loss: Tensor) -> bool:
    """Whether the backward of ``loss`` comes to an exchange."""
    seen, ahead = set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        # The end of the name: exchanges of other libraries have an _AllToAll of their own.
        if node.name().endswith(f"{AllToAll.__name__}Backward"):
            return True
        seen.add(node)
        ahead += [after for after, _ in node.next_functions]
    return False


@dataclass(frozen=True)
class Plan:
    """One exchange: what was asked for, and how many rows travel between which ranks.

    ``numbers``: of the expert of each row; ``sent`` and ``received``: rows by rank; ``sizes``: rows
    that this rank gets, by rank and own expert.
    """

    numbers: Tensor
    sent: Sequence[int]
    received: Sequence[int]
    sizes: Tensor


class Exchange:
    """Stands in for the forward of ``experts``, of which this rank has ``total / comm.size``."""

    #: Moves rows between ranks, and their gradients back.
    move: Callable[..., Tensor] = staticmethod(AllToAll.apply)

    def __init__(self, name: str, experts: Any, total: int, comm: Comm, repeats: bool) -> None:
        self.name, self.experts, self.total, self.comm = name, experts, total, comm
        #: Whether backward repeats forwards, so that plans are kept for it, the oldest first.
        self.repeats = repeats
        self.plans: deque[Plan] = deque()
        experts.forward = self.forward

    @property
    def own(self) -> slice:
        """The experts of this rank."""
        each = self.total // self.comm.size
        return slice(self.comm.rank * each, (self.comm.rank + 1) * each)

    def forward(self, rows: Tensor, numbers: Tensor, again: bool = False) -> Tensor:
        """Each of ``rows`` through the expert of its number, wherever that is.

        ``again``: it repeats a forward, as does every forward inside of backward.
        """
        plan = self.plan(numbers, again or torch._C._current_graph_task_id() != -1)
        order = self.send_order(numbers)
        # If no row needed a gradient, this rank would not join the others' backward.
        rows = rows if rows.requires_grad else rows.detach().requires_grad_()
        arrived = self.dispatch(rows[order], plan)
        return self.combine(self.compute(arrived, plan), plan)[self.return_order(order)]

    def send_order(self, numbers: Tensor) -> Tensor:
        """Rows by expert, hence by rank; those of one expert as they were."""
        return numbers.argsort(stable=True)

    def return_order(self, order: Tensor) -> Tensor:
        """The inverse of ``order``."""
        return order.argsort()

    def dispatch(self, rows: Tensor, plan: Plan) -> Tensor:
        """Rows to the ranks of their experts."""
        return self.move(rows, self.comm, plan.sent, plan.received)

    def combine(self, outputs: Tensor, plan: Plan) -> Tensor:
        """Outputs back to the ranks that asked for them."""
        return self.move(outputs, self.comm, plan.received, plan.sent)

    def compute(self, arrived: Tensor, plan: Plan) -> Tensor:
        """The outputs of this rank's experts, in the order of ``arrived``."""
        each = plan.sizes.shape[1]
        numbers = torch.arange(each, device=arrived.device).repeat(len(plan.sizes))
        by_expert = numbers.repeat_interleave(plan.sizes.flatten()).argsort(stable=True)
        outputs = self.experts.compute(arrived[by_expert], plan.sizes.sum(0).tolist())
        return outputs[by_expert.argsort()]

    # ------------------------------------------------------------------------------------ plans

    def plan(self, numbers: Tensor, again: bool) -> Plan:
        """That of a forward; of a repetition that of the oldest forward not yet repeated."""
        if again:
            plan = self.plans.popleft()
            if not torch.equal(plan.numbers, numbers):
                raise RuntimeError(
                    f"the recomputation of {self.name!r} chose other experts than its forward: the "
                    "choice of the router must depend only on the router's input and buffers; "
                    "otherwise set recompute_every to 0"
                )
            return plan
        plan = self.agree(numbers)
        if self.repeats and torch.is_grad_enabled():
            self.plans.append(plan)
        return plan

    def agree(self, numbers: Tensor) -> Plan:
        """Tell the others how many rows each of their experts gets, and hear the same."""
        counts = torch.bincount(numbers, minlength=self.total)
        sizes = torch.empty_like(counts)
        self.comm.all_to_all(sizes, counts)
        asked, sizes = (each.view(self.comm.size, -1) for each in (counts, sizes))
        return Plan(numbers, asked.sum(1).tolist(), sizes.sum(1).tolist(), sizes)

    def nothing(self) -> Tensor:
        """Rows of a rank that has none."""
        first = next(self.experts.parameters())
        return first.new_empty(0, first.shape[-1]).requires_grad_()

    def close(self) -> None:
        """Restore the forward of the experts."""
        del self.experts.forward
