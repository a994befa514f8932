"""A cluster of which a part is killed at random leaves nothing: of twenty runs, here three."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from real_engine import real_engine

ROOT = Path(__file__).resolve().parents[3]
#: Its first three kill a node at a step, the command once anything is there, and the head.
SEED = "39"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_left_of_three_kills() -> None:
    real_engine()
    command = [sys.executable, "deploy/random_kills.py", "--runs", "3", "--seed", SEED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 runs were killed and left nothing" in done.stdout


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("random_kills", ROOT / "deploy/random_kills.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "random_kills", module)  # where dataclasses look
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "name_of", lambda _: "own")
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    return module


class Part:
    """A container, or the command, that notes whether it was killed."""

    def __init__(self, name: str, status: str = "running") -> None:
        self.name, self.status, self.killed = name, status, False

    def kill(self) -> None:
        self.killed = True

    def poll(self) -> int | None:
        return None


@pytest.mark.parametrize(
    ("what", "which"), [("stop_head", 0), ("kill_node", 1), ("stop_client", 2)]
)
def test_what_is_to_be_killed_is_waited_for(
    what: str, which: int, kills: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [Part("own-head"), Part("own-node1"), Part("the command")]
    starting = [[], [], [Part("own-head", "created"), Part("own-node1", "created")]]
    seen = iter(starting)
    monkeypatch.setattr(kills.cluster, "parts", lambda *_: next(seen, parts[:2]))
    assert kills.kill(kills.Kill(what, after_ms=5), parts[2], None)
    assert [part.killed for part in parts] == [number == which for number in range(3)]


def test_a_command_that_has_ended_was_not_killed(
    kills: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Part("the command")
    monkeypatch.setattr(process, "poll", lambda: 0)
    for parts in ([], [Part("own-head")]):
        monkeypatch.setattr(kills.cluster, "parts", lambda *_, found=parts: found)
        assert not kills.kill(kills.Kill("stop_head"), process, None)
    assert not process.killed
