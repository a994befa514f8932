"""Which modules of a Transformer are split over the tensor axis, and how: rules by name.

A module whose name matches no rule stays whole on every rank.  Rules speak of the names of the
suite's models; a model with other names needs rules of its own.
"""

from __future__ import annotations

import re

from torch import nn

from shardproof.comm import Comm
from shardproof.contract import Refused
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

#: Pattern of a module's name -> how it is split.
SPLIT_RULES = {
    r"embed\.token": "vocabulary",
    r"embed\.position": "positions",
    r"blocks\.\d+\.attention\.qkv": "heads",
    r"blocks\.\d+\.attention\.out": "row",
    r"blocks\.\d+\.(mlp\.)?up": "column",
    r"blocks\.\d+\.(mlp\.)?down": "row",
    r"head": "classes",
}
#: Without one of each there is nothing to split; the names are for a refusal.
NEEDED = {"vocabulary": "embed.token", "column": "blocks.*.up", "classes": "head"}


def split_layers(
    module: nn.Module, comm: Comm, sequence_parallel: bool, gathered: bool
) -> list[SplitLayer]:
    """The layers of ``module`` that :data:`SPLIT_RULES` name, in the order of registration.

    ``gathered``: the head gives all classes on every rank, not this rank's only.  Raises
    :class:`Refused` for a model without the layers that tensor parallelism splits.
    """
    # Conjugate pairs: each undoes in backward what the other does in forward.
    enter = operators.g if sequence_parallel else operators.f
    leave = operators.g_bar if sequence_parallel else operators.f_bar
    kinds = {name: _kind(name) for name, _ in module.named_modules()}
    lacking = [repr(name) for kind, name in NEEDED.items() if kind not in kinds.values()]
    if lacking:
        raise Refused(
            f"strategy 'tensor' splits a Transformer's embedding, blocks and head; this model "
            f"has no {', '.join(lacking)}: run it with mesh axis 'tensor' = 1"
        )
    layers: list[SplitLayer] = []
    for name, part in module.named_modules():
        kind = kinds[name]
        this = (name, part, comm)
        if kind == "column":
            layers.append(Column(*this, enter))
        elif kind == "row":
            layers.append(Row(*this, leave))
        elif kind == "heads":
            attention = module.get_submodule(name.rpartition(".")[0])
            layers.append(Heads(*this, enter, attention))
        elif kind == "vocabulary":
            layers.append(Vocabulary(*this, leave))
        elif kind == "classes":
            layers.append(Classes(*this, enter, gathered))
        # These two have no part of their own, but must know which positions a rank has.
        elif kind == "positions" and sequence_parallel:
            layers.append(Positions(*this))
        elif sequence_parallel and hasattr(part, "first_position"):
            layers.append(Placed(*this))
        elif sequence_parallel and getattr(part, "whole_sequence", False):
            raise Refused(
                f"option 'sequence_parallel' = True: {name!r} goes along all positions, of which a "
                "rank has a part; set it to False"
            )
    return layers


def _kind(name: str) -> str:
    """How the module ``name`` is split (``""``: not at all)."""
    kinds = (kind for pattern, kind in SPLIT_RULES.items() if re.fullmatch(pattern, name))
    return next(kinds, "")
