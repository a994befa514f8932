"""A data file and its index: the pair of files that each writer creates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardproof.impls.reference.checkpoint.agreement import Agreed
from shardproof.impls.reference.checkpoint.checksum import crc32
from shardproof.impls.reference.checkpoint.data_file import DataFile, Held, Streamed
from shardproof.impls.reference.checkpoint.files import FileLayer
from shardproof.impls.reference.checkpoint.manifest import (
    DATA,
    INDEX,
    Listed,
    index_to_json,
    read_index,
)
from shardproof.impls.reference.checkpoint.reading.guarded_json import require_bounds
from shardproof.impls.reference.checkpoint.reading.safe_files import read_small

#: The last operation of a rank: whoever sees the index under its name finds all of the pair.
PART = ".part"


def stem_of(rank: int) -> str:
    """The file name of a rank's pair, without ending."""
    return f"rank-{rank:05}"


def open_pair(layer: FileLayer, agreed: Agreed, stem: str, tensors: Sequence[Held]) -> Streamed:
    """Open the data file of a pair for writing tensor by tensor; :func:`close_pair` completes
    it.
    """
    return Streamed(layer, agreed.folder / (stem + DATA), tensors, {"checkpoint": agreed.id})


def close_pair(layer: FileLayer, agreed: Agreed, written: DataFile) -> Listed:
    """Write the index of a written and synced data file; return the manifest's entry for both."""
    stem = written.name.removesuffix(DATA)
    index = index_to_json(written, agreed.id)
    path = agreed.folder / (stem + INDEX)
    require_bounds(index, path)
    layer.write_file(path.with_name(path.name + PART), [memoryview(index)])
    layer.rename(path.with_name(path.name + PART), path)
    # On a network's disk each machine answers for the names that it gave.
    layer.sync_folder(agreed.folder)
    return Listed(stem, crc32(index))


def listed_in(path: Path, identity: str) -> Listed:
    """The manifest entry for ``identity`` of a pair whose index another rank wrote at ``path``.

    :raises CheckpointError: it is not as that rank wrote it.
    """
    data = read_small(path)
    read_index(data, path, identity)
    return Listed(path.name.removesuffix(INDEX), crc32(data))


def write_pair(
    layer: FileLayer, agreed: Agreed, stem: str, tensors: Sequence[Held]
) -> Listed | None:
    """Write both files from tensors in memory; nothing if there are no tensors."""
    if not tensors:
        return None
    with open_pair(layer, agreed, stem, tensors) as file:
        for held in file.tensors:
            file.add(held.tensor)
    return close_pair(layer, agreed, file.result)
