"""Moving state: load named tensors, broadcast in few large messages, gather and scatter pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from shardproof.comm import Comm
from shardproof.contract import Piece, Refused


def named_state(module: nn.Module) -> dict[str, Tensor]:
    """Name -> parameter or buffer, as currently bound; tied tensors once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def aliases_of(module: nn.Module) -> dict[str, str]:
    """Further names of tied parameters and buffers -> the first name, which is saved."""
    first: dict[int, str] = {}
    found = {}
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    for name, tensor in named:
        kept = first.setdefault(id(tensor), name)
        if kept != name:
            found[name] = kept
    return found


def generators_of(module: nn.Module, device: torch.device) -> dict[str, torch.Generator]:
    """Name -> generator of ``module``: torch's own, the device's, those in its attributes."""
    found = {"torch": torch.default_generator}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.default_generators[device.index or 0]
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Generator):
                found[f"{path}.{name}".lstrip(".")] = value
    return found


def draws(module: nn.Module) -> bool:
    """Whether ``module`` has a part that draws random numbers when it trains.

    Dropout counts if its share is above 0, as a module or as a number in an attribute that is named
    after it.  A function that draws, without either, cannot be seen.
    """
    of_torch = nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d
    for part in module.modules():
        if isinstance(part, of_torch) or (isinstance(part, _DropoutNd) and part.p > 0):
            return True
        for name, value in vars(part).items():
            is_share = "dropout" in name.lower() and isinstance(value, float | int) and value > 0
            if is_share or isinstance(value, torch.Generator):
                return True
    return False


#: The word under which strategies decline such models.
SECOND_DERIVATIVE = "second_derivative"


def refuse_second_derivatives(module: nn.Module, asked: str, why: str, remedy: str) -> None:
    """Raise :class:`Refused` if a part of ``module`` takes a gradient in its forward."""
    for name, part in module.named_modules():
        if getattr(part, "differentiates", False):
            place = repr(name) if name else f"the model ({type(part).__name__})"
            what = f"{place} takes a gradient in its forward (declined {SECOND_DERIVATIVE!r})"
            raise Refused(f"{asked}: {what}, but {why}; {remedy}")


@torch.no_grad()
def load_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy ``state`` into ``module`` in place.

    Raises ValueError unless names and shapes agree exactly.
    """
    targets = named_state(module)
    if set(targets) != set(state):
        lacking = sorted(set(targets) - set(state))
        extra = sorted(set(state) - set(targets))
        raise ValueError(
            f"the state does not match the module: missing {lacking}, unexpected {extra}; give "
            "one tensor for each parameter and buffer of the module (one for all tied tensors), "
            "with the names from named_parameters() and named_buffers()"
        )
    for name, target in targets.items():
        if target.shape != state[name].shape:
            raise ValueError(
                f"{name!r} has shape {tuple(target.shape)} in the module, but "
                f"{tuple(state[name].shape)} in the state: build the module with the sizes that "
                "the state has"
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
        # Many small tensors in one message, or each would pay a call's latency.
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        comm.broadcast(flat, root)
        pieces = flat.split([tensor.numel() for tensor in same])
        for tensor, piece in zip(same, pieces, strict=True):
            tensor.copy_(piece.view(tensor.shape))


def place_of(piece: Piece) -> tuple[object, ...]:
    """The key that distinguishes a rank's pieces."""
    return piece.name, piece.slices, piece.flat_range


@torch.no_grad()
def copy_pieces(held: Sequence[Piece], given: Sequence[Piece]) -> list[Piece]:
    """Copy ``given`` into ``held``, whose tensors are views of a rank's state.

    Returns what is held nowhere.
    """
    tensors = {place_of(piece): piece.tensor for piece in held}
    for piece in given:
        # In place: the tensors are views of what the rank works with.
        if place_of(piece) in tensors:
            tensors[place_of(piece)].copy_(piece.tensor)
    return [piece for piece in given if place_of(piece) not in tensors]


def gather_pieces(pieces: Sequence[Piece], comm: Comm) -> dict[str, Tensor]:
    """Name -> whole tensor, on every rank, from the pieces that the ranks of ``comm`` hold.

    Where a rank holds all of a tensor, its own copy counts.  The rest, single numbers (Adam's step)
    included, travels as objects: this is for saving and looking, not for a step.
    """
    whole = {p.name: p.tensor.detach().clone() for p in pieces if p.tensor.shape == p.global_shape}
    parts = [
        p for p in pieces if p.flat_range or p.tensor.shape != p.global_shape or not p.global_shape
    ]
    for piece in gather_over(parts, [comm]):
        put(piece, whole)
    return whole


@torch.no_grad()
def gather_rows(pieces: Sequence[Piece], comm: Comm) -> dict[str, Tensor]:
    """Name -> whole tensor, on every rank of ``comm``: one message per dtype.

    Every rank gives the same names, and of each tensor as many rows as the others, in rank order.
    """
    by_dtype: dict[torch.dtype, list[Piece]] = {}
    for piece in pieces:
        by_dtype.setdefault(piece.tensor.dtype, []).append(piece)
    whole: dict[str, Tensor] = {}
    for same in by_dtype.values():
        flat = torch.cat([piece.tensor.reshape(-1) for piece in same])
        gathered = flat.new_empty(comm.size, flat.numel())
        comm.all_gather(gathered.view(-1), flat)
        parts = gathered.split([piece.tensor.numel() for piece in same], dim=1)
        for piece, part in zip(same, parts, strict=True):
            whole[piece.name] = part.reshape(piece.global_shape)
    return whole


def gather_over(pieces: Sequence[Piece], comms: Sequence[Comm]) -> list[Piece]:
    """The ``pieces`` of all ranks, gathered as objects along each of ``comms`` in turn."""
    # As bytes: N ranks unpickle N messages each, and a tensor takes torch far longer than bytes do.
    packed = [_packed(piece) for piece in pieces]
    for comm in comms:
        packed = [one for theirs in comm.all_gather_object(packed) for one in theirs]
    return [_unpacked(*one) for one in packed]


def _packed(piece: Piece) -> tuple[Piece, torch.dtype, str, bytes]:
    """``piece`` with the shape in place of its tensor and without ``source``; what it holds."""
    tensor, shape = piece.tensor.detach(), cast(Any, tuple(piece.tensor.shape))
    raw = tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    return replace(piece, tensor=shape, source=None), tensor.dtype, tensor.device.type, raw


def _unpacked(piece: Piece, dtype: torch.dtype, device: str, raw: bytes) -> Piece:
    shape = cast(Any, piece.tensor)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return replace(piece, tensor=flat.view(shape).to(device))


def put(piece: Piece, whole: dict[str, Tensor]) -> None:
    """Copy ``piece`` into the tensor of its name, which is created if missing."""
    tensor = piece.tensor
    if piece.name not in whole:
        empty = torch.zeros(piece.global_shape, dtype=tensor.dtype, device=tensor.device)
        whole[piece.name] = empty
    target = whole[piece.name]
    if piece.flat_range is not None:
        target.view(-1)[slice(*piece.flat_range)] = tensor.view(-1)
    elif piece.slices:
        target[tuple(slice(*bounds) for bounds in piece.slices)] = tensor
    else:
        target.copy_(tensor)
