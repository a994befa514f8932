"""Ranks on machines of their own: the worker, its records, and containers as nodes.

Tests that need a container engine are skipped with the reason where there is none; in CI
(``CI=true``) that is a failure.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import shardproof
from made_case import made_case
from made_engine import MadeEngine, assert_refused_at_once, made_cluster
from real_engine import compose, left_of, real_engine

from shardproof.cluster import head, torchrun
from shardproof.cluster.containers import caps, cluster, head_command
from shardproof.cluster.containers import engine as engine_room
from shardproof.cluster.containers.caps import Caps
from shardproof.cluster.containers.engine import NoCluster
from shardproof.cluster.launchers import foreign_records
from shardproof.errors import SelectionError
from shardproof.launch.nodes import Nodes
from shardproof.runs import machine
from shardproof.verdicts import BAD_INPUT, INTERRUPTED

ROOT = Path(__file__).resolve().parents[2]


def test_containers_have_no_rights_and_one_place_to_write(tmp_path: Path) -> None:
    engine, said = MadeEngine(code=1, says=b"1 fail\n"), []
    assert cluster.run(engine, made_cluster(tmp_path), ["run", "ddp-gpt"], said.append) == 1
    assert said == ["1 fail\n"] and not engine.parts
    head, network, *nodes = engine.made
    assert network.asked["internal"] and network.asked["options"] == cluster.NO_HOST
    assert [part.name for part in nodes] == ["shardproof-1-2-node0", "shardproof-1-2-node1"]
    for part in (head, *nodes):
        _, _, options = part.asked
        assert options["read_only"] and options["cap_drop"] == ["ALL"]
        assert options["security_opt"] == ["no-new-privileges:true"]
        assert not {"privileged", "cap_add", "ports", "devices"} & set(options)
        writable = [m["Target"] for m in options["mounts"] if not m["ReadOnly"]]
        assert writable == ([str(tmp_path)] if part is head else [])
        assert {m["Target"] for m in options["mounts"]} >= {"/home/me/work"}
        assert not options["user"].startswith("0")
        assert options["pids_limit"] == 4096
        assert options["environment"]["PYTHONSAFEPATH"] == "1", "a mounted checkout does not run"
    for part in nodes:
        assert part.asked[2]["pid_mode"] == part.asked[2]["ipc_mode"] == f"container:{head.id}"
        assert part.asked[2]["network"] == network.name
        assert part.asked[2]["mem_limit"] == 1 << 30
        own, judges = part.asked[2]["user"].split(":"), head.asked[2]["user"].split(":")
        assert own[0] != judges[0] and own[1] == judges[1], "ranks are another user than the judge"
    assert head.asked[2]["network_mode"] == "none"


def test_the_head_is_told_which_rank_lies_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = MadeEngine()
    cluster.run(engine, made_cluster(tmp_path), ["run"], print)
    ((_, words), named) = engine.executed[-1]
    assert words[-2:] == [head_command._PID, "run"]
    for name, value in named["environment"].items():
        monkeypatch.setenv(name, value)
    nodes = Nodes.here()
    assert nodes is not None and (nodes.count, nodes.ranks_per_node) == (2, 3)
    told = machine.begun(["run"], "now").cluster
    assert told is not None and told["images"] == {"rank": "sha256:1", "judge": "sha256:2"}
    assert told["nodes"] == [
        {"name": "node0", "ranks": [0, 1, 2]},
        {"name": "node1", "ranks": [3, 4, 5]},
    ]
    assert told["declared"] == {"memory_bytes": 1 << 30}
    assert told["measured"] == {"memory_bytes": [1 << 30, 1 << 30]}


def test_a_node_that_does_not_start_is_a_precondition_and_nothing_stays(tmp_path: Path) -> None:
    engine = MadeEngine(breaks=3)
    with pytest.raises(NoCluster, match="no such device"):
        cluster.run(engine, made_cluster(tmp_path), ["run"], print)
    assert len(engine.made) == 3 and not engine.parts


def test_a_head_that_is_stopped_from_outside_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    assert cluster.run(MadeEngine(code=137), made_cluster(tmp_path), ["run"], said.append) == 3
    assert "the head container ended with code 137" in said[-1]


def test_clean_leaves_runs_that_go_on() -> None:
    """Whatever the command is called, and wherever it runs; the number of one may be another's."""
    elsewhere = f"another start/pid:[1]/{os.getpid()}-17"
    makers = {
        "shardproof-1-17": cluster.made_by(os.getpid()),
        "shardproof-2-17": f"{cluster.this_place()}/{os.getpid()}-17",
        "shardproof-3-17": f"{cluster.this_place()}/{2**22 + 1}-17",
        "shardproof-4-17": elsewhere,
        "shardproof-5-17": elsewhere,  # as after a start of the machine: nothing of it runs
        "by-hand": "",
        "judge": "",  # of others, and of `docker run` of an older image
    }
    engine, said = MadeEngine(), list[str]()
    for name, maker in makers.items():
        labels = {"shardproof": name, cluster.MADE_BY: maker}
        engine.add(f"box of {name}", labels).status = "exited" if "-5-" in name else "running"
        engine.add(f"network of {name}", labels, {}).status = ""
    assert cluster.clean(engine, said.append)
    live = ["shardproof-1-17", "shardproof-4-17"]
    left = {part.attrs["Labels"]["shardproof"] for part in engine.parts}
    assert left == {*live, "by-hand", "judge"}
    assert "kept: shardproof-1-17, which is active; `cluster clean --all`" in said[0]
    assert any(
        "shardproof-4-17, which is active and was started elsewhere;" in line for line in said
    )
    assert not [part for part in cluster.parts(engine) if "by-hand" in part.name]
    assert cluster.clean(engine, said.append, everything=True)
    assert {part.attrs["Labels"]["shardproof"] for part in engine.parts} == {"by-hand", "judge"}


def test_clean_gives_results_back_where_nobody_lived_to_do_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, given = MadeEngine(), list[tuple[Path, int]]()
    monkeypatch.setattr(cluster, "OWN_USER", tmp_path.stat().st_uid)
    monkeypatch.setattr(cluster, "give", lambda *what: given.append(what))
    for name, folder in (("shardproof-1-17", tmp_path), ("shardproof-2-17", tmp_path / "gone")):
        labels = {"shardproof": name, cluster.MADE_BY: "", cluster.WRITES: str(folder)}
        engine.add(f"box of {name}", labels).status = "exited"
    engine.add("older", {"shardproof": "shardproof-3-17", cluster.MADE_BY: ""}).status = "exited"
    assert cluster.clean(engine, print)
    assert given == [(tmp_path, os.geteuid())]


def test_what_a_cluster_is_made_of_tells_who_made_it(tmp_path: Path) -> None:
    engine = MadeEngine()
    cluster.run(engine, made_cluster(tmp_path), ["run"], print)
    assert {cluster.label_of(part, cluster.MADE_BY) for part in engine.made} == {
        cluster.made_by(os.getpid())
    }


def test_images_and_compose_have_not_the_label_of_clusters() -> None:
    for file in ("Dockerfile", "compose.yaml"):
        assert not re.search(r"\bshardproof[=:]", (ROOT / file).read_text()), file


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["ddp-gpt", "--nodes", "0"], "--nodes"),
        (["ddp-gpt", "--ranks-per-node", "99"], "--ranks-per-node"),
        (
            ["ddp-gpt", "--memory", "2 parsecs"],
            "'2 parsecs' is not a valid size: give 512m or more",
        ),
        (["ddp-gpt", "--bandwidth", "fast"], "'fast' is not a rate between 1mbit and 10gbit"),
        (["ddp-gpt", "--bandwidth", "20gbit"], "'20gbit' is not a rate between 1mbit and 10gbit"),
        (["ddp-gpt", "--bandwidth", "1gbit", "--nodes", "1"], "choose --nodes 2"),
        (["ddp-ggt"], "did you mean ddp-gpt?"),
        (
            ["ddp-gpt", "--backend", "gloo", "--world", "4", "--nodes", "1"],
            "no case fits on 1 nodes x 2 ranks",
        ),
    ],
)
def test_bad_input_is_told_before_anything_is_built(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_refused_at_once(monkeypatch, says, "run", *words)


def test_results_that_cannot_be_written_are_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SelectionError, match="results cannot be written: Not a directory"):
        head.writable(tmp_path / "file" / "run")


@pytest.mark.skipif(os.geteuid() != 0, reason="of files of root only")
def test_a_folder_that_no_container_can_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o700)
    with pytest.raises(SelectionError, match="user 10002 and cannot read this folder"):
        head.own_folders([], ["mine:Mine"])
    tmp_path.chmod(0o755)
    assert head.own_folders([], ["mine:Mine"]) == [tmp_path]


# ---------------------------------------------------------------------------------- one machine


def test_no_case_of_that_world_is_bad_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched = {**os.environ, "RANK": "0", "WORLD_SIZE": "17", "MASTER_ADDR": "127.0.0.1"}
    monkeypatch.setattr(os, "environ", launched)
    assert torchrun.main(["ddp-gpt"]) == BAD_INPUT
    assert "--world matches nothing (17)" in capsys.readouterr().err


def test_rank_without_an_account_is_hung_or_killed(tmp_path: Path) -> None:
    assert foreign_records.outcomes_of(tmp_path, 2) is None
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.began").touch()
    (tmp_path / "rank0.stacks").write_text(
        'Thread 0x7f (most recent call first):\n  File "loop.py", line 3 in step\n'
    )
    found = foreign_records.outcomes_of(tmp_path, 2)
    assert found is not None
    assert [outcome.status for outcome in found] == ["hung", "killed"]
    assert "loop.py" in found[0].message


def _torchrun(world: int, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world), "-m", "shardproof.cluster.torchrun", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{cwd}:{ROOT}"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=150, check=False
    )


@pytest.mark.slow
def test_a_launch_is_judged_and_has_the_bits_of_local_processes(tmp_path: Path) -> None:
    chosen = ["ddp-gpt", "--tier", "full", "-k", "small_buckets and bitwise and sgd"]
    records, run, here = tmp_path / "records", tmp_path / "run", tmp_path / "here"
    done = _torchrun(2, *chosen, "--records", str(records), "--results", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass" in done.stdout and (run / "cases.jsonl").exists()
    again = shardproof("reproduce", str(run), "--results", str(here))
    assert again.returncode == 0 and "equal in every digest" in again.stdout, again.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "verdict", "says"),
    [
        ("time.sleep(1000)", "hang", "no rank computed"),
        ("torch.distributed.recv(torch.zeros(1), 0)", "hang", "no rank computed"),
        ("[None for _ in iter(int, 1)]", "over", "rank 1 computes in"),
    ],
    ids=["sleeps", "waits", "computes"],
)
def test_a_rank_that_does_not_end_is_seen_by_all(
    does: str, verdict: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "stuck.py").write_text(
        "import time, torch\n"
        "from shardproof import registry\n"
        "class Stuck(registry.load('reference/naive_ddp')):\n"
        "    def step(self, batch, observe):\n"
        f"        if torch.distributed.get_rank() == 1: {does}\n"
        "        return super().step(batch, observe)\n"
    )
    (tmp_path / "s.yaml").write_text(
        "name: stuck\nabout: a rank does not end\nsees: hangs\ndeadline: 8\n"
        "workload: {name: charnames_gpt}\n"
        "matrix: {implementation: ['stuck:Stuck'], backend: gloo,\n"
        "  mesh: {replicate: 2}, optimizer: sgd}\n"
        "checks: equivalence\n"
    )
    records = tmp_path / "records"
    _torchrun(2, "s.yaml", "--records", str(records), "--no-judge", cwd=tmp_path)
    judge = [*torchrun.JUDGE, str(records)]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, *judge], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    line = next(line for line in done.stdout.splitlines() if "::" in line)
    assert line.startswith(verdict) and says in line, done.stdout + done.stderr


def test_what_the_clock_ends_is_left_out(tmp_path: Path) -> None:
    case = made_case("reference/naive_ddp", {"replicate": 2}, backend="gloo")
    foreign_records.write_plan(tmp_path, [case], case.world)
    folder = foreign_records.case_folder(tmp_path, 0)
    folder.mkdir()
    for rank in range(case.world):
        (folder / f"rank{rank}.began").touch()

    def verdict() -> str:
        ((_, judged),) = foreign_records.results_of(tmp_path, tmp_path)
        return judged[1].verdict if judged else "left out"

    assert verdict() == "crash"
    (tmp_path / foreign_records.OUT_OF_TIME).touch()
    assert verdict() == "left out"


@pytest.mark.slow
def test_a_rank_that_raises_spoils_its_case_only(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from shardproof import registry\n"
        "class Broken(registry.load('reference/naive_ddp')):\n"
        "    def setup(self, build, state, optimizer, mesh, options):\n"
        "        self.rank = mesh.rank\n"
        "        super().setup(build, state, optimizer, mesh, options)\n"
        "    def step(self, batch, observe):\n"
        "        if self.rank == 1 and batch.step == 1:\n"
        "            raise ZeroDivisionError('on purpose')\n"
        "        return super().step(batch, observe)\n"
    )
    (tmp_path / "s.yaml").write_text(
        "name: broken\nabout: a rank raises\nsees: crashes\n"
        "workload: {name: charnames_gpt}\n"
        "matrix: {implementation: ['broken:Broken', 'reference/naive_ddp'], backend: gloo,\n"
        "  mesh: {replicate: 2}, optimizer: sgd}\n"
        "checks: equivalence\n"
    )
    done = _torchrun(2, "s.yaml", "--records", str(tmp_path / "records"), cwd=tmp_path)
    assert done.returncode != 0
    lines = [line.split()[:2] for line in done.stdout.splitlines()]
    verdicts = {
        words[1].split("::")[1]: words[0] for words in lines if len(words) > 1 and "::" in words[1]
    }
    assert verdicts == {"broken:Broken": "crash", "reference/naive_ddp": "pass"}, done.stdout
    assert "rank 1 raised ZeroDivisionError: on purpose" in done.stdout


# ----------------------------------------------------------------------------------- containers


@pytest.fixture(scope="module")
def engine() -> Any:
    """A container engine with both images."""
    return real_engine()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_containers_compute_the_bits_of_local_processes(engine: Any, tmp_path: Path) -> None:
    """Data, sharding, pipelines, tensors and replicas of shards: same verdicts, same digests."""
    chosen = ["zero-dyadic", "pipeline-dyadic", "tensor-dyadic", "fsdp-meshes"]
    chosen += ["--backend", "gloo", "--world", "4", "--tier", "full"]
    there, here = str(tmp_path / "there"), str(tmp_path / "here")
    assert shardproof("run", *chosen, "--results", here).returncode == 0
    done = shardproof("reproduce", here, "--cluster", "--results", there)
    assert done.returncode == 0, done.stdout + done.stderr
    words = [line.split(":")[0] for line in done.stdout.splitlines() if "::gloo::" in line]
    assert "equal" in words and "agrees" not in words, done.stdout
    assert shardproof("verify", there).returncode == 0
    (hybrid,) = (
        line
        for line in map(json.loads, Path(there, "cases.jsonl").read_text().splitlines())
        if "+hybrid::gloo" in line["id"] and "::full" in line["id"]
    )
    (figures,) = (c["figures"] for c in hybrid["checks"] if c["check"] == "traffic")
    across = {(row["axis"], row["operation"]): row for row in figures["between_nodes"]}
    assert across["shard", "all_gather"]["across"] == "0"
    assert across["replicate", "all_reduce"]["across"] == across["replicate", "all_reduce"]["bytes"]
    assert not left_of(engine, Path(there))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_class_of_ones_own_runs_and_a_rank_that_breaks_is_named(
    engine: Any, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "mine.py").write_text(
        "import os, signal\n"
        "from shardproof import registry\n"
        "class Mine(registry.load('reference/naive_ddp')):\n"
        "    def step(self, batch, observe):\n"
        "        import torch.distributed as dist\n"
        "        if dist.get_rank() == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return super().step(batch, observe)\n"
    )
    (tmp_path / "s.yaml").write_text(
        "name: own\nabout: a rank is killed\nsees: crashes\n"
        "workload: {name: charnames_gpt}\n"
        "matrix: {implementation: ['mine:Mine', 'reference/naive_ddp'], backend: gloo,\n"
        "  mesh: {replicate: 4}, optimizer: sgd}\n"
        "checks: equivalence\n"
    )
    done = shardproof("cluster", "run", "s.yaml", "--results", "run", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = (tmp_path / "run" / "cases.jsonl").read_text().splitlines()
    told = {line["case"]["implementation"]: line for line in map(json.loads, lines)}
    assert told["reference/naive_ddp"]["verdict"] == "pass"
    assert told["mine:Mine"]["verdict"] == "crash"
    assert "rank 3 killed" in told["mine:Mine"]["reason"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_caps_of_nodes_are_set_measured_and_told(engine: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "s.yaml").write_text(
        "name: capped\nabout: nodes are capped\nsees: nothing\n"
        "workload: {name: charnames_gpt}\n"
        "matrix: {implementation: reference/naive_ddp, backend: gloo,\n"
        "  mesh: {replicate: 4}, optimizer: sgd}\n"
        "checks: equivalence\n"
    )
    capped = ["s.yaml", "--bandwidth", "20mbit", "--memory", "1g", "--results", "run"]
    done = shardproof("cluster", "run", *capped, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    header = json.loads((tmp_path / "run" / "run.json").read_text())
    told = header["invocations"][-1]["cluster"]
    declared = {"bits_per_second": 20e6, "memory_bytes": 1 << 30}
    assert told["declared"] == declared
    assert {name: len(found) for name, found in told["measured"].items()} == dict.fromkeys(
        declared, 2
    )
    for name, found in told["measured"].items():
        assert found == pytest.approx([declared[name]] * 2, rel=0.2), name
    assert not left_of(engine, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_cores_of_a_node_are_capped_and_measured(engine: Any) -> None:
    """So few that a busy machine has them, too."""
    declared = Caps(cpus=0.1)
    image = engine_room.image_name("rank")
    started = {"detach": True, "init": True, "labels": {"shardproof": "test"}, **declared.limits}
    node = engine.containers.run(image, ["sleep", "infinity"], **started)
    try:
        measured = caps.measured(engine, node, [node], [], [declared], {})
    finally:
        node.remove(force=True)
    assert measured["cpus"] == pytest.approx([0.1], rel=caps.TOLERANCE)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_interrupt_leaves_nothing(engine: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardproof", "cluster", "run", "ddp-gpt", "--tier", "full"]
    process = subprocess.Popen(
        [*command, "--backend", "gloo", "--results", str(tmp_path / "run")],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    lines = tmp_path / "run" / "cases.jsonl"
    deadline = time.monotonic() + 120
    try:
        while not (lines.exists() and lines.stat().st_size):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == INTERRUPTED
    finally:
        process.kill()
        process.wait()
    assert not left_of(engine, tmp_path / "run")
    header = json.loads((tmp_path / "run" / "run.json").read_text())
    assert header["invocations"][-1]["exit_code"] == INTERRUPTED, "the head ended in order"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_compose_is_the_way_by_hand(engine: Any) -> None:
    run = f"test-{os.getpid()}"
    chosen = {"RUN": run, "EXPRESSION": "small_buckets", "COMPARE": "no", "NODES": "2"}
    environment = {**os.environ, **chosen, "OWNER": str(os.getuid())}
    command = [*compose(), "--project-name", run]
    up = ["up", "--no-build", "--scale", "node=1", "--exit-code-from", "head"]
    try:
        assert subprocess.call([*command, *up], cwd=ROOT, env=environment) == 0
        (header,) = (ROOT / "results" / run).glob("*/run.json")
        assert shardproof("verify", str(header.parent)).returncode == 0
        nodes = json.loads(header.read_text())["invocations"][0]["cluster"]["nodes"]
        assert [node["ranks"] for node in nodes] == [[0, 1], [2, 3]]
    finally:
        subprocess.call([*command, "down"], cwd=ROOT, env=environment)
        shutil.rmtree(ROOT / "results" / run, ignore_errors=True)
