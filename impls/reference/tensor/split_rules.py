"""The modules of a Transformer that are split over the tensor axis, chosen by their roles.

A module without one of these roles stays whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shardproof.comm import Comm
from shardproof.contract import Refused, Role
from shardproof.impls.reference.tensor import operators
from shardproof.impls.reference.tensor.layers import (
    Classes,
    Column,
    Heads,
    Placed,
    Positions,
    Row,
    SplitLayer,
    Vocabulary,
)

#: Layers whose output is split, and what must come behind them.
SPLIT_OUTPUTS: tuple[Role, ...] = ("column", "heads")
#: A Transformer has one of each; the names are for a refusal.
NEEDED: Mapping[Role, str] = {
    "embedding": "embed.token",
    "column": "blocks.*.up",
    "classes": "head",
}


def split_layers(
    module: nn.Module,
    roles: Mapping[str, Role],
    comm: Comm,
    sequence_parallel: bool,
    gathered: bool,
) -> list[SplitLayer]:
    """The layers of ``module`` that their ``roles`` split, in the order of registration.

    ``gathered``: the head gives all classes on every rank, not this rank's only.  Raises
    :class:`Refused` for a model without the layers that tensor parallelism splits.
    """
    # Conjugate pairs: each undoes in backward what the other does in forward.
    enter = operators.g if sequence_parallel else operators.f
    leave = operators.g_bar if sequence_parallel else operators.f_bar
    given = {*roles.values()}
    lacking = [repr(name) for role, name in NEEDED.items() if role not in given]
    if lacking and not given.intersection(SPLIT_OUTPUTS):
        raise Refused(
            "strategy 'tensor' splits a Transformer's embedding, blocks and head, but this "
            f"model has no {', '.join(lacking)}: run this model with mesh axis 'tensor' = 1"
        )
    if given.intersection(SPLIT_OUTPUTS) and "row" not in given:
        raise Refused(
            "strategy 'tensor': a layer has the role 'column' (split by columns), but no later "
            "layer has the role 'row', which sums the parts: give a later layer the role 'row'"
        )
    layers: list[SplitLayer] = []
    for name, part in module.named_modules():
        role = roles.get(name)
        this = (name, part, comm)
        if role == "column":
            layers.append(Column(*this, enter))
        elif role == "row":
            layers.append(Row(*this, leave))
        elif role == "heads":
            attention = module.get_submodule(name.rpartition(".")[0])
            layers.append(Heads(*this, enter, attention))
        elif role == "embedding":
            layers.append(Vocabulary(*this, leave))
        elif role == "classes":
            layers.append(Classes(*this, enter, gathered))
        # These two have no part of their own, but must know which positions a rank has.
        elif role == "positions" and sequence_parallel:
            layers.append(Positions(*this))
        elif sequence_parallel and hasattr(part, "first_position"):
            layers.append(Placed(*this))
        # A router shares out places, and counts, among all tokens of a micro-batch.
        elif sequence_parallel and (role == "router" or getattr(part, "whole_sequence", False)):
            raise Refused(
                f"option 'sequence_parallel' = True: {name!r} needs all positions of a sample, but "
                "each rank has only some of these positions; set sequence_parallel to false"
            )
    return layers
