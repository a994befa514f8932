"""Expert parallelism: each rank holds some experts of every mixture; tokens travel to them.

Problem.  A mixture of E experts has E times the parameters of one MLP, but each token needs only k
of them.  Copies of all experts on every rank waste memory, and sharding gathers all parameters for
tokens that use few.  So leave the experts where they are and send the tokens (GShard, arXiv
2006.16668, section 3.3; Switch Transformer, arXiv 2101.03961, section 5.4).

    what                              where
    experts, their gradients, state   E/X of each layer on each of the X ranks of the axis expert
    router, attention, all the rest   every rank
    samples                           every rank of both axes has its own
    buffers                           every rank its own; a balancing bias is equal on all
    tokens of one micro-batch         their own rank; while an expert computes, that of the expert

    layer     forward    router, choice, places | counts | dispatch | experts | combine | weights
              backward                                     combine' | experts | dispatch'
    step      before_step                [1] most and fewest micro-batches of a rank in the group
              micro-batches              [2] forward, backward; both all-to-alls, and their reverse
              rounds without one         [3] the same calls with no rows (idle.py); before backward
                                             the others say whether it comes to experts
              finish                     [4] all but experts: sum over replicate x expert
                                         [5] experts: sum over replicate only
              clip                       [6] norm: experts of all ranks, the rest once
              update                     local; then balancing biases move by the load of all ranks

The seam is the module that the model calls its experts by (role ``expert``): it is given rows and
the number of an expert for each, and returns outputs in the same order.  Router, choice, capacity,
weights and sums stay with the token's rank, so the routing of a token depends on no other rank.

[5] follows from who saw which tokens.  An expert has seen the tokens of all ranks of its group when
backward ends, so its gradient is the sum over the group already; other replicas saw other tokens.
The rest has seen its own rank's tokens only.  A sum of experts over their own axis would add
different experts; a division by X would shrink them.

Experts differ between ranks from the start: rank 0 sends the whole model once, then each rank keeps
its part.  A balancing bias (DeepSeek-V3, arXiv 2412.19437, section 2.1.2) moves by ``balance_rate``
times the sign of mean load minus own load, counted over all ranks and all micro-batches of a step.

Cost: floating-point bytes a step, over all N = R X ranks.  For each layer T tokens-times-choices of
width d that leave their rank: 4 T d (dispatch, combine, and both in backward); 6 T d with
recomputation.  T follows from the routing.  2 (N-1) bytes of gradients of all but experts,
2 (R-1) bytes of those of experts, 8-byte sums for the norm.  Memory: P, G and O of experts over X.
Numbers: an expert adds up tokens of several ranks in one product, in another order than one device.
Left out: overlap of the exchange with the shared experts, buckets that leave during backward, a
layer that the losses of some ranks reach and those of others in the same round do not, and an
elastic group: a member that leaves takes its experts with it.  Experts on ranks of the data axes
are the hybrid's (hybrid/experts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from shardproof.axes import EXPERT, cutting, summing
from shardproof.comm import Comm, Mesh
from shardproof.contract import (
    Batch,
    Capabilities,
    Kind,
    Now,
    Piece,
    Refused,
    Role,
)
from shardproof.impls.reference.engine.choices import FORMATS, Saved, declared
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.handle import Handle, Whole
from shardproof.impls.reference.engine.norm import NormPart, power_sum
from shardproof.impls.reference.engine.options import at_least, parse_options
from shardproof.impls.reference.engine.recompute import Group
from shardproof.impls.reference.engine.state import (
    broadcast_tensors,
    gather_pieces,
    gather_rows,
    named_state,
)
from shardproof.impls.reference.expert.balancing import Balancing
from shardproof.impls.reference.expert.exchange import Exchange, reaches
from shardproof.impls.reference.expert.idle import IdleRounds

T = TypeVar("T")
#: The axis whose ranks hold different experts.
AXIS = cutting("experts")


@dataclass(frozen=True)
class Options(Saved):
    """``balance_rate``: by how much a step moves a balancing bias (0: it stays).

    ``recompute_every``: see engine/recompute.py.
    """

    balance_rate: float = 0.0
    recompute_every: int = 0

    def __post_init__(self) -> None:
        at_least("balance_rate", self.balance_rate, 0.0)
        at_least("recompute_every", self.recompute_every, 0)


class ExpertParallel(Whole):
    """The handle: whole tensors, of which those of experts are parts of larger ones."""

    exchange_type: type[Exchange] = Exchange
    idle_type: type[IdleRounds] = IdleRounds

    def __init__(
        self, module: nn.Module, mesh: Mesh, roles: Mapping[str, Role], repeated: Sequence[Group]
    ) -> None:
        self.mesh = mesh
        self.comm = self.over(summing(mesh.axes))
        self.expert_comm = self.over(summing(mesh.axes, EXPERT))
        self.across = mesh.comm(AXIS) if AXIS in mesh.axes else None
        self.broadcast_initial(module)
        super().__init__(module, self.comm.rank if self.comm else 0)
        #: Names of parameters of experts, and of those that are cut: the experts of this rank, and
        #: how many there are.
        self.of_experts: set[str] = set()
        self.cuts: dict[str, tuple[slice, int]] = {}
        self.exchanges = self.cut(roles, [unit for group in repeated for unit in group.names])
        self.idle = self.idle_type(self.grouped(repeated))
        self.rounds = self.own_rounds = self.joint_rounds = self.round = 0
        self.ends: list[list[Tensor]] = []

    def over(self, along: Sequence[str]) -> Comm | None:
        """The group along some axes; ``None``: the mesh has none of them."""
        return self.mesh.comm(*along) if along else None

    def broadcast_initial(self, module: nn.Module) -> None:
        """Broadcast the whole model of rank 0, before any rank drops the experts of others."""
        if self.comm is not None:
            broadcast_tensors(list(named_state(module).values()), self.comm)

    def cut(self, roles: Mapping[str, Role], repeated: Sequence[str]) -> list[Exchange]:
        """Keep this rank's experts, and let tokens travel to the others'; backward repeats the
        units ``repeated``.
        """
        exchanges = []
        for name in (name for name, role in roles.items() if role == EXPERT):
            experts = self.module.get_submodule(name)
            self.of_experts |= {f"{name}.{leaf}" for leaf, _ in experts.named_parameters()}
            total = len(next(experts.parameters()))
            if self.across is None or self.across.size == 1:
                continue
            if total % self.across.size:
                valid = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
                raise Refused(
                    f"mesh axis {AXIS!r} = {self.across.size}: {name!r} has {total} experts, "
                    f"which cannot be divided among {self.across.size} ranks; valid: {valid}"
                )
            repeats = any(_within(name, unit) for unit in repeated)
            exchange = self.exchange_type(name, experts, total, self.across, repeats)
            for leaf, parameter in experts.named_parameters():
                self.cuts[f"{name}.{leaf}"] = exchange.own, total
                # Cloned: a view would keep the experts of all ranks in memory.
                parameter.data = parameter.data[exchange.own].clone()
            exchanges.append(exchange)
        return exchanges

    def grouped(self, repeated: Sequence[Group]) -> list[list[Exchange]]:
        """The exchanges in forward order, neighbours together that backward repeats together, or
        that lie in no group of units.
        """

        def home(one: Exchange) -> int:
            homes = (any(_within(one.name, unit) for unit in group.names) for group in repeated)
            return next((number for number, is_home in enumerate(homes) if is_home), -1)

        return [list(group) for _, group in groupby(self.exchanges, home)]

    # ------------------------------------------------------------------------------------ rounds

    def before_step(self, micro_batches: int) -> None:  # [1]
        """Agree on the rounds of the group, and on how many of them all ranks have."""
        self.own_rounds, self.round = micro_batches, 0
        self.rounds, fewest = self.most(micro_batches, -micro_batches)
        self.joint_rounds = -fewest

    def most(self, *numbers: int) -> Sequence[int]:
        """The largest of each of ``numbers`` in the group."""
        if self.across is None or not self.exchanges:
            return numbers
        return self.across.agree(numbers, "max")

    def backward_begins(self, loss: Tensor) -> None:
        """In a round that not all ranks have, tell the others whether backward needs them."""
        self.round += 1
        if self.round > self.joint_rounds:
            self.most(int(reaches(loss)))

    def forwards_ended(self) -> None:
        """Make the calls of the forwards that other ranks still have."""
        self.ends = [self.idle.forward() for _ in range(self.own_rounds, self.rounds)]

    def sit_out(self) -> None:  # [3]
        """Make the calls of the rounds that this rank has no micro-batch for."""
        for number in range(self.own_rounds, self.rounds):
            early = number - self.own_rounds < len(self.ends)
            end = self.ends[number - self.own_rounds] if early else self.idle.forward()
            # Only the others' losses know: in a step in which the head learns none comes here.
            if self.most(0)[0]:
                self.idle.backward(end)
        self.ends = []

    def evaluate(self, passes: Sequence[Callable[[], T]]) -> list[T]:
        """Results of ``passes``; a rank with fewer than others lends them its experts."""
        [most] = self.most(len(passes))  # before the first, in which others wait for this rank
        results = super().evaluate(passes)
        for _ in range(len(passes), most):
            self.idle.forward()
        return results

    # --------------------------------------------------------------------------------- gradients

    @torch.no_grad()
    def finish(self) -> None:
        """Sum gradients over the ranks that hold the same parameters and saw other tokens."""
        # Of forwards that no backward reached, such as those of a step in which the head learns.
        for exchange in self.exchanges:
            exchange.plans.clear()
        # In this order on all ranks: the two groups overlap, and would wait for each other.
        named = list(zip(self.names, self.parameters, strict=True))
        for comm, chosen in (
            (self.comm, [p for name, p in named if name not in self.of_experts]),  # [4]
            (self.expert_comm, [p for name, p in named if name in self.of_experts]),  # [5]
        ):
            if comm is not None and chosen:
                self.sum_over(comm, chosen)

    def sum_over(self, comm: Comm, parameters: Sequence[nn.Parameter]) -> None:
        """Sum the gradients of ``parameters``, one call per dtype; none where no rank has one."""
        used = comm.begin_agreement([p.grad is not None for p in parameters], "sum")
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_dtype.setdefault(parameter.dtype, []).append(parameter.grad)
        for gradients in by_dtype.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            comm.all_reduce(flat)
            totals = flat.split([gradient.numel() for gradient in gradients])
            for gradient, total in zip(gradients, totals, strict=True):
                gradient.copy_(total.view(gradient.shape))
        for parameter, count in zip(parameters, used.wait(), strict=True):
            # Not zero but none, or weight decay and momentum would move unused parameters.
            if not count:
                parameter.grad = None

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:  # [6]
        """Experts of all ranks of the axis, the rest once."""
        named = zip(self.names, self.parameters, strict=True)
        nothing = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        # Whether or not this rank has gradients: all ranks must make the call.
        return [(nothing, (AXIS,))] * bool(self.cuts) + [
            (power_sum(p.grad, order), (AXIS,) if name in self.cuts else ())
            for name, p in named
            if p.grad is not None
        ]

    # ------------------------------------------------------------------------------------- state

    def pieces(self, kind: Kind) -> list[Piece]:
        """Whole tensors, and parts of those of experts."""
        return [self.placed(piece.name, piece) for piece in super().pieces(kind)]

    def place(self, name: str, slot: str, tensor: Tensor) -> Piece:
        """As the parameter; a scalar (Adam's step) whole."""
        piece = super().place(name, slot, tensor)
        return self.placed(name, piece) if tensor.dim() else piece

    def placed(self, name: str, piece: Piece) -> Piece:
        """``piece`` of parameter ``name`` in the whole tensor."""
        if name not in self.cuts:
            return piece
        own, total = self.cuts[name]
        inner = piece.global_shape[1:]
        slices = ((own.start, own.stop), *((0, size) for size in inner))
        copy = self.expert_comm.rank if self.expert_comm else 0
        return replace(piece, global_shape=(total, *inner), slices=slices, replica=copy)

    def close(self) -> None:
        """Restore the forwards of the experts."""
        for exchange in self.exchanges:
            exchange.close()


class ReferenceExpert(Engine):
    """The strategy as a system under test."""

    strategy = "expert"
    depth = "layout"
    options_type = Options
    handle_type: type[ExpertParallel] = ExpertParallel
    balancing_type: type[Balancing] = Balancing
    handle: ExpertParallel

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The ``expert`` profile; a balancing bias is further state."""
        chosen = parse_options(Options, options)
        rules = cls.balancing_type.rules if chosen.balance_rate else {}
        axes, scopes = ("replicate", AXIS), ("rank", "global")
        return declared(axes=axes, checkpoints=FORMATS, follows=rules, scopes=scopes)

    @classmethod
    def given_state(cls, now: Now, options: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """The biases and counts that an update leaves behind."""
        return cls.balancing_type.given(now, parse_options(Options, options).balance_rate)

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        """Cut the experts along their axis."""
        self.handle = self.handle_type(module, mesh, self.build.roles, self.groups)
        rate = parse_options(Options, options).balance_rate
        self.balancing = self.balancing_type(module, self.handle.comm, rate) if rate else None
        return self.handle

    def backward(self, batch: Batch) -> Tensor | None:
        """All own micro-batches, then the rounds that only others have."""  # [2]
        loss = super().backward(batch)
        self.handle.sit_out()
        return loss

    def update(self) -> None:
        """One step of the optimizer, and of the balancing biases."""
        super().update()
        # Here, not after the step: an update that is skipped moves no bias.
        if self.balancing:
            self.balancing.update()

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """Whole tensors; those of experts are gathered."""
        pieces, across = self.local_state(kind), self.handle.across
        if across is None:
            return {piece.name: piece.tensor.clone() for piece in pieces}
        if kind != "parameters":  # state of an optimizer may be missing on some ranks
            return gather_pieces(pieces, across)
        # As objects, N ranks would unpack the pieces of N ranks one by one.
        cuts = self.handle.cuts
        whole = {p.name: p.tensor.detach().clone() for p in pieces if p.name not in cuts}
        return whole | gather_rows([p for p in pieces if p.name in cuts], across)

    def reconfigure(self, mesh: Mesh, joined: Sequence[int], left: Sequence[int]) -> NoReturn:
        """No rank has the experts of a member that is gone."""
        raise Refused(
            f"axis {AXIS!r}: ranks {sorted({*joined, *left})} join or leave, but each rank holds "
            "experts that no other rank of its group has; save a checkpoint and load it on the "
            "new mesh"
        )


def _within(name: str, unit: str) -> bool:
    """Whether the module ``name`` lies in ``unit``."""
    return f"{name}.".startswith(f"{unit}.")


IMPLEMENTATION = ReferenceExpert
