"""A sharded unit: a module, its parameters in flat shards, and their gradients.

Parameters of one dtype that are all trained, or all frozen, share one flat shard.  Frozen ones have
a flat shard of their own because they have no gradients: no memory, no reduction.  What can happen
to a flat shard is two small state machines: ``parameters.py`` (sharded, gathering, whole, chunked)
and ``gradients.py`` (arriving, packed, reducing, accumulated, final).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardproof.comm import Comm
from shardproof.impls.reference.engine.precision import Precision
from shardproof.impls.reference.parts.flat import FlatLayout, Part
from shardproof.impls.reference.parts.reducers import Reducer
from shardproof.impls.reference.units.gradients import Gradients
from shardproof.impls.reference.units.parameters import Parameters, ParameterState

if TYPE_CHECKING:
    from shardproof.impls.reference.engine.offload import HostMemory


class FlatShard:
    """Parameters ``named`` of one dtype, all trained or all frozen, sharded over ``comm``.

    ``comm`` of ``None``: one rank owns all.  With ``host`` shards rest on the host.  ``reducer``
    gathers parameters (``None``: the backend's own all-gather).
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        comm: Comm | None,
        precision: Precision,
        host: HostMemory | None = None,
        reducer: Reducer | None = None,
    ) -> None:
        self.comm = comm if comm is not None and comm.size > 1 else None
        self.layout = FlatLayout(named, self.comm.size if self.comm else 1)
        self.trained = next(iter(named.values())).requires_grad
        self.parameters = Parameters(named, self.layout, self.comm, precision, host, reducer)
        rank = self.comm.rank if self.comm else 0
        self.parts: dict[str, Part] = {part.name: part for part in self.layout.parts(rank)}
        #: This rank's parts of trained parameters: leaves for the optimizer, views of the shard.
        self.targets: dict[str, Tensor] = {}
        # Detached views of the shard: updating them updates it, and copies would double it.
        if self.trained:
            views = {name: part.of_shard(self.shard) for name, part in self.parts.items()}
            self.targets = {name: v.detach().requires_grad_() for name, v in views.items()}
        rest = None
        if host and self.trained:
            rest = host.zeros(self.shard.shape, self.layout.dtype)
        reduced_in = precision.reduction(self.layout.dtype)
        self.gradients = Gradients(self.layout, self.comm, reduced_in, self.parameters.device, rest)

    @property
    def shard(self) -> Tensor:
        """The parameters that this rank owns, ``(layout.shard_numel,)`` in the built dtype."""
        return self.parameters.shard

    def publish_gradients(self, used: Mapping[str, bool]) -> None:
        """Give the optimizer's targets their gradients; ``None`` to parameters that no rank
        used.
        """
        total = self.gradients.total
        for name, target in self.targets.items():
            target.grad = None
            if used[name]:
                assert total is not None
                target.grad = self.parts[name].of_shard(total).to(target.device)

    def clear_gradients(self) -> None:
        """End the step."""
        self.gradients.clear()
        for target in self.targets.values():
            target.grad = None


class ShardedUnit:
    """A module and its flat shards; ``number`` is its position in the list of units."""

    def __init__(
        self,
        number: int,
        name: str,
        module: nn.Module,
        named: Mapping[str, nn.Parameter],
        comm: Comm | None,
        precision: Precision,
        host: HostMemory | None = None,
        reducer: Reducer | None = None,
    ) -> None:
        self.number, self.name, self.module = number, name, module
        # A collective has one dtype; what is frozen has no gradients to be laid out.
        kinds: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
        for key, parameter in named.items():
            kinds.setdefault((parameter.dtype, parameter.requires_grad), {})[key] = parameter
        self.flats = [FlatShard(same, comm, precision, host, reducer) for same in kinds.values()]
        self.trained = [flat for flat in self.flats if flat.trained]
        self.start_round()

    def start_round(self) -> None:
        """Start a round in which the unit has not been called."""
        self.pending = 0  # calls whose backward has not passed the unit's inputs
        self.open_ended = False  # whether some call had no input that needs a gradient
        self.missing = {name for flat in self.trained for name in flat.layout.names}

    # --------------------------------------------------------------------------------- parameters

    @property
    def is_whole(self) -> bool:
        """Whether all of its parameters are gathered or being gathered."""
        return all(flat.parameters.is_whole for flat in self.flats)

    @property
    def is_chunked(self) -> bool:
        """Whether it keeps chunks of a sharding over fewer ranks."""
        return any(flat.parameters.state is ParameterState.CHUNKED for flat in self.flats)

    def gather(self, within: Comm | None = None) -> None:
        """Start to gather all parameters."""
        for flat in self.flats:
            flat.parameters.gather(within)

    def wait(self) -> None:
        """Wait for the gather in flight."""
        for flat in self.flats:
            flat.parameters.wait()

    def free(self, within: Comm | None = None) -> None:
        """Free all parameters."""
        for flat in self.flats:
            flat.parameters.free(within)

    # ---------------------------------------------------------------------------------- gradients

    def pack(self) -> None:
        """Pack the arrived gradients."""
        for flat in self.trained:
            flat.gradients.pack()

    def reduce(self, reducer: Reducer, step: int) -> None:
        """Start to reduce packed gradients of trained parameters, in optimizer step number
        ``step``.
        """
        for flat in self.trained:
            flat.gradients.reduce(reducer, step)
