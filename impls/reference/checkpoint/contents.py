"""The state that a reference strategy gives to a checkpoint.

    parameters, buffers    the pieces that the rank holds
    optimizer              slots, masters and averages
    extra                  what the reducer carries from step to step (error feedback)
    rng                    generators: torch's own, the device's, and those in attributes of modules
    about                  strategy, mesh, optimizer spec, scaler, precision, aliases, versions,
                           steps done, and the caller's ``extra``

Tensors are those that train, not copies.  The state of a generator belongs to one rank, and its
name ends with ``@<rank>``: on another mesh it has no meaning.  What reducers carry has such names,
too, but is shared out anew there.  Generators of Python and NumPy are the caller's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

import shardproof
from shardproof.contract import Piece
from shardproof.impls.reference.checkpoint.agreement import State
from shardproof.impls.reference.checkpoint.manifest import About
from shardproof.impls.reference.engine.optimizer import as_data
from shardproof.impls.reference.engine.state import generators_of

if TYPE_CHECKING:
    from shardproof.impls.reference.engine.engine import Engine

#: In this order: loaded masters know more digits than the parameters, so they come after these.
TRAINED = ("parameters", "optimizer", "buffers")
#: Progress in the data, in what callers give and get back.
DATA = "data"


class Contents:
    """The state of ``system`` on this rank."""

    def __init__(self, system: Engine) -> None:
        self.system, mesh = system, system.mesh
        self.rank = mesh.ranks.index(mesh.rank)

    def state(self, extra: Mapping[str, Any]) -> State:
        """The whole state, and the caller's ``extra``."""
        system = self.system
        pieces = {kind: system.saved_pieces(kind) for kind in TRAINED}  # type: ignore[arg-type]
        pieces["extra"] = system.kept_pieces()
        states = {name: get(generator) for name, generator in self.generators().items()}
        pieces["rng"] = [Piece.whole(name, state) for name, state in states.items()]
        return State(pieces, self.about(extra), system.handle.apart | {"buffers"})

    def about(self, extra: Mapping[str, Any]) -> About:
        """Values other than tensors."""
        system = self.system
        scaler, policy = system.scaler, dataclasses.asdict(system.precision)
        return About(
            *(system.steps_done, system.strategy, dict(system.mesh.axes)),
            optimizer=as_data(system.spec, system.steps_done),
            scaler={"scale": scaler.scale, "good": scaler.good} if scaler else None,
            precision={name: str(dtype) for name, dtype in policy.items() if dtype is not None},
            aliases=system.aliases,
            versions={"shardproof": shardproof.VERSION, "torch": str(torch.__version__)},
            data=extra.get(DATA, {}),
            extra={name: value for name, value in extra.items() if name != DATA},
        )

    def generators(self) -> dict[str, torch.Generator]:
        """Name -> generator that this rank draws from."""
        found = generators_of(self.system.module, torch.device(self.system.mesh.device))
        return {f"{name}@{self.rank}": generator for name, generator in found.items()}


def get(generator: torch.Generator) -> torch.Tensor:
    """The state of a generator; a copy."""
    return generator.get_state()
