"""The inner contract: the methods of a strategy on one module along given axes of the mesh.

A strategy offers :class:`Apply`, ``apply(module, comms, options, context) -> Handle``; the engine
drives the handle.  Names of parameters survive ``apply``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from shardproof.comm import Comm
from shardproof.contract import Kind, OptimizerSpec, Piece, Role
from shardproof.impls.reference.engine.norm import NormPart, power_sum
from shardproof.impls.reference.engine.optimizer import param_groups
from shardproof.impls.reference.parts.reducers import Reducer

if TYPE_CHECKING:
    from shardproof.impls.reference.engine.offload import HostMemory

T = TypeVar("T")


class Handle(ABC):
    """A module under a strategy. Methods are called in the listed order."""

    module: nn.Module
    #: How gradients are summed over ranks; handles of one rank share one.
    reducer: Reducer
    #: Number of the optimizer step, from 0.
    step = 0
    #: Kinds of which every rank's copy is its own now, so that each is saved; buffers always are.
    apart: frozenset[Kind] = frozenset()
    #: Number of this rank's copy, where its optimizer's state is its own.
    own_copy: int | None = None
    #: Whether the backward of a micro-batch must come before the forward of the next one.
    takes_turns = False

    @abstractmethod
    def param_groups(self, spec: OptimizerSpec) -> list[dict[str, Any]]:
        """Torch parameter groups of the tensors that this rank updates, as (name, tensor) pairs."""

    def begin_step(self, step: int) -> None:
        """Start optimizer step number ``step``; nested handles are notified as well."""
        self.step = step

    def before_step(self, micro_batches: int) -> None:
        """Prepare for a step in which this rank runs ``micro_batches`` (or 0)."""

    def accumulate(self, is_last: bool) -> None:
        """Prepare for the forward of a micro-batch; if ``is_last``, gradients may be sent during
        it.
        """

    def backward_begins(self, loss: Tensor) -> None:
        """Called with the loss of a micro-batch right before its backward."""

    def forwards_ended(self) -> None:
        """Called where all forwards of a step come before its first backward, between the two."""

    def backward_ended(self) -> None:
        """Called after each backward of a pipeline's stage.

        What it left for others to wait for must be done here: before the next backward this rank
        waits for a neighbour, who may wait, through others, for those who wait for it.
        """

    def sit_out(self) -> None:
        """On a rank without micro-batches, make the calls of the others' backwards, before
        `finish`.

        Of several stages each makes them before one of them finishes, as backward does.
        """

    @abstractmethod
    def finish(self) -> None:
        """Complete the gradients after the last backward (or none)."""

    @abstractmethod
    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        """Sums of ``|g| ** order``, each with the axes to sum over; replicated parts once."""

    @abstractmethod
    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by the scalar ``factor``, in place."""

    def after_update(self) -> None:
        """Complete whole parameters right after the optimizer's update, before any read."""

    def after_step(self) -> None:
        """End a step: clear gradients."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def evaluate(self, passes: Sequence[Callable[[], T]]) -> list[T]:
        """Results of ``passes``, forwards without gradients; their number may differ between
        ranks.
        """
        return [compute() for compute in passes]

    @abstractmethod
    def pieces(self, kind: Kind) -> list[Piece]:
        """The parameters, gradients or buffers of this rank."""

    def outer_pieces(self) -> list[Piece]:
        """State that the strategy itself keeps between steps, shown as slots of the optimizer."""
        return []

    @abstractmethod
    def place(self, name: str, slot: str, tensor: Tensor) -> Piece | list[Piece]:
        """The piece or pieces of ``tensor``, an optimizer slot of parameter ``name``."""

    def loaded(self) -> None:
        """Update everything derived from the parameters, whose values were loaded."""

    def reduced(self) -> Iterable[str]:
        """Names of the parameters whose gradients this rank helps to reduce."""
        return [name for name, p in self.module.named_parameters() if p.requires_grad]

    def numbered(self, piece: Piece) -> Piece:
        """``piece``, state of a parameter, with the number of this rank's copy."""
        return piece

    def drain(self) -> None:
        """Finish work in flight."""

    def close(self) -> None:
        """Release hooks and buffers."""


@dataclass(frozen=True)
class Context:
    """Additional inputs that a strategy may use.

    ``reducer`` sums gradients over ranks.  ``blocks`` are the model's repeated modules, by name:
    units, where the options name none.  ``host`` is where shards rest, if not on the device.
    ``roles`` say what modules are for.
    """

    reducer: Reducer = field(default_factory=Reducer)
    blocks: Sequence[str] = ()
    host: HostMemory | None = None
    roles: Mapping[str, Role] = field(default_factory=dict)


#: The backend's own collectives; units as the options say; shards on the device.
PLAIN = Context()


#: Mesh axis -> the ranks along it.
Comms = Mapping[str, Comm]


class Apply(Protocol):
    """The one signature of all strategies."""

    def __call__(
        self,
        module: nn.Module,
        comms: Mapping[str, Comm],
        options: Any,
        context: Context = ...,
        /,
    ) -> Handle:
        """Put ``module`` under the strategy, starting from the values of the first rank.

        ``comms`` maps the axes that the strategy takes; ``options`` are those of its own type.
        """


class Whole(Handle):
    """Base of handles that keep the whole ``module`` on this rank, as copy number ``replica``."""

    def __init__(self, module: nn.Module, replica: int = 0) -> None:
        self.module = module
        self.replica = replica
        trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.names = list(trainable)
        self.parameters = list(trainable.values())

    def param_groups(self, spec: OptimizerSpec) -> list[dict[str, Any]]:
        """All trainable parameters: every rank updates everything."""
        return param_groups(spec, dict(zip(self.names, self.parameters, strict=True)))

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        """No parts to sum: gradients are whole and equal on all ranks."""
        return [(power_sum(p.grad, order), ()) for p in self.parameters if p.grad is not None]

    @torch.no_grad()
    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient that exists."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.dtype))

    def pieces(self, kind: Kind) -> list[Piece]:
        """Whole tensors."""
        whole: dict[str, Tensor] = {}
        if kind == "parameters":
            whole = dict(self.module.named_parameters())
        elif kind == "buffers":
            whole = dict(self.module.named_buffers())
        elif kind == "gradients":
            pairs = zip(self.names, self.parameters, strict=True)
            whole = {name: p.grad for name, p in pairs if p.grad is not None}
        return [Piece.whole(n, t.detach(), replica=self.replica) for n, t in whole.items()]

    def place(self, name: str, slot: str, tensor: Tensor) -> Piece:
        """The whole tensor."""
        return Piece.whole(f"{name}.{slot}", tensor, replica=self.replica)


class Replicated(Whole):
    """Base of strategies that keep a whole copy of the model on every rank of ``comm``."""

    def __init__(self, module: nn.Module, comm: Comm) -> None:
        super().__init__(module, comm.rank)
        self.comm = comm


class Local(Whole):
    """A module on this rank only: nothing is exchanged."""

    def finish(self) -> None:
        """Leave the gradients of backward unchanged."""
