"""Models that no rank holds whole: built on ``meta``, they get values unit by unit.

    model = build("meta")             shapes, no memory
    for each unit                     values by reset_parameters, sent by the first rank, cut; the
                                      rest is freed before the next unit

So a rank needs memory for its shards and one unit.  Values are those that ``reset_parameters`` of
each module draws on the first rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from shardproof.comm import Comm
from shardproof.contract import Refused
from shardproof.impls.reference.engine.state import aliases_of, broadcast_tensors


def on_meta(module: nn.Module) -> bool:
    """Whether a parameter of ``module`` has no memory."""
    return any(parameter.is_meta for parameter in module.parameters())


def check(module: nn.Module) -> None:
    """Raise :class:`Refused` if a tensor on ``meta`` has no known way to get its values."""
    if not on_meta(module):
        return
    if tied := aliases_of(module):
        raise Refused(
            f"{next(iter(tied))!r} is a tied parameter or buffer, but a model on the meta "
            "device must not have tied tensors: build the model on another device"
        )
    for name, part in module.named_modules():
        own = {**part._parameters, **part._buffers}
        lacking = [leaf for leaf, tensor in own.items() if tensor is not None and tensor.is_meta]
        if lacking and not hasattr(part, "reset_parameters"):
            raise Refused(
                f"{f'{name}.{lacking[0]}'.lstrip('.')!r} is on the meta device, and its module "
                f"({type(part).__name__}) has no reset_parameters() to initialize the tensor: "
                "add that method, or build the model on another device"
            )


@torch.no_grad()
def materialize(
    module: nn.Module, names: Collection[str], device: str, comms: Iterable[Comm]
) -> None:
    """Give the parameters ``names``, and buffers of the same modules, the first rank's values."""
    owners = {name.rpartition(".")[0] for name in names if module.get_parameter(name).is_meta}
    parts = [module.get_submodule(owner) for owner in sorted(owners)]
    for part in parts:
        part.to_empty(device=device, recurse=False)
        part.reset_parameters()  # type: ignore[operator]
    own = [t for p in parts for t in (*p.parameters(False), *p.buffers(False))]
    for comm in comms if own else ():
        broadcast_tensors(own, comm)
