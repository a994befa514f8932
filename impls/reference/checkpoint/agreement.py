"""Agreement on which rank writes what: all ranks exchange descriptions before the first byte.

    each rank    kind, name, place, replica, bytes of every piece that it holds, no elements
    all ranks    the same table, hence the same choice:
                   a name with copies (DDP's parameters, Adam's step) is written once, from the copy
                   whose ranks have the least to write so far: files of about equal size
                   buffers are written as often as there are copies, for these may differ; so is
                   what is each rank's own where ranks train alone
    rank 0       makes the folder; its name travels with the table

A rank whose pieces are those of its last save says just that.  If all do, the last choice stands,
so a run makes it once, and training never waits for it again.

What is chosen covers every element once, or the save ends here: a rank that lost a piece is told
before a byte is written.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from shardproof.contract import Piece
from shardproof.impls.reference.checkpoint.data_file import Held
from shardproof.impls.reference.checkpoint.errors import CheckpointError
from shardproof.impls.reference.checkpoint.manifest import MOST_TENSORS, About
from shardproof.impls.reference.checkpoint.reading.guarded_json import require_bounds
from shardproof.impls.reference.checkpoint.reading.regions import Place, TooFine, hole_or_overlap
from shardproof.impls.reference.checkpoint.root import Branch, Root
from shardproof.impls.reference.checkpoint.together import Together


@dataclass(frozen=True)
class State:
    """The state that one rank has to save: pieces by kind (``manifest.KINDS``), and global values.

    ``apart``: kinds whose copies may differ, the same on all ranks; all of them are written.
    """

    pieces: Mapping[str, Sequence[Piece]]
    about: About
    apart: frozenset[str] = frozenset({"buffers"})


class Described(NamedTuple):
    """A piece without its elements."""

    rank: int
    number: int
    kind: str
    name: str
    place: Place
    replica: int
    incomplete: bool
    dtype: torch.dtype
    bytes: int


@dataclass(frozen=True)
class Agreed:
    """The save attempt that all ranks have agreed on.

    ``writes`` are the pieces of all ranks that are to be written, in one order; ``table`` are this
    rank's, all of them; ``apart`` is the state's.
    """

    folder: Path
    writes: tuple[Described, ...]
    table: list[Described] = field(default_factory=list)
    apart: frozenset[str] = frozenset()

    @property
    def id(self) -> str:
        """The id that every file of the checkpoint carries."""
        return self.folder.name


def place_of(piece: Piece) -> Place:
    """The place of ``piece`` in its tensor."""
    shape = tuple(piece.global_shape)
    if piece.flat_range is not None:
        return Place(shape, None, piece.flat_range)
    return Place(shape, tuple(piece.slices or ((0, size) for size in shape)), None)


def describe(state: State, rank: int) -> list[Described]:
    """The pieces of ``state``, without their elements."""
    return [
        Described(
            *(rank, number, kind, p.name, place_of(p), p.replica, p.incomplete),
            *(p.tensor.dtype, p.tensor.numel() * p.tensor.element_size()),
        )
        for kind, pieces in state.pieces.items()
        for number, p in enumerate(pieces)
    ]


def agree(
    together: Together,
    root: Root,
    state: State,
    last: Agreed | None = None,
    from_rank0: bool = False,
) -> Agreed:
    """Agree on one attempt on all ranks; a collective call. Rank 0 makes a folder in ``root``.

    ``last``: what was agreed before, if it was.  ``from_rank0``: where rank 0 has a copy, that one
    is written.

    :raises CheckpointError: an element is held nowhere or twice, or the root cannot be saved into.
    """
    rank, step = together.rank, state.about.step
    before = last.table if last and last.apart == state.apart else None

    def tell() -> Told:
        require_writable(state.about, root.path)
        table = describe(state, rank)
        attempt = None if rank else (root.begin(step).name, root.branch)
        return Told(step, None if table == before else table, attempt)

    told = together.all(tell)  # once, as a rule: training waits for it
    for other, one in enumerate(told):
        if one.step != told[0].step:
            what = f"rank {other} saves step {one.step}, but rank 0 saves step {told[0].step}"
            raise CheckpointError(root.path, what, "save on all ranks after the same step")
    assert told[0].attempt is not None
    name, root.branch = told[0].attempt
    if last is not None and all(one.table is None for one in told):
        return replace(last, folder=root.path / name)
    own = told[rank].table if last is None or told[rank].table is not None else last.table
    tables = [one.table for one in told]
    if None in tables:  # what was not told now, ranks without that last save do not know
        tables = together.everyone(own)
    pieces = [piece for table in tables for piece in table or ()]
    writes = choose(pieces, from_rank0, root.path, state.apart)
    if len(writes) > MOST_TENSORS:
        what = (
            f"the checkpoint would have {len(writes)} tensors, but readers accept at most "
            f"{MOST_TENSORS}"
        )
        raise CheckpointError(root.path, what, "save fewer tensors, or use fewer ranks")
    return Agreed(root.path / name, writes, own or [], state.apart)


class Told(NamedTuple):
    """The values that a rank sends to all: its step and pieces, and from rank 0 the folder.

    ``table``: none where the pieces are those of the last save.
    """

    step: int
    table: list[Described] | None
    attempt: tuple[str, Branch] | None


def require_writable(about: About, root: Path) -> None:
    """:raises CheckpointError: state that readers would refuse; checked before anything is
    written.
    """
    try:
        require_bounds(json.dumps(asdict(about)).encode(), root)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        what = f"a value that is not a tensor cannot be written as JSON: {error}"
        raise CheckpointError(root, what, "use only numbers, strings, lists and mappings") from None


def choose(
    table: Sequence[Described], from_rank0: bool, root: Path, apart: frozenset[str]
) -> tuple[Described, ...]:
    """Choose the pieces that are written.

    :raises CheckpointError: those of a name do not cover it, or do so twice.
    """
    copies: dict[tuple[str, str], dict[int, list[Described]]] = {}
    for one in table:
        copies.setdefault((one.kind, one.name), {}).setdefault(one.replica, []).append(one)
    load: dict[int, int] = defaultdict(int)
    chosen: list[Described] = []
    for (kind, name), by_replica in copies.items():
        # A copy may leave out what others have; the first one has it all (contract.Piece).
        whole = {r: c for r, c in by_replica.items() if not (r and any(p.incomplete for p in c))}
        if kind in apart:
            taken = list(whole.values())
        else:
            taken = [min(whole.values(), key=lambda copy: _cost(copy, load, from_rank0))]
        for copy in taken:
            require_cover(kind, name, [one.place for one in copy], root)
            for one in copy:
                load[one.rank] += one.bytes
            chosen += copy
    return tuple(chosen)


def _cost(copy: list[Described], load: Mapping[int, int], from_rank0: bool) -> tuple[int, ...]:
    """The cost of a choice of copies: bytes from other ranks, bytes of the busiest writer,
    number.
    """
    far = sum(one.bytes for one in copy if one.rank) if from_rank0 else 0
    return far, max(load[one.rank] + one.bytes for one in copy), copy[0].replica


def require_cover(kind: str, name: str, places: list[Place], file: Path) -> None:
    """:raises CheckpointError: ``places`` of a name leave out an element, or hold it twice."""
    try:
        problem = hole_or_overlap(places)
    except TooFine as error:
        problem = str(error)
    if problem or len({place.shape for place in places}) > 1:
        what = f"{kind} {name[:200]!r}: {problem or 'its parts state different shapes'}"
        raise CheckpointError(file, what, "each replica must save each element exactly once")


def held(one: Described, tensor: torch.Tensor, key: str = "") -> Held:
    """``one`` with its elements, under ``key`` or one made of kind, name, place and copy."""
    copy = f"#{one.replica}" if one.replica else ""
    where = "" if one.place.is_whole else str(one.place)
    key = key or f"{one.kind}/{one.name}{where}{copy}"
    return Held(key, one.kind, one.name, one.place, one.replica, one.rank, tensor)


def own_writes(agreed: Agreed, state: State, rank: int) -> list[Held]:
    """The pieces that this rank writes, if ranks write their own state."""
    return [
        held(one, state.pieces[one.kind][one.number].tensor)
        for one in agreed.writes
        if one.rank == rank
    ]
