"""deploy/slurm on a real Slurm of two nodes on this machine; without one, skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SLURM = ROOT / "deploy" / "slurm"
NEEDED = ("slurmctld", "slurmd", "sbatch", "munged")


def on_slurm(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {"PYTHON": sys.executable, "RESULTS": str(folder / "run")} | variables
    return subprocess.run(
        [SLURM / "try.sh", *command],
        cwd=ROOT,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )


@pytest.fixture
def slurm() -> None:
    missing = [name for name in NEEDED if shutil.which(name) is None]
    why = f"no Slurm: {', '.join(missing)}" if missing else "Slurm's daemons need root here"
    if missing or os.geteuid() != 0:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must run the tests on Slurm: {why}")
        pytest.skip(why)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("slurm")
def test_ranks_over_two_nodes_are_judged(tmp_path: Path) -> None:
    said = tmp_path / "said"
    case = ["ddp-gpt", "--tier", "full", "-k", "naive and bitwise and sgd"]
    job = ["sbatch", "--wait", f"--output={said}", str(SLURM / "ranks.sbatch"), *case]
    done = on_slurm(tmp_path, *job)
    assert done.returncode == 0, done.stdout + done.stderr + said.read_text()
    assert "replicate4" in said.read_text()
    assert "1 judged (1 pass" in said.read_text()
    assert (tmp_path / "run" / "cases.jsonl").exists()


#: Prints the addresses at which the daemons of Slurm listen.
LISTENS = """
import psutil
for process in psutil.process_iter(["name"]):
    if process.info["name"] in ("slurmctld", "slurmd"):
        for found in process.net_connections("inet"):
            if found.status == psutil.CONN_LISTEN:
                print(process.info["name"], found.laddr.ip)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("slurm")
def test_no_daemon_can_be_reached_from_outside(tmp_path: Path) -> None:
    """They run as root."""
    done = on_slurm(tmp_path, sys.executable, "-c", LISTENS)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {"slurmctld 127.0.0.1", "slurmd 127.0.0.1"}


#: A user without rights, who is root in a namespace of their own.
PRETENDER = "setpriv --reuid 65534 --regid 65534 --clear-groups unshare --map-root-user"


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("slurm")
def test_nobody_becomes_root_by_saying_so(tmp_path: Path) -> None:
    """A client of Slurm sends the number of its user: munge asks the kernel for it."""
    if subprocess.run([*PRETENDER.split(), "true"], check=False).returncode != 0:
        pytest.skip("users have no user namespaces here")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        submit = f"sbatch --wait --chdir=/ --output={folder}/said --wrap='id -u'"
        copy = f"cp $SLURM_CONF {folder}/conf; chmod 644 {folder}/conf"
        ask = f"{copy}; SLURM_CONF={folder}/conf {PRETENDER} {submit}"
        done = on_slurm(tmp_path, "sh", "-c", ask)
        assert done.returncode != 0 and "submission failed" in done.stderr, done.stderr
        assert not (Path(folder) / "said").exists()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("slurm")
def test_a_batch_script_without_srun_is_explained(tmp_path: Path) -> None:
    said = tmp_path / "said"
    program = f"{sys.executable} -m shardproof.cluster.torchrun ddp-gpt"
    job = ["sbatch", "--wait", "--ntasks=2", f"--output={said}", f"--wrap={program}"]
    assert on_slurm(tmp_path, *job).returncode == 2
    assert "put `srun` before the command" in said.read_text()


def test_tasks_of_an_array_cut_the_matrix_in_parts(tmp_path: Path) -> None:
    """The script, with a command that prints what it is given."""
    told = []
    for task in range(3):
        numbers = {"ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": str(task), "ARRAY_TASK_COUNT": "3"}
        numbers["CPUS_PER_TASK"] = "2"
        done = subprocess.run(
            ["bash", SLURM / "parts.sbatch", "conformance", "-k", "a and b"],
            env={"PATH": os.environ["PATH"], "SHARDPROOF": "echo"}
            | {f"SLURM_{name}": value for name, value in numbers.items()},
            capture_output=True,
            text=True,
            check=True,
        )
        told.append(done.stdout.strip())
    assert told == [
        f"run conformance -k a and b --shard {n + 1}/3 -j 2 --results results/slurm-7-part{n}"
        for n in range(3)
    ]
