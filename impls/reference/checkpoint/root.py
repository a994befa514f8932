"""The folder that holds a run's checkpoints: committed, newest and outdated ones.

    begin     take the lock; remove what killed saves left; make
              root/step-00000012-save-0007-<run>-<attempt>/
    commit    manifest.json.part -> fsync -> fsync of the folder and the root -> is the lock still
              one's own? -> rename to manifest.json -> fsync of the folder: from here on, and not
              before, there is a checkpoint
    retire    what is no longer wanted: the manifest goes first (now it is no checkpoint), then the
              rest; give the lock back

A name is synced before the manifest that relies on it, so no power cut leaves a manifest without
its data.

Newest is what was saved last, not the highest step: who loads step 2 where step 4 exists and goes
on starts a new *branch*.  Saves are numbered, so the first one of the new branch wins every
restart; step 4 stays until that one is committed, and goes then.  A manifest lists the checkpoints
that its own branch has behind it (``before``), of which the newest whole ones stay.

    save      1         2         3                     3 was made after 1: 2 goes
    step      2  -----  4
              \\------------------ 3

One job saves into a root.  Two at the same time meet in the lock (lock.py).  Two in turns meet in
what they have seen: a checkpoint that is neither older than a job's load nor its own is another's.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shardproof.impls.reference.checkpoint.errors import CheckpointError, told
from shardproof.impls.reference.checkpoint.files import FileLayer
from shardproof.impls.reference.checkpoint.lock import Lock
from shardproof.impls.reference.checkpoint.manifest import (
    DATA,
    INDEX,
    MANIFEST,
    Manifest,
    read_index,
    read_manifest,
)
from shardproof.impls.reference.checkpoint.reading.safe_files import read_small, size_of

_FOLDER = re.compile(r"step-(\d{8,18})-save-(\d{4,18})-([0-9a-f]{8})-([0-9a-f]{4})")
PART = MANIFEST + ".part"


@dataclass(frozen=True)
class Found:
    """A folder of a root: number of the save, step, run, path, and whether it has a manifest."""

    number: int
    step: int
    run: str
    path: Path

    @property
    def is_committed(self) -> bool:
        """Whether it is a checkpoint."""
        return (self.path / MANIFEST).is_file()


def named(path: Path) -> Found | None:
    """The fields in the name of ``path`` if it is that of a checkpoint."""
    match = _FOLDER.fullmatch(path.name)
    return Found(int(match[2]), int(match[1]), match[3], path) if match else None


def folders(root: Path) -> list[Found]:
    """The checkpoint folders in ``root``, the last save first, without links."""
    own = (path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    found = [one for path in own if (one := named(path))]
    return sorted(found, key=lambda one: (one.number, one.path.name), reverse=True)


def newest(root: Path) -> Path | None:
    """The last saved checkpoint in ``root``, or none."""
    return next((one.path for one in folders(root) if one.is_committed), None)


@dataclass
class Branch:
    """A job's knowledge of its run: its name, and its checkpoints by id.

    ``before``: those that it comes from, the newest first.  ``seen``: all that it knows of, those
    of other branches included; ``None``: what is there at its first save.
    """

    run: str = field(default_factory=lambda: secrets.token_hex(4))  # of no seed
    before: tuple[str, ...] = ()
    seen: frozenset[str] | None = None


class Root:
    """The folder ``path`` for one saving job; only the first rank uses it."""

    lock_type: type[Lock] = Lock

    def __init__(self, layer: FileLayer, path: Path, branch: Branch) -> None:
        self.layer, self.path, self.branch = layer, path, branch
        self.lock = self.lock_type(layer, path)
        self.attempt: Path | None = None

    def begin(self, step: int, number: int | None = None) -> Path:
        """Create a folder for the checkpoint of ``step`` and take the lock; save ``number``, or the
        next.

        :raises CheckpointError: another job or run saves here, or the step is saved already.
        """
        self.layer.make_folders(self.path)
        self.lock.take()
        try:
            found = folders(self.path)
            self._require_own(found, step, number)
            for one in found:
                if not one.is_committed:  # nobody saves here but who has the lock
                    self.layer.remove_all(one.path)
            number = number or 1 + max((one.number for one in found), default=0)
            attempt = secrets.token_hex(2)
            folder = self.path / f"step-{step:08}-save-{number:04}-{self.branch.run}-{attempt}"
            self.layer.make_folder(folder)
            self.attempt = folder
        except BaseException:
            self.abandon()
            raise
        return folder

    def _require_own(self, found: Iterable[Found], step: int, number: int | None) -> None:
        committed = [one for one in found if one.is_committed]
        if self.branch.seen is None:
            self.branch.seen = frozenset(one.path.name for one in committed)
        for one in committed:
            if one.run != self.branch.run:
                what = (
                    f"this checkpoint belongs to run {one.run}, but the saving run is "
                    f"{self.branch.run}"
                )
                remedy = "name another folder, or load that checkpoint and resume from it"
                raise CheckpointError(one.path, what, remedy)
            if one.path.name not in self.branch.seen:
                what = "this checkpoint was saved by another job, which continues the same run"
                remedy = "end one of the two jobs, or name another folder for one of them"
                raise CheckpointError(one.path, what, remedy)
            if one.number == number or (one.step == step and one.path.name in self.branch.before):
                what = f"this checkpoint already holds step {one.step} of this run"
                remedy = "train at least one more step before you save again"
                if number is not None:  # a copy, which nobody trains
                    remedy = "name another folder for the copy, or remove this checkpoint"
                raise CheckpointError(one.path, what, remedy)

    def commit(self, folder: Path, manifest: Manifest, keep: int | None) -> None:
        """Commit ``folder``, whose other files are written and synced, as a checkpoint.

        All but ``keep`` of its branch go (``None``: nothing goes).

        :raises CheckpointError: another job took the lock; or old ones cannot be removed.
        """
        self.layer.write_file(folder / PART, [memoryview(manifest.to_json())])
        # Every name must outlive a power cut before the one that vouches for them.
        self.layer.sync_folder(folder)
        self.layer.sync_folder(self.path)
        self.lock.require()
        self.layer.rename(folder / PART, folder / MANIFEST)
        self.layer.sync_folder(folder)
        self.attempt = None
        self.branch.before = (manifest.id, *manifest.before)
        self.branch.seen = (self.branch.seen or frozenset()) | {manifest.id}
        try:
            if keep is not None:
                self.retire(keep)
            self.lock.release()
        except OSError as error:
            file, what, remedy = told(error, self.path)
            what = (
                f"step {manifest.about.step} is committed, but the cleanup after it failed: {what}"
            )
            raise CheckpointError(file, what, remedy) from error

    def standing(self) -> tuple[str, ...]:
        """The remaining checkpoints of the branch, the newest first."""
        return tuple(name for name in self.branch.before if (self.path / name / MANIFEST).is_file())

    def retire(self, keep: int) -> None:
        """Remove other branches, and older checkpoints of this one beyond the newest ``keep`` valid
        ones.

        One that is damaged does not count, and is left for a look until the ones behind it go.
        """
        own, *older = self.standing()
        whole, stays = 1, {own}
        for name in older:
            if whole < keep:
                stays.add(name)
                whole += seems_whole(self.path / name)
        for one in folders(self.path):
            # Who puts a copy here while this job saves gets it back.
            if one.path.name not in stays and one.path.name in (self.branch.seen or ()):
                self.layer.remove_all(one.path, first=MANIFEST)
        self.layer.sync_folder(self.path)

    def abandon(self) -> None:
        """Remove the failed attempt, if there is one, and release the lock."""
        folder, self.attempt = self.attempt, None
        try:
            if folder is not None and folder.is_dir() and not (folder / MANIFEST).exists():
                self.layer.remove_all(folder)
        finally:
            self.lock.release()


def seems_whole(folder: Path) -> bool:
    """Whether manifest, indexes and file lengths are valid; no tensor is read."""
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
