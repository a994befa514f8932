"""What is in a checkpoint: sentences, tables, JSON, and a digest of it all."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardproof import tensor_bytes
from shardproof.errors import shorten
from shardproof.registry.checkpoints import blocks
from shardproof.table import Table

if TYPE_CHECKING:
    from shardproof.registry.checkpoints import Checkpoint


def size(checkpoint: Checkpoint) -> str:
    """Tensors, bytes and files."""
    files = checkpoint.files.values()
    tensors, held = len(checkpoint.copies), sum(file.bytes for file in files)
    return f"{tensors} names in {len(files)} files of {held:,} bytes"


def sentences(checkpoint: Checkpoint) -> Iterator[str]:
    """Who saved what, a line each."""
    manifest, about = checkpoint.manifest, checkpoint.manifest.about
    mesh = " x ".join(f"{axis} {ranks}" for axis, ranks in about.mesh.items())
    yield f"{checkpoint.folder}: {manifest.kind}, {size(checkpoint)}"
    yield f"step {about.step} of run {manifest.run}, saved by {about.strategy} on {mesh}"
    for name in ("optimizer", "scaler", "data", "extra"):
        if fields := getattr(about, name):
            yield f"{name}: {shorten(json.dumps(fields), 200)}"


def kinds(checkpoint: Checkpoint) -> Table:
    """A row for each kind."""
    rows = []
    for kind in dict.fromkeys(kind for kind, _ in checkpoint.copies):
        entries = [e for f in checkpoint.files.values() for e in f.entries if e.kind == kind]
        dtypes = ", ".join(sorted({e.dtype for e in entries}))
        names, held = len(checkpoint.names(kind)), sum(e.end - e.begin for e in entries)
        rows.append((kind, f"{names:,}", dtypes, f"{len(entries):,}", f"{held:,}"))
    headings = ("kind", "names", "dtypes", "parts", "bytes")
    return Table("Tensors", headings, rows, align="lrlrr")


def tensors(checkpoint: Checkpoint) -> Table:
    """A row for each name."""
    rows = []
    for (kind, name), copies in sorted(checkpoint.copies.items()):
        parts = [entry for entries in copies.values() for entry in entries]
        owners = ", ".join(map(str, sorted({entry.owner for entry in parts})))
        shape = " x ".join(map(str, parts[0].place.shape)) or "one number"
        where = str(parts[0].place) if len(parts) == 1 else f"{len(parts)} parts"
        rows.append((kind, shorten(name), parts[0].dtype, shape, where, shorten(owners)))
    headings = ("kind", "name", "dtype", "shape", "place", "ranks")
    return Table("Tensors", headings, rows)


def as_json(checkpoint: Checkpoint) -> str:
    """Manifest and layout."""
    manifest = dataclasses.asdict(checkpoint.manifest)
    layout = [
        dataclasses.asdict(entry) | {"place": entry.place._asdict()}
        for file in checkpoint.files.values()
        for entry in file.entries
    ]
    return json.dumps(manifest | {"folder": str(checkpoint.folder), "tensors": layout}, indent=1)


def digest(checkpoint: Checkpoint) -> str:
    """SHA-256 over every copy of every name, in the order of names."""
    found = hashlib.sha256()
    for (kind, name), copies in sorted(checkpoint.copies.items()):
        for copy, (replica, entries) in enumerate(sorted(copies.items())):
            first = entries[0]
            head = [kind, name, copy, first.dtype, first.place.shape]
            found.update(json.dumps(head).encode())
            elements = 0
            for begin, block in blocks(checkpoint, kind, name, replica):
                assert begin == elements
                elements += block.numel()
                found.update(tensor_bytes.raw(block))
            assert elements == math.prod(first.place.shape)
    return found.hexdigest()
