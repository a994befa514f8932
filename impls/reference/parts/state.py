"""Initial state and its distribution: load by name, broadcast in few large messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from suite.comm import Comm


def named_state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, as bound *now*; tied tensors once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@torch.no_grad()
def load_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy ``state`` into ``module`` in place.

    Raises ValueError unless names and shapes agree exactly.
    """
    targets = named_state(module)
    if set(targets) != set(state):
        lacking = sorted(set(targets) - set(state))
        extra = sorted(set(state) - set(targets))
        raise ValueError(f"state does not fit the module: lacks {lacking}, has extra {extra}")
    for name, target in targets.items():
        if target.shape != state[name].shape:
            raise ValueError(
                f"{name!r} has shape {tuple(target.shape)}, the state has "
                f"{tuple(state[name].shape)}"
            )
        target.copy_(state[name])


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor], comm: Comm, root: int = 0) -> None:
    """Overwrite ``tensors`` with those of group rank ``root``: one message per dtype.

    Every rank must give tensors of the same shapes and dtypes in the same order.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        comm.broadcast(flat, root)
        pieces = flat.split([tensor.numel() for tensor in same])
        for tensor, piece in zip(same, pieces, strict=True):
            tensor.copy_(piece.view(tensor.shape))
