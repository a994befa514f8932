"""The format full: one checkpoint of whole tensors, under their own names, that any tool opens.

    rank 0     agree --+--------------------------+-- model.safetensors, optimizer.safetensors,
    rank 1     agree --+-- a tensor at a time ----+   rest.safetensors, indexes -- manifest
    rank 2     agree --+   from who has it        +

    agree      which copy of each name is written: rank 0's own, where it has one (agreement.py)
    gather     name after name, in the same order on all ranks; a name that rank 0 holds itself
               costs no message
    write      model.safetensors has parameters and buffers under the names of the module,
               optimizer.safetensors the slots as ``<parameter>.<slot>``, rest.safetensors what
               belongs to single ranks
    manifest   all that is not a tensor, as JSON (manifest.py, commit.py)

Cost: what other ranks hold travels to rank 0 once, as objects over the mesh's own groups, which
hand it to all ranks on the way; rank 0 alone writes.  So it serves small models, and sharded.py the
rest.  Memory: of one tensor at a time every rank holds the parts of all ranks and their messages,
rank 0 the whole besides; nothing where rank 0 has the tensor already.
Numbers: bits are kept as they are.
Left out: any one rank's failing disk but rank 0's: the others write nothing.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from shardproof.contract import Piece
from shardproof.impls.reference.checkpoint.agreement import Agreed, Described, State, held
from shardproof.impls.reference.checkpoint.data_file import Held
from shardproof.impls.reference.checkpoint.errors import told
from shardproof.impls.reference.checkpoint.manifest import Listed
from shardproof.impls.reference.checkpoint.reading.regions import Place
from shardproof.impls.reference.checkpoint.saver import Saver
from shardproof.impls.reference.checkpoint.writing import close_pair, open_pair
from shardproof.impls.reference.engine.state import gather_over, put

#: File -> the kinds in it.
FILES = {
    "model": ("parameters", "buffers"),
    "optimizer": ("optimizer",),
    "rest": ("rng", "extra"),
}
#: The pieces of one copy of one name.
Copy = list[Described]


class Full(Saver):
    """Save the checkpoints of one run; rank 0 writes whole tensors."""

    kind = "full"

    def save(self, state: State) -> Path:
        """Save; a collective call. Return the folder of the committed checkpoint.

        :raises CheckpointError: on all ranks, if rank 0 cannot; nothing is committed.
        """
        with self.abandoned_if_it_fails():
            agreed = self.agree(state, from_rank0=True)
            listed = [self.write(agreed, state, stem, kinds) for stem, kinds in FILES.items()]
            self.commit_everywhere(agreed, state.about, listed)
        return agreed.folder

    def write(
        self, agreed: Agreed, state: State, stem: str, kinds: tuple[str, ...]
    ) -> Listed | None:
        """Write one file of whole tensors on rank 0; return its manifest entry on all ranks."""
        copies = copies_of(agreed, kinds)
        if not copies:
            return None
        file = open_pair(self.layer, agreed, stem, [announced(copy) for copy in copies])
        # The order of the file, which all ranks know: one gathers what the others send.
        by_key = {announced(copy).key: copy for copy in copies}
        tensors = (self.gather(by_key[one.key], state) for one in file.tensors)
        listed, failure, cause = None, None, None
        try:
            if self.rank == 0:
                with file:
                    for tensor in tensors:
                        file.add(tensor)
                listed = close_pair(self.layer, agreed, file.result)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must not wait
            failure, cause = told(error, self.root.path), error
        for _ in tensors:  # all of them on other ranks; on rank 0 what a failing disk left over
            pass
        found: list[Listed | None] = self.together.all_or_none(listed, failure, cause)
        return found[0]

    def gather(self, copy: Copy, state: State) -> Tensor:
        """The whole tensor that the ranks hold as ``copy``; only rank 0, which writes it, gets
        it.
        """
        mine = [state.pieces[one.kind][one.number] for one in copy if one.rank == self.rank]
        if {one.rank for one in copy} == {0}:
            pieces: list[Piece] = mine
        else:
            mesh = self.together.mesh
            comms = [mesh.comm(axis) for axis in mesh.axes]
            pieces = gather_over(mine, comms)
        if len(pieces) == 1 and copy[0].place.is_whole:
            return pieces[0].tensor
        whole: dict[str, Tensor] = {}
        for piece in pieces if self.rank == 0 else ():
            put(piece, whole)
        return whole[copy[0].name] if whole else torch.empty(0)


def copies_of(agreed: Agreed, kinds: tuple[str, ...]) -> list[Copy]:
    """The tensors written for ``kinds``: each name with each of its copies."""
    own = [one for one in agreed.writes if one.kind in kinds]
    own.sort(key=lambda one: (kinds.index(one.kind), one.name, one.replica))
    return [list(some) for _, some in groupby(own, lambda one: (one.kind, one.name, one.replica))]


def announced(copy: Copy) -> Held:
    """The description of a whole tensor under its own name (a second copy is numbered)."""
    first = copy[0]
    shape = first.place.shape
    whole = first._replace(place=Place.all_of(shape))
    # A number that the first copy does not need: tools look for the names of the module.
    key = (
        f"{first.name}#{first.replica}" if first.replica and first.kind == "buffers" else first.name
    )
    return held(whole, torch.empty(shape, dtype=first.dtype, device="meta"), key)
