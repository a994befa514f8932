"""Ranks on machines of their own: the worker, its records, and containers as nodes.

Tests that need a container engine are skipped with the reason where there is none; in CI
(``CI=true``) that is a failure.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from made_case import made_case

from shardproof.contract import Piece
from shardproof.errors import SelectionError
from shardproof.evidence.records import RankRecord
from shardproof.multinode import cluster, foreign_records, torchrun
from shardproof.registry.declaration import Declaration
from shardproof.verdicts import BAD_INPUT

ROOT = Path(__file__).resolve().parents[2]


# --------------------------------------------------------------------------------------- clean


@pytest.fixture
def made_engine(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """An engine that holds a container and a network of each run: run -> what is there."""
    there: dict[str, list[str]] = {}

    def answer(*command: str, timeout: float = 0) -> subprocess.CompletedProcess[str]:
        label = next((w for w in command if w.startswith("label=")), "").split("=")[2:]
        kept = [run for run in there if label in ([], [run])]
        if "rm" in command:
            for run, parts in there.items():
                there[run] = [part for part in parts if part not in command]
        kind = "network" if "network" in command else "volume" if "volume" in command else "box"
        parts = [(run, part) for run in kept for part in there[run] if part.startswith(kind)]
        lines = [run if "--format" in command else part for run, part in parts]
        return subprocess.CompletedProcess(command, 0, "\n".join(lines), "")

    monkeypatch.setattr(cluster, "_run", answer)
    return there


def test_clean_leaves_runs_that_go_on(
    made_engine: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()", "cluster"], stdin=-1) as live:
        with subprocess.Popen(["sleep", "60"]) as other:
            runs = [f"shardproof-{pid}-17" for pid in (live.pid, other.pid, 2**22 + 1)]
            parts = [[f"box{n}", f"network{n}"] for n in range(4)]
            made_engine |= dict(zip([*runs, "made-by-hand"], parts, strict=True))
            assert cluster.main(["clean"]) == 0
            assert list(made_engine.values()) == [parts[0], [], [], []]
            assert (
                f"left: {runs[0]}, which goes on; `cluster clean --all`" in capsys.readouterr().out
            )
            assert cluster.main(["clean", "--all"]) == 0
            assert not any(made_engine.values())
            other.kill()
        live.kill()


def test_results_that_cannot_be_written_are_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "engine_missing", lambda: None)
    monkeypatch.setattr(cluster, "build", lambda: None)
    (tmp_path / "file").touch()
    assert cluster.main(["run", "--results", str(tmp_path / "file" / "run")]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path / 'file' / 'run'}: Not a directory - ")


# ---------------------------------------------------------------------------------- one machine


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (
            {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "1234"},
            torchrun.Place(3, 4, "head", 1234),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            torchrun.Place(1, 2, "127.0.0.1", 29511),
        ),
        (
            {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "MASTER_ADDR": "n1"},
            torchrun.Place(5, 8, "n1", 29511),
        ),
    ],
)
def test_place_is_read_from_any_launcher(
    environment: dict[str, str], place: torchrun.Place
) -> None:
    assert torchrun.Place.find(environment) == place


def test_place_says_what_is_missing() -> None:
    with pytest.raises(SelectionError, match="torchrun"):
        torchrun.Place.find({})
    with pytest.raises(SelectionError, match="MASTER_ADDR"):
        torchrun.Place.find({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"})


@pytest.mark.parametrize("started", ["2", "4"], ids=["as MPI says", "by another mpirun"])
def test_a_rank_of_mpi_that_ends_early_leaves_no_shared_memory(
    started: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPICH removes the names of its segments only when ranks leave it in order."""
    done: list[str] = []
    here = SimpleNamespace(Get_size=lambda: 2)
    comm = SimpleNamespace(
        Get_rank=lambda: 1,
        Get_size=lambda: 2,
        Split_type=lambda kind: done.append("all have begun") or here,
        bcast=lambda place, root: ("127.0.0.1", 4242),
    )
    world = SimpleNamespace(COMM_WORLD=comm, COMM_TYPE_SHARED=0)
    monkeypatch.setattr(torchrun.mpi, "start", lambda: world)
    monkeypatch.setattr(torchrun.mpi, "available", lambda: None)
    monkeypatch.setattr(torchrun, "unlink_segments", lambda: done.append("unlinked"))
    monkeypatch.setenv("PMI_SIZE", started)
    if started == "4":
        with pytest.raises(SelectionError, match="MPI knows of 2 ranks, but the launcher"):
            torchrun.Place.by_mpi()
    else:
        assert torchrun.Place.by_mpi() == torchrun.Place(1, 2, "127.0.0.1", 4242)
    assert done == ["all have begun", "unlinked"]


def test_interface_leads_to_the_address() -> None:
    assert torchrun.interface_to("127.0.0.1") in ("lo", "lo0")


def test_no_case_of_that_world_is_bad_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched = {**os.environ, "RANK": "0", "WORLD_SIZE": "17", "MASTER_ADDR": "127.0.0.1"}
    monkeypatch.setattr(os, "environ", launched)
    assert torchrun.main(["ddp-gpt"]) == BAD_INPUT
    assert "--world matches nothing (17)" in capsys.readouterr().err


def test_digests_see_bits_shape_and_dtype() -> None:
    def record(tensor: torch.Tensor) -> RankRecord:
        piece = Piece("w", tuple(tensor.shape), tensor)
        return RankRecord(0, 1, Declaration(strategy="ddp"), initial={"parameters": [piece]})

    base = torch.zeros(4)
    one = foreign_records.digests(record(base))
    assert one == foreign_records.digests(record(base.clone()))
    for other in (torch.tensor([0.0, -0.0, 0.0, 0.0]), base.view(2, 2), base.to(torch.int32)):
        assert foreign_records.digests(record(other)) != one


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
    command += ["--nproc-per-node", str(world), "-m", "shardproof.multinode.torchrun", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{cwd}:{ROOT}"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=150, check=False
    )


@pytest.mark.slow
def test_two_launches_agree_bit_for_bit_and_are_judged(tmp_path: Path) -> None:
    chosen = ["ddp-gpt", "--tier", "full", "-k", "small_buckets and bitwise and sgd"]
    one, two = tmp_path / "one", tmp_path / "two"
    first = _torchrun(2, *chosen, "--records", str(one), "--results", str(tmp_path / "run"))
    assert first.returncode == 0, first.stdout + first.stderr
    assert "pass" in first.stdout
    assert (tmp_path / "run" / "cases.jsonl").exists()
    second = _torchrun(2, *chosen, "--records", str(two), "--digests-only")
    assert second.returncode == 0, second.stdout + second.stderr
    assert not list(two.rglob("*.rec"))
    (row,) = foreign_records.compare(one, two)
    assert row.equal > 100
    assert row.unequal == 0
    assert "identical" in row.sentence()
    # The comparison is able to fail: one bit elsewhere is seen and named.
    end = two / "case0000" / "rank1.end"
    told = json.loads(end.read_text())
    key = next(iter(told["digests"]))
    told["digests"][key] = "0" * 64
    end.write_text(json.dumps(told))
    (row,) = foreign_records.compare(one, two)
    assert row.unequal == 1
    assert f"rank 1 {key}" in row.sentence()


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
    judge = ["-m", "shardproof.multinode.torchrun", "--judge", str(records)]
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
def engine() -> None:
    """A container engine and both images."""
    missing = cluster.engine_missing()
    if missing and os.environ.get("CI") == "true":
        pytest.fail(f"CI must run the container tests: {missing}")
    if missing:
        pytest.skip(missing)
    try:
        cluster.build()
    except cluster.NoCluster as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))


def _inside(target: str, *command: str) -> str:
    done = subprocess.run(
        [
            "docker",
            "run",
            "--rm",
            "--label",
            "shardproof=test",
            f"{cluster.IMAGE}-{target}",
            *command,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_images_are_slim_and_without_rights(engine: None) -> None:
    size = subprocess.run(
        ["docker", "image", "inspect", "-f", "{{.Size}}", f"{cluster.IMAGE}-rank"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(size.stdout) < 1.4e9
    probe = (
        "import os, importlib.util as u, shardproof.multinode.torchrun\n"
        "from shardproof.workloads import data\n"
        "print(os.getuid(), len(data.digits()[0]),\n"
        "      [n for n in ('typer', 'rich', 'sklearn', 'scipy', 'pandas') if u.find_spec(n)])"
    )
    assert _inside("rank", "python", "-c", probe).split() == ["10001", "1797", "[]"]
    assert "typer" in _inside(
        "judge", "python", "-c", "import typer, sklearn; print(typer.__name__)"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_containers_compute_the_bits_of_local_processes(engine: None, tmp_path: Path) -> None:
    job = cluster.Job(("ddp-gpt",), 2, 2, "full", "small_buckets and (quick or bitwise) and sgd")
    assert cluster.run(job, tmp_path) == 0
    told = {row["lane"]: row for row in json.loads((tmp_path / "digests.json").read_text())}
    assert told["bitwise"]["equal"] > 100
    assert told["bitwise"]["unequal"] == 0
    facts = json.loads((tmp_path / "cluster.json").read_text())
    assert facts["seconds_to_first_case"] > 0
    assert (tmp_path / "cases.jsonl").exists()
    assert not cluster.leftovers(facts["run"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_interrupt_leaves_nothing(engine: None, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "shardproof.multinode.cluster",
            "run",
            "--results",
            str(tmp_path / "run"),
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    run = f"shardproof-{process.pid}-"

    def containers() -> list[str]:
        form = '{{.Label "shardproof"}}'
        listed = subprocess.run(
            ["docker", "ps", "--filter", "label=shardproof", "--format", form],
            capture_output=True,
            text=True,
            check=True,
        )
        return [name for name in listed.stdout.split() if name.startswith(run)]

    deadline = time.monotonic() + 120
    try:
        while not (found := containers()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == cluster.INTERRUPTED
    finally:
        process.kill()
        process.wait()
    assert not cluster.leftovers(found[0])
