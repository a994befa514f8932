"""A torch optimizer from an :class:`~shardproof.contract.OptimizerSpec`, and its named state."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardproof.contract import OptimizerSpec, Piece

if TYPE_CHECKING:
    from shardproof.impls.reference.engine.offload import HostMemory


def param_groups(spec: OptimizerSpec, named: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Torch parameter groups over ``named``, the tensors that this rank updates."""
    if not named:  # torch refuses an optimizer without a group, and takes an empty group
        empty = {"params": [], "param_names": [], "weight_decay": 0.0, "own_decay": None}
        return [{**empty, "lr_scale": 1.0}]
    return [
        {
            "params": [(name, named[name]) for name in names],
            "weight_decay": spec.weight_decay if group.weight_decay is None else group.weight_decay,
            "own_decay": group.weight_decay if group.pattern else None,
            "lr_scale": group.lr_scale,
        }
        for group, names in spec.assign(named)
    ]


def build_optimizer(spec: OptimizerSpec, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer that ``spec`` names.

    ``foreach=False``: one kernel a parameter, so that a sharded update repeats it bit for bit.
    """
    takes = inspect.signature(spec.kind).parameters  # a class of the user's own may know no foreach
    alone: dict[str, Any] = {"foreach": False} if "foreach" in takes else {}
    return spec.kind(groups, **spec.arguments, **alone)


def unnamed_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``groups`` without parameter names, which not every optimizer accepts."""
    return [{**group, "params": [p for _, p in group["params"]]} for group in groups]


def seed_state(
    optimizer: torch.optim.Optimizer,
    spec: OptimizerSpec,
    host: HostMemory | None = None,
) -> None:
    """Create the state of parameters that have their first gradient, with :func:`make_slots`.

    Torch makes it in the step: in the usual memory, and momentum with the strides of the gradient,
    which a reduction may have made contiguous.  Zeros are where every slot starts from.
    """
    adamw = spec.name == "adamw"
    slots = ("exp_avg", "exp_avg_sq") if adamw else ("momentum_buffer",) if spec.momentum else ()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # As torch does: a parameter without a gradient so far has no state either.
            if parameter.grad is None or optimizer.state.get(parameter):
                continue
            if host is None and (adamw or parameter.grad.stride() == parameter.stride()):
                continue  # torch makes the same
            made = {slot: zeros(parameter, parameter.dtype, host) for slot in slots}
            counter = {"step": zeros(torch.empty(()), torch.float32, host)} if adamw else {}
            if made:
                optimizer.state[parameter].update(counter | made)


def zeros(like: Tensor, dtype: torch.dtype, host: HostMemory | None) -> Tensor:
    """A slot of zeros: in ``host`` memory if given, else next to ``like`` with its strides.

    With other strides another kernel would update it, and round otherwise in the last place.
    """
    return torch.zeros_like(like, dtype=dtype) if host is None else host.zeros(like.shape, dtype)


def set_learning_rate(optimizer: torch.optim.Optimizer, spec: OptimizerSpec, step: int) -> None:
    """Set every group's learning rate for optimizer step ``step`` (counted from 0)."""
    for group in optimizer.param_groups:
        group["lr"] = spec.lr_at(step) * group["lr_scale"]


def as_data(spec: OptimizerSpec, steps_done: int) -> dict[str, Any]:
    """``spec`` as a checkpoint keeps it.

    A function, such as a schedule of the learning rate, is left out: ``lr`` is then the rate of the
    last of ``steps_done`` updates.
    """
    names = [field.name for field in dataclasses.fields(spec)]
    functions: dict[str, Any] = {n: None for n in names if callable(getattr(spec, n))}
    # Replaced first: ``asdict`` would copy the object that a function belongs to.
    data = dataclasses.asdict(dataclasses.replace(spec, **functions))
    rate = {"lr": spec.lr_at(max(0, steps_done - 1))} if functions else {}
    return {name: value for name, value in data.items() if name not in functions} | rate


def set_weight_decay(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Set the weight decay of every group without its own."""
    for group in optimizer.param_groups:
        if group["own_decay"] is None:
            group["weight_decay"] = decay


#: Where a slot of parameter ``name`` lies: (name, slot, tensor) -> piece or pieces.
Place = Callable[[str, str, Tensor], Piece | list[Piece]]


@torch.no_grad()
def make_slots(
    optimizer: torch.optim.Optimizer, pieces: Iterable[Piece], host: HostMemory | None = None
) -> list[tuple[Tensor, str]]:
    """Give ``optimizer`` slots of zeros for pieces that are named ``<name>.<slot>``.

    Each has the shape of its parameter, or is a single number; it lies in ``host`` memory, if that
    is given.  Returns what was made, as parameters and slots.

    :raises KeyError: a parameter that this optimizer does not update.
    """
    named = {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }
    made = []
    for full, like in {piece.name: piece.tensor for piece in pieces}.items():
        name, _, slot = full.rpartition(".")
        if name not in named:
            raise KeyError(f"this rank does not update {name!r}, so it cannot load state {full!r}")
        # A counter is one number even where the parameter is not.
        shape = named[name] if like.dim() else like
        optimizer.state[named[name]][slot] = zeros(shape, like.dtype, host)
        made.append((named[name], slot))
    return made


def slot_pieces(optimizer: torch.optim.Optimizer, place: Place) -> list[Piece]:
    """Pieces of all tensors in the optimizer's state."""
    return [
        piece
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        for slot, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
        for piece in placed(place, name, slot, value)
    ]


def placed(place: Place, name: str, slot: str, tensor: Tensor) -> list[Piece]:
    """The result of ``place`` as a list."""
    pieces = place(name, slot, tensor)
    return [pieces] if isinstance(pieces, Piece) else pieces
