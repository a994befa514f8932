"""A pool counts CPU seconds by what still runs, and a session that cannot begin leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardproof.cases.runner import Session
from shardproof.launch.fork_server import ForkServer
from shardproof.launch.pool import Pool, _Running
from shardproof.launch.workspace import Workspace


@pytest.mark.parametrize(
    ("looks", "late"),
    [
        ([50.0, 100.0, 130.0], [False, False, True]),  # all its seconds are spent
        ([20.0, 20.1], [False, True]),  # it stands still
        ([20.0, 3.0, 23.0], [False, False, False]),  # another task has ended meanwhile
    ],
)
def test_a_task_is_late_by_its_cpu_seconds(
    monkeypatch: pytest.MonkeyPatch, looks: list[float], late: list[bool]
) -> None:
    spent: Iterator[float] = iter(looks)
    monkeypatch.setattr(Pool, "_spent", lambda self: next(spent))
    item = _Running("", None, Path(), 0.0, 0.0, seconds=120.0, left=120.0, spent=0.0)
    pool = Pool(1)
    assert [pool._is_late(item) for _ in looks] == late


def test_a_session_that_cannot_begin_leaves_nothing(tmp_path: Path) -> None:
    session = Session(1)
    session._pool.fork_server = ForkServer()  # the tests' own would be kept for others
    session._disk = Workspace(tmp_path / "nowhere")
    with pytest.raises(OSError, match="nowhere"):
        session.__enter__()
    assert not session._pool.folder.exists()
    assert session._pool.fork_server._process is None
