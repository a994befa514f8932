"""Loading into a reference strategy from any strategy and any mesh: everything or nothing.

    find      rank 0 names the checkpoint; all ranks open that one
    plan      what this rank wants follows from its own pieces alone, so the strategy, mesh or world
              that saved does not matter; slots of a fresh optimizer are made first
    check     every chunk that the rank needs is read and compared with its checksum
    agree     did every rank come so far?  is there a name that nobody wants?
    fill      read again, tensor by tensor, into the memory that trains

Up to the fourth line nothing is changed, so a load that fails leaves the system as it was, on all
ranks.  Memory: no second copy of anything; a tensor that is not contiguous, or not of the host, is
filled by way of one of its size.

What ranks that meet keep for their outer optimizer begins anew where no such slot was saved, from
the parameters that were loaded, and is left out where nobody here keeps it.

What has no place here is told (:attr:`Loaded.notes`, and a warning on rank 0): hyperparameters
that differ, for the caller's spec counts; state of single ranks on another mesh; scaling of losses
that only one of the two has.  A name that this model does not have is refused.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardproof.contract import Piece, is_outer
from shardproof.impls.reference.checkpoint.agreement import place_of
from shardproof.impls.reference.checkpoint.contents import DATA, TRAINED, Contents
from shardproof.impls.reference.checkpoint.data_file import DTYPES
from shardproof.impls.reference.checkpoint.errors import CheckpointError, CheckpointWarning
from shardproof.impls.reference.checkpoint.fitting import require_fitting
from shardproof.impls.reference.checkpoint.manifest import About
from shardproof.impls.reference.checkpoint.reading.checkpoint import Checkpoint, Name, find
from shardproof.impls.reference.checkpoint.reading.reshape import Read
from shardproof.impls.reference.checkpoint.reading.sources import NOUNS, Sources
from shardproof.impls.reference.checkpoint.root import Branch, folders
from shardproof.impls.reference.checkpoint.together import Together
from shardproof.impls.reference.engine.averages import SLOT as AVERAGE
from shardproof.impls.reference.engine.masters import SLOT as MASTER
from shardproof.impls.reference.engine.optimizer import make_slots
from shardproof.impls.reference.engine.state import draws
from shardproof.impls.reference.parts.reducers import parameter_of, pieces_on, slot_of

if TYPE_CHECKING:
    from shardproof.impls.reference.engine.engine import Engine

#: Slots of one number.
_COUNTER = "step"


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The result of a load: the checkpoint, the branch that continues, and the parts without a
    place here.

    ``left_out`` are names; ``notes`` are sentences, of these and of hyperparameters that differ.
    ``bytes_read``: of this rank, data and metadata, each byte once (what was verified comes from
    the system's cache when it is read again).
    """

    folder: Path
    branch: Branch
    about: About
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    bytes_read: int

    @property
    def extra(self) -> dict[str, Any]:
        """The value that was given to ``save``."""
        data = {DATA: dict(self.about.data)} if self.about.data else {}
        return {**self.about.extra, **data}


@dataclasses.dataclass(frozen=True)
class Want:
    """A tensor of this rank, the name that it is read from, and the part that is read."""

    target: Tensor
    name: Name
    reads: list[Read]


class Loading:
    """One load of ``path``, a checkpoint or the folder of several, into ``system``."""

    reader_type: type[Checkpoint] = Checkpoint
    checkpoint: Checkpoint
    sources: Sources

    def __init__(self, system: Engine, path: Path) -> None:
        self.system, self.path = system, path
        self.contents = Contents(system)
        self.rank, self.ranks = self.contents.rank, Together(system.mesh, path)
        self.made: list[tuple[Tensor, str]] = []  # slots of the optimizer
        self.wants: dict[str, list[Want]] = {}
        self.left_out: list[str] = []

    def run(self) -> Loaded:
        """Load; a collective call.

        :raises CheckpointError: on all ranks, if one cannot; what they hold is as before.
        """
        ranks, whole = self.ranks, False
        name = ranks.all(lambda: None if self.rank else self.find())[0]
        try:
            used = set[Name]().union(*ranks.all(lambda: self.prepare(str(name))))
            self.left_out += self.require_all(used)
            whole = True
            ranks.all(self.fill)
        except CheckpointError as error:
            if whole:
                what = (
                    f"{error.what}; the checkpoint was undamaged when this load started, and a "
                    "part of it has been loaded"
                )
                remedy = "call setup again, and load another checkpoint"
                raise CheckpointError(error.file, what, remedy) from error
            self.unmake()
            raise
        finally:
            if hasattr(self, "checkpoint"):
                self.checkpoint.close()
        return self.loaded()

    def prepare(self, name: str) -> set[Name]:
        """Run every step that may fail; return the names that this rank reads."""
        self.open(name)
        self.plan()
        return self.check()

    def find(self) -> str:
        """Find the name of the checkpoint in ``path``; empty if ``path`` is a checkpoint."""
        found = find(self.path)
        return "." if found == self.path else found.name

    def open(self, name: str) -> None:
        """Open the checkpoint that rank 0 found."""
        self.checkpoint = self.reader_type.open(self.path / name)
        self.sources = Sources(self.system, self.checkpoint)
        require_fitting(self.system, self.checkpoint)

    # ------------------------------------------------------------------------------------- wants

    def plan(self) -> None:
        """Plan the source of every tensor of this rank. Slots are created; nothing else changes."""
        system, kept = self.system, outer_slots(self.checkpoint.copies)
        self.made = make_slots(system.optimizer, self.missing_slots(), system.host)
        for kind in TRAINED:
            pieces = system.saved_pieces(kind)  # type: ignore[arg-type]
            there = [piece for piece in pieces if outer_slots([(kind, piece.name)]) <= kept]
            self.wants[kind] = [self.want(kind, piece) for piece in there]
        own = self.contents.generators() if self.has_same_ranks else {}
        drawn = [name for name in self.names("rng") if name in own]
        for kind, saved in {"rng": drawn, "extra": self.carried()}.items():
            self.wants[kind] = [self.whole(kind, name) for name in saved]

    def names(self, kind: str) -> list[str]:
        """The saved names of ``kind``."""
        return self.checkpoint.names(kind)

    @property
    def has_same_ranks(self) -> bool:
        """Whether the ranks match those that saved, so per-rank state has a meaning here."""
        return self.checkpoint.manifest.about.has_ranks_of(self.system.mesh.axes)

    def carried(self) -> list[str]:
        """The carried state that this rank's reducer resumes from: that of parameters that it
        reduces.
        """
        ours = set(self.system.handle.reduced())
        saved = [name for name in self.names("extra") if parameter_of(name) in ours]
        return self.system.reducer.wanted(saved)

    def missing_slots(self) -> Iterator[Piece]:
        """A placeholder for each saved slot that this rank updates but does not have yet.

        Where ranks train alone one of them may have used a parameter, and others not yet.
        """
        own = self.system.handle.own_copy
        for group in self.system.optimizer.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                there = self.system.optimizer.state.get(parameter, {})
                for full in self.checkpoint.slots_of(name, own):
                    slot = full.removeprefix(f"{name}.")
                    kept = slot in (MASTER, AVERAGE) or is_outer(full)
                    if not kept and slot not in there:
                        shape = () if slot == _COUNTER else (1,)
                        like = torch.empty(shape, dtype=self.sources.dtype(("optimizer", full)))
                        yield Piece.whole(full, like)

    def want(self, kind: str, piece: Piece) -> Want:
        """The read that fills ``piece``.

        :raises CheckpointError: it was not saved, or with another dtype or shape.
        """
        name = self.sources.of(kind, piece)
        # A rank has a copy of its own of buffers, and of what is apart; else all take the first.
        own = kind == "buffers" or self.system.handle.apart
        try:
            reads = self.checkpoint.plan(place_of(piece), name, piece.replica if own else 0)
        except ValueError as error:
            what = f"{NOUNS[kind]} {piece.name!r}: {error}"
            raise self.sources.refusal(what, "use the same model as the saved run") from None
        return Want(piece.tensor, name, reads)

    def whole(self, kind: str, name: str) -> Want:
        """A whole tensor that belongs to this rank; its memory is allocated later."""
        first = self.checkpoint.entries((kind, name))[0]
        target = torch.empty(first.place.shape, dtype=DTYPES[first.dtype], device="meta")
        place = place_of(Piece.whole(name, target))
        return Want(target, (kind, name), self.checkpoint.plan(place, (kind, name)))

    # ---------------------------------------------------------------------------------- agreement

    def check(self) -> set[Name]:
        """Verify every chunk that this rank needs; return the names that are read."""
        checkpoint, wants = self.checkpoint, [w for some in self.wants.values() for w in some]
        for want in wants:
            checkpoint.check(want.reads)
        self.bytes_read = checkpoint.metadata_bytes + checkpoint.bytes_read
        return {want.name for want in wants}

    def require_all(self, used: set[Name]) -> list[str]:
        """The saved tensors that no rank wants and that may be left out.

        :raises CheckpointError: a name that this model does not have.
        """
        order = (*TRAINED, "extra", "rng")
        unread = sorted(self.checkpoint.copies.keys() - used, key=lambda n: (order.index(n[0]), n))
        left_out, unknown = [], []
        kept = outer_slots(used)
        for kind, name in unread:
            master = ("optimizer", f"{name}.{MASTER}")
            parameter = ("parameters", name.removesuffix(f".{MASTER}"))
            if kind == "extra" and slot_of(name) in self.system.reducer.slots:
                continue  # a copy of what every rank has
            is_foreign = not outer_slots([(kind, name)]) <= kept
            is_rounded = name.endswith(f".{MASTER}") and parameter in used
            if kind not in TRAINED or is_foreign or is_rounded:
                left_out.append(name)
            elif kind != "parameters" or master not in used:
                unknown.append((kind, name))
        if unknown:
            (kind, name), *others = unknown
            more = f" (and {len(others)} more)" if others else ""
            what = (
                f"the checkpoint has {NOUNS[kind]} {name!r}{more}, which this system does not have"
            )
            if (first := self.system.aliases.get(name)) is not None:
                what += f"; this system ties {name!r} to {first!r}"
            raise self.sources.refusal(
                what, "use the same model as the saved run, and train the same parameters"
            )
        return left_out

    # ------------------------------------------------------------------------------------ changes

    @torch.no_grad()
    def fill(self) -> None:
        """Read into the trained tensors, after everything was verified."""
        system, about = self.system, self.checkpoint.manifest.about
        for kind in TRAINED:
            for want in self.wants[kind]:
                self.read(want)
            system.settle(kind)  # type: ignore[arg-type]
        generators = self.contents.generators()
        for want in self.wants["rng"]:
            generators[want.name[1]].set_state(self.read(want))
        # At once: several ranks' of one parameter are added up, and all that was there is replaced.
        pieces = [Piece.whole(want.name[1], self.read(want)) for want in self.wants["extra"]]
        system.reducer.load_pieces(pieces_on(system.mesh.device, pieces))
        if system.scaler and about.scaler is not None:
            system.scaler.scale = float(about.scaler["scale"])
            system.scaler.good = int(about.scaler["good"])
        system.steps_done = about.step

    def read(self, want: Want) -> Tensor:
        """Fill the target, or new memory if there is none."""
        target, dtype = want.target, self.sources.dtype(want.name)
        is_plain = target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype
        memory = target if is_plain else torch.empty(target.shape, dtype=dtype)
        self.checkpoint.fill(memory, want.reads)
        return memory if is_plain or target.is_meta else target.copy_(memory)

    def unmake(self) -> None:
        """Remove the slots that this load created."""
        for parameter, slot in self.made:
            state = self.system.optimizer.state[parameter]
            del state[slot]
            if not state:
                del self.system.optimizer.state[parameter]

    def loaded(self) -> Loaded:
        """The result of the load."""
        manifest, folder = self.checkpoint.manifest, self.checkpoint.folder
        seen = frozenset(one.path.name for one in folders(folder.parent) if one.is_committed)
        branch = Branch(manifest.run, (manifest.id, *manifest.before), seen)
        notes = tuple(self.notes())
        for note in notes if self.rank == 0 else ():
            warnings.warn(f"{folder}: {note}", CheckpointWarning, stacklevel=5)
        return Loaded(folder, branch, manifest.about, tuple(self.left_out), notes, self.bytes_read)

    def notes(self) -> Iterator[str]:
        """The parts without a place here, as sentences; of per-rank state, that of this rank."""
        about, system = self.checkpoint.manifest.about, self.system
        states = [name for name in self.left_out if ("rng", name) in self.checkpoint.copies]
        if states and draws(system.module):
            ranks = len({name.rpartition("@")[2] for name in states})
            yield (
                f"the random states of {ranks} saved ranks were not loaded, because fewer ranks "
                "load than saved: dropout will draw different masks"
            )
        if others := [name for name in self.left_out if name not in states]:
            shown = ", ".join(others[:4]) + (", ..." if len(others) > 4 else "")
            yield (
                f"this system cannot hold a part of the saved state, which was left out: {shown}"
            )
        read = {want.name[1] for want in self.wants["rng"]}
        if self.has_same_ranks and (new := sorted(self.contents.generators().keys() - read)):
            yield f"the checkpoint has no state for these generators: {', '.join(new)}"
        held = [("optimizer", piece.name) for piece in system.handle.outer_pieces()]
        if anew := sorted(outer_slots(held) - outer_slots(self.checkpoint.copies)):
            yield (
                f"the checkpoint has no {' or '.join(anew)} of any parameter: the outer "
                "optimizer starts without state"
            )
        own: Mapping[str, Any] = self.contents.about({}).optimizer or {}
        for name, value in own.items():
            saved = (about.optimizer or {}).get(name)
            if plain(saved) != plain(value) and not (name == "scaler" and None in (saved, value)):
                yield (
                    f"{name} was {plain(saved)} at the save and is {plain(value)} here; the "
                    "value of this system is used"
                )
        if (about.scaler is None) != (system.scaler is None):
            had, has = ("scaled", "not scaled") if about.scaler is not None else ("not scaled", "")
            yield f"losses were {had} when the checkpoint was saved, and are {has or 'scaled'} here"


def outer_slots(names: Iterable[Name]) -> set[str]:
    """The slots of an outer optimizer for all parameters."""
    return {
        name.rpartition(".")[2] for kind, name in names if kind == "optimizer" and is_outer(name)
    }


def plain(value: object) -> str:
    """The value as JSON stores it."""
    return json.dumps(value, default=dataclasses.asdict)
