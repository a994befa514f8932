"""Conversion of a checkpoint to another format, in one process and from its files only.

    full       whole tensors under their own names: one tensor in memory at a time
    sharded    ``ranks`` data files; parameters and slots are cut into equal ranges of elements

Only where elements lie changes.  Strategy and mesh stay those of the training that saved, for state
that belongs to one rank (generators) means that one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shardproof.impls.reference.checkpoint.agreement import Agreed
from shardproof.impls.reference.checkpoint.data_file import DTYPES, Held
from shardproof.impls.reference.checkpoint.files import FileLayer
from shardproof.impls.reference.checkpoint.full import FILES
from shardproof.impls.reference.checkpoint.manifest import Listed
from shardproof.impls.reference.checkpoint.reading.checkpoint import Checkpoint, Name
from shardproof.impls.reference.checkpoint.reading.regions import Place
from shardproof.impls.reference.checkpoint.reading.reshape import plan
from shardproof.impls.reference.checkpoint.root import Branch, Root, named
from shardproof.impls.reference.checkpoint.writing import close_pair, open_pair, stem_of

#: What is cut; the rest is small, and belongs to somebody.
CUT = ("parameters", "optimizer")
#: Elements that are read at once.
BLOCK = 1 << 20


def convert(
    source: Checkpoint, root: Path, kind: str, ranks: int, layer: FileLayer | None = None
) -> Path:
    """Write ``source`` into ``root`` in the format ``kind``; return the new checkpoint's folder.

    :raises CheckpointError: ``source`` is damaged, or ``root`` holds that step or another run.
    """
    layer = layer or FileLayer()
    manifest = source.manifest
    # The number of the save as well: what was saved later is newer in a root of copies, too.
    place, found = Root(layer, root, Branch(manifest.run)), named(Path(manifest.id))
    agreed = Agreed(place.begin(manifest.about.step, found.number if found else None), ())
    files = whole(source) if kind == "full" else cut(source, ranks)
    try:
        listed = [write(source, layer, agreed, stem, held) for stem, held in files.items() if held]
        made = replace(manifest, kind=kind, id=agreed.id, files=tuple(listed))
        place.commit(agreed.folder, made, keep=None)
    except BaseException:
        place.abandon()
        raise
    return agreed.folder


def write(
    source: Checkpoint, layer: FileLayer, agreed: Agreed, stem: str, tensors: Sequence[Held]
) -> Listed:
    """Write one pair of files, tensor by tensor."""
    with open_pair(layer, agreed, stem, tensors) as file:
        for held in file.tensors:
            target = torch.empty(held.tensor.shape, dtype=held.tensor.dtype)
            entries = source.copies[held.kind, held.name][held.replica]
            source.fill(target, plan(held.place, entries))
            file.add(target)
    return close_pair(layer, agreed, file.result)


def tensor_of(source: Checkpoint, name: Name) -> Tensor:
    """A whole tensor, verified; of several copies the first."""
    first = source.entries(name)[0]
    target = torch.empty(first.place.shape, dtype=DTYPES[first.dtype])
    source.fill(target, source.plan(Place.all_of(first.place.shape), name))
    return target


def blocks(source: Checkpoint, kind: str, name: str, copy: int) -> Iterator[tuple[int, Tensor]]:
    """First element and elements of copy number ``copy``, in the order of the flattened tensor."""
    entries = source.copies[kind, name][copy]
    shape, dtype = entries[0].place.shape, DTYPES[entries[0].dtype]
    numel = torch.Size(shape).numel()
    for begin in range(0, numel, BLOCK):
        end = min(begin + BLOCK, numel)
        target = torch.empty(end - begin, dtype=dtype)
        source.fill(target, plan(Place(shape, None, (begin, end)), entries))
        yield begin, target


@contextmanager
def nothing_left(root: Path) -> Iterator[None]:
    """On an error, remove ``root`` and its parents if they were created here and are empty."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):  # one that holds something stays
            for folder in missing:
                folder.rmdir()
        raise


def names(source: Checkpoint) -> Iterator[tuple[str, str, int, torch.dtype, tuple[int, ...]]]:
    """Kind, name, number of the copy, dtype and shape of all tensors, sorted."""
    for (kind, name), copies in sorted(source.copies.items()):
        for replica, entries in sorted(copies.items()):
            first = entries[0]
            yield kind, name, replica, DTYPES[first.dtype], first.place.shape


def stand_in(
    kind: str, name: str, replica: int, dtype: torch.dtype, place: Place, rank: int, key: str
) -> Held:
    """The description of a tensor to write, without elements."""
    return Held(
        *(key, kind, name, place, replica, rank),
        torch.empty(place.own_shape, dtype=dtype, device="meta"),
    )


def whole(source: Checkpoint) -> Mapping[str, list[Held]]:
    """File -> whole tensors, in the layout of ``full.py``."""
    files: dict[str, list[Held]] = {stem: [] for stem in FILES}
    stems = {kind: stem for stem, kinds in FILES.items() for kind in kinds}
    seen: set[tuple[str, str]] = set()
    for kind, name, replica, dtype, shape in names(source):
        place = Place.all_of(shape)
        key = f"{name}#{replica}" if (kind, name) in seen else name
        seen.add((kind, name))
        files[stems[kind]].append(stand_in(kind, name, replica, dtype, place, 0, key))
    return files


def cut(source: Checkpoint, ranks: int) -> Mapping[str, list[Held]]:
    """File -> equal ranges of parameters and slots; everything else is in the first file."""
    files: dict[str, list[Held]] = {stem_of(rank): [] for rank in range(ranks)}
    for kind, name, replica, dtype, shape in names(source):
        numel, copy = math.prod(shape), f"#{replica}" if replica else ""
        if kind not in CUT or numel < ranks:
            place = Place.all_of(shape)
            held = stand_in(kind, name, replica, dtype, place, 0, f"{kind}/{name}{copy}")
            files[stem_of(0)].append(held)
            continue
        for rank in range(ranks):
            bounds = (rank * numel // ranks, (rank + 1) * numel // ranks)
            place = Place(shape, None, bounds)
            key = f"{kind}/{name}{place}{copy}"
            files[stem_of(rank)].append(stand_in(kind, name, replica, dtype, place, rank, key))
    return files
