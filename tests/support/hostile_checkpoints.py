"""Checkpoints that nobody would write: mutations of whole ones, drawn from a number.

    python tests/support/hostile_checkpoints.py 0 20000    the long fuzz; prints what it found

Half of the mutations of JSON get their checksums made anew, as who forges a file would, so that
they are met by what reads the fields and not only by the checksum.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import sys
import tempfile
import traceback
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from checkpoints import saved, workload
from fuzzing import changed_bytes, changed_json

from shardproof.impls.reference.checkpoint.convert import tensor_of
from shardproof.impls.reference.checkpoint.errors import CheckpointError
from shardproof.impls.reference.checkpoint.manifest import DATA, INDEX, MANIFEST
from shardproof.impls.reference.checkpoint.reading.checkpoint import Checkpoint
from shardproof.impls.reference.checkpoint.reading.guarded_json import SEAL

FORMS = (("full", "zero1", {"shard": 2}), ("sharded", "zero3", {"shard": 2}))
#: JSON in place of a value that only hurts in bulk.
BULK = (
    lambda: "[" * 100_000,
    lambda: "[" * 500 + "]" * 500,
    lambda: "[" + "[]," * 2_000_000 + "[]]",
    lambda: "{" + ",".join(f'"{n}":{{"dtype":"F32"}}' for n in range(1_000_000)) + "}",
    lambda: "9" * 100_000,
    lambda: '"' + "\\ud83d\\ude00" + "x" * 7_000_000 + '"',
)


def make_bases(place: Path) -> list[Path]:
    """One small committed checkpoint of each form."""
    found = []
    for form, strategy, mesh in FORMS:
        work = workload(layers=1, width=8, heads=2)
        saved(place / form, strategy, mesh, 1, form, work=work)
        found += [path.parent for path in (place / form).glob(f"*/{MANIFEST}")]
    return found


def mutate(source: random.Random, folder: Path, bulk: bool = True) -> str:
    """Change the checkpoint in ``folder``; what was done."""
    file = source.choice(sorted(folder.iterdir()))
    how = source.choice(("bits", "bytes", "json", "json", "head", "gone", "cut", "other", "link"))
    if how == "gone":
        file.unlink()
    elif how == "cut":
        file.write_bytes(file.read_bytes()[: source.randrange(file.stat().st_size)])
    elif how == "other":
        others = [p for p in sorted(folder.iterdir()) if p != file]
        file.write_bytes(source.choice(others).read_bytes())
    elif how == "link":
        file.unlink()
        file.symlink_to(source.choice(("/dev/zero", "/etc/passwd", "..", "nowhere")))
    elif how == "bits":
        data = bytearray(file.read_bytes())
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)
        file.write_bytes(data)
    elif file.suffix == INDEX:
        body = file.read_bytes().rpartition(SEAL)[0]
        if how == "json":
            body = changed_json(source, body + b"}").rstrip()[:-1]
        elif how == "head" and bulk and source.random() < 0.05:
            body = body + b',\n"more": ' + source.choice(BULK)().encode()
        else:
            body = changed_bytes(source, body)
        _put(source, folder, file, body)
    elif how in ("json", "head"):
        _change_head(source, folder, file)
    else:
        file.write_bytes(changed_bytes(source, file.read_bytes()))
    return f"{how} {file.name}"


def _put(source: random.Random, folder: Path, file: Path, body: bytes) -> None:
    """A JSON file with its checksum, mostly; and the manifest then knows the index, mostly."""
    if source.random() < 0.2:
        file.write_bytes(body + b"}")
        return
    data = body + SEAL + str(zlib.crc32(body)).encode() + b"}\n"
    file.write_bytes(data)
    if file.name == MANIFEST or source.random() < 0.2:
        return
    manifest = folder / MANIFEST
    text = manifest.read_bytes().rpartition(SEAL)[0]
    fields: Any = json.loads(text + b"}")
    for listed in fields["files"]:
        if listed["name"] + INDEX == file.name:
            listed["index_sum"] = zlib.crc32(data)
    text = json.dumps(fields).encode()[:-1]
    manifest.write_bytes(text + SEAL + str(zlib.crc32(text)).encode() + b"}\n")


def _change_head(source: random.Random, folder: Path, file: Path) -> None:
    """Another safetensors header or length, with an index that believes it."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    head, rest = data[8 : 8 + length], data[8 + length :]
    way = source.randrange(3)
    if way == 0:
        length = source.choice((0, 1, 2**31, 2**60, 2**63, 2**64 - 1, length + 8, length - 8))
    else:
        head = changed_json(source, head)
        length = len(head)
    start = length.to_bytes(8, "little") + head
    file.write_bytes(start + rest)
    index = file.with_suffix(INDEX)
    fields: Any = json.loads(index.read_bytes().rpartition(SEAL)[0] + b"}")
    moved = len(start) - fields["header_bytes"]
    fields |= {"header_bytes": len(start), "header_sum": zlib.crc32(start)}
    fields["bytes"] += moved
    for one in fields["tensors"]:
        one["bytes"] = [at + moved for at in one["bytes"]]
    _put(source, folder, index, json.dumps(fields).encode()[:-1])


def examine(folder: Path) -> str:
    """Read everything; empty if it is whole, else the error in words.  Anything else raises."""
    try:
        with Checkpoint.open(folder) as checkpoint:
            problems = [str(one) for one in checkpoint.verify()]
            for name in checkpoint.copies:
                tensor_of(checkpoint, name)
            return problems[0] if problems else ""
    except CheckpointError as error:
        return str(error)


def try_one(number: int, bases: list[Path], place: Path) -> tuple[str, str]:
    """What mutation ``number`` did, and what reading said.

    AssertionError: it was read without a word, and with other values than the whole one.
    """
    source = random.Random(number)
    base = source.choice(bases)
    folder = place / base.name
    shutil.copytree(base, folder)
    try:
        before = {p.name: p.read_bytes() for p in folder.iterdir()}
        done = mutate(source, folder)
        said = examine(folder)
        same = all(
            not p.is_symlink() and p.read_bytes() == before.get(p.name)
            for p in folder.iterdir()
            if p.suffix == DATA
        )
        if not said:  # metadata that was forged with its checksums may say what it likes
            is_forged = done.startswith(("json", "head")) or done.endswith(INDEX)
            assert (same or is_forged) and not done.startswith(("bits", "cut", "gone", "link")), (
                f"{number}: {done}: no word"
            )
        else:
            assert str(folder) in said and " - " in said, f"{number}: {done}: {said}"
        return done, said
    finally:
        shutil.rmtree(folder)


def main(first: int, last: int) -> int:
    """The long fuzz, mutations ``first`` to ``last - 1``; exit code 1 with what broke."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        bases = make_bases(place)
        (place / "work").mkdir()
        for number in range(20):  # what is loaded late is idle memory
            examine(bases[number % len(bases)])
        idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        count = last - first
        broken, told, kinds = 0, 0, Counter[str]()
        for number in range(first, last):
            try:
                done, said = try_one(number, bases, place / "work")
                told += bool(said)
                kinds[done.split()[0]] += 1
            except BaseException:  # noqa: BLE001 - whatever it is, it is a finding
                broken += 1
                print(number, traceback.format_exc(), flush=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read = count - told - broken
    print(f"{count} mutations: {told} refused in words, {read} read, {broken} broke")
    print(f"kinds: {dict(sorted(kinds.items()))}")
    print(f"memory above idle: {(peak - idle) / 1024:.0f} MiB")
    return int(broken > 0 or peak - idle > 256 * 1024)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
