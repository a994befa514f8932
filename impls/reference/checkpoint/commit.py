"""When a checkpoint counts, and which old ones go.

    begin     root/step-00000012-<run>-<attempt>/, a folder that nobody else writes into
    commit    manifest.json.part -> fsync -> fsync of the folder -> rename to manifest.json -> fsync
              of the folder: from here on, and not before, there is a checkpoint
    retire    beyond the newest ``keep`` whole ones: the manifest goes first (now it is no
              checkpoint), then the rest

A name is synced before the manifest that relies on it, so no power cut leaves a manifest without
its data.  An attempt that was killed has a folder without a manifest; the next commit of its run
removes it, if its step is over.  What other runs left is never touched: two jobs that save into one
root have folders of their own, and the one that finds the other's checkpoint refuses.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from shardproof.impls.reference.checkpoint.errors import CheckpointError
from shardproof.impls.reference.checkpoint.files import FileLayer
from shardproof.impls.reference.checkpoint.manifest import (
    DATA,
    INDEX,
    MANIFEST,
    Manifest,
    read_index,
    read_manifest,
)
from shardproof.impls.reference.checkpoint.safe_files import read_small, size_of

_FOLDER = re.compile(r"step-(\d{8,18})-([0-9a-f]{8})-([0-9a-f]{4})")
PART = MANIFEST + ".part"


@dataclass(frozen=True)
class Found:
    """A folder of a root: its step, run and path, and whether it has a manifest."""

    step: int
    run: str
    path: Path

    @property
    def is_committed(self) -> bool:
        """Whether it is a checkpoint."""
        return (self.path / MANIFEST).is_file()


def new_run() -> str:
    """A name for a run that has none: it is drawn from the system, not from any seed."""
    return secrets.token_hex(4)


def folders(root: Path) -> list[Found]:
    """What stands in ``root``, the newest step first."""
    matches = [(path, _FOLDER.fullmatch(path.name)) for path in root.iterdir()]
    found = [Found(int(m[1]), m[2], p) for p, m in matches if m and p.is_dir()]
    return sorted(found, key=lambda one: (one.step, one.path.name), reverse=True)


def newest(root: Path) -> Path | None:
    """The newest checkpoint in ``root``, or none."""
    return next((one.path for one in folders(root) if one.is_committed), None)


def begin(layer: FileLayer, root: Path, run: str, step: int) -> Path:
    """A new folder for the checkpoint of ``step``.

    :raises CheckpointError: another run saves here, or the step is saved already.
    """
    layer.make_folders(root)
    committed = [one for one in folders(root) if one.is_committed]
    for one in committed:
        if one.run != run:
            what = f"is a checkpoint of another run ({one.run}), this one is {run}"
            remedy = "name another folder for this run, or load that checkpoint and go on with it"
            raise CheckpointError(one.path, what, remedy)
        if one.step == step:
            what = f"holds step {step} of this run already"
            raise CheckpointError(one.path, what, "remove it to save that step again")
    path = root / f"step-{step:08}-{run}-{secrets.token_hex(2)}"
    layer.make_folder(path)
    layer.sync_folder(root)
    return path


def commit(layer: FileLayer, folder: Path, manifest: Manifest, keep: int) -> None:
    """Make ``folder``, whose other files are written and synced, a checkpoint; retire old ones."""
    layer.write_file(folder / PART, [memoryview(manifest.to_json())])
    # Every name in the folder must outlive a power cut before the one that vouches for them.
    layer.sync_folder(folder)
    layer.rename(folder / PART, folder / MANIFEST)
    layer.sync_folder(folder)
    retire(layer, folder.parent, manifest.run, manifest.about.step, keep)


def retire(layer: FileLayer, root: Path, run: str, step: int, keep: int) -> None:
    """Remove what ``run`` left in ``root`` beyond its newest ``keep`` whole checkpoints.

    One that is damaged does not count, and is older than none that goes: it is left for a look.
    """
    whole = 0
    for one in folders(root):
        if one.run != run or one.step > step:
            continue
        if not one.is_committed:
            layer.remove_all(one.path)  # an attempt that was killed: its step is over
        elif whole >= keep:
            layer.remove_all(one.path, first=MANIFEST)
        else:
            whole += seems_whole(one.path)
    layer.sync_folder(root)


def abandon(layer: FileLayer, folder: Path) -> None:
    """Remove an attempt that failed, to give its room back."""
    if folder.is_dir() and not (folder / MANIFEST).exists():
        layer.remove_all(folder)


def seems_whole(folder: Path) -> bool:
    """Whether manifest and indexes are as written and data files as long: nothing else is read."""
    try:
        manifest = read_manifest(read_small(folder / MANIFEST), folder / MANIFEST)
        for listed in manifest.files:
            path = folder / (listed.name + INDEX)
            index = read_index(read_small(path), path, manifest.id)
            if size_of(folder / (listed.name + DATA)) != index.bytes:
                return False
    except CheckpointError:
        return False
    return True
