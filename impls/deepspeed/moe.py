"""DeepSpeed's ``MOELayer`` in the place of the exchange of ``reference/expert``.

    places     each expert has the same number for each rank; used or not, all are sent
    dispatch   rows into the places of their experts; an all-to-all of all places
    experts    of this rank, on the places of all ranks
    combine    an all-to-all back; each row from its place

It is given rows, and the number of the expert of each.  The gate is ours, because DeepSpeed's own
computes in float32 and takes experts by chance: it tells DeepSpeed the expert and the place of each
row in the form of ``TopKGate``.  There are as many places as any expert gets rows from any rank, on
which ranks agree by an integer, as ``TopKGate`` does where it drops nothing.  So the test covers
how rows travel, and the gradients that they bring back.

Router, weights, sums of gradients and norm are those of ``reference/expert``.
Numbers: as ``reference/expert``; places without a row have a gradient of zero.
Left out: the engine and its sums of gradients, ``TopKGate``, tutel, tensor-parallel experts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.comm import Comm, Mesh, environment
from shardproof.contract import Capabilities, Depth
from shardproof.impls.deepspeed.engine import init_communication
from shardproof.impls.reference.engine.handle import Handle
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.expert import ExpertParallel, ReferenceExpert
from shardproof.impls.reference.expert.exchange import Exchange

if importlib.util.find_spec("deepspeed") is not None:
    from deepspeed.moe.experts import Experts
    from deepspeed.moe.sharded_moe import MOELayer


@dataclass(frozen=True)
class NoOptions:
    """No options: the system is tested with its defaults."""


class Gate(nn.Module):
    """A gate that returns the choice it was given."""

    #: Places of an expert, experts; expert, place and weight of each row.
    routes: tuple[Any, ...] = ()

    def _set_ep_group(self, group: Any) -> None:
        """DeepSpeed gives the group to its gate as well."""

    def forward(self, *given: Any) -> tuple[Any, ...]:
        """No loss before the routes, no counts behind them."""
        return (None, *self.routes, None)


class OneExpert(nn.Module):
    """Expert ``number`` of the ``count`` in this rank's stack, as a separate layer."""

    def __init__(self, experts: Any, number: int, count: int) -> None:
        super().__init__()
        self.compute, self.number, self.count = experts.compute, number, count

    def forward(self, places: Tensor) -> Tensor:
        """The outputs of ``places`` ``(ranks, 1, places, width)``, in that shape."""
        rows = places.flatten(0, -2)
        sizes = [len(rows) if number == self.number else 0 for number in range(self.count)]
        outputs: Tensor = self.compute(rows, sizes)
        return outputs.view_as(places)


class ByPlaces(Exchange):
    """The exchange, whose messages are DeepSpeed's."""

    def __init__(self, name: str, experts: Any, total: int, comm: Comm, repeats: bool) -> None:
        super().__init__(name, experts, total, comm, repeats)
        count = total // comm.size
        held = Experts(nn.Identity(), count)
        # DeepSpeed's container would copy an expert, and train the copies.
        held.deepspeed_experts = nn.ModuleList(OneExpert(experts, n, count) for n in range(count))
        self.layer: Any = MOELayer(Gate(), held, f"ep_size_{comm.size}", comm.size, count)
        self.layer._set_ep_group(comm.group)

    def forward(self, rows: Tensor, numbers: Tensor, again: bool = False) -> Tensor:
        """Each of ``rows`` through the expert of its number, wherever that is."""
        before = F.one_hot(numbers, self.total).cumsum(0)
        most = int(before[-1].max()) if len(rows) else 0
        capacity = max(1, self.comm.agree([most], "max")[0])
        places = before.gather(1, numbers[:, None]).squeeze(1) - 1
        weights = rows.new_ones(len(rows))
        routes = (numbers, places, weights)
        self.layer.gate.routes = (capacity, self.total, *(part[None] for part in routes))
        # If no row needed a gradient, this rank would not join the others' backward.
        rows = rows if rows.requires_grad else rows.detach().requires_grad_()
        result: Tensor = self.layer(rows, None)
        return result


class WithDeepSpeed(ExpertParallel):
    """The handle of expert parallelism with that exchange."""

    exchange_type: type[Exchange] = ByPlaces


class DeepSpeedMoE(ReferenceExpert):
    """The adapter."""

    # The reference promises a layout: rows that leave, not places.
    depth: ClassVar[Depth] = "family"  # type: ignore[assignment]
    handle_type: type[ExpertParallel] = WithDeepSpeed

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """Those of ``reference/expert`` without checkpoints; ranks are processes."""
        parse_options(NoOptions, options)
        usual = super().capabilities(options)
        dtypes = ("float64", "float32")
        needed = replace(usual, backends=("gloo",), packages=("deepspeed",))
        return replace(needed, dtypes=dtypes, checkpoints=())

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        """Let DeepSpeed know the processes, and cut the experts along their axis."""
        with environment(LOCAL_RANK=str(mesh.rank), LOCAL_SIZE=str(mesh.world)):
            init_communication()
        return super().transform(module, mesh, options)


IMPLEMENTATION = DeepSpeedMoE
