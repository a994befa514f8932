"""A reference strategy's state for a checkpoint, and back: what is asked for, by its own layout.

    parameters, buffers    the pieces that the rank holds
    optimizer              slots and masters; a fresh optimizer has no slots, so they are made first
    rng                    torch's own generator, one state a rank
    about                  strategy, mesh, optimizer spec, scaler, steps done, the caller's extra

A load reads and verifies all that it needs before it changes anything.  What a rank wants follows
from its own pieces alone, so the strategy, mesh or world that saved does not matter.  Precision
does: a parameter of another dtype comes from the master that was saved with it, or is refused.

Another world: state that belongs to one rank by name (``...@<rank>``: generators, errors that
compression carries over) has no meaning there.  It is left out, and ``Loaded.left_out`` says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardproof.contract import Piece
from shardproof.impls.reference.checkpoint.agreement import State, place_of
from shardproof.impls.reference.checkpoint.data_file import DTYPES
from shardproof.impls.reference.checkpoint.errors import CheckpointError
from shardproof.impls.reference.checkpoint.manifest import About
from shardproof.impls.reference.checkpoint.reading import Checkpoint, Name
from shardproof.impls.reference.checkpoint.reshape import plan
from shardproof.impls.reference.engine.masters import SLOT as MASTER
from shardproof.impls.reference.engine.optimizer import make_slots

if TYPE_CHECKING:
    from shardproof.impls.reference.engine.engine import Engine

#: In this order: loaded masters know more digits than the parameters, so they come after these.
LOADED = ("parameters", "optimizer", "buffers")
#: Progress in the data, in what callers give and get back.
DATA = "data"
_COUNTER = "step"


@dataclass(frozen=True)
class Loaded:
    """What was loaded: the run to go on with, what the caller saved, and names left out."""

    run: str
    about: About
    left_out: tuple[str, ...]

    @property
    def extra(self) -> dict[str, Any]:
        """As it was given to ``save``."""
        data = {DATA: dict(self.about.data)} if self.about.data else {}
        return {**self.about.extra, **data}


def rank_of(system: Engine) -> int:
    """The rank's place in its mesh."""
    return system.mesh.ranks.index(system.mesh.rank)


def state_of(system: Engine, extra: Mapping[str, Any]) -> State:
    """What this rank has to save; tensors are those that train, not copies."""
    rng = Piece.whole(f"torch@{rank_of(system)}", torch.get_rng_state())
    pieces = {kind: system.local_state(kind) for kind in LOADED}  # type: ignore[arg-type]
    scaler = system.scaler
    about = About(
        *(system.steps_done, system.strategy, dict(system.mesh.axes)),
        optimizer=dataclasses.asdict(system.spec),
        scaler={"scale": scaler.scale, "good": scaler.good} if scaler else None,
        data=extra.get(DATA, {}),
        extra={name: value for name, value in extra.items() if name != DATA},
    )
    return State({**pieces, "rng": [rng]}, about)


@torch.no_grad()
def restore(system: Engine, path: Path) -> Loaded:
    """Load the checkpoint ``path``, or the newest in it, into a freshly set-up ``system``.

    :raises CheckpointError: damaged, or without something that this system holds; the values that
        it holds are as before.
    """
    with system.reader_type.open(path) as checkpoint:
        about = checkpoint.manifest.about
        require_same_optimizer(system, checkpoint)
        make_slots(system.optimizer, slots_of(system, checkpoint))
        own, left_out = own_state(system, checkpoint)
        found = {
            kind: [read(checkpoint, kind, piece) for piece in system.held_pieces(kind)]  # type: ignore[arg-type]
            for kind in LOADED
        }
        found["optimizer"] += own
        rng = whole(checkpoint, ("rng", f"torch@{rank_of(system)}"))
    # Only now, with everything verified:
    for kind, pieces in found.items():
        system.load_pieces(kind, pieces)  # type: ignore[arg-type]
    if rng is not None:
        torch.set_rng_state(rng)
    if system.scaler and about.scaler is not None:
        system.scaler.scale = float(about.scaler["scale"])
        system.scaler.good = int(about.scaler["good"])
    system.steps_done = about.step
    return Loaded(checkpoint.manifest.run, about, tuple(left_out))


def require_same_optimizer(system: Engine, checkpoint: Checkpoint) -> None:
    """:raises CheckpointError: moments of another optimizer would be taken for this one's."""
    saved = checkpoint.manifest.about.optimizer
    if saved is not None and saved.get("name") != system.spec.name:
        name = f"{saved.get('name')!r:.40}"
        what = f"was saved under {name}, this system trains with {system.spec.name!r}"
        raise CheckpointError(checkpoint.folder, what, "train with the optimizer that saved it")


def slots_of(system: Engine, checkpoint: Checkpoint) -> Iterator[Piece]:
    """A stand-in for each slot of what this rank updates that was saved and is not there yet."""
    for group in system.optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            there = system.optimizer.state.get(parameter, {})
            for full in checkpoint.slots.get(name, ()):
                slot = full.removeprefix(f"{name}.")
                if slot != MASTER and "@" not in slot and slot not in there:
                    dtype = DTYPES[checkpoint.entries(("optimizer", full))[0].dtype]
                    shape = () if slot == _COUNTER else (1,)
                    yield Piece.whole(full, torch.zeros(shape, dtype=dtype))


def own_state(system: Engine, checkpoint: Checkpoint) -> tuple[list[Piece], list[str]]:
    """Optimizer state that is this rank's own by name, and the names that serve nobody here."""
    names = [name for name in checkpoint.names("optimizer") if "@" in name]
    names += checkpoint.names("rng")
    if checkpoint.manifest.about.world != system.mesh.world:
        return [], names
    end = f"@{rank_of(system)}"
    tensors = {n: whole(checkpoint, ("optimizer", n)) for n in names if n.endswith(end)}
    return [Piece.whole(name, tensor) for name, tensor in tensors.items() if tensor is not None], []


def whole(checkpoint: Checkpoint, name: Name) -> Tensor | None:
    """All of a tensor, if it was saved."""
    if name not in checkpoint.copies:
        return None
    first = checkpoint.entries(name)[0]
    target = torch.empty(first.place.shape, dtype=DTYPES[first.dtype])
    like = Piece.whole(name[1], target)
    checkpoint.fill(target, plan(place_of(like), checkpoint.entries(name)))
    return target


def read(checkpoint: Checkpoint, kind: str, piece: Piece) -> Piece:
    """``piece`` with the elements that were saved, in memory of their own.

    :raises CheckpointError: they were not, or have another dtype or shape.
    """
    name = stored_as(checkpoint, kind, piece)
    entries = checkpoint.entries(name, piece.replica)
    stored = DTYPES[entries[0].dtype]
    if stored != piece.tensor.dtype:
        what = f"{kind} {piece.name!r} was saved as {stored} and is {piece.tensor.dtype} here"
        raise CheckpointError(checkpoint.folder, what, "set up with the precision that saved it")
    target = torch.empty(piece.tensor.shape, dtype=stored)
    try:
        checkpoint.fill(target, plan(place_of(piece), entries))
    except CheckpointError:
        raise
    except ValueError as error:
        what = f"{kind} {piece.name!r} {error}"
        raise CheckpointError(checkpoint.folder, what, "build the model that was saved") from None
    return dataclasses.replace(piece, tensor=target, source=None)


def stored_as(checkpoint: Checkpoint, kind: str, piece: Piece) -> Name:
    """What ``piece`` is read from: itself, or, between precisions, its master or parameter."""
    own, parameter = (kind, piece.name), ("parameters", piece.name.removesuffix(f".{MASTER}"))
    master = ("optimizer", f"{piece.name}.{MASTER}")
    wanted = piece.tensor.dtype
    for name in (own, master if kind == "parameters" else parameter):
        if name in checkpoint.copies and DTYPES[checkpoint.entries(name)[0].dtype] == wanted:
            return name
    if own in checkpoint.copies:
        return own
    what = f"{NOUNS[kind]} {piece.name!r} was not saved"
    raise CheckpointError(checkpoint.folder, what, "load into a fresh instance of the same model")


NOUNS: Mapping[str, str] = {
    "parameters": "the parameter",
    "optimizer": "optimizer state",
    "buffers": "the buffer",
}
