"""Cases as tasks of a Ray cluster: which cluster, what must be equal there, what a loss costs."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from commands import ROOT, here
from made_case import made_case

from shardproof.case import Case
from shardproof.cluster.on_ray import address, address_of_environment, cluster, task
from shardproof.errors import SelectionError
from shardproof.files import fast_json, read_fast_json
from shardproof.launch.workspace import PREFIX, workspace_base

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="no package ray: pip install -e '.[ray]'"
)
#: Marks the processes of a test in their environment.
MARK = "SHARDPROOF_TEST_MARK"


@pytest.mark.parametrize(
    ("where", "means"),
    [
        ("ray", ""),
        ("ray://head", "ray://head:10001"),
        ("ray://10.0.0.1:7", "ray://10.0.0.1:7"),
        ("ray://[::1]:7", "ray://[::1]:7"),
    ],
)
def test_an_address(where: str, means: str) -> None:
    assert address(where) == means


@pytest.mark.parametrize(
    "where", ["", "slurm", "ray://", "ray://a b", "ray://a:0", "ray://a:70000"]
)
def test_no_address(where: str) -> None:
    with pytest.raises(SelectionError, match="--on is not the address of a Ray cluster"):
        address(where)


@pytest.mark.parametrize(
    ("where", "means"),
    [
        ("", ""),
        ("auto", ""),
        ("local", "local"),
        ("ray://head", "ray://head:10001"),
        ("10.0.0.1:6379", "10.0.0.1:6379"),
    ],
)
def test_an_address_of_the_environment(where: str, means: str) -> None:
    assert address_of_environment(where) == means


@pytest.mark.parametrize("where", ["head", "ray://", "http://head:8265"])
def test_no_address_of_the_environment(where: str) -> None:
    with pytest.raises(SelectionError, match="is not the address of a Ray cluster"):
        address_of_environment(where)


class JoinedRay:
    """As much of Ray as is joined: two nodes of one name, the first with other versions."""

    class exceptions:
        class RayError(Exception): ...

        class RayTaskError(RayError):
            cause = task.OtherVersions("torch 0.1 instead of 2")

        class GetTimeoutError(RayError): ...

    def __init__(self) -> None:
        self.joined: list[tuple[str, dict[str, object]]] = []

    def init(self, where: str, **how: object) -> None:
        self.joined.append((where, how))

    def shutdown(self) -> None: ...

    def remote(self, **_: object) -> Callable[[object], JoinedRay]:
        return lambda _: self

    def options(self, scheduling_strategy: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda _: scheduling_strategy)

    def nodes(self) -> list[dict[str, object]]:
        same = {"Alive": True, "NodeManagerHostname": "worker", "Resources": {"CPU": 1.0}}
        return [{**same, "NodeID": name} for name in ("first", "second")]

    def get(self, answer: str, timeout: float) -> None:
        if answer == "first":
            raise self.exceptions.RayTaskError


@pytest.fixture
def made_ray(monkeypatch: pytest.MonkeyPatch) -> JoinedRay:
    made = JoinedRay()
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda name, soft: name)
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    return made


def test_of_two_nodes_with_one_name_both_are_asked(made_ray: JoinedRay) -> None:
    """And a new cluster is served to this machine only."""
    says = r"the Ray node worker has torch 0\.1 instead of 2"
    with pytest.raises(SelectionError, match=says), cluster.joined("", 3):
        pass
    ((where, how),) = made_ray.joined
    assert (where, how["num_cpus"], how["_node_ip_address"]) == ("local", 3, "127.0.0.1")


def test_without_the_package_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = here("run", "ddp-gpt", "--on", "ray")
    assert done.returncode == 2 and "pip install 'shardproof[ray]'" in done.stdout + done.stderr


@needs_ray
def test_a_host_that_does_not_answer_is_bad_input() -> None:
    with socket.socket() as bound:  # not listening: refused at once
        bound.bind(("127.0.0.1", 0))
        where = f"ray://127.0.0.1:{bound.getsockname()[1]}"
        done = here("run", "ddp-gpt", "--on", where)
    told = done.stdout + done.stderr
    assert done.returncode == 2 and "no Ray cluster answers" in told and where in told, told


def test_other_versions_are_refused_by_name() -> None:
    here_now = task.versions()
    assert set(here_now) == {"shardproof", "torch", "Python"} and all(here_now.values())
    task.require(here_now)
    with pytest.raises(task.OtherVersions, match=r"^torch .* instead of 0\.1$"):
        task.require(here_now | {"torch": "0.1"})


def _case(number: int = 1, steps: int = 2) -> Case:
    return made_case("reference/naive_ddp", {"replicate": 2}, id=f"case{number}", steps=steps)


def _marked(mark: str) -> list[psutil.Process]:
    """Processes that carry the mark; their descendants do as well."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "did not come"
        time.sleep(0.05)


@pytest.mark.launches
def test_a_case_server_judges_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"{os.getpid()}-server"
    monkeypatch.setenv(MARK, mark)
    server = task.Server()
    for number in (1, 2):
        answer = read_fast_json(server.judge(fast_json(_case(number).to_dict())))
        assert answer["result"]["verdict"] == "pass" and answer["account"]["case"]["id"]
    folders = {
        Path(file.path).parent
        for process in _marked(mark)
        for file in process.open_files()
        if Path(file.path).parent.name.startswith(PREFIX)
    }
    # Shared oracles have a second folder, on the disk, for where memory has little room.
    parents = {folder.parent for folder in folders}
    assert workspace_base() in parents <= {workspace_base(), Path(tempfile.gettempdir())}
    server.close()
    _until(lambda: not _marked(mark))
    assert not any(folder.exists() for folder in folders)


class MadeRay:
    """As much of Ray as hands out tasks: each stays pending."""

    class exceptions:
        class RayError(Exception): ...

    def __init__(self, *nodes: dict[str, float]) -> None:
        self.alive, self.cancelled = list(nodes), []
        self.polls = 0

    def remote(self, **_: object) -> Callable[[object], MadeRay]:
        return lambda _: self

    def options(self, **_: object) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *_: object())

    def nodes(self) -> list[dict[str, object]]:
        return [{"Alive": True, "Resources": found} for found in self.alive]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": sum(found["CPU"] for found in self.alive)}

    def wait(self, answers: list[object], timeout: float) -> tuple[list[object], list[object]]:
        self.polls += 1
        if self.polls == 3:
            self.alive.pop()
        assert self.polls < 9, "it waits for ever"
        return [], answers

    def cancel(self, answer: object, force: bool) -> None:
        self.cancelled.append(answer)


@pytest.mark.parametrize(
    ("backend", "left", "lacks"),
    [("gloo", [], "a CPU"), ("nccl", [{"CPU": 4.0}], "a CPU and 2 GPUs")],
)
def test_a_case_whose_last_node_is_lost_ends(
    backend: str, left: list[dict[str, float]], lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "PLACE_SECONDS", 0.0)
    ray = MadeRay(*left, {"CPU": 1.0, "GPU": 2.0})
    case = made_case("reference/naive_ddp", {"replicate": 2}, backend=backend)
    (judged,) = cluster.RayCluster(ray, 1).judge([case])
    assert judged.result.verdict == "judge error" and ray.polls == 3 and len(ray.cancelled) == 1
    assert f"no live Ray node has {lacks}:" in judged.result.reason


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The mark of a cluster that is new and keeps its tokens apart from the user's."""
    mark = str(tmp_path)
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield mark
    for process in _marked(mark):
        process.kill()


#: Judges a case on a new cluster of one CPU, without the suite's own second try; then asks for
#: versions that no node has, as a cluster is asked at first, and as a node is that joins later.
PROGRAM = """
import sys
from shardproof.case import Case
from shardproof.cluster.on_ray.cluster import joined
from shardproof.errors import SelectionError
from shardproof.files import read_fast_json

case = Case.from_dict(read_fast_json(sys.argv[1].encode()))
with joined("", 1) as cluster:
    for judged in cluster.judge([case]):
        print(judged.result.verdict, judged.account["leader"])
    cluster._versions = {"torch": "0.1"}
    for ask in (cluster.require_versions, lambda: [*cluster.judge([case])]):
        try:
            ask()
        except SelectionError as error:
            print(error)
"""


@needs_ray
@pytest.mark.slow
def test_a_lost_worker_costs_its_case_which_runs_again(alone: str) -> None:
    command = [sys.executable, "-c", PROGRAM, fast_json(_case().to_dict()).decode()]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def workers() -> list[psutil.Process]:
        below = psutil.Process(running.pid).children(recursive=True)
        return [process for process in below if process.cmdline()[:1] == ["ray::judge"]]

    _until(workers)
    workers()[0].kill()
    told, _ = running.communicate(timeout=120)
    verdict, first, late = told.splitlines()[-3:]
    assert verdict == "pass None" and running.returncode == 0, told
    for refused in (first, late):
        assert " instead of 0.1 - install the same shardproof" in refused, told
    _until(lambda: not _marked(alone))


@needs_ray
@pytest.mark.slow
def test_an_interrupt_leaves_nothing_behind(alone: str, tmp_path: Path) -> None:
    results = tmp_path / "run"
    words = ["ddp-gpt", "--on", "ray", "-j", "2", "--results", str(results)]
    running = subprocess.Popen([sys.executable, "-m", "shardproof", "run", *words], cwd=ROOT)
    _until(lambda: len([*results.glob("records/*")]) >= 2)
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130
    assert here("verify", str(results)).returncode == 0
    _until(lambda: not _marked(alone))
