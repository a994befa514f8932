"""After a power cut at any moment: the last committed checkpoint loads, the torn one is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import FORMATS
from local_ranks import succeed
from lossy_disk import Recorder, crashes
from torch import Tensor

from shardproof.comm import Mesh
from shardproof.contract import Piece
from shardproof.impls.reference.checkpoint import lock
from shardproof.impls.reference.checkpoint.agreement import State
from shardproof.impls.reference.checkpoint.convert import tensor_of
from shardproof.impls.reference.checkpoint.errors import CheckpointError, NotCommitted
from shardproof.impls.reference.checkpoint.files import FileLayer
from shardproof.impls.reference.checkpoint.manifest import MANIFEST, About
from shardproof.impls.reference.checkpoint.reading.checkpoint import Checkpoint
from shardproof.impls.reference.checkpoint.root import PART, Branch, Root, folders

pytestmark = pytest.mark.usefixtures("one_thread")
SAVES = 3


def values(step: int) -> Tensor:
    """The parameter that step saves: 6 elements, rank 0 has the first 3."""
    return torch.arange(6.0) + 100 * step


def record(form: str, root: Path, make: Callable[[Path], Recorder] = Recorder) -> Recorder:
    """Three saves of two ranks into ``root``, of which the newest stays."""
    layer = make(root)

    def body(rank: int, world: int) -> None:
        saver = FORMATS[form](root, Mesh({"shard": 2}), keep=1, layer=layer)
        for step in range(1, SAVES + 1):
            own = (3 * rank, 3 * rank + 3)
            piece = Piece("w", (6,), values(step)[slice(*own)], flat_range=own)
            about = About(step, "made", {"shard": 2})
            saver.save(State({"parameters": [piece]}, about))
            saver.wait()

    succeed(body, 2)
    return layer


def committed(recorder: Recorder, count: int) -> int:
    """The step that must be there after so many operations."""
    done, step, renamed = recorder.done[:count], 0, None
    for one in done:
        if one.bound and one.bound[1] == MANIFEST:
            renamed = one.bound[0]
        elif one.is_sync and one.node is renamed:
            step, renamed = step + 1, None
    return step


def wrong(recorder: Recorder, place: Path, seeds: int) -> list[str]:
    """What is not as promised, over all crashes."""
    found = []
    place.mkdir()
    for count, way, root in crashes(recorder, place, seeds):
        step = committed(recorder, count)
        try:
            with Checkpoint.open(root) as checkpoint:
                about, problems = checkpoint.manifest.about, list(checkpoint.verify())
                is_right = torch.equal(
                    tensor_of(checkpoint, ("parameters", "w")), values(about.step)
                )
            if problems or about.step < step or not is_right:
                found.append(f"{count} {way}: step {about.step} of {step}, {problems}")
        except NotCommitted:
            if step:
                found.append(f"{count} {way}: step {step} is lost")
        except ValueError as error:
            found.append(f"{count} {way}: {error}")
        # Every attempt that was not committed is refused as such, in words.
        for one in folders(root):
            if not one.is_committed:
                with pytest.raises(NotCommitted, match=r"cut short|holds no checkpoint"):
                    Checkpoint.open(one.path)
        if way == "lost":
            found += [f"{count} {way}: {problem}" for problem in not_gone_on_with(root)]
        shutil.rmtree(root)
    return found


def not_gone_on_with(root: Path) -> list[str]:
    """What keeps the next job from saving, after the machine was started again; leaves it saved."""
    run = folders(root)[0].run if folders(root) else "00000000"
    job = Root(FileLayer(), root, Branch(run))
    try:
        job.begin(SAVES + 1)
    except CheckpointError as error:
        return [f"nothing can be saved: {error}"]
    left = [one.path.name for one in folders(root) if not one.is_committed]
    job.abandon()
    left += [path.name for path in root.iterdir() if not (path / MANIFEST).exists()]
    return [f"left over: {left}"] if len(left) > 1 else []


@pytest.mark.parametrize("form", FORMATS)
def test_no_power_cut_loses_what_was_committed(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "root").mkdir()
    recorder = record(form, tmp_path / "root")
    assert len(recorder.done) > 40 and committed(recorder, len(recorder.done)) == SAVES
    host, boot = lock.here()
    monkeypatch.setattr(lock, "here", lambda: (host, f"not {boot}"))
    monkeypatch.setattr(lock, "_WRITTEN", 0.0)
    assert wrong(recorder, tmp_path / "crashed", seeds=3) == []


class NeverSyncsFiles(Recorder):
    def sync(self, path: Path, file: int) -> None:
        pass


class NeverSyncsFolders(Recorder):
    def sync_folder(self, path: Path) -> None:
        pass


class WritesTheManifestInPlace(Recorder):
    """No second name: readers see it while it grows."""

    def create(self, path: Path) -> int:
        return super().create(path.with_name(path.name.replace(PART, MANIFEST)))

    def write(self, path: Path, file: int, data: memoryview) -> None:
        super().write(path.with_name(path.name.replace(PART, MANIFEST)), file, data)

    def sync(self, path: Path, file: int) -> None:
        super().sync(path.with_name(path.name.replace(PART, MANIFEST)), file)

    def rename(self, old: Path, new: Path) -> None:
        if new.name != MANIFEST:
            super().rename(old, new)


@pytest.mark.parametrize(
    "fault",
    [
        NeverSyncsFolders,
        pytest.param(NeverSyncsFiles, marks=pytest.mark.slow),
        pytest.param(WritesTheManifestInPlace, marks=pytest.mark.slow),
    ],
)
def test_the_replay_finds_what_was_forgotten(
    fault: Callable[[Path], Recorder], tmp_path: Path
) -> None:
    (tmp_path / "root").mkdir()
    recorder = record("sharded", tmp_path / "root", fault)
    assert wrong(recorder, tmp_path / "crashed", seeds=1)
