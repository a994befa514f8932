"""A cluster that stays: made once, found by name, run in, and ended by name alone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_engine import MadeEngine
from real_engine import real_engine

from shardproof.cluster.containers import cluster, guardian, standing
from shardproof.cluster.containers import engine as engine_room
from shardproof.cluster.containers.engine import NoCluster
from shardproof.commands import main as command_line

IMAGES = {"rank": "sha256:1", "judge": "sha256:2"}


class Typed:
    """What commands do with a made engine: exit code and what they say."""

    def __init__(self, engine: MadeEngine, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        monkeypatch.setattr(engine_room, "client", lambda: engine)
        monkeypatch.setattr(engine_room, "build", lambda *_, **__: IMAGES)
        monkeypatch.setattr(engine_room, "is_old", lambda *_: False)
        # Tests of other processes have clusters of these names, too.
        monkeypatch.setattr(standing, "_SOCKETS", f"{os.getpid()}-")
        monkeypatch.setattr(standing, "guarded", self._guarded)
        self._engine = engine
        #: Names of clusters with what there was of them as their guardians came and went.
        self.guarded: list[tuple[str, int, int]] = []

    @contextlib.contextmanager
    def _guarded(self, name: str, results: Path, held: Sequence[int]) -> Iterator[None]:
        assert results.is_dir() and [os.fstat(number) for number in held]
        before = len(self._engine.parts)
        yield
        self.guarded.append((name, before, len(self._engine.parts)))

    def __call__(self, *words: str) -> tuple[int, str]:
        self._monkeypatch.setattr(sys, "argv", ["shardproof", "cluster", *words])
        with pytest.raises(SystemExit) as left:
            command_line.main()
        out, err = self._capsys.readouterr()
        return int(left.value.code or 0), " ".join((out + err).split())


@pytest.fixture
def engine() -> MadeEngine:
    return MadeEngine(says=b"1 pass\n")


@pytest.fixture
def typed(
    engine: MadeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Typed:
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return Typed(engine, monkeypatch, capsys)


def test_it_stays_is_run_in_and_ends_by_its_name(
    engine: MadeEngine, typed: Typed, tmp_path: Path
) -> None:
    code, said = typed("up", "lab", "--nodes", "3", "--ranks-per-node", "1")
    assert code == 0 and "lab: 3 nodes x 1 ranks" in said
    assert typed.guarded == [("shardproof-lab", 0, 5)], "until all of it is there"
    started = [part.name for part in engine.made]
    names = ["head", "node0", "node1", "node2"]
    assert [name for name in started if "-" in name[11:]] == [f"shardproof-lab-{n}" for n in names]
    ((_, waited), _) = engine.executed[-1]
    assert waited[3] == "wait", "its agents are there when the command ends"
    for _ in range(2):
        code, said = typed("run", "ddp-gpt", "--on", "lab", "--backend", "gloo")
        assert code == 0 and "1 pass" in said
        ((box, words), named) = engine.executed[-1]
        assert box == "id-of-shardproof-lab-head" and words[3:5] == ["run", "ddp-gpt"]
        assert '"ranks_per_node": 1' in str(named["environment"])
    assert [part.name for part in engine.made] == started, "nothing more is started"
    listed = typed("ps")[1]
    assert f"shardproof-lab-head running stays in {tmp_path} shardproof-lab-node0" in listed
    assert "shardproof-lab-node2 running stays" in listed
    assert typed("clean") == (
        0,
        "left: shardproof-lab, which stays; `cluster clean --all` ends it, too",
    )
    gone = "removed shardproof-lab: 5 containers and networks"
    assert typed("down", "lab") == (0, gone) and not engine.parts


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["up", "lab"], "there is one already (lab)"),
        (["up", "No Name"], "no name of a cluster"),
        (["run", "ddp-gpt", "--on", "other"], "--on: there is no such cluster (other)"),
        (["run", "ddp-gpt", "--on", "lab", "--nodes", "2"], "leave --nodes out"),
        (["run", "ddp-gpt", "--on", "lab", "--memory", "1g"], "leave --memory out"),
        (
            ["run", "ddp-gpt", "--on", "lab", "--results", "/tmp/x"],
            "cluster lab cannot write there",
        ),
        (["run", "{far}/s.yaml", "--on", "lab"], "cluster lab does not see it"),
        (["run", "mpi", "--on", "lab", "--backend", "mpi"], "then `up lab --all-packages`"),
        (
            ["run", "deepspeed-pipeline", "--tier", "full", "--on", "lab"],
            "neither DeepSpeed nor MPI",
        ),
        (["run", "ddp-gpt", "--on", "lab", "--backend", "nccl"], "cluster lab has no GPUs"),
        (
            ["run", "ddp-gpt", "--on", "lab", "--fault", "kill_node"],
            "made in a cluster of its own (--on) - leave --on out, or --fault",
        ),
        (["run", "cluster", "--tier", "full", "--on", "lab"], "leave --on out, or these cases"),
        (["down", "other"], "there is no such cluster (shardproof-other)"),
    ],
)
def test_bad_input_starts_nothing(
    words: list[str],
    says: str,
    engine: MadeEngine,
    typed: Typed,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    typed("up", "lab")
    far = tmp_path_factory.mktemp("far")
    far.chmod(0o755)
    (far / "s.yaml").write_text((SCENARIOS / "data" / "ddp-gpt.yaml").read_text())
    started, asked = len(engine.made), len(engine.executed)
    monkeypatch.setattr(engine_room, "build", lambda *_, **__: pytest.fail("it builds images"))
    code, said = typed(*(word.format(far=far) for word in words))
    assert code == 2 and says in said, said
    assert (len(engine.made), len(engine.executed)) == (started, asked)


SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios" / "conformance"


def test_one_that_ended_or_is_old_is_a_precondition(
    engine: MadeEngine, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed("up")
    monkeypatch.setattr(engine_room, "is_old", lambda *_: True)
    code, said = typed("run", "ddp-gpt", "--on", "up")
    assert code == 3 and "made of other files than this checkout has now" in said
    node = next(part for part in engine.made if part.name == "shardproof-up-node1")
    node.status = "exited"
    code, said = typed("run", "ddp-gpt", "--on", "up")
    assert code == 3 and "has ended in part (shardproof-up-node1)" in said
    assert "`shardproof cluster down up`, then `up up`" in said


def test_what_it_was_made_with_is_there(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = IMAGES | {"targets": ["rank-all", "judge-all"]}
    monkeypatch.setattr(engine_room, "build", lambda *_, **__: everything)
    typed("up", "lab", "--all-packages")
    assert typed("run", "mpi", "--on", "lab", "--backend", "mpi")[0] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="folders are given away by root only")
def test_a_run_whose_command_was_killed_gives_its_folder_back(typed: Typed, tmp_path: Path) -> None:
    typed("up", "lab")
    owners = []
    for name, cluster_name in (("own", "shardproof-lab"), ("other", "shardproof-1-2")):
        run = tmp_path / "results" / name
        run.mkdir()
        header = {"invocations": [{"cluster": None}, {"cluster": {"name": cluster_name}}]}
        (run / "run.json").write_text(json.dumps(header))
        cluster.give(run, cluster.OWN_USER)
        owners.append(run)
    (tmp_path / "results" / "run.json").write_text("damaged")
    assert typed("down", "lab")[0] == 0
    own, other = ([run.stat().st_uid, (run / "run.json").stat().st_uid] for run in owners)
    assert own == [0, 0] and other == [cluster.OWN_USER] * 2, "another cluster may write it still"


def test_elsewhere_it_is_not_run(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed("up")
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    code, said = typed("run", "ddp-gpt", "--on", "up", "--results", str(tmp_path / "results" / "r"))
    assert code == 2 and f"cluster up was started in {tmp_path} - run it there" in said


def test_what_fails_to_start_leaves_nothing(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = MadeEngine(breaks=3)
    monkeypatch.setattr(engine_room, "client", lambda: broken)
    code, said = typed("up", "lab")
    assert code == 3 and "no such device" in said and not broken.parts


def test_a_run_whose_command_was_killed_is_told(
    engine: MadeEngine, typed: Typed, tmp_path: Path
) -> None:
    typed("up", "lab")
    run = f"shardproof-{2**22 + 1}-17"
    engine.probed["names"] = run.encode()
    _, said = typed("run", "ddp-gpt", "--on", "lab", "--backend", "gloo")
    assert f"run {run}, whose command was killed, goes on in cluster lab; `shardproof" in said
    assert f"running stays in {tmp_path} with {run} shardproof-lab-node0" in typed("ps")[1]
    assert typed("down", "lab")[1].startswith(f"{run} went on in it, and ends")


def test_one_run_at_a_time_has_nodes_that_are_capped(engine: MadeEngine, typed: Typed) -> None:
    on = ("run", "ddp-gpt", "--backend", "gloo", "--on")
    typed("up", "capped", "--memory", "1g")
    engine.probed["cores"] = b"0.5"
    typed("up", "slow", "--slow-node", "1:cpus=0.5")
    typed("up", "free")
    for name in ("capped", "slow", "free"):
        with standing.alone(f"shardproof-{name}"):
            code, said = typed(*on, name)
            assert (code, "1 pass" in said) == ((0, True) if name == "free" else (3, False)), said
    assert typed(*on, "capped")[0] == 0
    engine.probed["names"] = f"shardproof-{2**22 + 1}-17".encode()
    asked = len(engine.executed)
    code, said = typed(*on, "capped")
    assert code == 3 and "`shardproof cluster down capped` ends it" in said
    assert len(engine.executed) == asked + 1, "nothing is measured beside another run"


def test_of_two_that_make_one_the_second_ends_and_removes_nothing(
    engine: MadeEngine, typed: Typed
) -> None:
    with standing.alone("shardproof-lab"):
        engine.add("shardproof-lab-head", {"shardproof": "shardproof-lab"}, ())
        engine.containers.list = lambda **_: []  # as it was when the second looked
        code, said = typed("up", "lab")
    assert code == 3 and "another command is busy with cluster lab" in said
    assert len(engine.parts) == 1


def test_a_guardian_keeps_the_name_that_its_command_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a second `up` made one of that name, and the guardian of the first removed it."""
    monkeypatch.setattr(standing, "_SOCKETS", f"{os.getpid()}-")
    with contextlib.ExitStack() as watched:
        with standing.alone("shardproof-lab") as held:
            watched.enter_context(guardian.guarded("shardproof-lab", tmp_path, [held]))
        with pytest.raises(NoCluster, match="another command is busy with cluster lab"):
            standing.alone("shardproof-lab").__enter__()
    with standing.alone("shardproof-lab"):
        pass


def test_a_guardian_waits_for_an_engine_that_starts_again(
    engine: MadeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And removes what comes after a first look."""
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


def test_names_of_runs_are_no_names_of_those_that_stay() -> None:
    assert cluster.stays("shardproof-lab-2") and not cluster.stays(f"shardproof-{os.getpid()}-17")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_one_runs_twice_and_is_gone(tmp_path: Path) -> None:
    engine = real_engine()
    tmp_path.chmod(0o755)
    name = f"test-{os.getpid()}"

    def shardproof(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "shardproof", "cluster", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(SCENARIOS.parents[1])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        shardproof("up", name)
        started = {part.id for part in cluster.parts(engine, f"shardproof-{name}")}
        for number in "12":
            (tmp_path / "mine.py").write_text(OWN + f"    number = {number}\n")
            chosen = ("mine.yaml", "--on", name, "--results", f"results/{number}")
            (tmp_path / "mine.yaml").write_text(SCENARIO)
            assert "1 judged (1 pass)" in shardproof("run", *chosen)
        assert started == {part.id for part in cluster.parts(engine, f"shardproof-{name}")}
    finally:
        cluster.remove(engine, f"shardproof-{name}")
    assert not cluster.parts(engine, f"shardproof-{name}")


OWN = "from shardproof import registry\nclass Mine(registry.load('reference/naive_ddp')):\n"
SCENARIO = (
    "name: own\nabout: a class of one's own\nsees: nothing\n"
    "workload: {name: charnames_gpt}\n"
    "matrix: {implementation: 'mine:Mine', backend: gloo, mesh: {replicate: 4}, optimizer: sgd}\n"
    "checks: equivalence\n"
)
