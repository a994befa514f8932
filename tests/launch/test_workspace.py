"""Work folders of runners that live beside each other, and of runners that died."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

from shardproof.launch import workspace


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(workspace, "workspace_base", lambda: tmp_path)
    return tmp_path


def test_a_living_runner_keeps_its_folder(base: Path) -> None:
    with workspace.Workspace() as first, workspace.Workspace() as second:
        assert first != second and first.is_dir() and second.is_dir()
        assert workspace.sweep(base) == []
    assert not any(base.iterdir())


def test_a_runner_that_starts_is_not_swept(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runners start at once, as under pytest-xdist: one sweeps just as the other locks."""
    lock, swept = fcntl.flock, []

    def late(stream: Any, how: int) -> None:
        if how == fcntl.LOCK_EX:
            swept.append(workspace.sweep(base))
        lock(stream, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with workspace.Workspace() as folder:
        assert swept == [[]] and folder.is_dir()


def test_the_next_runner_removes_what_a_dead_one_left(base: Path) -> None:
    left = base / f"{workspace.PREFIX}left"
    left.mkdir()
    (left / workspace.LOCK).touch()
    with workspace.Workspace() as folder:
        assert not left.exists() and folder.is_dir()
