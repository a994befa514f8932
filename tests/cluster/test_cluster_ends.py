"""How a cluster and the command in its head end: whole, cut short, or as the engine breaks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from made_engine import MadeEngine, made_cluster
from real_engine import left_of, missing

from shardproof.cluster import head
from shardproof.cluster.containers import cluster, guardian, head_command
from shardproof.cluster.containers import engine as engine_room
from shardproof.cluster.containers.caps import Caps
from shardproof.cluster.containers.engine import NoCluster
from shardproof.commands import main as command_line
from shardproof.commands.supervision import Interrupts
from shardproof.verdicts import INTERRUPTED


def ends(engine: MadeEngine) -> int:
    """How often a head was told to end in order."""
    return engine.told.count([*head_command._INTERRUPT])


def test_a_reader_that_goes_away_ends_the_head_and_is_told_as_such(tmp_path: Path) -> None:
    engine = MadeEngine(code=None, says=b"1 pass\n")

    def say(_: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        cluster.run(engine, made_cluster(tmp_path), ["run"], say)
    assert ends(engine) == 1 and not engine.parts


def test_output_that_ends_before_its_command_is_a_precondition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_command, "_TELL_SECONDS", 0)
    engine = MadeEngine(code=None)
    with pytest.raises(NoCluster, match="output ended before its command did"):
        cluster.run(engine, made_cluster(tmp_path), ["run"], print)
    assert ends(engine) == 1 and not engine.parts


def silent(engine: MadeEngine, word: str, **state: bool) -> None:
    """Have a command say nothing for ever, in a container of which the engine tells ``state``."""
    start = engine.api.exec_start
    told = {"State": {"Paused": False, "Running": True} | state}

    def exec_start(asked: str, **named: Any) -> Any:
        return iter(threading.Event().wait, None) if asked == word else start(asked, **named)

    engine.api.exec_start, engine.api.inspect_container = exec_start, lambda _: told


@pytest.mark.parametrize(
    ("word", "state", "says"),
    [
        ("", {"Paused": True}, "another program paused container shardproof-1-2-head"),
        ("", {"Running": False}, "shardproof-1-2-head has ended"),
        ("memory", {"Paused": True}, "another program paused container shardproof-1-2-node0"),
    ],
    ids=["head is paused", "head ended", "node is paused while it is measured"],
)
def test_a_container_that_cannot_say_anything_is_a_precondition(
    word: str,
    state: dict[str, bool],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_room, "_SILENT_SECONDS", 0)
    engine = MadeEngine()
    silent(engine, word, **state)
    with pytest.raises(NoCluster, match=says):
        cluster.run(engine, made_cluster(tmp_path), ["run"], print)
    assert not engine.parts


def test_a_head_that_says_nothing_for_long_may_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_room, "_SILENT_SECONDS", 0)
    engine, looks = MadeEngine(), threading.Semaphore(0)
    silent(engine, "")
    engine.api.exec_start, start = (
        lambda asked, **_: iter([]) if asked else iter(lambda: looks.acquire() and None, None),
        engine.api.inspect_container,
    )

    def looked(box: str) -> Any:
        looks.release()
        return start(box)

    engine.api.inspect_container = looked
    made = replace(made_cluster(tmp_path), caps=Caps())
    assert cluster.run(engine, made, ["run"], print) == 0


def test_a_letter_may_come_in_two_parts(tmp_path: Path) -> None:
    engine, said = MadeEngine(), list[str]()
    whole = "größer".encode()
    engine.api.exec_start = lambda *_, **__: iter([whole[:3], whole[3:]])
    made = replace(made_cluster(tmp_path), caps=Caps())
    assert cluster.run(engine, made, ["run"], said.append) == 0
    assert "".join(said) == "größer"


class Stalls:
    """Breaks whatever is asked for, as a daemon that hangs or has gone."""

    def __call__(self, *_: object, **__: object) -> Any:
        raise requests.exceptions.ReadTimeout("read timed out")


def test_an_engine_that_dies_is_a_precondition_and_its_cluster_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "_REMOVE_SECONDS", 0)
    engine = MadeEngine()
    engine.api.exec_start = engine.containers.list = Stalls()
    with pytest.raises(NoCluster, match="read timed out"):
        cluster.run(engine, made_cluster(tmp_path), ["run"], print)
    assert "could not be removed: shardproof-1-2;" in capsys.readouterr().out


@pytest.mark.parametrize("words", [("clean",), ("clean", "--all")])
def test_no_command_shows_a_traceback_of_the_engine(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = MadeEngine()
    engine.containers.list = Stalls()
    monkeypatch.setattr(engine_room, "client", lambda: engine)
    monkeypatch.setattr(sys, "argv", ["shardproof", "cluster", *words])
    with pytest.raises(SystemExit) as left:
        command_line.main()
    assert left.value.code == 3
    assert (
        "precondition: the container engine cannot run the cluster: read timed"
        in capsys.readouterr().err
    )


def test_a_part_that_stalls_once_is_removed_at_the_next_try() -> None:
    engine = MadeEngine()
    part, tries = engine.add("box", {"shardproof": "shardproof-1-2"}, ()), []

    def remove(**_: object) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise requests.exceptions.ConnectionError("the daemon starts again")
        engine.parts.remove(part)

    part.remove = remove  # type: ignore[method-assign]
    assert cluster.remove(engine, "shardproof-1-2") == [] and len(tries) == 2


def test_a_ping_that_stalls_is_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    import docker

    monkeypatch.setattr(docker, "from_env", lambda **_: SimpleNamespace(ping=Stalls()))
    with pytest.raises(NoCluster, match="no container engine answers"):
        engine_room.client()


def test_a_command_in_a_head_is_interrupted_once_it_has_begun(tmp_path: Path) -> None:
    def there(words: Sequence[str]) -> list[str]:
        return [word.replace(head_command._PID, str(tmp_path / "pid")) for word in words]

    script = "trap 'exit 7' INT; sleep 60 & wait"
    with subprocess.Popen(there(head_command._INTERRUPT)) as interrupt:
        command = [*there(head_command._START), "sh", "-c", script]
        with subprocess.Popen(command, start_new_session=True) as first:
            assert first.wait(30) in (7, -signal.SIGINT)
            with contextlib.suppress(ProcessLookupError):  # SIGINT may have ended the sleep as well
                os.killpg(first.pid, signal.SIGKILL)
        assert interrupt.wait(30) == 0


def interrupted(engine: MadeEngine) -> None:
    """Have the command in the head go on until it is told to end, and send this process SIGINT."""
    ended, start, tell = threading.Event(), engine.api.exec_start, engine.tell

    def goes_on(word: str, **_: object) -> Any:
        if not word:
            os.kill(os.getpid(), signal.SIGINT)
            ended.wait()
        return start(word)

    def told(words: list[str]) -> None:
        ended.set()
        tell(words)

    engine.api.exec_start, engine.tell = goes_on, told  # type: ignore[method-assign]


def test_what_is_interrupted_is_not_kept(tmp_path: Path) -> None:
    engine = MadeEngine(code=1)
    assert cluster.run(engine, made_cluster(tmp_path), ["run"], print, keep=True) == 1
    assert len(engine.parts) == 4, "it ran to its end"
    engine = MadeEngine()
    interrupted(engine)
    assert cluster.run(engine, made_cluster(tmp_path), ["run"], print, keep=True) == INTERRUPTED
    assert ends(engine) == 1 and not engine.parts


def test_what_the_engine_makes_after_a_first_look_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, late = MadeEngine(), ["node0"]

    def sleep(_: float) -> None:
        if late:
            engine.add(late.pop(), {"shardproof": "shardproof-1-2"}, ())

    monkeypatch.setattr(cluster.time, "sleep", sleep)
    assert cluster.remove(engine, "shardproof-1-2") == []
    assert not engine.parts and not late


def test_what_is_ignored_under_nohup_ends_no_cluster() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_two_commands_in_one_second_have_two_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with contextlib.ExitStack() as open_now:
        folders = {open_now.enter_context(head.run_folder(None)) for _ in range(3)}
        assert folders == set((tmp_path / "results").iterdir()) and len(folders) == 3


def test_a_cluster_that_cannot_be_had_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine_room, "client", lambda: MadeEngine(breaks=0))
    monkeypatch.setattr(engine_room, "build", lambda *_, **__: {"rank": "r", "judge": "j"})
    (tmp_path / "own").mkdir()
    named = [("run", "ddp-gpt", "--results", name) for name in ("new", "own")]
    for words in (("run", "ddp-gpt"), *named):
        monkeypatch.setattr(sys, "argv", ["shardproof", "cluster", *words])
        with pytest.raises(SystemExit) as left:
            command_line.main()
        assert left.value.code == 3
    kept = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")]
    assert sorted(kept) == ["own", "results"], "what was there before stays"


def test_what_tests_of_containers_need_may_not_be_missing_in_ci(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value, outcome in (("true", pytest.fail.Exception), ("", pytest.skip.Exception)):
        monkeypatch.setenv("CI", value)
        with pytest.raises(outcome, match="no Compose"):
            missing("no Compose")


def test_another_cluster_is_none_of_a_runs(tmp_path: Path) -> None:
    engine, invocation = MadeEngine(), {"cluster": {"name": "shardproof-1-2"}}
    (tmp_path / "run.json").write_text(json.dumps({"invocations": [invocation]}))
    engine.add("another", {"shardproof": "shardproof-3-4"}, ())
    assert not left_of(engine, tmp_path)
    own = engine.add("own", {"shardproof": "shardproof-1-2"}, ())
    assert left_of(engine, tmp_path) == [own]


def test_a_guardian_waits_for_an_engine_that_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And removes what comes after a first look."""
    engine = MadeEngine()
    engine.close = lambda: None  # type: ignore[attr-defined]
    seconds, late = [0.0], ["node0"]

    def client() -> MadeEngine:
        if seconds[0] < 20:
            raise NoCluster("no container engine answers")
        return engine

    def sleep(more: float) -> None:
        seconds[0] += more
        if seconds[0] > 25 and late:
            engine.add(late.pop(), {"shardproof": "shardproof-1-2"}, ())

    engine.add("head", {"shardproof": "shardproof-1-2"}, ())
    monkeypatch.setattr(engine_room, "client", client)
    clock = SimpleNamespace(monotonic=lambda: seconds[0], sleep=sleep)
    monkeypatch.setattr(guardian, "time", clock)
    monkeypatch.setattr(cluster.time, "sleep", lambda _: None)
    monkeypatch.setattr(guardian.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO()))
    guardian.main("shardproof-1-2", str(tmp_path))
    assert not engine.parts and not late
    assert 30 < seconds[0] < 60, "nothing has come for a while"
